"""CLS, LAST, MEAN, ALL and STEP on causal models: the same result however the engine cuts, caches,
orders or interrupts the prompts. Chapter 13.
"""

import random
from collections.abc import Iterable

import pytest
import references
import torch
from answers import ask, ask_once, assert_close, start
from tiny_tokenizers import BPE_VOCAB

from nanopool import LLM, PoolerConfig

TAG = 7  # closes a step, where the method is STEP
LENGTHS = (1, 2, 5, 9, 16)
PROMPTS = [
    [TAG if i % 4 == 3 else token for i, token in enumerate(ids)]
    for ids in references.random_prompts(BPE_VOCAB, LENGTHS)
]
SMALL = {"suffix": "Model", "std": 0.2}  # a decoder without a head, of even attention
IN_ORDER = range(len(PROMPTS))
METHODS = {
    "CLS": lambda rows, ids: references.normalize(rows[0]),
    "LAST": lambda rows, ids: references.normalize(rows[-1]),
    "MEAN": lambda rows, ids: references.normalize(rows.mean(0)),
    "ALL": lambda rows, ids: references.normalize(rows),
    "STEP": lambda logits, ids: logits[torch.tensor(ids) == TAG].softmax(-1),
}


class Case:
    """One method: the checkpoint and task that show it, its settings, what transformers says."""

    def __init__(self, method: str, checkpoint):
        self.method = method
        if method == "STEP":
            self.folder, self.task = checkpoint("qwen2_process_reward", **SMALL), "token_classify"
            rows = [references.reward_logits(self.folder, ids) for ids in PROMPTS]
        else:
            self.folder = checkpoint("qwen3", **SMALL)
            self.task = "token_embed" if method == "ALL" else "embed"
            model = references.load(self.folder)
            rows = [references.hidden_states(model, ids) for ids in PROMPTS]
        pairs = zip(rows, PROMPTS, strict=True)
        self.expected = [METHODS[method](*pair) for pair in pairs]
        tag = TAG if method == "STEP" else None
        self.pooler = {"pooler_config": PoolerConfig(pooling_type=method, step_tag_id=tag)}

    def start(self, **settings) -> LLM:
        return start(self.folder, **{"block_size": 4, "num_kv_blocks": 64} | self.pooler | settings)

    def check(self, llm: LLM, order: Iterable[int] = IN_ORDER) -> None:
        """All prompts in one call, in this order, give what transformers gives."""
        found = ask(llm, [PROMPTS[i] for i in order], self.task)
        assert_close(found, [self.expected[i] for i in order])


@pytest.fixture(scope="module", params=METHODS)
def case(request, checkpoint) -> Case:
    return Case(request.param, checkpoint)


@pytest.fixture(scope="module")
def llm(case):
    with case.start() as llm:
        yield llm


def test_a_whole_prompt_gives_what_transformers_gives(case, llm):
    case.check(llm)


