"""Poolers of single model kinds.

SPLADE's vocabulary weights, BGE-M3's and ColBERT's rows. Chapter 16.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import pick, to_device
from nanopool.pooler.metadata import PoolingMetadata
from nanopool.pooler.methods import ACCUMULATION_BYTES
from nanopool.pooler.params import PoolingParams
from nanopool.pooler.poolers import Pooler, PoolerWrapper


class SpladePooler(Pooler):
    """`embed` as one weight a vocabulary entry (SPLADE, arXiv 2109.10086). Chapter 16.

    log1p(relu(logit)), by maximum or sum over all tokens. The vocabulary logits exist for 16 MiB of
    rows at a time; the maximum is taken first, since relu and log1p are monotone.
    """

    def __init__(self, lm_head: Callable[[Tensor], Tensor], vocab_size: int, mode: str):
        super().__init__("embed")
        self.lm_head = lm_head
        self.vocab_size = vocab_size
        self.mode = mode

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        """hidden `[T, D]` -> for each request `[V]`.

        Encoders see a prompt whole, so all are finished.
        """
        query_lens = metadata.cursor.query_lens
        owners = to_device(np.repeat(np.arange(len(query_lens)), query_lens), hidden.device)
        weights = hidden.new_zeros(len(query_lens), self.vocab_size, dtype=torch.float32)
        piece = max(1, ACCUMULATION_BYTES // (4 * self.vocab_size))
        for rows, owner in zip(hidden.split(piece), owners.split(piece), strict=True):
            logits = self.lm_head(rows).float().relu_()  # [n, V]
            if self.mode == "sum":
                weights.index_add_(0, owner, logits.log1p_())
            else:
                weights.scatter_reduce_(0, owner.unsqueeze(1).expand_as(logits), logits, "amax")
        return list(weights if self.mode == "sum" else weights.log1p_())


Keep = Callable[[Tensor, PoolingParams], Tensor]


class RowFilter(PoolerWrapper):
    """Drops token rows by `keep(token ids [n], params) -> bool [n]`. Chapters 16 and 17.

    Late-chunked rows are means over all tokens and pass as they are.
    """

    def __init__(self, inner: Pooler, keep: Keep):
        super().__init__(inner)
        self.keep = keep

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return {"requires_token_ids": True}

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        outputs = self.inner(hidden, metadata)
        for i, (rows, params) in enumerate(zip(outputs, metadata.params, strict=True)):
            if rows is not None and params.late_chunking_params is None:
                kept = self.keep(metadata.token_ids(i), params)
                outputs[i] = pick(rows, np.flatnonzero(kept))
        return outputs


def without_ends(bos: int | None, eos: int | None) -> Keep:
    """Drop the first row where its id is bos, the last where its id is eos."""

    def keep(ids: Tensor, params: PoolingParams) -> Tensor:
        kept = torch.ones(len(ids), dtype=torch.bool)
        kept[0] = ids[0] != (-1 if bos is None else bos)
        kept[-1] &= ids[-1] != (-1 if eos is None else eos)
        return kept

    return keep


def without_skipped(ids: Tensor, params: PoolingParams) -> Tensor:
    """Drop the tokens that the request names: ColBERT's punctuation in documents."""
    return ~torch.isin(ids, torch.tensor(params.skip_token_ids, dtype=ids.dtype))


class ConcatPooler(Pooler):
    """Two tasks' results of one request, joined: BGE-M3's `embed&token_classify`. Chapter 16."""

    def __init__(self, first: Pooler, second: Pooler, task: str):
        super().__init__(task)
        self.parts = (first, second)

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        first, second = (part.get_pooling_updates(task) for part in self.parts)
        return first | second

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        outputs = [part(hidden, metadata) for part in self.parts]
        return [
            None if first is None else torch.cat((first.flatten(), second.flatten()))
            for first, second in zip(*outputs, strict=True)
        ]
