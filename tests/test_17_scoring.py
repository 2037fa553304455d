"""score and rerank: cosine and cross-encoder, their prompts, their errors. Chapter 17.

The third route, late interaction, has its own file.
"""

import shutil

import pytest
import references
import torch
from answers import assert_close, start
from checkpoints import edit_json
from sentence_transformers import CrossEncoder, SentenceTransformer

from nanopool import PoolerConfig, PoolingParams

QUERY = "what is the capital of france ?"
QUERIES = ["what is the capital of france ?", "a dog in the house", "who is he"]
DOCUMENTS = ["paris is the capital", "a dog and a cat in the old house", "no"]
LONG = " ".join(references.TEXTS[:5] * 3)
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
TEXT = "{{ (messages | selectattr('role', 'eq', '%s') | first).content }}"
TEMPLATE = references.rerank_prompt(TEXT % "query", TEXT % "document")
TEMPLATE += "\n"  # jinja drops the last line end of a template


def scores(llm, data_1, data_2, **kwargs) -> list[float]:
    outputs = llm.score(data_1, data_2, use_tqdm=False, **kwargs)
    return [output.outputs.score for output in outputs]


def prompts(llm, data_1, data_2, **kwargs) -> list[list[int]]:
    outputs = llm.score(data_1, data_2, use_tqdm=False, **kwargs)
    return [output.prompt_token_ids for output in outputs]


# Bi-encoder


@pytest.fixture(scope="module", params=[True, False], ids=["normalised", "as they are"])
def embedder(request, checkpoint):
    folder = checkpoint("sentence_transformer", normalize=request.param)
    model = SentenceTransformer(str(folder), device="cpu", similarity_fn_name="cosine")
    with start(folder) as llm:
        yield llm, model


def test_one_to_one_is_the_cosine(embedder):
    llm, model = embedder
    expected = model.similarity(model.encode(QUERY), model.encode(DOCUMENTS[0]))
    assert_close(scores(llm, QUERY, DOCUMENTS[0]), expected.flatten().tolist())


def test_one_to_many(embedder):
    llm, model = embedder
    expected = model.similarity(model.encode(QUERY), model.encode(DOCUMENTS))
    assert_close(scores(llm, QUERY, DOCUMENTS), expected[0].tolist())


def test_many_to_many_goes_side_by_side(embedder):
    llm, model = embedder
    expected = model.similarity_pairwise(model.encode(QUERIES), model.encode(DOCUMENTS))
    assert_close(scores(llm, QUERIES, DOCUMENTS), expected.tolist())


def test_an_embedders_pair_reports_both_prompts_and_a_pad_between(embedder):
    llm, _ = embedder
    tokenizer = llm.get_tokenizer()
    sides = [tokenizer(text)["input_ids"] for text in (QUERY, DOCUMENTS[0])]
    assert prompts(llm, QUERY, DOCUMENTS[0]) == [sides[0] + [tokenizer.pad_token_id] + sides[1]]


def test_the_score_is_a_scalar_tensor(embedder):
    (output,) = embedder[0].score(QUERY, DOCUMENTS[0], use_tqdm=False)
    assert output.outputs.data.shape == ()


def test_token_ids_and_dicts_are_texts_too(embedder):
    llm, _ = embedder
    ids = llm.get_tokenizer()(QUERY)["input_ids"]
    expected = scores(llm, QUERY, DOCUMENTS)
    assert scores(llm, ids, [{"prompt": text} for text in DOCUMENTS]) == expected


# Cross-encoder


ENCODERS = [
    ("bert_classifier", {}),
    ("roberta_classifier", {}),
    ("xlm_roberta_classifier", {}),
    ("cross_encoder", {"layout": "old", "activation_fn": "Identity"}),
    ("cross_encoder", {"layout": "new", "activation_fn": "Tanh"}),
    ("cross_encoder_dense", {}),
    ("logit_score", {}),
    ("logit_score", {"two_tokens": False}),
    ("logit_score", {"prompt": "answer the question"}),
    ("logit_score", {"tied": False}),
    ("cross_encoder", {"backbone": "qwen3_classifier"}),
]


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda case: f"{case[0]}{case[1] or ''}")
def reranker(request, checkpoint):
    folder = checkpoint(request.param[0], **request.param[1])
    return folder, CrossEncoder(str(folder), device="cpu")