def test_a_prompt_alone_gives_the_same(case, llm):
    assert_close([ask(llm, [ids], case.task)[0] for ids in PROMPTS], case.expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_order_gives_the_same(case, llm, seed):
    case.check(llm, random.Random(seed).sample(range(len(PROMPTS)), len(PROMPTS)))


@pytest.mark.parametrize("budget", range(1, max(LENGTHS) + 2))
def test_every_budget_gives_the_same(case, budget):
    with case.start(max_num_batched_tokens=budget) as llm:
        case.check(llm)


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_every_block_size_gives_the_same(case, block_size):
    with case.start(block_size=block_size, max_num_batched_tokens=10) as llm:
        case.check(llm)


@pytest.mark.parametrize("budget", [5, 64])
def test_a_starved_pool_gives_the_same(case, budget):
    with case.start(num_kv_blocks=max(LENGTHS) // 4, max_num_batched_tokens=budget) as llm:
        case.check(llm)


def test_a_preempted_prompt_starts_its_pooling_again(case, monkeypatch):
    """The longest prompt is 9 tokens far when it is preempted, by force, before the second step."""
    with case.start(max_num_batched_tokens=9) as llm:
        scheduler, preempted = llm.llm_engine.scheduler, []
        schedule = scheduler.schedule

        def interrupted():
            if scheduler.running and not preempted:
                preempted.append(scheduler.running[-1].num_computed_tokens)
                scheduler._preempt_youngest()
            return schedule()

        monkeypatch.setattr(scheduler, "schedule", interrupted)
        case.check(llm)
    assert preempted == [9]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_prompts_sent_twice_give_the_same(case, enable_prefix_caching):
    with case.start(enable_prefix_caching=enable_prefix_caching) as llm:
        case.check(llm)
        case.check(llm)


@pytest.mark.parametrize("length", [4, 7, 8, 9])
def test_only_last_reads_the_prefix_cache(case, length):
    """Whole blocks of 4, and at least one token is computed."""
    computed = []
    with case.start() as llm:
        llm.llm_engine.runner.model.register_forward_pre_hook(
            lambda _, args: computed.append(len(args[0].input_ids))
        )
        for _ in range(2):
            ask(llm, [PROMPTS[-1][:length]], case.task)
    again = length - (length - 1) // 4 * 4 if case.method == "LAST" else length
    assert computed == [length, again]


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_a_prompt_may_be_as_long_as_the_model_allows(case, llm, enable_chunked_prefill):
    """No place is kept for a sampled token."""
    prompts = [PROMPTS[2], PROMPTS[-1], PROMPTS[-1][:-1]]
    expected = ask(llm, prompts, case.task)
    settings = {"max_model_len": 16, "max_num_batched_tokens": 16}
    with case.start(enable_chunked_prefill=enable_chunked_prefill, **settings) as limited:
        assert_close(ask(limited, prompts, case.task), expected)
        with pytest.raises(ValueError, match="prompt 1 has 17 tokens"):
            ask(limited, [[5], [5] * 17], case.task)
        assert_close(ask(limited, prompts, case.task), expected)


def test_a_prompt_without_a_step_tag_gives_no_rows(checkpoint):
    settings = {"pooler_config": PoolerConfig(step_tag_id=TAG)}
    folder = checkpoint("qwen2_process_reward", **SMALL)
    (rows,) = ask_once(folder, [[8, 9, 10]], "token_classify", settings)
    assert rows.shape == (0, 2)


@pytest.mark.parametrize("given", ["request", "config"])
def test_a_step_tag_outside_the_vocabulary_is_refused(checkpoint, given):
    tag = {"step_tag_id": BPE_VOCAB}
    pooler = PoolerConfig(**tag if given == "config" else {"step_tag_id": TAG})
    params = tag if given == "request" else {}
    with start(checkpoint("qwen2_process_reward", **SMALL), pooler_config=pooler) as llm:
        with pytest.raises(ValueError, match=f"step_tag_id={BPE_VOCAB}.* to {BPE_VOCAB - 1}"):
            ask(llm, [[8, 9, 10]], "token_classify", **params)
        assert ask(llm, [[8, TAG]], "token_classify", step_tag_id=TAG)[0].shape == (1, 2)


def test_mean_divides_by_each_prompts_own_length(checkpoint):
    folder = checkpoint("qwen3", **SMALL)
    settings = {"pooler_config": PoolerConfig(pooling_type="MEAN")}
    found = ask_once(folder, [PROMPTS[1], PROMPTS[3]], "embed", settings, use_activation=False)
    model = references.load(folder)
    rows = [references.hidden_states(model, ids) for ids in (PROMPTS[1], PROMPTS[3])]
    assert_close(found, [r.mean(0) for r in rows])


@pytest.mark.parametrize(
    ("backbone", "facts", "budget"), [("qwen3", SMALL, 7), ("qwen3", SMALL, 64), ("bert", {}, 64)]
)
def test_mean_leaves_out_the_prompts_rows_where_the_folder_says_so(
    checkpoint, backbone, facts, budget
):
    """[CLS] goes with the prompt; of an empty text a decoder has nothing left."""
    from sentence_transformers import SentenceTransformer

    facts = {"backbone": backbone, "include_prompt": False} | facts
    folder, texts = checkpoint("sentence_transformer", **facts), [*references.TEXTS, ""]
    with start(folder, max_num_batched_tokens=budget) as llm:
        outputs = llm.embed(texts, prompt_name="query", use_tqdm=False)
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(texts, prompt_name="query", convert_to_tensor=True)
    assert_close(torch.stack([output.outputs.data for output in outputs]), expected)
