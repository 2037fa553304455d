"""Tiny real tokenizers: a WordPiece of 131 entries, a Unigram of 131 and byte-level BPEs of 307.

The two sizes are prime, so that no number of ranks divides a vocabulary. Every function returns a
transformers tokenizer that `save_pretrained` writes as the usual `tokenizer.json` folder.
"""

import string

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

WORDS = (
    "a an the of in is are was and or to for on with by it this that what who where which how "
    "he she they not no yes paris berlin london rome france germany england italy europe city "
    "capital river sea food wine bread cheese good bad big small old new red blue green white "
    "man woman child dog cat bird tree house street car train book paper word sentence query "
    "document answer question search model vector token layer rank"
).split()
PUNCTUATION = ". , ? ! ' - : ;".split()
WORDPIECES = "##s ##ed ##ing ##er ##ly".split()
WORD_VOCAB = 131
BPE_VOCAB = 307

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
QWEN_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_PLAIN = ["<think>", "</think>", "<extra_0>"]
LLAMA_SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
MERGED = "yes no the what query document is capital answer".split()


def _filled(entries: list[str], size: int) -> list[str]:
    """`entries` filled up with unused entries to `size`."""
    assert len(set(entries)) == len(entries) <= size, f"{len(entries)} entries, room for {size}"
    return entries + [f"[unused{i}]" for i in range(size - len(entries))]


def wordpiece(max_length: int = 128, lower: bool = True) -> transformers.PreTrainedTokenizerBase:
    """BERT's tokenizer: [CLS] a [SEP] b [SEP]; [unused0] and [unused1] are ColBERT's markers."""
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PUNCTUATION, *WORDS, *WORDPIECES]
    entries += [letter for letter in string.ascii_lowercase if letter not in entries][:10]
    vocab = {entry: i for i, entry in enumerate(_filled(entries, WORD_VOCAB))}
    return transformers.BertTokenizer(vocab, do_lower_case=lower, model_max_length=max_length)


def unigram(max_length: int = 128) -> transformers.PreTrainedTokenizerBase:
    """XLM-R's tokenizer: <s> a </s> and <s> a </s></s> b </s>; pad is 1, <mask> the last entry."""
    entries = ["<s>", "<pad>", "</s>", "<unk>"]
    entries += ["▁", *(f"▁{word}" for word in WORDS), *PUNCTUATION, "s", "ed", "ing", "er", "ly"]
    vocab = [*_filled(entries, WORD_VOCAB - 1), "<mask>"]
    scored = [(entry, -0.01 * i) for i, entry in enumerate(vocab)]
    return transformers.XLMRobertaTokenizer(scored, model_max_length=max_length)


def _byte_level(first: list[str], last: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a byte-level BPE that knows MERGED as whole tokens."""
    merges: list[tuple[str, str]] = []
    for word in MERGED:
        pairs = [(word[:i], word[i]) for i in range(1, len(word))]
        merges += [pair for pair in pairs if pair not in merges]
    entries = first + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(m) for m in merges]
    vocab = _filled(entries, BPE_VOCAB - len(last)) + last
    return {entry: i for i, entry in enumerate(vocab)}, merges


def roberta_bpe(max_length: int = 128) -> transformers.PreTrainedTokenizerBase:
    """RoBERTa's tokenizer: byte-level BPE, <s> a </s></s> b </s>, pad id 1."""
    vocab, merges = _byte_level(["<s>", "<pad>", "</s>", "<unk>"], ["<mask>"])
    return transformers.RobertaTokenizer(vocab, merges, model_max_length=max_length)


def qwen_bpe(
    max_length: int = 512, end_token: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """Qwen's tokenizer: ChatML specials last, nothing added to a text.

    `end_token` appends <|endoftext|> to every text, as the tokenizer of Qwen3-Embedding does.
    """
    vocab, merges = _byte_level([], QWEN_SPECIALS + QWEN_PLAIN)
    tokenizer = transformers.Qwen2Tokenizer(
        vocab,
        merges,
        eos_token="<|endoftext|>" if end_token else "<|im_end|>",
        model_max_length=max_length,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_SPECIALS})
    tokenizer.add_tokens(QWEN_PLAIN)
    tokenizer.chat_template = CHATML
    if end_token:
        tokenizer.backend_tokenizer.post_processor = _template("$A <|endoftext|>", tokenizer)
    return tokenizer


def llama_bpe(max_length: int = 512) -> transformers.PreTrainedTokenizerBase:
    """Llama 3's tokenizer: byte-level BPE with <|begin_of_text|> before every text."""
    vocab, merges = _byte_level([], LLAMA_SPECIALS)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|end_of_text|>",
        model_max_length=max_length,
    )
    tokenizer.chat_template = LLAMA_CHAT
    tokenizer.backend_tokenizer.post_processor = _template("<|begin_of_text|> $A", tokenizer)
    return tokenizer


def _template(single: str, tokenizer) -> processors.TemplateProcessing:
    """A post-processor that adds the special token of `single` to every text, once to a pair."""
    special = next(part for part in single.split() if part != "$A")
    pair = single.replace("$A", "$A $B")
    ids = [(special, tokenizer.convert_tokens_to_ids(special))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
