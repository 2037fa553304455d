"""Classifiers, cross-encoders, NER, rewards, LLM rerankers equal their references. Chapter 17."""

import pytest
import references
import torch
from answers import ask, ask_once, assert_close, start
from references import TEXTS
from safetensors.torch import load_file
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB
from transformers import AutoTokenizer

from nanopool import PoolerConfig

QUERY, DOCUMENTS = TEXTS[1], [text for text in TEXTS if text != TEXTS[1]]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
LENGTHS = (1, 2, 7, 33)
SMALL = {"suffix": "Model", "std": 0.2}  # a decoder without a head, of even attention


def prompts_for(kind: str) -> list[list[int]]:
    is_wordwise = kind.startswith(("bert", "xlm"))
    return references.random_prompts(WORD_VOCAB if is_wordwise else BPE_VOCAB, LENGTHS)


def score(folder, settings=None, **kwargs) -> list[float]:
    """The scores of DOCUMENTS for QUERY."""
    with start(folder, **settings or {}) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False, **kwargs)
    return [output.outputs.score for output in outputs]


def sequence_logits(folder, prompts) -> list[torch.Tensor]:
    model = references.load(folder, "AutoModelForSequenceClassification")
    return [references.logits(model, ids) for ids in prompts]


def pair_logits(folder) -> list[torch.Tensor]:
    """Logits of PAIRS by transformers, with the segment ids that the tokenizer gives."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = references.load(folder, "AutoModelForSequenceClassification")
    encoded = [tokenizer(*pair) for pair in PAIRS]
    return [references.logits(model, x.input_ids, x.get("token_type_ids")) for x in encoded]


# Sequence classifiers


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(
    "kind", ["bert_classifier", "roberta_classifier", "xlm_roberta_classifier"]
)
def test_classes_equal_transformers(checkpoint, kind, labels):
    """use_activation=False leaves the head's own tanh in place: raw logits are transformers'."""
    folder, prompts = checkpoint(kind, labels=labels), prompts_for(kind)
    logits = sequence_logits(folder, prompts)
    probs = [x.sigmoid() if labels == 1 else x.softmax(-1) for x in logits]
    with start(folder) as llm:
        assert_close(ask(llm, prompts, "classify", use_activation=False), logits)
        assert_close(ask(llm, prompts, "classify"), probs)


@pytest.mark.parametrize("kind", ["qwen3_classifier", "qwen2_classifier"])
@pytest.mark.parametrize("budget", [1, 6, 8192])
def test_a_decoder_classifies_by_its_last_token(checkpoint, kind, budget):
    folder, prompts = checkpoint(kind, labels=3, std=0.2), prompts_for(kind)
    settings = {"max_num_batched_tokens": budget}
    found = ask_once(folder, prompts, "classify", settings, use_activation=False)
    assert_close(found, sequence_logits(folder, prompts))


def test_bert_classifies_single_tokens_without_its_pooler(checkpoint):
    folder, prompts = checkpoint("bert_classifier", labels=3), prompts_for("bert")
    weights, model = load_file(folder / "model.safetensors"), references.load(folder)
    rows = [references.hidden_states(model, ids) for ids in prompts]
    expected = [x @ weights["classifier.weight"].T + weights["classifier.bias"] for x in rows]
    assert_close(ask_once(folder, prompts, "token_classify", use_activation=False), expected)


def test_roberta_classifies_single_tokens_with_its_whole_head(checkpoint):
    folder, prompts = checkpoint("roberta_classifier", labels=3), prompts_for("roberta")
    model = references.load(folder, "AutoModelForSequenceClassification")
    rows = [references.hidden_states(model.roberta, ids) for ids in prompts]
    with torch.inference_mode():
        expected = [model.classifier(x.unsqueeze(1)) for x in rows]  # every row as the first
    assert_close(ask_once(folder, prompts, "token_classify", use_activation=False), expected)


def test_berts_pooler_is_an_embedding_where_the_caller_names_it(checkpoint):
    folder, prompts = checkpoint("bert"), prompts_for("bert")
    settings = {"hf_overrides": {"architectures": ["BertPoolingModel"]}}
    model = references.load(folder)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).pooler_output[0] for ids in prompts]
    assert_close(ask_once(folder, prompts, "embed", settings), expected)


# Pairs


@pytest.mark.parametrize(
    "kind", ["bert_classifier", "roberta_classifier", "xlm_roberta_classifier"]
)
def test_scores_of_pairs_equal_transformers(checkpoint, kind):
    folder = checkpoint(kind)
    assert_close(score(folder), [x.sigmoid().item() for x in pair_logits(folder)])


def test_segment_ids_change_a_berts_score(checkpoint):
    folder = checkpoint("bert_classifier")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(*pair).input_ids for pair in PAIRS]
    without = [x.sigmoid().item() for x in sequence_logits(folder, ids)]
    assert max(abs(a - b) for a, b in zip(score(folder), without, strict=True)) > 1e-3


@pytest.mark.parametrize("layout", ["old", "4", "new"])
@pytest.mark.parametrize("activation_fn", [None, "Identity", "Sigmoid", "Tanh"])
def test_a_cross_encoder_folder_equals_sentence_transformers(checkpoint, layout, activation_fn):
    from sentence_transformers import CrossEncoder

    folder = checkpoint("cross_encoder", layout=layout, activation_fn=activation_fn)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    assert_close(score(folder), expected.tolist())


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_cross_encoder_of_pooling_and_dense_equals_sentence_transformers(checkpoint, pooling):
    from sentence_transformers import CrossEncoder

    folder = checkpoint("cross_encoder_dense", pooling=pooling)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    assert_close(score(folder), expected.tolist())


# Tokens


@pytest.mark.parametrize("kind", ["bert_ner", "roberta_ner"])
def test_token_classes_equal_transformers(checkpoint, kind):
    folder, prompts = checkpoint(kind), prompts_for(kind)
    model = references.load(folder, "AutoModelForTokenClassification")
    logits = [references.logits(model, ids) for ids in prompts]
    with start(folder) as llm:
        assert_close(ask(llm, prompts, "token_classify", use_activation=False), logits)
        assert_close(ask(llm, prompts), [x.softmax(-1) for x in logits])


def test_named_entities_are_read_from_the_labels_of_the_config(checkpoint):
    """The loop of vLLM's NER example."""
    folder = checkpoint("bert_ner")
    with start(folder) as llm:
        tokenizer = llm.get_tokenizer()
        label_map = llm.llm_engine.vllm_config.model_config.hf_config.id2label
        outputs = llm.encode(TEXTS, pooling_task="token_classify", use_tqdm=False)
    model = references.load(folder, "AutoModelForTokenClassification")
    for text, output in zip(TEXTS, outputs, strict=True):
        predictions = output.outputs.data.argmax(dim=-1)
        tokens = tokenizer.convert_ids_to_tokens(output.prompt_token_ids)
        found = [(t, label_map[p.item()]) for t, p in zip(tokens, predictions, strict=True)]
        best = references.logits(model, tokenizer(text).input_ids).argmax(-1).tolist()
        words = ["[CLS]", *tokenizer.tokenize(text), "[SEP]"]
        assert found == [(w, model.config.id2label[p]) for w, p in zip(words, best, strict=True)]


