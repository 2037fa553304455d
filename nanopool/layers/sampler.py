"""From logits to the next token. Chapters 01 and 07."""

import numpy as np
import torch
from torch import Tensor

from nanopool.config import SamplingParams


def sample(logits: Tensor, params: list[SamplingParams], seeds: list[tuple[int, ...]]) -> list[int]:
    """logits `[B, V]` -> one token a row: the best at temperature 0, else a draw.

    Each row draws with a generator of its own, made from its seed, so that neighbours never change
    a sample.
    """
    tokens = logits.argmax(-1).tolist()
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return tokens
    chosen = [params[i] for i in rows]
    probs = filtered_probs(logits[rows].float(), chosen)  # [B', V]
    draws = torch.tensor([np.random.default_rng(seeds[i]).random() for i in rows])
    cumulative = probs.double().cumsum(-1)
    targets = draws.to(cumulative) * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
    for i, token in zip(rows, drawn.clamp_(max=logits.size(-1) - 1).tolist(), strict=True):
        tokens[i] = token
    return tokens


def filtered_probs(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """softmax of logits `[B, V]` / temperature, zero outside top_k and top_p (arXiv 1904.09751)."""
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    probs = (logits / temperatures.unsqueeze(-1)).softmax(-1)
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    V = logits.size(-1)
    top_k = torch.tensor([p.top_k or V for p in params], device=logits.device).unsqueeze(-1)
    top_p = torch.tensor([p.top_p for p in params], device=logits.device).unsqueeze(-1)
    ordered[torch.arange(V, device=logits.device) >= top_k] = 0
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered  # the mass of more likely tokens
    ordered[before >= top_p] = 0
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
