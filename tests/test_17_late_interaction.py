"""Late interaction: ColBERT's inputs, and MaxSim inside the engine. Chapter 17."""

import pytest
import references
import torch
from answers import ask, assert_close, start
from safetensors.torch import load_file
from sentence_transformers import MultiVectorEncoder
from st_checkpoints import COLBERT_DIM

from nanopool import LateInteractionParams, PoolerConfig, PoolingParams
from nanopool.pooler.late_interaction import LateInteractionPooler

QUERIES = ["what is the capital of france ?", "no", "a dog and a cat"]
DOCUMENTS = [
    "Paris is the capital, and a good city!",
    "a dog and a cat in the old house . " * 12,
    "was he there ?",
]
FOLDERS = [
    ("hf_colbert", {}),
    ("hf_colbert", {"attend": True, "mask_punctuation": False, "query_length": 20}),
    ("multi_vector_encoder", {}),
    ("multi_vector_encoder", {"expansion": "min", "query_length": 9, "attend": True}),
    ("multi_vector_encoder", {"expansion": None, "document_length": None, "skiplist": []}),
    ("multi_vector_encoder", {"expansion": None, "query_length": 7}),
    ("multi_vector_encoder", {"prompts": {"query": "search : ", "document": ""}}),
    ("pylate", {}),
    ("pylate", {"expansion": False}),
    ("pylate", {"model_type": None, "skiplist": None, "attend": True}),
]


@pytest.fixture(scope="module", params=FOLDERS, ids=str)
def encoder(request, checkpoint):
    folder = checkpoint(request.param[0], **request.param[1])
    return folder, MultiVectorEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def colbert(checkpoint):
    with start(checkpoint("hf_colbert")) as llm:
        yield llm


def ask_side(llm, texts: list[str], prompt_name: str | None) -> list[torch.Tensor]:
    kwargs = {"pooling_task": "token_embed", "prompt_name": prompt_name, "use_tqdm": False}
    return [output.outputs.data for output in llm.encode(texts, **kwargs)]


def scores(llm, queries, documents) -> list[float]:
    return [output.outputs.score for output in llm.score(queries, documents, use_tqdm=False)]


# Queries and documents


def test_rows_equal_multi_vector_encoder(encoder):
    folder, model = encoder
    with start(folder) as llm:
        queries = ask_side(llm, QUERIES, "query")
        documents = ask_side(llm, DOCUMENTS, "document")
    assert_close(queries, model.encode_query(QUERIES))
    assert_close(documents, model.encode_document(DOCUMENTS))


def test_a_text_is_a_document_unless_the_call_says_query(colbert):
    assert_close(ask_side(colbert, DOCUMENTS, None), ask_side(colbert, DOCUMENTS, "document"))


def test_another_prompt_name_is_refused(colbert):
    with pytest.raises(ValueError, match=r"prompt_name='passage'.*'query', 'document'"):
        ask_side(colbert, DOCUMENTS, "passage")


def test_a_short_query_has_32_rows_and_attends_to_its_own_tokens(colbert):
    """As BERT gives them for a mask of 1 on real and 0 on [MASK] tokens."""
    rows = ask_side(colbert, ["what is paris"], "query")[0]
    model = references.load(colbert.model_config.folder)
    tokenizer = colbert.get_tokenizer()
    ids = tokenizer("what is paris")["input_ids"]
    ids[1:1] = [tokenizer.convert_tokens_to_ids("[unused0]")]
    assert len(ids) == 6
    filled = torch.tensor([ids + [tokenizer.mask_token_id] * 26])
    mask = torch.tensor([[1] * 6 + [0] * 26])
    with torch.inference_mode():
        hidden = model(filled, attention_mask=mask).last_hidden_state[0]
    weight = load_file(colbert.model_config.folder / "model.safetensors")["linear.weight"]
    assert rows.shape == (32, COLBERT_DIM)
    assert_close(rows, references.normalize(hidden @ weight.T))


def test_the_marker_is_one_id_and_counts_toward_the_limit(colbert):
    kwargs = {"pooling_task": "token_embed", "use_tqdm": False}
    (output,) = colbert.encode("paris " * 100, **kwargs)
    marker = colbert.get_tokenizer().convert_tokens_to_ids("[unused1]")
    paris = colbert.get_tokenizer().convert_tokens_to_ids("paris")
    assert output.prompt_token_ids == [2, marker, *[paris] * 45, 3]


def test_a_marker_that_a_text_contains_is_text(colbert):
    """Only the marker that the folder puts there is one id."""
    (output,) = colbert.encode("[unused1]", pooling_task="token_embed", use_tqdm=False)
    plain = colbert.get_tokenizer()("[unused1]")["input_ids"]
    marker = colbert.get_tokenizer().convert_tokens_to_ids("[unused1]")
    assert output.prompt_token_ids == [plain[0], marker, *plain[1:]]


def test_punctuation_is_encoded_and_then_its_rows_are_dropped(colbert):
    """The rows left are those of the whole text, not those of the text without punctuation."""
    (whole,) = ask_side(colbert, ["a , b ."], "document")
    (bare,) = ask_side(colbert, ["a b"], "document")
    assert whole.shape == bare.shape == (5, COLBERT_DIM)  # [CLS], marker, a, b, [SEP]
    assert (whole - bare).abs().max() > 1e-2


def test_queries_keep_their_punctuation(checkpoint):
    with start(checkpoint("pylate", expansion=False)) as llm:
        (rows,) = ask_side(llm, ["a , b ."], "query")
    assert rows.shape == (7, COLBERT_DIM)


def test_token_ids_are_taken_as_they_are(colbert):
    ids = [2, 15, 16, 3]
    (rows,) = ask(colbert, [ids], "token_embed")
    assert rows.shape == (4, COLBERT_DIM)


