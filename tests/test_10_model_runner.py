"""The model runner: memory, warm-up, padded and replayed steps, copies to the host. Chapter 10."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import references
import torch
from answers import ask, assert_close, start
from test_03_kernels import CALLS, on_gpu
from torch import Tensor

from nanopool import LLM, PoolerConfig, PoolingParams, SamplingParams
from nanopool.batch import Batch, Slice, to_device
from nanopool.engine.cuda_graphs import DEAD, capture_sizes, padded
from nanopool.engine.engine import Engine
from nanopool.engine.host_copy import HostCopy
from nanopool.engine.kv_cache import blocks_on_cpu, blocks_on_gpu
from nanopool.engine.model_runner import ModelRunner, own_device
from nanopool.engine.sequence import Request, Sequence
from nanopool.engine.warm_up import largest_step
from nanopool.layers import attention

PROMPTS = [[7, 8, 9], [5], [6, 7, 8, 9, 10, 11], [9, 5], [12, 13, 14, 15, 16]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


# Memory


def test_other_processes_are_not_charged_to_this_one():
    """80 in all, 30 held by others, 10 by this process, which may take half: 30 are left for it."""
    assert blocks_on_gpu(total=80, free=40, mine=10, utilization=0.5, bytes_each=1) == 30


def test_what_is_not_free_cannot_be_used():
    assert blocks_on_gpu(total=80, free=5, mine=10, utilization=0.9, bytes_each=1) == 5


@pytest.mark.parametrize("free, mine", [(40, 40), (40, 60), (0, 10)])
def test_no_room_for_a_block_is_an_error_with_the_numbers(free, mine):
    gib = 2**30
    with pytest.raises(ValueError, match="gpu_memory_utilization") as error:
        blocks_on_gpu(80 * gib, free * gib, mine * gib, 0.5, bytes_each=gib)
    assert {"0.5", "80.0", f"{mine}.0", f"{free}.0"} <= set(
        str(error.value).replace("=", " ").split()
    )


def test_the_cpu_pool_holds_the_largest_batch_and_one_long_sequence():
    assert blocks_on_cpu(4, max_model_len=33, block_size=16, bytes_each=2**20) == 4 * 3
    assert blocks_on_cpu(256, max_model_len=512, block_size=16, bytes_each=2**20) == 2048
    assert blocks_on_cpu(1, max_model_len=512, block_size=16, bytes_each=2**30) == 32


@pytest.mark.parametrize("num_kv_blocks", [10**10, 10**17, 10**20])
def test_a_pool_above_any_memory_is_an_error_with_the_numbers(checkpoint, num_kv_blocks):
    with pytest.raises(ValueError, match=rf"num_kv_blocks = {num_kv_blocks} needs \d+\.\d GiB"):
        start(checkpoint("qwen3"), num_kv_blocks=num_kv_blocks)


def test_a_rank_has_one_device():
    for device in ("cpu", "cuda:1"):
        assert own_device(torch.device(device)) == torch.device(device)


# Warm-up


@pytest.mark.parametrize(
    "limits, lens",
    [
        ((8192, 256, 512), [32] * 256),
        ((100, 3, 512), [34, 33, 33]),
        ((8192, 3, 512), [512] * 3),
        ((4, 256, 512), [1] * 4),
        ((512, 1, 512), [512]),
    ],
)
def test_the_largest_step_fills_the_budget(limits, lens):
    assert largest_step(*limits) == lens


KINDS = [
    "qwen3",
    "qwen3_classifier",
    "qwen2_process_reward",
    "bert_classifier",
    "bert_mlm",
    "bge_m3",
]


@pytest.mark.parametrize("kind", [*KINDS, "hf_colbert"])
def test_warm_up_runs_every_task_without_a_kv_cache(checkpoint, kind, monkeypatch):
    steps = []
    with start(checkpoint(kind), max_num_seqs=3) as llm:
        runner, config = llm.llm_engine.runner, llm.model_config
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(runner, "kv_caches", [None] * config.hf_config.num_hidden_layers)
            patch.setattr(runner, "block_size", None)
            execute = runner.execute
            patch.setattr(runner, "execute", lambda step: steps.append(step) or execute(step))
            runner.warm_up(3)
        if config.runner == "pooling":
            assert len(ask(llm, PROMPTS)) == len(PROMPTS)
    largest = largest_step(config.max_num_batched_tokens, 3, config.max_model_len)
    assert [[n for _, n in step] for step in steps] == [largest] * len(config.spec.tasks)
    asked = [step[0][0].request.pooling for step in steps]
    assert [params.task if params else "generate" for params in asked] == list(config.spec.tasks)


# Padded steps


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 12, 16, 20, 256])
def test_captured_sizes_end_at_max_num_seqs(max_num_seqs):
    sizes = capture_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    assert list(sizes) == sorted(set(sizes))
    for count in range(1, max_num_seqs + 1):
        assert len(padded([DEAD] * count, sizes)) in range(count, max(2 * count, count + 16))


def test_dead_rows_are_stored_nowhere():
    slices = [
        Slice(np.array([7], np.int32), 5, 6, [3, 1]),
        Slice(np.array([8], np.int32), 0, 1, [2]),
    ]
    batch = Batch.build(padded([*slices, slices[0]], (1, 2, 4)), 4, torch.device("cpu"))
    assert batch.slot_mapping.tolist() == [5, 8, 5, -1]
    assert batch.input_ids.tolist() == [7, 8, 7, 0]
    assert batch.positions.tolist() == [5, 0, 5, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert batch.cu_seqlens_k.tolist() == [0, 6, 7, 13, 14]
    assert batch.block_tables.tolist() == [[3, 1], [2, 0], [3, 1], [0, 0]]


def decoding(engine: Engine, count: int) -> list[tuple[Sequence, int]]:
    """A step in which `count` sequences, whose prompts are computed, have one token each."""
    for i in range(count):
        ids = tuple(PROMPTS[i % len(PROMPTS)])
        engine.scheduler.add(Sequence(Request(str(i), ids, sampling=GREEDY, max_new_tokens=9)))
    while True:
        scheduled = engine.scheduler.schedule()
        if len(scheduled) == count and all(
            n == 1 and s.num_tokens > s.num_prompt_tokens for s, n in scheduled
        ):
            return scheduled
        engine.scheduler.update(scheduled, engine.runner.execute(scheduled).tokens)


def eager_and_padded(engine: Engine, count: int, run: Callable) -> tuple[Tensor, ...]:
    """Hidden rows and KV pool of one step as it is, then of the same step by `run(slices)`."""
    runner, pools, rows = engine.runner, engine.runner.kv_caches, []
    slices = [seq.slice(n) for seq, n in decoding(engine, count)]
    before = [pool.clone() for pool in pools]
    after = []
    for compute in (lambda part: runner.forward(build(runner, part)), run):
        for pool, old in zip(pools, before, strict=True):
            pool.copy_(old)
        rows.append(compute(slices)[:count].clone())
        after.append(torch.stack(pools))
    engine.reset()
    return *rows, *after


def build(runner, slices: list[Slice]) -> Batch:
    return Batch.build(slices, runner.block_size, runner.config.device)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_padded_step_equals_the_eager_one(checkpoint, count):
    """Its real rows and the pool, in which a dead row must not write."""
    with start(checkpoint("qwen3"), max_num_seqs=7, block_size=4, num_kv_blocks=40) as llm:
        engine = llm.llm_engine

        def run(slices):
            return engine.runner.forward(build(engine.runner, padded(slices, (4, 7))))

        with torch.inference_mode():
            for pool in engine.runner.kv_caches:
                pool.fill_(float("nan"))
            eager, replayed, pool, pool_after = eager_and_padded(engine, count, run)
    torch.testing.assert_close(replayed, eager)
    torch.testing.assert_close(pool_after, pool, equal_nan=True)


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """CUDA graphs without CUDA; the list fills with the sizes that are replayed.

    A replay computes again what was recorded, from the same static tensors into the same output.
    Attention reads its lengths from tensors, as the flash kernels do.
    """
    sizes: list[int] = []
    forward = ModelRunner.forward

    class Graph:
        recording: "Graph | None" = None

        def replay(self) -> None:
            sizes.append(len(self.static.query_lens))
            self.hidden.copy_(forward(self.runner, replace(self.static)))

    @contextmanager
    def record(graph: Graph, pool: object):
        Graph.recording = graph
        yield
        Graph.recording = None

    def recorded_forward(runner: ModelRunner, batch: Batch) -> Tensor:
        hidden = forward(runner, batch)
        if (graph := Graph.recording) is not None:
            graph.runner, graph.static, graph.hidden = runner, batch, hidden
        return hidden

    monkeypatch.setattr(ModelRunner, "forward", recorded_forward)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(attention, "select_backend", lambda *args: CALLS["torch"])
    return sizes


def test_generation_by_replays(checkpoint, replays):
    """The sequences end one after the other: three of them run in the recording of four."""
    folder, settings = checkpoint("qwen3"), {"max_num_seqs": 5, "block_size": 4}
    params, results = [replace(GREEDY, max_tokens=4 + 3 * i) for i in range(5)], []
    for enforce_eager in (True, False):
        with start(folder, enforce_eager=enforce_eager, **settings) as llm:
            outputs = llm.generate(PROMPTS, params, False)
            results.append([output.outputs[0].token_ids for output in outputs])
        assert bool(replays) is not enforce_eager
    assert results[0] == results[1]
    assert set(replays) == {1, 2, 4, 5}


@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("seq_pooling_type", ["CLS", "LAST", "MEAN"])
def test_pooling_by_replays(checkpoint, replays, task, seq_pooling_type):
    """Some prompts in pieces, some of one token; a replay overwrites what no pooler has copied."""
    pooler, prompts = PoolerConfig(seq_pooling_type=seq_pooling_type), PROMPTS + [[5], [6], [7]] * 3
    folder, settings = checkpoint("qwen3"), {"convert": "embed", "pooler_config": pooler}
    with start(folder, enforce_eager=True, **settings) as llm:
        expected = ask(llm, prompts, task)
    for budget in (1, 3):
        limits = {"max_num_seqs": 6, "max_num_batched_tokens": budget, "block_size": 4}
        with start(folder, **settings, **limits) as llm:
            actual = ask(llm, prompts, task)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert {1: 1, 3: 4}[budget] in replays


def test_encoders_record_no_graphs(checkpoint, replays):
    with start(checkpoint("bert")) as llm:
        assert llm.llm_engine.runner.graphs is None


# Copies to the host


def test_outputs_arrive_with_their_shapes_and_own_their_storage(device):
    stream = torch.cuda.Stream() if device == "cuda" else None
    rows = torch.arange(12.0, device=device).view(4, 3)
    outputs = {"a": rows[0], "b": rows[1:3], "c": rows[3, 2]}
    expected = {name: output.cpu().clone() for name, output in outputs.items()}
    copy = HostCopy(outputs, stream)
    rows.fill_(float("nan"))
    arrived = copy.split()
    assert list(arrived) == ["a", "b", "c"]
    for name, tensor in arrived.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
        assert tensor.device.type == "cpu" and not tensor.is_pinned()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_result_may_be_changed_in_place_and_trained_on(checkpoint):
    with start(checkpoint("bert")) as llm:
        vector, rows = (ask(llm, [[5, 6, 7]], task)[0] for task in ("embed", "token_embed"))
    vector /= 2
    weight = torch.ones(32, requires_grad=True)
    (rows @ weight).sum().backward()
    assert_close(vector.norm(), torch.tensor(0.5))
    assert_close(weight.grad, rows.sum(0))


def test_a_staged_array_may_be_rewritten_at_once(device):
    staged = [np.full(1000, i) for i in range(50)]
    tensors = [to_device(array, torch.device(device)) for array in staged]
    assert [tensor[-1].item() for tensor in tensors] == list(range(50))


def test_results_of_every_step_are_right(checkpoint):
    """One sequence a step, 120 steps: none has another's rows."""
    folder, prompts = checkpoint("bert"), [[5 + i % 50, 6, 7][: 1 + i % 3] for i in range(120)]
    with start(folder, max_num_seqs=1) as llm:
        together = ask(llm, prompts, "embed")
        alone = [ask(llm, [prompt], "embed")[0] for prompt in prompts[:50:7]]
    torch.testing.assert_close(together[:50:7], alone, rtol=1e-5, atol=1e-5)