def test_pairs_equal_cross_encoder(reranker):
    folder, model = reranker
    with start(folder) as llm:
        found = scores(llm, QUERIES, DOCUMENTS)
        assert_close(scores(llm, QUERIES[1], DOCUMENTS[1]), found[1:2])
    pairs = list(zip(QUERIES, DOCUMENTS, strict=True))
    assert_close(found, model.predict(pairs).tolist())


@pytest.mark.parametrize("kind", ["bert_classifier", "logit_score", "sentence_transformer"])
def test_ranks_change_nothing(checkpoint, kind):
    found = []
    for ranks in (1, 2, 4):
        with start(checkpoint(kind), tensor_parallel_size=ranks) as llm:
            found.append(scores(llm, QUERIES, DOCUMENTS))
    assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("limit", [24, 40])
def test_long_pairs_are_cut_as_cross_encoder_cuts_them(reranker, limit):
    folder, model = reranker
    model.max_length = limit
    with start(folder) as llm:
        found = scores(llm, QUERY, [LONG, "no"], truncate_prompt_tokens=limit)
    model.max_length = limit
    assert_close(found, model.predict([(QUERY, LONG), (QUERY, "no")]).tolist())


def test_a_pair_equals_transformers(checkpoint):
    folder = checkpoint("bert_classifier")
    model = references.load(folder, "AutoModelForSequenceClassification")
    with start(folder) as llm:
        encoded = llm.get_tokenizer()(QUERY, DOCUMENTS[0])
        (ids,) = prompts(llm, QUERY, DOCUMENTS[0])
        found = scores(llm, QUERY, DOCUMENTS[0], pooling_params=PoolingParams(use_activation=False))
    assert ids == encoded["input_ids"]
    logits = references.logits(model, ids, encoded["token_type_ids"])
    assert_close(found, logits.tolist())


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_longer_text_of_a_pair_is_cut_first(checkpoint, side):
    """A query of 20 tokens and a document of 50, in 55 with three special tokens."""
    query, document = "paris " * 20, "berlin " * 30 + "rome " * 20
    with start(checkpoint("bert_classifier")) as llm:
        cut = {"truncate_prompt_tokens": 55, "truncation_side": side}
        (ids,) = prompts(llm, query, document, **cut)
        names = llm.get_tokenizer().convert_ids_to_tokens(ids)
    assert names[:22] == ["[CLS]", *["paris"] * 20, "[SEP]"] and names[-1] == "[SEP]"
    kept = ["berlin"] * 30 + ["rome"] * 20
    assert names[22:-1] == (kept[:32] if side == "right" else kept[-32:])


def test_two_long_texts_are_cut_to_one_length(checkpoint):
    with start(checkpoint("bert_classifier")) as llm:
        (ids,) = prompts(llm, "paris " * 40, "rome " * 50, truncate_prompt_tokens=51)
        names = llm.get_tokenizer().convert_ids_to_tokens(ids)
    assert (names.count("paris"), names.count("rome")) == (24, 24)


def test_a_side_given_once_is_not_the_next_calls_default(checkpoint):
    with start(checkpoint("bert_classifier")) as llm:
        cut = {"truncate_prompt_tokens": 30}
        expected = prompts(llm, QUERY, LONG, **cut)
        assert prompts(llm, QUERY, LONG, truncation_side="left", **cut) != expected
        assert prompts(llm, QUERY, LONG, **cut) == expected


# Templates


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def qwen3(request, checkpoint):
    folder = checkpoint("qwen3_reranker", tied=request.param)
    with start(folder, hf_overrides=RERANKER) as llm:
        yield llm, references.load(folder, "AutoModelForCausalLM")


def test_qwen3_reranker_reads_its_published_template(qwen3):
    llm, _ = qwen3
    expected = llm.get_tokenizer()(references.rerank_prompt(QUERY, DOCUMENTS[0]))["input_ids"]
    assert prompts(llm, QUERY, DOCUMENTS[0]) == [expected]


