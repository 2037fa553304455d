"""What must change no result: neighbours, order, cuts, caches, starved pools, ranks, old memory.

One table of model kinds and tasks; every test takes every row that it applies to.
"""

import random
from dataclasses import dataclass, field

import pytest
import references
import torch
from answers import ask, assert_close, start
from hypothesis import given, settings
from hypothesis import strategies as st
from references import TEXTS
from torch.utils import deterministic

from nanopool import LLM, PoolerConfig, PoolingRequestOutput

TAG = 7  # closes a step, where the method is STEP
LENGTHS = (1, 4, 9, 17, 9, 30)
PROMPTS = [
    [TAG if i % 4 == 2 else token for i, token in enumerate(ids)]
    for ids in references.random_prompts(130, LENGTHS)
]
PAIRS = [(TEXTS[1], TEXTS[0]), (TEXTS[1], TEXTS[3]), (TEXTS[4], TEXTS[2])]
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
SMALL = {"suffix": "Model", "std": 0.2}  # a decoder without a head, of even attention


@dataclass(frozen=True)
class Row:
    """A checkpoint of tests/checkpoints.py and a task; `score` is one of pairs of texts."""

    kind: str
    task: str
    facts: dict = field(default_factory=dict)
    pooler: dict = field(default_factory=dict)
    overrides: dict = field(default_factory=dict)


CAUSAL = {
    "qwen3-last": Row("qwen3", "embed", SMALL),
    "qwen3-cls": Row("qwen3", "embed", SMALL, {"pooling_type": "CLS"}),
    "qwen3-mean": Row("qwen3", "embed", SMALL, {"pooling_type": "MEAN"}),
    "qwen3-all": Row("qwen3", "token_embed", SMALL),
    "qwen2-all": Row("qwen2", "token_embed", SMALL),
    "llama-last": Row("llama", "embed", SMALL | {"rope": "llama3"}),
    "qwen3-classifier": Row("qwen3_classifier", "classify", {"labels": 3, "std": 0.2}),
    "qwen3-token-classifier": Row("qwen3_classifier", "token_classify", {"std": 0.2}),
    "qwen3-reranker": Row("qwen3_reranker", "classify", overrides=RERANKER),
    "logit-score": Row("logit_score", "score"),
    "token-reward": Row("qwen2_reward", "token_classify", SMALL),
    "step-reward": Row("qwen2_process_reward", "token_classify", SMALL, {"step_tag_id": TAG}),
}
ENCODERS = {
    "bert-cls": Row("bert", "embed"),
    "bert-mean": Row("bert", "embed", {}, {"pooling_type": "MEAN"}),
    "bert-last": Row("bert", "embed", {}, {"pooling_type": "LAST"}),
    "bert-all": Row("bert", "token_embed"),
    "bert-step": Row("bert", "token_embed", {}, {"pooling_type": "STEP", "step_tag_id": TAG}),
    "bert-tanh": Row("bert", "embed", overrides={"architectures": ["BertPoolingModel"]}),
    "roberta-all": Row("roberta", "token_embed"),
    "xlm-roberta-mean": Row("xlm_roberta", "embed", {}, {"pooling_type": "MEAN"}),
    "dense": Row("sentence_transformer", "embed", {"dense": 24}),
    "bi-encoder": Row("sentence_transformer", "score", {"dense": 24}),
    "cross-encoder": Row("bert_classifier", "score"),
    "cross-encoder-dense": Row("cross_encoder_dense", "score"),
    "bert-classifier": Row("bert_classifier", "classify", {"labels": 3}),
    "roberta-token-classifier": Row("roberta_classifier", "token_classify", {"labels": 3}),
    "bert-ner": Row("bert_ner", "token_classify"),
    "splade-max": Row("bert_mlm", "embed"),
    "splade-sum": Row("sparse_encoder", "embed", {"strategy": "sum"}),
    "masked-lm": Row("bert_mlm", "token_classify"),
    "bge-m3-dense": Row("bge_m3", "embed"),
    "bge-m3-sparse": Row("bge_m3", "token_classify"),
    "bge-m3-rows": Row("bge_m3", "token_embed"),
    "bge-m3-joint": Row("bge_m3", "embed&token_classify"),
    "colbert": Row("hf_colbert", "score"),
    "colbert-attended": Row("pylate", "score", {"attend": True}),
}
TABLE = CAUSAL | ENCODERS


