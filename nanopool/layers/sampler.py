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
    rows = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
    if not rows:
        return logits.argmax(-1).tolist()  # the one place where a step waits for the device
    is_mixed = len(rows) < len(params)
    drawing = pick(logits, rows) if is_mixed else logits
    probs = filtered_probs(drawing.float(), [params[i] for i in rows])  # [B', V]
    shares = [[1 - np.random.default_rng(seeds[i]).random(dtype=np.float32)] for i in rows]
    ends = probs.cumsum_(-1)
    targets = to_device(np.array(shares), logits.device) * ends[:, -1:]
    tokens = torch.searchsorted(ends, targets).squeeze(-1).clamp_(max=logits.size(-1) - 1)  # [B']
    if is_mixed:
        index = to_device(np.array(rows), logits.device)
        tokens = logits.argmax(-1).index_copy_(0, index, tokens)  # [B]
    return tokens.tolist()


def filtered_probs(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """softmax of logits `[B, V]` / temperature, zero outside top_k and top_p (arXiv 1904.09751)."""

    def column(values: list[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float32), logits.device).unsqueeze(-1)

    probs = (logits / column([p.temperature for p in params])).softmax(-1)
    if all(p.top_k == 0 and p.top_p == 1.0 for p in params):
        return probs
    V = logits.size(-1)
    ordered, order = probs.topk(min(V, max(p.top_k or V for p in params)))
    ranks = torch.arange(ordered.size(-1), device=logits.device)
    ordered.masked_fill_(ranks >= column([min(p.top_k or V, V) for p in params]), 0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered  # the mass of more likely tokens
    ordered.masked_fill_((before > 0) & (before >= column([p.top_p for p in params])), 0)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)