def test_qwen3_reranker_is_the_softmax_of_yes_against_no(qwen3):
    llm, model = qwen3
    texts = [references.rerank_prompt(QUERY, document) for document in DOCUMENTS]
    expected = [references.rerank_score(model, llm.get_tokenizer(), text) for text in texts]
    assert len({round(score, 3) for score in expected}) == 3
    assert_close(scores(llm, QUERY, DOCUMENTS), expected)


def test_vllms_template_gives_the_same_prompt(qwen3):
    llm, _ = qwen3
    expected = prompts(llm, QUERY, DOCUMENTS)
    assert prompts(llm, QUERY, DOCUMENTS, chat_template=TEMPLATE) == expected


def test_a_pair_that_the_caller_wrote_as_a_chat_is_left_as_it_is(qwen3):
    llm, _ = qwen3
    text = references.rerank_prompt(QUERY, DOCUMENTS[0])
    query, document = text.split("<Document>")
    assert prompts(llm, query, "<Document>" + document) == prompts(llm, QUERY, DOCUMENTS[0])


def test_each_pair_is_looked_at_by_itself(qwen3):
    """One query of two is a chat already: it does not decide for the other."""
    llm, _ = qwen3
    text = references.rerank_prompt(QUERY, DOCUMENTS[0])
    query, document = text.split("<Document>")
    queries, documents = [QUERY, query], [DOCUMENTS[0], "<Document>" + document]
    assert prompts(llm, queries, documents) == prompts(llm, QUERY, DOCUMENTS[0]) * 2
    assert prompts(llm, queries[::-1], documents[::-1]) == prompts(llm, QUERY, DOCUMENTS[0]) * 2


@pytest.mark.parametrize("side", [None, "left"])
def test_query_and_closing_template_survive_a_long_document(qwen3, side):
    llm, _ = qwen3
    words = "paris berlin rome " * 400
    (whole,) = prompts(llm, QUERY, "paris")
    (ids,) = prompts(llm, QUERY, words, truncate_prompt_tokens=-1, truncation_side=side)
    text = llm.get_tokenizer().decode(ids)
    before, after = references.rerank_prompt(QUERY, "@@").split("@@")
    assert len(ids) == 1024 > len(whole)
    assert text.startswith(before + "paris berlin rome paris") and text.endswith(after)


def test_without_cutting_a_long_document_is_an_error(qwen3):
    with pytest.raises(ValueError, match=r"prompt 1 has .* tokens, the limit is 1024.*prompt_tok"):
        scores(qwen3[0], QUERY, ["no", "paris berlin rome " * 400])


def test_a_closing_template_that_has_no_room_is_an_error(qwen3):
    with pytest.raises(ValueError, match=r"prompt 0 has .* tokens, the limit is 9"):
        scores(qwen3[0], QUERY, LONG, truncate_prompt_tokens=9)


def test_a_converted_reranker_takes_a_template(checkpoint):
    folder = checkpoint("qwen3_classifier")
    model = references.load(folder, "AutoModelForSequenceClassification")
    with start(folder) as llm:
        (ids,) = prompts(llm, QUERY, DOCUMENTS[0], chat_template=TEMPLATE)
        found = scores(llm, QUERY, DOCUMENTS[0], chat_template=TEMPLATE)
        tokenizer = llm.get_tokenizer()
    assert ids == tokenizer(references.rerank_prompt(QUERY, DOCUMENTS[0]))["input_ids"]
    assert_close(found, references.logits(model, ids).sigmoid().tolist())


def test_without_a_template_the_tokenizer_joins_the_pair(checkpoint):
    with start(checkpoint("qwen3_classifier")) as llm:
        expected = llm.get_tokenizer()(QUERY, DOCUMENTS[0])["input_ids"]
        assert prompts(llm, QUERY, DOCUMENTS[0]) == [expected]


