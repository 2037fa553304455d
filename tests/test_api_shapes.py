"""The calls that vLLM's offline examples make, in their words, on tiny checkpoints."""

import pytest
import references
import torch
from answers import start

import nanopool
from nanopool import LLM, PoolerConfig, PoolingParams, SamplingParams
from nanopool.pooler.params import LateChunkingParams

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
QUERY = "What is the capital of France?"
TEXTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def test_import_names_what_the_examples_import():
    names = {"LLM", "PoolingParams", "PoolerConfig", "SamplingParams", "PoolingRequestOutput"}
    assert names <= vars(nanopool).keys()


def test_embed(checkpoint):
    args = {"runner": "pooling", "enforce_eager": True, "trust_remote_code": True}
    llm = start(checkpoint("sentence_transformer"), **args)
    outputs = llm.embed(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        embeds = output.outputs.embedding
        assert isinstance(embeds, list) and isinstance(embeds[0], float) and len(embeds) == 32
        assert output.prompt_token_ids == llm.get_tokenizer()(prompt)["input_ids"]
    llm.shutdown()


def test_classify(checkpoint):
    with start(checkpoint("bert_classifier", labels=3), runner="pooling") as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
    for output in outputs:
        assert len(output.outputs.probs) == 3 and sum(output.outputs.probs) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["bert_classifier", "xlm_roberta_classifier", "qwen3_classifier"])
def test_score(checkpoint, kind):
    with start(checkpoint(kind), runner="pooling", enforce_eager=True) as llm:
        outputs = llm.score(QUERY, TEXTS)
        (first,) = llm.score(QUERY, TEXTS[0])
    assert all(isinstance(output.outputs.score, float) for output in outputs)
    assert first.outputs.score == pytest.approx(outputs[0].outputs.score, abs=1e-6)


def test_sequence_reward(checkpoint):
    with start(checkpoint("qwen2_classifier"), runner="pooling", max_model_len=128) as llm:
        outputs = llm.encode(PROMPTS, pooling_task="classify")
    assert [len(output.outputs.data.tolist()) for output in outputs] == [1] * 4


def test_token_reward(checkpoint):
    with start(checkpoint("qwen2_reward"), runner="pooling") as llm:
        outputs = llm.encode(PROMPTS, pooling_task="token_classify")
        again = llm.reward(PROMPTS)
    for output, other in zip(outputs, again, strict=True):
        assert output.outputs.data.shape == (len(output.prompt_token_ids), 1)
        assert torch.equal(output.outputs.data, other.outputs.data)


def test_ner(checkpoint):
    llm = start(checkpoint("bert_ner"), runner="pooling")
    tokenizer = llm.get_tokenizer()
    label_map = llm.llm_engine.vllm_config.model_config.hf_config.id2label
    assert label_map == llm.llm_engine.model_config.hf_config.id2label
    found = []
    for output in llm.encode(["he was in paris ."], pooling_task="token_classify"):
        predictions = output.outputs.data.argmax(dim=-1)
        tokens = tokenizer.convert_ids_to_tokens(output.prompt_token_ids)
        labels = [label_map[p.item()] for p in predictions]
        for token, label in zip(tokens, labels, strict=True):
            if token not in tokenizer.all_special_tokens:
                found.append((token, label))
    assert [token for token, _ in found] == ["he", "was", "in", "paris", "."]
    assert {label for _, label in found} <= {*label_map.values()}


def test_matryoshka(checkpoint):
    folder = checkpoint("qwen3_embedding")
    with start(folder, hf_overrides={"is_matryoshka": True}) as llm:
        outputs = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=16))
        (query,) = llm.embed(QUERY, prompt_name="query", use_tqdm=False)
    for output in outputs:
        assert torch.tensor(output.outputs.embedding).norm() == pytest.approx(1, abs=1e-6)
        assert len(output.outputs.embedding) == 16
    assert len(query.outputs.embedding) == 32


