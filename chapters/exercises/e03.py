"""Exercises of chapter 03. Replace a `raise NotImplementedError`, then run its test."""

import torch
import torch.nn.functional as F
from torch import Tensor


def slots(table: list[int], start: int, count: int, block_size: int) -> list[int]:
    """The slots of `count` tokens of a sequence, from position `start` on."""
    raise NotImplementedError


def causal_mask(query_len: int, key_len: int) -> Tensor:
    """`[query_len, key_len]`, True where a query sees a key; the last query sees all keys."""
    raise NotImplementedError


def decode(q: Tensor, pool: Tensor, tables: list[list[int]], lens: list[int]) -> Tensor:
    """Attention of one query each, for sequences of unequal length, in one call.

    q `[B, H, d]`; pool `[2, N, block, H, d]` holds keys and values, and NaN where nobody wrote;
    sequence i has `lens[i]` keys in the blocks `tables[i]` -> `[B, H, d]`. Call
    `scaled_dot_product_attention` once.
    """
    raise NotImplementedError


def check_1(slots) -> None:
    assert slots([0, 1, 4], 6, 3, 4) == [6, 7, 16]
    assert slots([2, 3], 0, 8, 4) == list(range(8, 16))
    assert slots([5], 0, 1, 16) == [80]


def check_2(causal_mask) -> None:
    for query_len, key_len in ((1, 5), (3, 5), (4, 4)):
        mask = causal_mask(query_len, key_len)
        seen = [key_len - query_len + i + 1 for i in range(query_len)]
        assert mask.shape == (query_len, key_len)
        assert mask.sum(1).tolist() == seen
        assert all(mask[i, :n].all() for i, n in enumerate(seen))


def check_3(decode) -> None:
    generator = torch.Generator().manual_seed(0)
    lens, tables = [6, 1, 4], [[4, 0], [3], [1]]
    q = torch.randn(3, 2, 4, generator=generator)
    pool = torch.full((2, 5, 4, 2, 4), float("nan"))
    expected = []
    for i, (n, table) in enumerate(zip(lens, tables, strict=True)):
        k, v = torch.randn(2, n, 2, 4, generator=generator)
        for position in range(n):
            place = table[position // 4], position % 4
            pool[0][place], pool[1][place] = k[position], v[position]
        heads = (x.transpose(0, 1) for x in (q[i][None], k, v))  # [H, 1 or n, d]
        expected.append(F.scaled_dot_product_attention(*heads).squeeze(1))
    torch.testing.assert_close(decode(q, pool, tables, lens), torch.stack(expected))


EXERCISES = [(slots, check_1), (causal_mask, check_2), (decode, check_3)]