# MaxSim


def test_scores_equal_multi_vector_encoder(encoder):
    folder, model = encoder
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(DOCUMENTS))
    with start(folder) as llm:
        assert_close(scores(llm, QUERIES[0], DOCUMENTS), expected[0].tolist())
        assert_close(scores(llm, QUERIES, DOCUMENTS), expected.diagonal().tolist())
        assert_close(scores(llm, QUERIES[1], DOCUMENTS[1]), expected[1:2, 1].tolist())


def test_ranks_change_nothing(checkpoint):
    folder = checkpoint("pylate")
    with start(folder) as llm:
        expected = scores(llm, QUERIES, DOCUMENTS)
    for ranks in (2, 4):
        with start(folder, tensor_parallel_size=ranks) as llm:
            assert_close(scores(llm, QUERIES, DOCUMENTS), expected)


@pytest.mark.parametrize("budget", [1, 7, 8192])
def test_a_causal_model_may_cut_queries_and_documents(checkpoint, budget):
    """A Qwen3 asked to score by token_embed: MaxSim of plain rows at every token budget."""
    settings = {"convert": "embed", "pooler_config": PoolerConfig(task="token_embed")}
    folder = checkpoint("qwen3", suffix="Model", std=0.2)
    model = references.load(folder)
    with start(folder, max_num_batched_tokens=budget, block_size=4, **settings) as llm:
        found = scores(llm, QUERIES[0], QUERIES)
        tokenizer = llm.get_tokenizer()
    rows = [references.hidden_states(model, tokenizer(text)["input_ids"]) for text in QUERIES]
    query, *documents = map(references.normalize, [rows[0], *rows])
    assert_close(found, [references.maxsim(query, document) for document in documents])


def test_a_document_comes_back_as_a_scalar_with_both_prompts(colbert):
    tokenizer = colbert.get_tokenizer()
    (output,) = colbert.score("paris", "rome", use_tqdm=False)
    query = [2, tokenizer.convert_tokens_to_ids("[unused0]"), *tokenizer("paris")["input_ids"][1:]]
    query += [tokenizer.mask_token_id] * 28
    document = [
        2,
        tokenizer.convert_tokens_to_ids("[unused1]"),
        *tokenizer("rome")["input_ids"][1:],
    ]
    assert output.outputs.data.shape == ()
    assert output.prompt_token_ids == [*query, tokenizer.pad_token_id, *document]


@pytest.fixture
def pooled(colbert, monkeypatch):
    """What the late-interaction pooler met: (modes of a step, the call's query cache)."""
    steps = []
    inner = LateInteractionPooler.__call__

    def watching(pooler, hidden, metadata):
        outputs = inner(pooler, hidden, metadata)
        late = [params.late_interaction_params for params in metadata.params]
        steps.append(([params and params.mode for params in late], metadata.states[0].queries))
        return outputs

    monkeypatch.setattr(LateInteractionPooler, "__call__", watching)
    return steps


def test_each_query_is_encoded_once_and_before_its_documents(colbert, pooled):
    colbert.score([QUERIES[0], QUERIES[1], QUERIES[0]], DOCUMENTS, use_tqdm=False)
    modes = [mode for step, _ in pooled for mode in step]
    assert modes == ["cache_query"] * 2 + ["score_doc"] * 3


def test_a_query_is_freed_with_its_last_document(colbert, pooled):
    colbert.score(QUERIES, DOCUMENTS, use_tqdm=False)
    assert all(queries == {} for _, queries in pooled)


def test_equal_ids_with_other_keys_are_two_queries(colbert):
    """A written [MASK] is attended to, one that fills a query up is not."""
    plain, written = scores(colbert, ["paris", "paris [MASK]"], ["rome", "rome"])
    assert abs(plain - written) > 1e-3


def test_a_document_without_its_query_is_an_error_and_the_next_call_is_right(colbert):
    expected = scores(colbert, QUERIES[0], DOCUMENTS)
    late = LateInteractionParams("score_doc", "lost")
    with pytest.raises(ValueError, match="'lost'"):
        ask(colbert, DOCUMENTS, "token_embed", PoolingParams(late_interaction_params=late))
    assert scores(colbert, QUERIES[0], DOCUMENTS) == expected


def test_a_callers_own_queries_go_before_their_documents(colbert):
    """In one call of encode, whatever the order and the lengths."""
    texts = [*DOCUMENTS, "paris"]
    *documents, query = ask(colbert, texts, "token_embed")
    late = [LateInteractionParams("score_doc", "own")] * 3
    late.append(LateInteractionParams("cache_query", "own", 3))
    params = [PoolingParams(late_interaction_params=part) for part in late]
    found = [x.item() for x in ask(colbert, texts, "token_embed", params)[:3]]
    assert_close(found, [references.maxsim(query, document) for document in documents])


def test_a_failure_between_the_waves_leaves_nothing(colbert, pooled, monkeypatch):
    expected = scores(colbert, QUERIES[0], DOCUMENTS)
    runner, seen = colbert.llm_engine.runner, []
    execute = runner.execute

    def failing(scheduled):
        seen.append(len(scheduled))
        if len(seen) == 2:
            raise RuntimeError("broken")
        return execute(scheduled)

    monkeypatch.setattr(runner, "execute", failing)
    with pytest.raises(RuntimeError, match="broken"):
        colbert.score(QUERIES[0], DOCUMENTS, use_tqdm=False)
    monkeypatch.setattr(runner, "execute", execute)
    pooled.clear()
    assert scores(colbert, QUERIES[0], DOCUMENTS) == expected
    assert all(queries == {} for _, queries in pooled)
