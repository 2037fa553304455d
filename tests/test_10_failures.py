"""An error on any rank reaches the caller, and the next call is right. Chapter 10."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import references
import torch
from answers import ask, assert_close, start
from tiny_tokenizers import BPE_VOCAB

from nanopool import LLM, PoolerConfig, SamplingParams
from nanopool.engine import model_runner
from nanopool.pooler.poolers import DispatchPooler

PROMPTS = references.random_prompts(BPE_VOCAB, (5, 9, 17))
SMALL = {"suffix": "Model", "std": 0.2}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class InjectedError(Exception):
    """What the tests throw into the engine."""


@contextmanager
def failing(module, name: str, calls_before: int, monkeypatch) -> Iterator[None]:
    """`module.name(...)` fails after some good calls."""
    real, calls = getattr(module, name), []

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) > calls_before:
            raise InjectedError(name)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        yield


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=[1, 2, 4])
def generator(request, checkpoint):
    settings = {"tensor_parallel_size": request.param, "max_num_batched_tokens": 8}
    with start(checkpoint("qwen3"), block_size=4, num_kv_blocks=64, **settings) as llm:
        yield llm, generate(llm)


@pytest.fixture(scope="module", params=[1, 2, 4])
def embedder(request, checkpoint):
    settings = {"tensor_parallel_size": request.param, "max_num_batched_tokens": 8}
    settings |= {"pooler_config": PoolerConfig(pooling_type="MEAN")}  # reads no prefix cache
    folder = checkpoint("qwen3", **SMALL)
    with start(folder, block_size=4, num_kv_blocks=64, **settings) as llm:
        yield llm, ask(llm, PROMPTS, "embed")


@pytest.mark.parametrize("rank", [0, -1], ids=["first-rank", "last-rank"])
@pytest.mark.parametrize("calls_before", [0, 2])
@pytest.mark.parametrize("method", ["forward", "compute_logits"])
def test_generation_survives_a_failure_of_the_model(
    generator, method, rank, calls_before, monkeypatch
):
    llm, expected = generator
    model = llm.ranks.targets[rank].runner.model
    with failing(model, method, calls_before, monkeypatch):
        with pytest.raises(InjectedError, match=method):
            generate(llm)
    assert generate(llm) == expected


@pytest.mark.parametrize("calls_before", [0, 2])
def test_generation_survives_a_failure_of_the_sampler(generator, calls_before, monkeypatch):
    llm, expected = generator
    with failing(model_runner, "sample", calls_before, monkeypatch):
        with pytest.raises(InjectedError, match="sample"):
            generate(llm)
    assert generate(llm) == expected


@pytest.mark.parametrize("rank", [0, -1], ids=["first-rank", "last-rank"])
@pytest.mark.parametrize("calls_before", [0, 2])
def test_pooling_survives_a_failure_of_the_model(embedder, rank, calls_before, monkeypatch):
    llm, expected = embedder
    with failing(llm.ranks.targets[rank].runner.model, "forward", calls_before, monkeypatch):
        with pytest.raises(InjectedError, match="forward"):
            ask(llm, PROMPTS, "embed")
    assert_close(ask(llm, PROMPTS, "embed"), expected)


@pytest.mark.parametrize("calls_before", [0, 2])
def test_pooling_survives_a_failure_of_the_pooler(embedder, calls_before, monkeypatch):
    llm, expected = embedder
    with failing(DispatchPooler, "__call__", calls_before, monkeypatch):
        with pytest.raises(InjectedError, match="__call__"):
            ask(llm, PROMPTS, "embed")
    assert_close(ask(llm, PROMPTS, "embed"), expected)


def test_a_result_that_is_not_finite_is_named_and_its_neighbours_are_right(checkpoint):
    """Token 9 is broken; so is every later row of its own prompt, and nothing else."""
    folder, prompts = checkpoint("qwen3", **SMALL), [[5, 6, 7, 8, 10], [5, 6, 9, 8], [8, 7]]
    with start(folder, block_size=2, num_kv_blocks=16, max_num_batched_tokens=4) as llm:
        good = ask(llm, [prompts[0], prompts[2]], "embed")
        with torch.inference_mode():
            llm.llm_engine.runner.model.model.embed_tokens.weight[9] = float("inf")
        llm.llm_engine.reset()
        for _ in range(2):
            with pytest.warns(UserWarning, match=r"inf or NaN in the result of request \d+;"):
                found = ask(llm, prompts, "embed")
            assert not found[1].isfinite().all()
            assert_close([found[0], found[2]], good)
        assert_close(ask(llm, [prompts[0], prompts[2]], "embed"), good)
