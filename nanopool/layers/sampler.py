"""From logits to the next token. Chapters 01 and 07."""

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import pick, to_device
from nanopool.config import SamplingParams

GREEDY_BELOW = 1e-5  # a smaller temperature overflows float32; vLLM draws the same line


def sample(logits: Tensor, params: list[SamplingParams], seeds: list[tuple[int, ...]]) -> list[int]:
    """logits `[B, V]` -> one token a row: the best at temperature 0, else a draw.

    Each row draws with a generator of its own, made from its seed, so that neighbours never change
    a sample.
    """
    tokens = logits.argmax(-1)  # [B]
    rows = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
    if rows:
        picked = logits if len(rows) == len(params) else pick(logits, rows)
        probs = filtered_probs(picked.float(), [params[i] for i in rows])  # [B', V]
        draws = np.array([np.random.default_rng(seeds[i]).random() for i in rows])
        cumulative = probs.double().cumsum_(-1)
        targets = to_device(draws, logits.device) * cumulative[:, -1]
        drawn = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
        tokens[to_device(np.array(rows), logits.device)] = drawn.clamp_(max=logits.size(-1) - 1)
    return tokens.tolist()  # the one place where a step waits for the device


def filtered_probs(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """softmax of logits `[B, V]` / temperature, zero outside top_k and top_p (arXiv 1904.09751)."""

    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float32), logits.device).unsqueeze(-1)

    probs = (logits / column([p.temperature for p in params])).softmax(-1)
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True)
    V = logits.size(-1)
    ranks = torch.arange(V, device=logits.device)
    ordered.masked_fill_(ranks >= column([p.top_k or V for p in params]), 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered  # the mass of more likely tokens
    ordered.masked_fill_(before >= column([p.top_p for p in params]), 0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
