"""One rank's engine: requests in, results out, step by step. Chapters 00 and 10."""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from nanopool.config import EngineConfig
from nanopool.engine.block_manager import BlockManager
from nanopool.engine.host_copy import HostCopy
from nanopool.engine.model_runner import ModelRunner
from nanopool.engine.scheduler import Scheduler
from nanopool.engine.sequence import Request, Sequence
from nanopool.parallel import TensorParallel
from nanopool.ranks import ProcessRanks, Ranks, ThreadRanks, TorchrunRanks
from nanopool.resolve import resolve


def start_ranks(config: EngineConfig) -> Ranks:
    """An Engine on every rank: those that torchrun started, processes, or threads of this one."""
    build, size = partial(Engine, config), config.tensor_parallel_size
    if torch.distributed.is_torchelastic_launched():
        return TorchrunRanks(build, size)
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.tp_backend == "process" or (on_cuda and size > 1 and config.tp_backend is None):
        return ProcessRanks(build, size)
    return ThreadRanks(build, size)


@dataclass
class CallResult:
    """What one call gave: results by request id, and an error that only rank 0 had. Chapter 10.

    Pooled outputs stay packed, step by step, until the call ends: small tensors made between the
    large ones of a step would keep the allocator from using that memory again.
    """

    outputs: dict[str, list[int] | Tensor] = field(default_factory=dict)
    error: Exception | None = None
    copies: list[HostCopy] = field(default_factory=list)

    def collect(self, pooled: HostCopy | None) -> None:
        """Take in what a step pooled; the one before came over beside its work."""
        if self.copies:
            self.copies[-1].wait()
        if pooled is not None:
            self.copies.append(pooled)

    def split(self) -> None:
        """The end of the call: every pooled output by its request id."""
        while self.copies:
            self.outputs |= self.copies.pop().split()


class Engine:
    """Scheduler and model runner of one rank.

    Every rank runs the same program on the same requests. Chapter 10.

    Built and called through `ranks.call`. After a failure in the model `reset` drops what was under
    way.
    """

    def __init__(self, config: EngineConfig, tp: TensorParallel):
        self.model_config = facts = resolve(config)
        self.tp = tp
        self.runner = runner = ModelRunner(facts, config, tp)
        blocks = BlockManager(runner.num_kv_blocks, facts.block_size, facts.enable_prefix_caching)
        self.scheduler = Scheduler(
            facts.max_num_batched_tokens, config.max_num_seqs, facts.enable_chunked_prefill, blocks
        )

    @property
    def vllm_config(self) -> "Engine":
        """What vLLM's scripts ask for `.model_config`; here the engine holds it."""
        return self

    def run(self, waves: Sequences[Sequences[Request]], progress: str | None = None) -> CallResult:
        """Compute the requests; those of a wave are admitted when the wave before has ended.

        An error of what only rank 0 does (pooling, sampling) is returned, so that all ranks stay in
        step.
        """
        result = CallResult()
        queries: dict[str, list] = {}
        quiet = progress is None or self.tp.rank > 0
        with tqdm(total=sum(map(len, waves)), desc=progress, disable=quiet) as bar:
            for wave in waves:
                for request in wave:
                    self.scheduler.add(Sequence(request, queries))
                while self.scheduler.has_work:
                    bar.update(self.step(result))
        result.split()
        return result

    def step(self, result: CallResult) -> int:
        """Schedule, compute, move on; returns how many requests ended."""
        scheduled = self.scheduler.schedule()
        output = self.runner.execute(scheduled)
        result.error = result.error or output.error
        finished = self.scheduler.update(scheduled, output.tokens)
        for seq in finished:
            result.outputs[seq.request.request_id] = seq.output_ids
        result.collect(output.pooled)
        if output.must_stop:
            self.scheduler.clear()
        return len(finished)

    def reset(self) -> None:
        """Drop every sequence and the prefix cache."""
        self.scheduler.clear()
