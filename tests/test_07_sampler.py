"""Sampling: transformers' filters, one generator for each request, and nothing else. Chapter 07."""

import pytest
import references
import torch
from answers import assert_close, start
from tiny_tokenizers import BPE_VOCAB
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanopool import SamplingParams
from nanopool.layers.sampler import filtered_probs, sample

PROMPTS = references.random_prompts(BPE_VOCAB, (3, 11, 6, 17))
RULES = [(1.0, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.5), (0.7, 5, 0.8), (1.0, 1, 1.0), (3.0, 0, 0.9)]
LOGITS = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3


def warped_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers samples from."""
    warpers = [TemperatureLogitsWarper(params.temperature)]
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_filters_equal_transformers(temperature, top_k, top_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    found = filtered_probs(LOGITS, [params] * len(LOGITS))
    assert_close(found / found.sum(-1, keepdim=True), warped_probs(LOGITS, params))


def test_each_row_has_its_own_filters():
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in RULES]
    found = filtered_probs(LOGITS, params)
    expected = [warped_probs(row[None], p)[0] for row, p in zip(LOGITS, params, strict=True)]
    assert_close(found / found.sum(-1, keepdim=True), torch.stack(expected))


def test_draws_follow_the_filtered_probabilities():
    params = SamplingParams(top_k=4)
    n = 4000
    draws = sample(LOGITS[:1].expand(n, -1), [params] * n, [(i,) for i in range(n)])
    found = torch.bincount(torch.tensor(draws), minlength=50) / n
    assert (found - warped_probs(LOGITS[:1], params)[0]).abs().max() < 0.03


def test_the_smallest_top_p_leaves_the_likeliest_token():
    params = SamplingParams(top_p=1e-300)
    assert sample(LOGITS, [params] * 6, [(i,) for i in range(6)]) == LOGITS.argmax(-1).tolist()


def test_no_draw_takes_what_the_filters_left_out(monkeypatch):
    class Least:
        """A generator whose number is the smallest there is."""

        def random(self, dtype):
            return dtype(0)

    monkeypatch.setattr("numpy.random.default_rng", lambda seed: Least())
    logits = torch.tensor([[0.0, 3.0, 2.0]])
    assert sample(logits, [SamplingParams(top_k=2)], [(0,)]) == [2]


def test_temperature_0_takes_the_largest_logit_beside_any_neighbour():
    params = [SamplingParams(temperature=i % 2) for i in range(len(LOGITS))]
    tokens = sample(LOGITS, params, [(i,) for i in range(len(LOGITS))])
    assert tokens[::2] == LOGITS.argmax(-1)[::2].tolist()


def tokens_of(llm, prompts, params) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def seeded(**fields) -> list[SamplingParams]:
    """One for each prompt, with a seed of its own."""
    return [SamplingParams(max_tokens=12, ignore_eos=True, seed=i, **fields) for i in range(4)]


def test_vllms_word_for_no_top_k_is_taken():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@pytest.mark.parametrize("fields", [{}, {"top_k": 5, "temperature": 1.5}, {"top_p": 0.8}], ids=str)
def test_a_seed_gives_the_same_tokens_alone_batched_and_on_two_ranks(checkpoint, fields):
    params = seeded(**fields)
    with start(checkpoint("qwen3"), num_kv_blocks=64) as llm:
        pairs = zip(PROMPTS, params, strict=True)
        alone = [tokens_of(llm, [prompt], param)[0] for prompt, param in pairs]
        assert tokens_of(llm, PROMPTS, params) == alone
    with start(checkpoint("qwen3"), num_kv_blocks=64, tensor_parallel_size=2) as llm:
        assert tokens_of(llm, PROMPTS[::-1], params[::-1]) == alone[::-1]


def test_a_starved_pool_changes_no_sample(checkpoint):
    params = seeded()
    found = []
    for blocks in (64, 8):
        with start(checkpoint("qwen3"), num_kv_blocks=blocks, block_size=4) as llm:
            found.append(tokens_of(llm, PROMPTS, params))
    assert found[0] == found[1]


def test_seeds_and_requests_without_a_seed_draw_differently(checkpoint):
    with start(checkpoint("qwen3"), num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
        drawn = tokens_of(llm, PROMPTS[:1] * 3, params)
        drawn += tokens_of(llm, PROMPTS[:1] * 3, seeded(temperature=2.0)[:3])
    assert len({tuple(tokens) for tokens in drawn}) == 6


def test_an_llms_seed_decides_what_requests_without_one_draw(checkpoint):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = []
    for seed in (1, 1, 2):
        with start(checkpoint("qwen3"), num_kv_blocks=64, seed=seed) as llm:
            drawn.append(tokens_of(llm, PROMPTS, params))
    assert drawn[0] == drawn[1] != drawn[2]
