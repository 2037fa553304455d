"""Exercises of chapter 20. Replace a `raise NotImplementedError`, then run its test."""

import torch
from torch import Tensor


def pooling_matrix(kind: str, lens: list[int]) -> Tensor:
    """`[B, T]` float32 whose product with packed rows `[T, D]` is MEAN, CLS or LAST pooling."""
    raise NotImplementedError


def padded_batches(lens: list[int], max_tokens: int) -> list[list[int]]:
    """Lengths in batches of at most `max_tokens` padded rows (longest times number).

    Sorted, longest first, each batch as full as it gets.
    """
    raise NotImplementedError


def rendezvous(key: str, engines: list[str]) -> str:
    """The engine for a key, the same in every process. Adding an engine moves keys only to it."""
    raise NotImplementedError


def check_1(pooling_matrix) -> None:
    torch.manual_seed(0)
    lens = [2, 1, 4]
    rows = torch.randn(7, 3)
    parts = rows.split(lens)
    expected = {
        "MEAN": torch.stack([part.mean(0) for part in parts]),
        "CLS": torch.stack([part[0] for part in parts]),
        "LAST": torch.stack([part[-1] for part in parts]),
    }
    for kind, vectors in expected.items():
        torch.testing.assert_close(pooling_matrix(kind, lens) @ rows, vectors)


def check_2(padded_batches) -> None:
    assert padded_batches([3, 9, 5, 20], 20) == [[20], [9, 5], [3]]
    assert padded_batches([2, 2, 2, 2], 6) == [[2, 2, 2], [2]]
    assert padded_batches([4], 4) == [[4]]
    assert padded_batches([], 4) == []


def check_3(rendezvous) -> None:
    keys = [f"query-{i}" for i in range(300)]
    before = [rendezvous(key, ["a", "b", "c"]) for key in keys]
    after = [rendezvous(key, ["a", "b", "c", "d"]) for key in keys]
    assert all(before.count(engine) > 50 for engine in "abc")
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"} and 40 < len(moved) < 120, len(moved)


EXERCISES = [(pooling_matrix, check_1), (padded_batches, check_2), (rendezvous, check_3)]
