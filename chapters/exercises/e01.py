"""Exercises of chapter 01. Replace a `raise NotImplementedError`, then run its test."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopool.parallel import TensorParallel, simulate


def look_up(ids: Tensor, shard: Tensor, start: int) -> Tensor:
    """A rank's share of an embedding, without ever reading a foreign row.

    ids of any shape, `shard` `[V/R, D]` holds the rows from `start` on -> ids' shape + `[D]`.
    """
    raise NotImplementedError


def shard_rows(vocab_size: int, size: int) -> list[tuple[int, int]]:
    """(real rows, rows of padding) of each rank; all hold equally many rows, as few as possible."""
    raise NotImplementedError


def best_token(scores: Tensor, start: int, tp: TensorParallel) -> Tensor:
    """The id of the best score of all ranks; of equal scores the smallest id.

    Each rank has `scores` `[B, V/R]` of the ids from `start` on, and may send two numbers a
    sequence -> ids `[B]`, the same on every rank.
    """
    raise NotImplementedError


def check_1(look_up) -> None:
    table = torch.arange(24.0).view(12, 2)
    table[0] = table[6] = float("nan")  # the first row of each shard must not leak
    ids = torch.tensor([[2, 10], [7, 11]])
    total = look_up(ids, table[:6], 0) + look_up(ids, table[6:], 6)
    torch.testing.assert_close(total, F.embedding(ids, table))


def check_2(shard_rows) -> None:
    assert shard_rows(12, 2) == [(6, 0), (6, 0)]
    assert shard_rows(13, 4) == [(4, 0), (4, 0), (4, 0), (1, 3)]
    assert shard_rows(3, 4) == [(1, 0), (1, 0), (1, 0), (0, 1)]


def check_3(best_token) -> None:
    logits = torch.tensor([[1.0, 3, 2, 0, 3, 1, 0, 2], [-4.0, -3, -5, -6, -7, -2, -8, -9]])
    for size in (1, 2, 4):
        width = 8 // size

        def one_rank(tp: TensorParallel, width: int = width) -> Tensor:
            start = tp.rank * width
            return best_token(logits[:, start : start + width], start, tp)

        for ids in simulate(one_rank, size):
            assert ids.tolist() == [1, 5], f"{size} ranks: {ids.tolist()} instead of [1, 5]"


EXERCISES = [(look_up, check_1), (shard_rows, check_2), (best_token, check_3)]
