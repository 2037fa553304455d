"""Greedy generation equals transformers', however the engine cuts, caches or preempts it."""

import pytest
import references

from nanopool import LLM, SamplingParams

NUM_TOKENS = 32


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def case(request, checkpoint):
    """(folder, 16 prompts, their greedy continuations by transformers)."""
    folder = checkpoint(request.param)
    model = references.load(folder, "AutoModelForCausalLM")
    prompts = references.random_prompts(model.config.vocab_size)
    expected, gap = references.greedy(model, prompts, NUM_TOKENS)
    assert gap > 1e-3, "a near tie between two tokens would make the test depend on rounding"
    return folder, prompts, expected


def generate(folder, prompts, **kwargs) -> list[list[int]]:
    with LLM(folder, **kwargs) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, False)]


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64, 8192])
@pytest.mark.parametrize("pool", ["ample", "starved"])
def test_budget_and_pool_change_nothing(case, max_num_batched_tokens, pool):
    folder, prompts, expected = case
    longest = max(map(len, prompts)) + NUM_TOKENS
    blocks = {"ample": None, "starved": -(-longest // 4) + 1}[pool]
    settings = {"max_num_batched_tokens": max_num_batched_tokens, "num_kv_blocks": blocks}
    assert generate(folder, prompts, block_size=4, **settings) == expected


@pytest.mark.parametrize("tensor_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_ranks_and_prefix_cache_change_nothing(case, tensor_parallel_size, enable_prefix_caching):
    folder, prompts, expected = case
    twice = prompts + prompts
    settings = {
        "tensor_parallel_size": tensor_parallel_size,
        "enable_prefix_caching": enable_prefix_caching,
    }
    assert generate(folder, twice, block_size=4, **settings) == expected + expected
