"""From what the caller writes to token ids: prompts, pairs, templates, limits. Chapters 00 and 17."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nanopool.checks import check_value
from nanopool.config import ModelConfig
from nanopool.multi_vector import ROLES

QWEN3_RERANKER = """\
{% if messages[-2].content.startswith('<|im_start|>') %}
{{- messages[-2].content + messages[-1].content }}
{%- else %}<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: {{ messages[-2].content }}
<Document>: {{ messages[-1].content }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{% endif %}"""
JOINED = "{{ messages[-2].content + messages[-1].content }}"


@dataclass(frozen=True)
class Truncation:
    """How long a prompt may be: `limit` tokens; a longer one is cut at a side, or refused. Chapter 18."""

    limit: int
    cut: bool
    side: str
    add_special_tokens: bool


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, with the facts that its Request carries. Chapter 00.

    `offsets` are the characters of each token (asked for by late chunking), `prefix_len` the leading rows that MEAN
    leaves out, `skip_token_ids` the tokens whose rows ColBERT drops.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] = ()
    num_first_segment: int | None = None
    num_keys: int | None = None
    prefix_len: int = 0
    skip_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frame:
    """What the folder puts around each text of a call. Chapter 17.

    A prompt before it; for ColBERT also a `marker` behind [CLS], a length `limit` at which texts are cut, and
    `fill_to` tokens up to which queries get `filler`s, attended or not.
    """

    prefix: str = ""
    prefix_len: int = 0
    marker: tuple[int, ...] = ()
    limit: int | None = None
    fill_to: int = 0
    filler: int | None = None
    attends_to_filler: bool = False
    skip_token_ids: tuple[int, ...] = ()


class InputProcessor:
    """Tokenizes and checks what the caller gives. Owned by the LLM, the same on every rank. Chapter 00."""

    def __init__(self, tokenizer, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.truncation_side = tokenizer.truncation_side
        if config.multi_vector is not None:
            self.frames = {role: self.multi_vector_frame(role) for role in ROLES}

    def truncation(
        self,
        limit: int,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        add_special_tokens: bool = True,
    ) -> Truncation:
        """None: a prompt over the limit is an error; -1: cut to what the model takes; n: cut to n."""
        side, n = truncation_side or self.truncation_side, truncate_prompt_tokens
        check_value("truncation_side", side, ("left", "right"))
        if n is None:
            return Truncation(limit, False, side, add_special_tokens)
        longest = min(limit, self.config.max_model_len)
        if n != -1:
            check_value("truncate_prompt_tokens", n, 1)
        if n > longest:
            raise ValueError(f"truncate_prompt_tokens={n}: the limit is {longest}; use -1 for that")
        return Truncation(longest if n == -1 else n, True, side, add_special_tokens)

    def frame(self, prompt_name: str | None) -> Frame:
        """The folder's prompt of that name, else its default one; a ColBERT's queries or (None) documents.

        Raises ValueError for a name that the folder lacks.
        """
        config = self.config
        if config.multi_vector is not None:
            check_value("prompt_name", prompt_name or "document", ROLES)
            return self.frames[prompt_name or "document"]
        name = prompt_name or config.default_prompt_name
        if name is None:
            return Frame()
        check_value("prompt_name", name, tuple(config.prompts))
        prefix = config.prompts[name]
        if config.include_prompt or not prefix:
            return Frame(prefix)
        ids = self.tokenizer(self.clean(prefix))["input_ids"]
        return Frame(prefix, len(ids) - (ids[-1] in self.tokenizer.all_special_ids))

    def multi_vector_frame(self, role: str) -> Frame:
        """How queries or documents are written, as sentence_transformers.MultiVectorEncoder does it."""
        facts, tokenizer = self.config.multi_vector, self.tokenizer
        prefix, limit = getattr(facts, f"{role}_prefix"), getattr(facts, f"{role}_length")
        fill_to = (facts.expansion_length or 0) if role == "query" else 0
        if fill_to:
            limit = fill_to if facts.expansion_truncates else limit and max(limit, fill_to)
        owned = [marker for marker in facts.markers if prefix.startswith(marker)]
        spellings = [part for marker in owned for part in (marker, *marker.split()[:1])]
        marker = next((part for part in spellings if self.known_ids([part])), "")
        skipped = self.known_ids(facts.skiplist_words) if role in facts.skiplist_tasks else ()
        if role == "document" and facts.keep_only_token_ids:
            others = {*range(self.config.hf_config.vocab_size)} - {*facts.keep_only_token_ids}
            skipped = (*skipped, *others)
        fillers = (facts.expansion_token, tokenizer.mask_token, tokenizer.eos_token)
        return Frame(
            prefix.removeprefix(marker),
            marker=self.known_ids([marker]),
            limit=limit,
            fill_to=fill_to,
            filler=next(iter(self.known_ids(filter(None, fillers))), None),
            attends_to_filler=facts.attend_to_expansion_tokens,
            skip_token_ids=skipped,
        )

    def known_ids(self, tokens: Iterable[str]) -> tuple[int, ...]:
        """The ids of those tokens that the vocabulary has."""
        ids = self.tokenizer.convert_tokens_to_ids(list(tokens))
        return tuple(i for i in ids if i not in (None, self.tokenizer.unk_token_id))

    def encode(
        self, prompts: list, truncation: Truncation, frame: Frame, with_offsets: bool = False
    ) -> list[Prompt]:
        """Texts and token ids, in any of the accepted forms -> Prompts in the same order.

        ValueError names the index of a prompt that is empty, too long, or has an id outside the vocabulary.
        """
        parsed = [parse_prompt(prompt, i) for i, prompt in enumerate(prompts)]
        texts = [prompt for prompt in parsed if isinstance(prompt, str)]
        written = iter(self.write(texts, truncation, frame, with_offsets) if texts else ())
        return [
            self.check(
                next(written)
                if isinstance(prompt, str)
                else Prompt(cut(prompt, truncation), skip_token_ids=frame.skip_token_ids),
                truncation,
                i,
            )
            for i, prompt in enumerate(parsed)
        ]

    def write(
        self, texts: list[str], truncation: Truncation, frame: Frame, with_offsets: bool
    ) -> Iterable[Prompt]:
        """Texts -> Prompts, special tokens and the frame included; cut as the two say."""
        limit = min(truncation.limit, frame.limit or truncation.limit) - len(frame.marker)
        is_cut = truncation.cut or frame.limit is not None
        encoding = self.call_tokenizer(
            replace(truncation, limit=limit, cut=is_cut),
            [frame.prefix + text for text in texts],
            return_offsets_mapping=with_offsets,
        )
        spans = encoding["offset_mapping"] if with_offsets else [()] * len(texts)
        ends = {self.tokenizer.cls_token_id, self.tokenizer.bos_token_id}
        for text, ids, offsets in zip(texts, encoding["input_ids"], spans, strict=True):
            start = int(ids[0] in ends) if ids else 0
            ids = [*ids[:start], *frame.marker, *ids[start:]]
