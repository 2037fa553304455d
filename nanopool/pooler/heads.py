"""What is done to pooled rows.

Projection, truncation, normalisation; or logits, calibration, activation. Chapter 14.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopool.batch import pick
from nanopool.pooler.params import PoolingParams, load_activation

RowMap = Callable[[Tensor], Tensor]


class EmbeddingHead:
    """Rows to embeddings: project, cut (Matryoshka, arXiv 2205.13147), normalise. Chapter 14.

    One head serves pooled rows and token rows: it maps `[n, D] -> [n, E]` under one request's
    params.
    """

    def __init__(self, head_dtype: torch.dtype, projector: RowMap | None = None):
        self.head_dtype = head_dtype
        self.projector = projector

    def __call__(self, rows: Tensor, params: PoolingParams) -> Tensor:
        rows = rows.to(self.head_dtype)
        if self.projector is not None:
            rows = self.projector(rows)
        rows = rows[..., : params.dimensions].float()
        return F.normalize(rows, dim=-1) if params.use_activation else rows


class ClassifierHead:
    """Rows to scores: classify, pick columns, calibrate, activate. Chapter 14."""

    def __init__(
        self,
        head_dtype: torch.dtype,
        classifier: RowMap | None,
        activation: RowMap,
        logit_mean: float | None = None,
        logit_sigma: float | None = None,
    ):
        self.head_dtype = head_dtype
        self.classifier = classifier
        self.activation = activation
        self.logit_mean = logit_mean
        self.logit_sigma = logit_sigma

    def __call__(self, rows: Tensor, params: PoolingParams) -> Tensor:
        logits = rows.to(self.head_dtype)  # [n, D]
        if self.classifier is not None:
            logits = self.classifier(logits)
        logits = logits.float()  # [n, L]
        if params.returned_token_ids:
            logits = pick(logits.mT, params.returned_token_ids).mT
        if self.logit_mean is not None:
            logits = logits - self.logit_mean
        if self.logit_sigma is not None:
            logits = logits / self.logit_sigma
        return self.activation(logits) if params.use_activation else logits


def get_classifier_activation(name: str) -> RowMap:
    """The activation of a resolved name: classify, identity, or a class of torch.nn.modules."""
    named = {"classify": classify_activation, "identity": torch.nn.Identity()}
    return named[name] if name in named else load_activation(name)


def classify_activation(logits: Tensor) -> Tensor:
    """vLLM's rule where no file says otherwise: sigmoid for one label, softmax for more."""
    return logits.sigmoid() if logits.size(-1) < 2 else logits.softmax(-1)
