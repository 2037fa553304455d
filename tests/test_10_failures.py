"""An error on any rank reaches the caller, and the next call is right. Chapter 10."""

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import references
import torch
from answers import ask, assert_close, start
from tiny_tokenizers import BPE_VOCAB

from nanopool import LLM, PoolerConfig, SamplingParams
from nanopool.engine import model_runner
from nanopool.parallel import RankLost
from nanopool.pooler.poolers import DispatchPooler

PROMPTS = references.random_prompts(BPE_VOCAB, (5, 9, 17))
SMALL = {"suffix": "Model", "std": 0.2}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class InjectedError(Exception):
    """What the tests throw into the engine."""


@contextmanager
def failing(
    module, name: str, calls_before: int, monkeypatch, error=InjectedError
) -> Iterator[None]:
    """`module.name(...)` fails after some good calls; `error` makes the exception."""
    real, calls = getattr(module, name), []

    def fails(*args, **kwargs):
        calls.append(name)
        if len(calls) > calls_before:
            raise error(name)
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


@pytest.mark.parametrize("calls_before", [0, 2])
def test_ctrl_c_in_a_long_call_ends_it_and_the_next_is_right(embedder, calls_before, monkeypatch):
    """It lands in the caller's thread, which is rank 0's."""
    llm, expected = embedder
    model = llm.ranks.targets[0].runner.model
    with failing(model, "forward", calls_before, monkeypatch, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            ask(llm, PROMPTS * 20, "embed")
    assert_close(ask(llm, PROMPTS, "embed"), expected)


def test_one_request_above_the_pool_among_a_hundred_is_named(checkpoint):
    prompts = references.random_prompts(BPE_VOCAB, [7] * 99)
    prompts.insert(41, [5] * 40)
    with start(checkpoint("qwen3", **SMALL), block_size=4, num_kv_blocks=8) as llm:
        with pytest.raises(ValueError, match=r"prompt 41 of 40 tokens .* num_kv_blocks"):
            ask(llm, prompts, "embed")
        others = prompts[:41] + prompts[42:]
        alone = [ask(llm, [ids], "embed")[0] for ids in others[:3] + others[-3:]]
        found = ask(llm, others, "embed")
    assert_close(found[:3] + found[-3:], alone)


def test_two_llms_live_side_by_side(generator, embedder):
    (first, tokens), (second, vectors) = generator, embedder
    for _ in range(2):
        assert generate(first) == tokens
        assert_close(ask(second, PROMPTS, "embed"), vectors)


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_from_several_threads_take_turns(checkpoint, ranks):
    """Each thread cuts its texts at another length and at another side."""
    folder, text = checkpoint("qwen3_embedding"), "the capital of france is paris " * 20
    cuts = [
        {"truncate_prompt_tokens": n, "truncation_side": side}
        for n in (5, 17, 64)
        for side in ("left", "right")
    ]
    with start(folder, tensor_parallel_size=ranks, block_size=4, num_kv_blocks=64) as llm:

        def vectors(cut):
            outputs = llm.embed([text, "no"], use_tqdm=False, **cut)
            return [output.outputs.data for output in outputs]

        expected = [vectors(cut) for cut in cuts]
        with ThreadPoolExecutor(6) as pool:
            for _ in range(5):
                assert_close([*pool.map(vectors, cuts)], expected)


def test_a_bfloat16_checkpoint_pools_and_scores_in_float32(checkpoint):
    folder = checkpoint("qwen3", dtype="bfloat16", **SMALL)
    with start(folder, dtype="bfloat16") as llm:
        assert llm.llm_engine.runner.model.model.embed_tokens.weight.dtype == torch.bfloat16
        vectors = torch.stack(ask(llm, PROMPTS, "embed"))
        scores = llm.score(PROMPTS[0], PROMPTS, use_tqdm=False)
    assert vectors.dtype == torch.float32
    assert (vectors.norm(dim=-1) - 1).abs().max() < 1e-6
    assert_close([output.outputs.data for output in scores], [*vectors @ vectors[0]])


# Processes


@pytest.fixture
def pair(checkpoint):
    settings = {"tensor_parallel_size": 2, "tp_backend": "process", "num_kv_blocks": 64}
    with start(checkpoint("qwen3", **SMALL), **settings) as llm:
        yield llm


@pytest.mark.slow
def test_a_failed_forward_of_process_ranks_ends_them_and_the_llm_says_so(pair, monkeypatch):
    good = ask(pair, PROMPTS, "embed")
    assert_close(ask(pair, PROMPTS, "embed"), good)
    workers = pair.ranks.workers
    with failing(pair.llm_engine.runner.model, "forward", 0, monkeypatch):
        with pytest.raises(InjectedError, match="forward"):
            ask(pair, PROMPTS, "embed")
    assert all(worker.poll() is not None for worker in workers)
    with pytest.raises(RuntimeError, match="shut down: make a new one"):
        ask(pair, PROMPTS, "embed")


@pytest.mark.slow
def test_a_worker_killed_in_a_call_is_named(pair, monkeypatch):
    model, (worker,) = pair.llm_engine.runner.model, pair.ranks.workers
    forward = model.forward

    def killing(*args):
        worker.kill()
        worker.wait()
        return forward(*args)

    monkeypatch.setattr(model, "forward", killing)
    with pytest.raises(RankLost, match=r"rank 1 .* -9"):
        ask(pair, PROMPTS, "embed")
    with pytest.raises(RuntimeError, match="shut down: make a new one"):
        ask(pair, PROMPTS, "embed")


# What is left behind


def resources() -> dict[str, int]:
    """Threads, open files, children and MiB of this process (where the system says it)."""
    gc.collect()
    own = Path("/proc/self")
    if not own.exists():
        return {}
    pages = int((own / "statm").read_text().split()[1])
    children = (own / "task" / str(os.getpid()) / "children").read_text().split()
    return {
        "threads": len(os.listdir(own / "task")),
        "files": len(os.listdir(own / "fd")),
        "children": len(children),
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }


@pytest.mark.slow
def test_fifty_llms_leave_nothing(checkpoint):
    """Dropped, not shut down; the first ten may still warm caches."""
    folder = checkpoint("qwen3", **SMALL)
    for i in range(50):
        llm = start(folder, tensor_parallel_size=1 + i % 2, num_kv_blocks=64)
        ask(llm, PROMPTS, "embed")
        del llm
        if i == 9:
            before = resources()
    after = resources()
    grown = {name: after[name] - before[name] for name in before}
    assert {name: n for name, n in grown.items() if n > (32 if name == "MiB" else 0)} == {}
