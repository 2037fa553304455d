"""Exercises of chapter 10. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanopool.parallel import TensorParallel, simulate


def step_slots(parts: list[tuple[list[int], int, int]], block_size: int) -> list[int]:
    """The slot of each row of a step.

    A part is (block table, first position, number of rows) of one sequence.
    """
    raise NotImplementedError


class Recording:
    """Replays `operation(static)` on one tensor `[size]`, which it owns.

    `operation` always returns the same tensor `[size]` and writes its results into it.
    """

    def __init__(self, operation: Callable[[Tensor], Tensor], size: int):
        raise NotImplementedError

    def __call__(self, rows: Tensor) -> Tensor:
        """rows `[n]`, n <= size -> `[n]`, which stays as it is when the next call comes."""
        raise NotImplementedError


def agree(num_blocks: int, tp: TensorParallel) -> int:
    """The largest pool that every rank can hold, when this rank could hold num_blocks."""
    raise NotImplementedError


def check_1(step_slots) -> None:
    assert step_slots([([3], 0, 3)], 4) == [12, 13, 14]
    assert step_slots([([0, 2], 5, 1), ([1], 0, 2), ([4, 3], 3, 2)], 4) == [9, 4, 5, 19, 12]


def check_2(Recording) -> None:
    seen, output = [], torch.zeros(4)

    def operation(static: Tensor) -> Tensor:
        seen.append((static.data_ptr(), static.shape))
        return torch.add(static, 1, out=output)

    recording = Recording(operation, 4)
    first = recording(torch.tensor([1.0, 2.0, 3.0]))
    second = recording(torch.tensor([10.0]))
    assert first.tolist() == [2, 3, 4], "the next call must not change an earlier result"
    assert second.tolist() == [11]
    assert len(set(seen)) == 1, "every call works on the same tensor"


def check_3(agree) -> None:
    found = [70, 64, 90]
    assert simulate(lambda tp: agree(found[tp.rank], tp), 3) == [64, 64, 64]


EXERCISES = [(step_slots, check_1), (Recording, check_2), (agree, check_3)]