class Case:
    """One row at work: an LLM of its checkpoint, and what each prompt gives when it is alone."""

    def __init__(self, row: Row, checkpoint):
        self.row = row
        self.folder = checkpoint(row.kind, **row.facts)
        self.prompts = PAIRS if row.task == "score" else PROMPTS
        self.llm = self.start()
        outputs = [self.outputs(self.llm, [prompt])[0] for prompt in self.prompts]
        self.alone = [output.outputs.data for output in outputs]
        self.longest = max(len(output.prompt_token_ids) for output in outputs)

    def start(self, **settings) -> LLM:
        row = self.row
        given = {"pooler_config": PoolerConfig(**row.pooler), "hf_overrides": row.overrides}
        return start(self.folder, **{"block_size": 4, "num_kv_blocks": 512} | given | settings)

    def outputs(self, llm: LLM, prompts: list) -> list[PoolingRequestOutput]:
        if self.row.task != "score":
            return llm.encode(prompts, pooling_task=self.row.task, use_tqdm=False)
        return llm.score(*map(list, zip(*prompts, strict=True)), use_tqdm=False)

    def check(self, llm: LLM, seed: int = 0) -> None:
        """All prompts in one call, in an order drawn from `seed`, give what each gives alone."""
        order = random.Random(seed).sample(range(len(self.prompts)), len(self.prompts))
        outputs = self.outputs(llm, [self.prompts[i] for i in order])
        assert_close([o.outputs.data for o in outputs], [self.alone[i] for i in order])


def rows(table: dict[str, Row]):
    """Parametrizes the fixture below by the names of a table."""
    return pytest.mark.parametrize("case", table, indirect=True, scope="module")


@pytest.fixture(scope="module")
def case(request, checkpoint) -> Case:
    return Case(TABLE[request.param], checkpoint)


@rows(TABLE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_neighbours_and_order_change_nothing(case, seed):
    case.check(case.llm, seed)


@rows(TABLE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_ranks_changes_nothing(case, ranks):
    with case.start(tensor_parallel_size=ranks) as llm:
        case.check(llm)


@pytest.fixture
def dirty_memory(monkeypatch):
    """New tensors hold NaN until they are written: weights, KV pools, everything."""
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@rows(TABLE)
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_what_memory_held_before_reaches_no_result(case, dirty_memory):
    assert torch.empty(3).isnan().all(), "the fixture does not work"
    budget = 2048 if case.llm.model_config.spec.encoder_only else 7
    with case.start(max_num_batched_tokens=budget) as llm:
        case.check(llm)


@rows(CAUSAL)
@pytest.mark.parametrize("budget", [1, 7])
def test_cutting_prompts_into_pieces_changes_nothing(case, budget):
    with case.start(max_num_batched_tokens=budget) as llm:
        case.check(llm)


@rows(CAUSAL)
def test_what_the_prefix_cache_holds_changes_nothing(case):
    case.check(case.llm)
    case.check(case.llm)


@rows(CAUSAL)
def test_no_prefix_cache_changes_nothing(case):
    with case.start(enable_prefix_caching=False) as llm:
        case.check(llm)


@rows(CAUSAL)
def test_a_starved_pool_changes_nothing(case):
    """One block more than the longest prompt needs."""
    blocks = -(-case.longest // 4) + 1
    with case.start(num_kv_blocks=blocks, max_num_batched_tokens=16) as llm:
        case.check(llm)


@rows(TABLE)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_random_settings_change_nothing(case, data):
    """All of them at once: blocks, pool, budget, places, ranks, caches, orders, a second call."""
    block_size = data.draw(st.sampled_from((1, 2, 3, 4, 8, 16)), "block_size")
    needed = -(-case.longest // block_size)
    facts = {
        "block_size": block_size,
        "num_kv_blocks": needed + data.draw(st.sampled_from((0, 1, 3, 40)), "more blocks"),
        "max_num_seqs": data.draw(st.integers(1, 8), "max_num_seqs"),
        "tensor_parallel_size": data.draw(st.sampled_from((1, 1, 2, 4)), "ranks"),
    }
    if not case.llm.model_config.spec.encoder_only:
        facts["enable_prefix_caching"] = data.draw(st.booleans(), "caching")
        if data.draw(st.booleans(), "chunked"):
            facts["max_num_batched_tokens"] = data.draw(st.integers(1, 64), "budget")
        else:
            facts["enable_chunked_prefill"] = False
    with case.start(**facts) as llm:
        for seed in data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)), "orders"):
            case.check(llm, seed)


@rows(ENCODERS)
def test_encoders_own_no_kv_cache(case):
    assert case.llm.llm_engine.runner.kv_caches == []
    assert case.llm.llm_engine.scheduler.block_manager.blocks == []


def test_an_encoder_that_is_asked_for_a_prefix_cache_warns_and_has_none(checkpoint):
    with pytest.warns(UserWarning, match="enable_prefix_caching"):
        llm = start(checkpoint("bert"), enable_prefix_caching=True)
    with llm:
        assert not llm.model_config.enable_prefix_caching
        assert_close(ask(llm, [[7, 8]] * 2, "embed"), ask(llm, [[7, 8]] * 2, "embed"))