def test_rows_of_the_lm_head_without_a_template_read_one_text(checkpoint):
    """As vLLM without separator tokens: mxbai-rerank-v2 until it is given its template."""
    overrides = {
        "architectures": ["Qwen2ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "method": "from_2_way_softmax",
    }
    with start(checkpoint("qwen2"), hf_overrides=overrides) as llm:
        expected = llm.get_tokenizer()(QUERY + DOCUMENTS[0])["input_ids"]
        assert prompts(llm, QUERY, DOCUMENTS[0]) == [expected]


def test_a_given_template_gets_the_tokenizers_special_tokens(checkpoint):
    """As vLLM does it: nemotron's template has no <|begin_of_text|> of its own."""
    template = "question:{{ messages[0].content }} passage:{{ messages[1].content }}"
    with start(checkpoint("llama", suffix="ForSequenceClassification", num_labels=1)) as llm:
        tokenizer = llm.get_tokenizer()
        expected = tokenizer(f"question:{QUERY} passage:no")["input_ids"]
        assert expected[0] == tokenizer.bos_token_id
        assert prompts(llm, QUERY, "no", chat_template=template) == [expected]
        bare = {"chat_template": template, "add_special_tokens": False}
        assert prompts(llm, QUERY, "no", **bare) == [expected[1:]]


def test_a_folder_says_what_its_chat_template_is_told(checkpoint, tmp_path):
    kind = checkpoint("cross_encoder", backbone="qwen3_classifier")
    folder = shutil.copytree(kind, tmp_path / "told")
    told = {"chat_template": {"add_generation_prompt": True}}
    edit_json(folder / "sentence_bert_config.json", processing_kwargs=told)
    with start(folder) as llm:
        (ids,) = prompts(llm, QUERY, DOCUMENTS[0])
        assert llm.get_tokenizer().decode(ids).endswith("<|im_start|>assistant\n")
        found = scores(llm, QUERY, [*DOCUMENTS, LONG], truncate_prompt_tokens=120)
    model = CrossEncoder(str(folder), device="cpu")
    model.max_length = 120
    pairs = [(QUERY, document) for document in [*DOCUMENTS, LONG]]
    assert_close(found, model.predict(pairs).tolist())


def test_the_query_of_many_documents_is_computed_once(qwen3, monkeypatch):
    """After one template and query each document computes its own tokens, and part of a block."""
    llm, _ = qwen3
    documents = [f"document {i}" for i in range(64)]
    sizes = count_computed_tokens(llm, monkeypatch, lambda: scores(llm, QUERY, documents))
    lengths = [len(ids) for ids in prompts(llm, QUERY, documents)]
    head = references.rerank_prompt(QUERY, "@@").split("@@")[0]
    shared = len(llm.get_tokenizer()(head)["input_ids"]) // 16 * 16
    assert shared >= 128
    assert sum(sizes) <= sum(lengths) - 63 * shared


def count_computed_tokens(llm, monkeypatch, call) -> list[int]:
    """How many tokens each step of `call` gave to the model, with an empty prefix cache."""
    sizes = []
    runner = llm.llm_engine.runner
    execute = runner.execute

    def counting(scheduled):
        sizes.append(sum(n for _, n in scheduled))
        return execute(scheduled)

    llm.llm_engine.reset()
    monkeypatch.setattr(runner, "execute", counting)
    call()
    monkeypatch.undo()
    return sizes


# Lengths of the two texts


def test_max_tokens_shorten_the_texts(checkpoint):
    with start(checkpoint("bert_classifier")) as llm:
        limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 2}
        (ids,) = prompts(llm, "what is the capital", "paris is the capital", **limits)
        text = llm.get_tokenizer().decode(ids)
    assert text == "[CLS] what is the [SEP] paris is [SEP]"


def test_max_tokens_shorten_what_a_template_holds(qwen3):
    llm, _ = qwen3
    expected = prompts(llm, QUERY, "paris berlin"[:8])
    size = len(llm.get_tokenizer()("paris berlin"[:8])["input_ids"])
    assert prompts(llm, QUERY, "paris berlin", max_tokens_per_doc=size) == expected


@pytest.mark.parametrize("name", ["max_tokens_per_query", "max_tokens_per_doc"])
@pytest.mark.parametrize("value", [-1, 128, True])
def test_max_tokens_are_checked(embedder, name, value):
    with pytest.raises(ValueError, match=name):
        scores(embedder[0], QUERY, DOCUMENTS, **{name: value})


# Errors


