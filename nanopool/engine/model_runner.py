"""Runs a step on this rank's device: packs, computes, samples or pools. Chapter 10."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import Batch, pick
from nanopool.config import EngineConfig, ModelConfig
from nanopool.engine.cuda_graphs import CudaGraphs, padded
from nanopool.engine.host_copy import HostCopy
from nanopool.engine.kv_cache import allocate_kv_caches, kv_pool_size
from nanopool.engine.scheduler import Scheduled
from nanopool.engine.sequence import Sequence
from nanopool.engine.warm_up import warm_up_steps
from nanopool.layers.attention import backend_for, sdpa_attention
from nanopool.layers.sampler import sample
from nanopool.models.loader import load_model
from nanopool.parallel import TensorParallel
from nanopool.pooler.metadata import PoolingCursor, PoolingMetadata


@dataclass(frozen=True)
class StepOutput:
    """What a step gave: a token or None for each sequence, and pooled outputs on their way.

    `error` is rank 0's own; `must_stop` holds on every rank.
    """

    tokens: list[int | None]
    pooled: HostCopy | None = None
    error: Exception | None = None
    must_stop: bool = False


class ModelRunner:
    """The model, its KV caches and what a device needs around them. Owned by the Engine.

    While the memory is measured there is no KV cache yet: attention then uses the rows of the step.
    Chapter 10.
    """

    def __init__(self, config: ModelConfig, engine_config: EngineConfig, tp: TensorParallel):
        self.config = config = replace(config, device=own_device(config.device))
        self.tp = tp
        self.use_device()
        self.model = load_model(config, tp)
        on_cuda = config.device.type == "cuda"
        self.copy_stream = torch.cuda.Stream() if on_cuda else None
        self.graphs = self.block_size = None
        self.kv_caches = [None] * config.hf_config.num_hidden_layers
        peak = self.measure_peak(engine_config.max_num_seqs) if on_cuda else 0
        self.num_kv_blocks = kv_pool_size(config, engine_config, tp, peak)
        self.kv_caches = allocate_kv_caches(config, tp, self.num_kv_blocks)
        if self.kv_caches:
            self.block_size = config.block_size
            self.record_graphs(engine_config)

    def use_device(self) -> None:
        """Make the device the current one of this thread: streams and Triton kernels go by it."""
        if self.config.device.type == "cuda":
            torch.cuda.set_device(self.config.device)

    def measure_peak(self, max_num_seqs: int) -> int:
        """Bytes in use while the largest step of each task runs.

        The allocator keeps them, so that what is free afterwards is free beside them.
        """
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.warm_up(max_num_seqs)
        return torch.cuda.max_memory_allocated()

    def warm_up(self, max_num_seqs: int) -> None:
        """Run the largest step of every supported task."""
        for step in warm_up_steps(self.model, self.config, max_num_seqs):
            if error := self.execute(step).error:
                raise error

    def record_graphs(self, engine_config: EngineConfig) -> None:
        """CUDA graphs, where attention reads lengths on the device and no rank is a thread."""
        pool = self.kv_caches[0]
        is_eager = engine_config.enforce_eager or engine_config.tp_backend == "thread"
        if not is_eager and backend_for(pool, pool) is not sdpa_attention:
            self.graphs = CudaGraphs(self.forward, self.config, engine_config.max_num_seqs)

    def forward(self, batch: Batch) -> Tensor:
        return self.model(batch, self.kv_caches)  # [T, D]

    def execute(self, scheduled: Scheduled) -> StepOutput:
        """Compute the scheduled tokens; sample where a sequence caught up, or pool."""
        self.use_device()
        slices, forward = [seq.slice(n) for seq, n in scheduled], self.forward
        if self.graphs is not None and all(n == 1 for _, n in scheduled):
            slices, forward = padded(slices, self.graphs.sizes), self.graphs
        batch = Batch.build(slices, self.block_size, self.config.device)
        hidden = forward(batch)[: sum(n for _, n in scheduled)]  # [T, D]
        if self.config.runner == "generate":
            return self._sample(hidden, batch, scheduled)
        pooled, error = self._on_rank_0(self._pool, hidden, batch, [seq for seq, _ in scheduled])
        return StepOutput([None] * len(scheduled), pooled, error)

    def _on_rank_0(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
        """(result, error) of what only rank 0 does; it keeps its error, since the others go on."""
        if self.tp.rank > 0:
            return None, None
        try:
            return fn(*args), None
        except Exception as error:
            return None, error

    def _sample(self, hidden: Tensor, batch: Batch, scheduled: Scheduled) -> StepOutput:
        """Every rank computes the logits; rank 0 draws and tells the others, or to stop."""
        tokens: list[int | None] = [None] * len(scheduled)
        ready = [i for i, (seq, n) in enumerate(scheduled) if n == seq.num_new_tokens]
        if not ready:
            return StepOutput(tokens)
        last_rows = pick(hidden, np.cumsum(batch.query_lens)[ready] - 1)  # [B, D]
        logits = self.model.compute_logits(last_rows)  # [B, V]
        sequences = [scheduled[i][0] for i in ready]
        drawn, error = self.tp.broadcast(self._on_rank_0(self._draw, logits, sequences))
        if error is not None:
            return StepOutput(tokens, error=error, must_stop=True)
        for i, token in zip(ready, drawn, strict=True):
            tokens[i] = token
        return StepOutput(tokens)

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """logits `[B, V]` -> the next token of each sequence."""
        params = [seq.request.sampling for seq in sequences]
        seeds = [(*seq.request.seed, seq.num_tokens) for seq in sequences]
        return sample(logits, params, seeds)

    def _pool(self, hidden: Tensor, batch: Batch, sequences: list[Sequence]) -> HostCopy | None:
        """hidden `[T, D]` -> what this step finished, on its way to the host."""
        requests = [seq.request for seq in sequences]
        metadata = PoolingMetadata(
            PoolingCursor.build(batch, tuple(len(request.token_ids) for request in requests)),
            params=tuple(request.pooling for request in requests),
            states=tuple(seq.pooling_state for seq in sequences),
            prompts=tuple(request.token_ids for request in requests),
        )
        outputs = zip(requests, self.model.pooler(hidden, metadata), strict=True)
        ready = {request.request_id: x for request, x in outputs if x is not None}
        return HostCopy(ready, self.copy_stream) if ready else None


def own_device(device: torch.device) -> torch.device:
    """This rank's GPU for "cuda": LOCAL_RANK's where ranks are processes, else the current one."""
    if device.type != "cuda" or device.index is not None:
        return device
    index = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
    return torch.device("cuda", int(index))
