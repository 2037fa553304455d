"""Exercises of chapter 02. Replace a `raise NotImplementedError`, then run its test."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopool.parallel import TensorParallel, simulate


def merged_rows(sizes: list[int], rank: int, ranks: int) -> list[int]:
    """The rows of a rank in a merged column-parallel layer.

    `sizes` are the rows of the parts, each divisible by `ranks`; rows count through all parts, put
    below each other -> row numbers in the order in which the rank holds them.
    """
    raise NotImplementedError


def heads_of(rank: int, H: int, K: int, ranks: int) -> tuple[list[int], list[int]]:
    """(query heads, key/value heads) of a rank, each in order.

    K divides H, `ranks` divides H, and one of K and `ranks` divides the other.
    """
    raise NotImplementedError


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, tp: TensorParallel) -> Tensor:
    """down(silu(gate(x)) * up(x)) on this rank, which may use only its part of each weight.

    x `[T, D]`, gate and up `[F, D]`, down `[D, F]` -> `[T, D]`, the same on every rank, with one
    collective.
    """
    raise NotImplementedError


def check_1(merged_rows) -> None:
    assert merged_rows([4, 4], 0, 1) == list(range(8))
    assert merged_rows([4, 4], 0, 2) == [0, 1, 4, 5]
    assert merged_rows([4, 4], 1, 2) == [2, 3, 6, 7]
    assert merged_rows([8, 4, 4], 3, 4) == [6, 7, 11, 15]


def check_2(heads_of) -> None:
    assert heads_of(0, 4, 2, 1) == ([0, 1, 2, 3], [0, 1])
    assert heads_of(1, 4, 2, 2) == ([2, 3], [1])
    assert heads_of(1, 4, 2, 4) == ([1], [0])
    assert heads_of(5, 16, 4, 8) == ([10, 11], [2])
    for H, K, ranks in ((8, 8, 4), (8, 4, 4), (8, 2, 8), (12, 6, 3)):
        for rank in range(ranks):
            queries, kv = heads_of(rank, H, K, ranks)
            assert sorted({head * K // H for head in queries}) == kv


class Counted(TensorParallel):
    """A rank that counts its collectives."""

    def __init__(self, tp: TensorParallel):
        self.tp, self.rank, self.size, self.meetings = tp, tp.rank, tp.size, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.meetings += 1
        return self.tp.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.meetings += 1
        return self.tp.all_gather(x, dim)


def check_3(swiglu) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (3, 4), "gate": (8, 4), "up": (8, 4), "down": (4, 8)}
    x, gate, up, down = (torch.randn(*shape, generator=generator) for shape in shapes.values())
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def one_rank(tp: TensorParallel) -> tuple[Tensor, int]:
        counted = Counted(tp)
        return swiglu(x, gate, up, down, counted), counted.meetings

    for size in (1, 2, 4):
        for out, meetings in simulate(one_rank, size):
            torch.testing.assert_close(out, expected)
            assert meetings <= 1, f"{meetings} collectives on {size} ranks"


EXERCISES = [(merged_rows, check_1), (heads_of, check_2), (swiglu, check_3)]
