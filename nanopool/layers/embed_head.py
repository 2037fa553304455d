"""The two ends of a language model, split over the vocabulary. Chapter 01."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.layers.linear import ShardedModule, copy_exactly, narrow
from nanopool.parallel import TensorParallel


class VocabParallelEmbedding(ShardedModule):
    """Rank r holds rows [start, end) of the embedding table. Called by every model; chapter 01.

    Ids of other ranks look up row 0 and are zeroed. The vocabulary V is padded to a multiple of R.
    The all_reduce adds one real row and R-1 zero rows, so every rank ends with the whole
    embedding.
    """

    def __init__(self, vocab_size: int, hidden: int, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.rows = -(-vocab_size // tp.size)
        self.start, self.end = tp.rank * self.rows, (tp.rank + 1) * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden))

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's rows of a `[V, D]` table; the padding rows become zero."""
        rows = max(0, min(self.end, self.vocab_size) - self.start)
        start = min(self.start, self.vocab_size)
        copy_exactly(param.data[:rows], narrow(loaded, 0, self.vocab_size, start, rows))
        param.data[rows:].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)  # [T] -> [T, D]
        mask = (ids >= self.start) & (ids < self.end)
        local = (ids - self.start) * mask
        rows = F.embedding(local, self.weight)  # [T] -> [T, D]
        rows = rows.masked_fill(~mask.unsqueeze(-1), 0)
        return self.tp.all_reduce(rows)


class ParallelLMHead(VocabParallelEmbedding):
    """The same split the other way: each rank scores its part of the vocabulary. Chapter 01.

    all_gather joins the parts. A tied head shares the embedding's parameter itself.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.weight)  # [B, D] -> [B, V/R]
        return self.tp.all_gather(logits)[..., : self.vocab_size]  # [B, V]