# On a GPU

HALF = {"dtype": "bfloat16", "head_dim": 64}


def gpu_llm(folder, **settings) -> LLM:
    return LLM(folder, **{"device": "cuda", "dtype": "bfloat16", "num_kv_blocks": 600} | settings)


@on_gpu
@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 20])
def test_replay_equals_eager_at_every_size(checkpoint, device, max_num_seqs):
    with gpu_llm(checkpoint("qwen3", **HALF), max_num_seqs=max_num_seqs) as llm:
        engine, graphs = llm.llm_engine, llm.llm_engine.runner.graphs
        if graphs is None:
            pytest.skip("no flash attention here")
        assert tuple(sorted(graphs.graphs)) == graphs.sizes == capture_sizes(max_num_seqs)

        def run(slices):
            return graphs(build(engine.runner, padded(slices, graphs.sizes)))

        with torch.inference_mode():
            for count in {size - less for size in graphs.sizes for less in (0, 1)} - {0}:
                eager, replayed, pool, pool_after = eager_and_padded(engine, count, run)
                torch.testing.assert_close(replayed, eager, rtol=3e-2, atol=3e-2)
                changed = (pool_after != pool).any(-1).any(-1).any(1).any(0)  # [N, block]
                assert changed.sum() <= count, "a dead row wrote to the pool"


