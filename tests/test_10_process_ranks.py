"""Whole LLMs on two gloo processes, one long-lived pair a checkpoint: the results of one rank."""

import pytest
import references
from test_invariances import TABLE, Case

from nanopool import LLM, SamplingParams

PAIRS = {
    "qwen3-last": {"max_num_batched_tokens": 7, "num_kv_blocks": 9},  # cut, and hardly any room
    "qwen3-all": {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
    "bert-mean": {},
    "bge-m3-joint": {},
    "colbert": {},
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, checkpoint):
    """(case on one rank, the same checkpoint on two processes)."""
    case = Case(TABLE[request.param], checkpoint)
    settings = {"tensor_parallel_size": 2, "tp_backend": "process"} | PAIRS[request.param]
    with case.llm, case.start(**settings) as llm:
        yield case, llm


@pytest.mark.parametrize("seed", [0, 1])
def test_two_processes_give_what_each_prompt_gives_alone_on_one_rank(pair, seed):
    case, llm = pair
    case.check(llm, seed)


def test_generation_on_two_processes_equals_transformers(checkpoint):
    folder = checkpoint("qwen3")
    model = references.load(folder, "AutoModelForCausalLM")
    prompts = references.random_prompts(model.config.vocab_size)[:6]
    expected, gap = references.greedy(model, prompts, 12)
    assert gap > 1e-3, "a near tie between two tokens would make the test depend on rounding"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
    with LLM(folder, device="cpu", block_size=4) as llm:
        sampled = [o.outputs[0].token_ids for o in llm.generate(prompts, seeded, False)]
    settings = {"tensor_parallel_size": 2, "tp_backend": "process", "num_kv_blocks": 24}
    with LLM(folder, device="cpu", block_size=4, **settings) as llm:
        greedy = [o.outputs[0].token_ids for o in llm.generate(prompts, params, False)]
        again = [o.outputs[0].token_ids for o in llm.generate(prompts, seeded, False)]
    assert greedy == expected
    assert again == sampled
