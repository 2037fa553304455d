"""Normalisation of the rows of a decoder. Chapter 04."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (arXiv 1910.07467). Chapter 04."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.size(-1),), eps=self.eps)
        return normed.to(x.dtype) * self.weight
