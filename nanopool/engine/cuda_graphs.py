"""CUDA graphs: steps of one-token sequences, recorded once for each size and replayed. Chapter 10.

Such a step is hundreds of short kernels, and launching them takes longer than running them. A graph
launches them all at once, on the addresses and in the sizes of its recording.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import Batch, Slice
from nanopool.config import ModelConfig

# What a step copies into a graph's own batch; cu_seqlens_q is 0, 1, 2, ... in all of them.
COPIED = ("input_ids", "positions", "cu_seqlens_k", "slot_mapping")
# One token without blocks: stored nowhere (slot -1), it sees one key, the first of block 0.
DEAD = Slice(np.zeros(1, dtype=np.int32), start=0, key_len=1, block_table=[])


def capture_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, ... up to exactly max_num_seqs: every step finds a graph."""
    sizes = (1, 2, 4, 8, *range(16, max_num_seqs, 16))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def padded(slices: list[Slice], sizes: tuple[int, ...]) -> list[Slice]:
    """Slices of one token each, with dead ones after them up to the next size.

    Every kernel takes a dead row for a sequence, no other row sees it, and the runner cuts it off.
    """
    size = sizes[bisect_left(sizes, len(slices))]
    return slices + [DEAD] * (size - len(slices))


class CudaGraphs:
    """The recordings of one rank's model, by size. Made and called by the ModelRunner; chapter 10.

    `forward(batch) -> hidden [T, D]` must read lengths on the device, as flash attention does.
    Each graph owns a Batch of static tensors, which a step is copied into, and its output, which
    the next replay overwrites.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], config: ModelConfig, max_num_seqs: int):
        self.forward = forward
        self.config = config
        self.sizes = capture_sizes(max_num_seqs)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = {size: self._capture(size) for size in reversed(self.sizes)}

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Batch, Tensor]:
        """Record a step of `size` rows; the largest comes first, so that the others fit its memory.

        It runs once before, on a batch of its own: what a Batch computes when first asked must be
        recorded too, not kept from that run.
        """
        config = self.config
        step = Batch.build([DEAD] * size, config.block_size, config.device)
        tables = step.block_tables.repeat(1, -(-config.max_model_len // config.block_size))
        static = replace(step, block_tables=tables, max_seqlen_k=config.max_model_len)
        self.forward(replace(static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self.pool):
            hidden = self.forward(static)
        return graph, static, hidden

    def __call__(self, batch: Batch) -> Tensor:
        """A padded batch of one-token sequences -> hidden `[T, D]`, until the next call."""
        graph, static, hidden = self.graphs[len(batch.query_lens)]
        for name in COPIED:
            getattr(static, name).copy_(getattr(batch, name))
        tables = batch.block_tables  # narrower: what is left beside them lies past every length
        static.block_tables[:, : tables.size(1)].copy_(tables)
        graph.replay()
        return hidden
