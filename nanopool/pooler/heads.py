"""What is done to pooled rows.

Projection, truncation, normalisation; or logits, calibration, activation. Chapter 14.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.batch import pick
from nanopool.pooler.params import PoolingParams

RowMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class EmbeddingHead:
    """Rows to embeddings: project, cut (Matryoshka, arXiv 2205.13147), normalise. Chapter 14.

    One head serves pooled rows and token rows: it maps `[n, D] -> [n, E]` under one request's
    params.
    """

    head_dtype: torch.dtype
    projector: RowMap = field(default_factory=nn.Identity)

    def __call__(self, rows: Tensor, params: PoolingParams) -> Tensor:
        rows = self.projector(rows.to(self.head_dtype))
        rows = rows[..., : params.dimensions].float()
        return F.normalize(rows, dim=-1) if params.use_activation else rows


@dataclass(frozen=True)
class ClassifierHead:
    """Rows to scores: classify, pick columns, calibrate, activate. Chapter 14."""

    head_dtype: torch.dtype
    classifier: RowMap
    activation: RowMap
    logit_mean: float = 0.0
    logit_sigma: float = 1.0

    def __call__(self, rows: Tensor, params: PoolingParams) -> Tensor:
        logits = self.classifier(rows.to(self.head_dtype)).float()  # [n, D] -> [n, L]
        if params.returned_token_ids:
            logits = pick(logits.mT, params.returned_token_ids).mT
        logits = (logits - self.logit_mean) / self.logit_sigma
        return self.activation(logits) if params.use_activation else logits


def classify_activation(logits: Tensor) -> Tensor:
    """vLLM's rule where no file says otherwise: sigmoid for one label, softmax for more."""
    return logits.sigmoid() if logits.size(-1) < 2 else logits.softmax(-1)