@pytest.mark.parametrize(
    ("data_1", "data_2"),
    [([], DOCUMENTS), (QUERY, []), (QUERIES[:2], DOCUMENTS), (QUERIES, DOCUMENTS[0])],
    ids=["0:N", "1:0", "2:3", "N:1"],
)
def test_lengths_that_make_no_pairs(embedder, data_1, data_2):
    with pytest.raises(ValueError, match="either 1:1, 1:N or N:N"):
        scores(embedder[0], data_1, data_2)
    assert len(scores(embedder[0], QUERY, DOCUMENTS)) == 3


@pytest.mark.parametrize(
    ("kind", "facts", "message"),
    [
        ("bert_classifier", {"labels": 2}, "num_labels=2.*only enabled for num_labels == 1"),
        ("qwen2_reward", {}, "does not support the Scoring API"),
        ("qwen3", {}, "does not support the Scoring API"),
    ],
)
def test_models_that_do_not_score(checkpoint, kind, facts, message):
    with start(checkpoint(kind, **facts)) as llm:
        with pytest.raises(ValueError, match=message):
            scores(llm, QUERY, DOCUMENTS)


def test_a_cross_encoder_needs_texts(checkpoint):
    with start(checkpoint("bert_classifier")) as llm:
        with pytest.raises(ValueError, match="a text for a cross-encoder"):
            scores(llm, [2, 5, 3], DOCUMENTS)


def test_an_unknown_tokenization_argument_is_named(embedder):
    with pytest.raises(ValueError, match="'max_length'"):
        scores(embedder[0], QUERY, DOCUMENTS, max_length=3)


# Routes


def test_the_pooler_config_chooses_the_route(checkpoint):
    """BGE-M3 embeds by default; asked for token_embed it scores by MaxSim, as vLLM's example."""
    folder = checkpoint("bge_m3")
    with start(folder) as llm:
        found = scores(llm, QUERY, DOCUMENTS)
        vectors = [o.outputs.data for o in llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)]
    assert_close(found, [(vectors[0] @ vector).item() for vector in vectors[1:]])
    with start(folder, pooler_config=PoolerConfig(task="token_embed")) as llm:
        found = scores(llm, QUERY, DOCUMENTS)
        outputs = llm.encode([QUERY, *DOCUMENTS], pooling_task="token_embed", use_tqdm=False)
    query, *documents = (output.outputs.data for output in outputs)
    assert_close(found, [references.maxsim(query, document) for document in documents])


# rerank


class Scores:
    """An LLM whose scores are known beforehand."""

    def __init__(self, llm, values, monkeypatch):
        data = [torch.tensor(value) for value in values]
        (output,) = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
        made = [type(output)(str(i), type(output.outputs)(x), []) for i, x in enumerate(data)]
        monkeypatch.setattr(type(llm), "score", lambda *_, **__: made)


def test_rerank_sorts_and_keeps_the_order_of_ties(embedder, monkeypatch):
    llm, values = embedder[0], [0.5, 0.25, 0.75, 0.5, 0.75]
    Scores(llm, values, monkeypatch)
    ranking = [(2, 0.75), (4, 0.75), (0, 0.5), (3, 0.5), (1, 0.25)]
    assert llm.rerank(QUERY, ["text"] * 5) == ranking
    assert llm.rerank(QUERY, ["text"] * 5, top_n=2) == ranking[:2]
    for every in (None, 0, 9):
        assert llm.rerank(QUERY, ["text"] * 5, top_n=every) == ranking


def test_rerank_puts_what_is_not_a_number_last(embedder, monkeypatch):
    nan = float("nan")
    Scores(embedder[0], [0.25, nan, 0.75, nan, 0.5], monkeypatch)
    assert [i for i, _ in embedder[0].rerank(QUERY, ["text"] * 5)] == [2, 4, 0, 1, 3]


def test_rerank_gives_the_scores_of_score(embedder):
    llm, _ = embedder
    expected = scores(llm, QUERY, DOCUMENTS)
    ranking = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False)
    assert dict(ranking) == pytest.approx(dict(enumerate(expected)))
    assert [score for _, score in ranking] == sorted(expected, reverse=True)


def test_rerank_of_nothing_is_nothing(embedder):
    assert embedder[0].rerank(QUERY, []) == []


def test_rerank_refuses_a_negative_number(embedder):
    with pytest.raises(ValueError, match="top_n"):
        embedder[0].rerank(QUERY, DOCUMENTS, top_n=-1)
