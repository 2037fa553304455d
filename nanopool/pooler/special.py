"""Poolers of single model kinds.

SPLADE's vocabulary weights, BGE-M3's and ColBERT's rows. Chapter 16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import to_device
from nanopool.pooler.metadata import PoolingMetadata
from nanopool.pooler.methods import ACCUMULATION_BYTES
from nanopool.pooler.params import PoolingParams
from nanopool.pooler.poolers import Keep, Pooler


@dataclass(frozen=True)
class SpladePooler(Pooler):
    """`embed` as one weight a vocabulary entry (SPLADE, arXiv 2109.10086). Chapter 16.

    log1p(relu(logit)), by maximum or sum over all tokens. The vocabulary logits exist for 16 MiB of
    rows at a time; the maximum is taken first, since relu and log1p are monotone.
    """

    lm_head: Callable[[Tensor], Tensor]
    vocab_size: int
    mode: str
    tasks = ("embed",)

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return {"use_activation": False}  # nothing is normalised, joined pieces neither

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


def without_ends(bos: int | None, eos: int | None) -> Keep:
    """Drop the first row where its id is bos, the last where its id is eos."""

    def keep(ids: Tensor, params: PoolingParams) -> Tensor:
        kept = torch.ones(len(ids), dtype=torch.bool)
        kept[0] = ids[0].item() != bos
        kept[-1] &= ids[-1].item() != eos
        return kept

    return keep


def without_skipped(ids: Tensor, params: PoolingParams) -> Tensor:
    """Drop the tokens that the request names: ColBERT's punctuation in documents."""
    return ~torch.isin(ids, torch.tensor(params.skip_token_ids, dtype=ids.dtype))


@dataclass(frozen=True)
class ConcatPooler(Pooler):
    """Two tasks' results of one request, joined: BGE-M3's `embed&token_classify`. Chapter 16."""

    first: Pooler
    second: Pooler
    tasks = ("embed&token_classify",)

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return self.first.get_pooling_updates(task) | self.second.get_pooling_updates(task)

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        pairs = zip(self.first(hidden, metadata), self.second(hidden, metadata), strict=True)
        return [None if a is None else torch.cat((a.flatten(), b.flatten())) for a, b in pairs]