def test_multi_vector_retrieval(checkpoint):
    config = PoolerConfig(task="token_embed")
    llm = LLM(model=checkpoint("bge_m3"), pooler_config=config, runner="pooling", device="cpu")
    outputs = llm.encode(PROMPTS, pooling_task="token_embed")
    rows = [output.outputs.data for output in outputs]
    assert all(row.ndim == 2 and row.shape[1] == 32 for row in rows)
    documents = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    (query,) = llm.encode(QUERY, pooling_task="token_embed", use_tqdm=False)
    for output, document in zip(llm.score(QUERY, TEXTS), documents, strict=True):
        expected = references.maxsim(query.outputs.data, document.outputs.data)
        assert output.outputs.score == pytest.approx(expected, abs=1e-5)
    llm.shutdown()


def test_qwen3_reranker_with_a_template(checkpoint):
    chat_template = references.rerank_prompt(
        '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}',
        '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}',
    )
    llm = LLM(
        model=checkpoint("qwen3_reranker"),
        runner="pooling",
        device="cpu",
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        },
    )
    queries = ["What is the capital of China?", "Explain gravity"]
    documents = ["The capital of China is Beijing.", "Gravity is a force."]
    outputs = llm.score(queries, documents, chat_template=chat_template)
    assert all(0 < output.outputs.score < 1 for output in outputs)
    llm.shutdown()


def test_sentence_transformers_6_reranker(checkpoint):
    with start(checkpoint("logit_score"), runner="pooling", trust_remote_code=True) as llm:
        assert all(0 < output.outputs.score < 1 for output in llm.score(QUERY, TEXTS))


def test_late_chunking(checkpoint):
    settings = {"pooler_config": PoolerConfig(task="token_embed"), "max_model_len": 64}
    with start(checkpoint("sentence_transformer"), runner="pooling", **settings) as llm:
        params = PoolingParams(late_chunking_params=LateChunkingParams(chunk_size=4))
        outputs = llm.encode(TEXTS, pooling_task="token_embed", pooling_params=params)
    for document, output in zip(TEXTS, outputs, strict=True):
        metadata = output.late_chunking
        assert metadata.input_tokens == len(output.prompt_token_ids)
        assert len(metadata.chunks) == len(output.outputs.data)
        for chunk in metadata.chunks:
            if chunk.char_range is not None:
                start_char, end_char = chunk.char_range
                assert document[start_char:end_char].strip()


def test_plugin_without_a_processor(checkpoint):
    with start(checkpoint("bert")) as llm:
        (output,) = llm.encode({"prompt_token_ids": [5]}, pooling_task="plugin", use_tqdm=False)
    assert output.outputs.data.shape == (1, 32)


def test_generate(checkpoint):
    with start(checkpoint("qwen3")) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert isinstance(output.outputs[0].text, str) and output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("sentence_transformer", lambda llm: llm.embed(TEXTS, use_tqdm=False)),
        ("sentence_transformer", lambda llm: llm.score(QUERY, TEXTS, use_tqdm=False)),
        ("bert_classifier", lambda llm: llm.score(QUERY, TEXTS, use_tqdm=False)),
        ("hf_colbert", lambda llm: llm.score(QUERY, TEXTS, use_tqdm=False)),
    ],
)
def test_ranks_other_than_the_first_get_none(checkpoint, monkeypatch, kind, call):
    """Under torchrun each process makes the calls, and the results are with the first."""
    with start(checkpoint(kind)) as llm:
        assert None not in call(llm)
        monkeypatch.setattr(llm.llm_engine.tp, "rank", 1)
        assert call(llm) == [None, None]


def test_rerank_on_another_rank_is_empty(checkpoint, monkeypatch):
    with start(checkpoint("sentence_transformer")) as llm:
        monkeypatch.setattr(llm.llm_engine.tp, "rank", 1)
        assert llm.rerank(QUERY, TEXTS, use_tqdm=False) == []
