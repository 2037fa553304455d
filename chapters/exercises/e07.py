"""Exercises of chapter 07. Replace a `raise NotImplementedError`, then run its test."""

import torch
import torch.nn.functional as F
from torch import Tensor


def count_rows(prompt_len: int, num_tokens: int) -> tuple[int, int]:
    """Rows computed in all steps to generate num_tokens: (naively, with a KV cache)."""
    raise NotImplementedError


def decode(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, position: int
) -> Tensor:
    """One head, one new row: store k and v `[d]` at `position` of the caches `[n, d]`, then attend.

    q `[d]` -> `[d]`, over the positions 0 to `position`. The caches change in place.
    """
    raise NotImplementedError


def min_p(probs: Tensor, share: float) -> Tensor:
    """probs `[B, V]` -> the same, zero below share * the best of the row, each row summing to 1."""
    raise NotImplementedError


def check_1(count_rows) -> None:
    assert count_rows(4, 6) == (39, 9)
    assert count_rows(1, 1) == (1, 1)
    assert count_rows(1000, 1000) == (1_499_500, 1999)


def check_2(decode) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 5, 8)
    k_cache, v_cache = torch.full((2, 16, 8), float("nan"))
    rows = [decode(q[i], k[i], v[i], k_cache, v_cache, i) for i in range(5)]
    expected = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    torch.testing.assert_close(torch.stack(rows), expected)
    torch.testing.assert_close(k_cache[:5], k)
    assert k_cache[5:].isnan().all(), "only the row at `position` is written"


def check_3(min_p) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.07, 0.03], [0.2, 0.2, 0.2, 0.2, 0.2]])
    expected = torch.tensor([[2 / 3, 1 / 3, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    torch.testing.assert_close(min_p(probs, 0.5), expected)
    torch.testing.assert_close(min_p(probs, 0.0), probs)


EXERCISES = [(count_rows, check_1), (decode, check_2), (min_p, check_3)]