# Reward models


def test_a_sequence_reward_is_the_raw_logit_of_one_label(checkpoint):
    folder, prompts = checkpoint("qwen2_classifier", std=0.2), prompts_for("qwen2")
    found = ask_once(folder, prompts, "classify", use_activation=False)
    assert_close(found, sequence_logits(folder, prompts))


def test_a_token_reward_is_one_raw_value_for_every_token(checkpoint):
    folder, prompts = checkpoint("qwen2_reward", **SMALL), prompts_for("qwen2")
    with start(folder) as llm:
        outputs = llm.reward(prompts, use_tqdm=False)
    expected = [references.reward_logits(folder, ids) for ids in prompts]
    assert_close([output.outputs.data for output in outputs], expected)


def test_a_process_reward_is_a_softmax_at_every_step_tag(checkpoint):
    folder = checkpoint("qwen2_process_reward", **SMALL)
    tag = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<extra_0>")
    text = "first , 1 + 1 = 2<extra_0>so 2 + 1 = 3<extra_0>"
    with start(folder, pooler_config=PoolerConfig(step_tag_id=tag)) as llm:
        (output,) = llm.reward(text, use_tqdm=False)
    ids = output.prompt_token_ids
    logits = references.reward_logits(folder, ids)[[t == tag for t in ids]]
    assert logits.shape == (2, 2)
    assert_close(output.outputs.data, logits.softmax(-1))


