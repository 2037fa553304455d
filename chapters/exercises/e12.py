"""Exercises of chapter 12. Replace a `raise NotImplementedError`, then run its test."""

from itertools import combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import Batch, Slice
from nanopool.pooler.metadata import PoolingCursor, PoolingState


def regroup(tasks: list[str], query_lens: list[int]) -> list[tuple[str, slice, slice]]:
    """(task, its requests, their rows) of each group of neighbours with one task, in order."""
    raise NotImplementedError


def outcome(start: int, n: int, prompt_len: int, num_seen: int) -> str:
    """Whether a mean over the prompt can be formed after a step of n rows that begin at `start`.

    "now", "later" or "never". Before it, earlier steps of this request have seen `num_seen` rows.
    """
    raise NotImplementedError


def second_last(
    hidden: Tensor, cursor: PoolingCursor, states: list[PoolingState]
) -> list[Tensor | None]:
    """hidden `[T, D]` -> for each request the row before its last, or None while it is unfinished.

    Prompts have two tokens or more and may be cut anywhere; `states[i].value` is yours.
    """
    raise NotImplementedError


def check_1(regroup) -> None:
    groups = regroup(["embed", "embed", "classify", "embed"], [2, 4, 1, 3])
    assert groups == [
        ("embed", slice(0, 2), slice(0, 6)),
        ("classify", slice(2, 3), slice(6, 7)),
        ("embed", slice(3, 4), slice(7, 10)),
    ]
    assert regroup(["embed"], [5]) == [("embed", slice(0, 1), slice(0, 5))]


def check_2(outcome) -> None:
    assert outcome(0, 5, 5, 0) == "now"
    assert outcome(0, 3, 5, 0) == "later"
    assert outcome(3, 1, 5, 3) == "later"
    assert outcome(4, 1, 5, 4) == "now"
    assert outcome(4, 1, 5, 0) == "never", "the first four rows were cached, nobody kept them"
    assert outcome(2, 1, 5, 0) == "never"


def check_3(second_last) -> None:
    prompt = torch.arange(10.0).view(5, 2)  # [5, D]
    cuts = [cut for k in range(5) for cut in combinations(range(1, 5), k)]
    for cut in cuts:
        state, edges = PoolingState(), [0, *cut, 5]
        for start, end in pairwise(edges):
            ids = np.arange(start, end, dtype=np.int32)
            before = np.zeros(2, np.int32)  # a neighbour of two rows, whole in every step
            slices = [Slice(before, 0, 2, []), Slice(ids, start, end, [])]
            cursor = PoolingCursor.build(Batch.build(slices, None, torch.device("cpu")), (2, 5))
            hidden = torch.cat((torch.full((2, 2), -1.0), prompt[start:end]))
            neighbour, row = second_last(hidden, cursor, [PoolingState(), state])
            assert neighbour.tolist() == [-1, -1]
            assert end == 5 or row is None, f"cut at {cut}: a result after {end} of 5 tokens"
        torch.testing.assert_close(row, prompt[3], msg=f"cut at {cut}: {row}")


EXERCISES = [(regroup, check_1), (outcome, check_2), (second_last, check_3)]