@on_gpu
def test_pooling_by_replays_equals_eager(checkpoint, device):
    """At a budget of one token every step is a replay."""
    folder, results = checkpoint("qwen3", **HALF), []
    for enforce_eager in (True, False):
        limits = {"max_num_batched_tokens": 1, "enforce_eager": enforce_eager}
        with gpu_llm(folder, convert="embed", **limits) as llm:
            assert enforce_eager <= (llm.llm_engine.runner.graphs is None)
            results.append(torch.stack(ask(llm, PROMPTS, "embed")))
    torch.testing.assert_close(*results, rtol=3e-2, atol=3e-2)


@on_gpu
def test_generation_by_replays_gives_every_token(checkpoint, device):
    with gpu_llm(checkpoint("qwen3", **HALF), max_num_seqs=3) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * len(PROMPTS)


@on_gpu
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_copies_beside_200_steps(checkpoint, device, task):
    prompts = [[5 + i % 90] * (1 + i % 40) for i in range(200)]
    with gpu_llm(checkpoint("qwen3", **HALF), convert="embed", max_num_seqs=1) as llm:
        together = ask(llm, prompts, task)
        alone = [ask(llm, [prompt], task)[0] for prompt in prompts]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@on_gpu
@pytest.mark.parametrize("kind", ["qwen3_classifier", "bert_classifier"])
def test_a_pooling_step_never_waits_for_the_device(checkpoint, device, kind):
    facts = {"dtype": "bfloat16"} | ({"head_dim": 64} if kind.startswith("qwen3") else {})
    with gpu_llm(checkpoint(kind, **facts)) as llm:
        ask(llm, PROMPTS, "classify")
        engine = llm.llm_engine
        params = PoolingParams().resolve("classify", llm.model_config)
        for i, ids in enumerate(PROMPTS):
            engine.scheduler.add(Sequence(Request(str(i), tuple(ids), pooling=params)))
        scheduled = engine.scheduler.schedule()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                output = engine.runner.execute(scheduled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine.reset()
        assert output.error is None and len(output.pooled.split()) == len(PROMPTS)


@on_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_pair_in_chunks_scores_the_same_every_time(checkpoint, device, dtype):
    """9,000 tokens in chunks of 1,000, 20 times: one staging buffer too few shows as noise."""
    facts = {"dtype": dtype, "head_dim": 64, "max_position_embeddings": 10240, "std": 0.1}
    folder = checkpoint("qwen3_classifier", **facts)
    [prompt] = references.random_prompts(200, [9000])
    scores = {}
    for budget in (1024, 10240):
        settings = {"max_num_batched_tokens": budget, "enable_prefix_caching": False}
        with gpu_llm(folder, dtype=dtype, **settings) as llm:
            runs = [ask(llm, [prompt], "classify", use_activation=False)[0] for _ in range(20)]
        scores[budget] = torch.stack(runs)
        assert scores[budget].max() - scores[budget].min() < 1e-3
    one_shot, chunked = scores.values()
    torch.testing.assert_close(
        chunked[0], one_shot[0], rtol=3e-2, atol=1e-3 if dtype == "float32" else 3e-2
    )


@on_gpu
@pytest.mark.parametrize("kind", [*KINDS, "hf_colbert"])
def test_every_model_starts_and_answers_as_on_a_cpu(checkpoint, device, kind):
    """Warm-up, KV size from free memory and float32 throughout, so that results are comparable."""
    folder, answers = checkpoint(kind), []
    for settings in ({"device": "cpu"}, {"device": device, "gpu_memory_utilization": 0.2}):
        with LLM(folder, dtype="float32", **settings) as llm:
            if llm.model_config.runner == "generate":
                outputs = llm.generate(PROMPTS, GREEDY, False)
                answers.append([torch.tensor(o.outputs[0].token_ids) for o in outputs])
            else:
                answers.append(ask(llm, PROMPTS))
    torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-4)