@pytest.mark.parametrize("given", ["request", "config"])
def test_step_columns_are_picked_from_the_logits_before_the_softmax(checkpoint, given):
    """As math-shepherd: a classifier over many labels, of which two are asked for."""
    folder, tag, columns = checkpoint("qwen3_classifier", labels=5, std=0.2), 7, [4, 1]
    prompts = [[8, 7, 9, 10, 7], [7, 8]]
    step = {"step_tag_id": tag, "returned_token_ids": columns}
    pooler = PoolerConfig(pooling_type="STEP", **step if given == "config" else {})
    overrides = {"architectures": ["Qwen3ForTokenClassification"]}
    settings = {"pooler_config": pooler, "hf_overrides": overrides}
    fields = step if given == "request" else {}
    found = ask_once(folder, prompts, "token_classify", settings, **fields)
    weight = load_file(folder / "model.safetensors")["score.weight"]
    model = references.load(folder)
    for rows, ids in zip(found, prompts, strict=True):
        logits = references.hidden_states(model, ids) @ weight.T
        assert_close(rows, logits[[t == tag for t in ids]][:, columns].softmax(-1))


# Decoders that were trained for something else


def test_any_decoder_embeds_its_last_token_when_converted(checkpoint):
    folder, prompts = checkpoint("llama"), prompts_for("llama")
    model = references.load(folder)
    expected = [references.normalize(references.hidden_states(model, x)[-1]) for x in prompts]
    assert_close(ask_once(folder, prompts, "embed", {"convert": "embed"}), expected)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_classifies_by_rows_of_its_head(checkpoint, kind, tied):
    """no_post_processing: the logits of the named tokens are the logits of the classes."""
    folder, prompts = checkpoint(kind, tied=tied), prompts_for(kind)
    tokens = ["yes", "no", "the"]
    overrides = {"classifier_from_token": tokens, "method": "no_post_processing"}
    settings = {"convert": "classify", "hf_overrides": overrides}
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(tokens)
    model = references.load(folder, "AutoModelForCausalLM")
    expected = [references.logits(model, x)[-1, ids] for x in prompts]
    assert_close(ask_once(folder, prompts, "classify", settings, use_activation=False), expected)


RERANKER = {
    "hf_overrides": {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_yes_row_minus_the_no_row_is_the_softmax_of_the_two_tokens(checkpoint, tied):
    folder, prompts = checkpoint("qwen3_reranker", tied=tied), prompts_for("qwen3")
    yes_no = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["yes", "no"])
    model = references.load(folder, "AutoModelForCausalLM")
    expected = [references.logits(model, ids)[-1, yes_no].softmax(0)[:1] for ids in prompts]
    assert_close(ask_once(folder, prompts, "classify", RERANKER), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [16, 8192])
def test_a_qwen3_reranker_scores_pairs_in_its_own_template(checkpoint, tied, budget):
    folder = checkpoint("qwen3_reranker", tied=tied)
    model = references.load(folder, "AutoModelForCausalLM")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [references.rerank_prompt(*pair) for pair in PAIRS]
    expected = [references.rerank_score(model, tokenizer, prompt) for prompt in prompts]
    assert_close(score(folder, RERANKER | {"max_num_batched_tokens": budget}), expected)


def test_a_converted_qwen3_reranker_scores_with_its_one_label(checkpoint):
    folder, prompts = checkpoint("qwen3_classifier", std=0.2), prompts_for("qwen3")
    expected = [x.sigmoid() for x in sequence_logits(folder, prompts)]
    assert_close(ask_once(folder, prompts, "classify"), expected)


@pytest.mark.parametrize("two_tokens", [True, False])
@pytest.mark.parametrize("prompt", [None, "judge the document"])
def test_a_logit_score_folder_equals_sentence_transformers(checkpoint, two_tokens, prompt):
    from sentence_transformers import CrossEncoder

    folder = checkpoint("logit_score", two_tokens=two_tokens, prompt=prompt)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    assert_close(score(folder), expected.tolist())
