"""Exercises of chapter 13. Replace a `raise NotImplementedError`, then run its test."""

import torch
from torch import Tensor


def max_pool(piece: Tensor, kept: Tensor | None) -> Tensor:
    """The largest number of each column so far.

    `piece` `[n, D]` are the next rows of a prompt, `kept` is what the call before returned (None at
    the start) -> `[D]`.
    """
    raise NotImplementedError


def weighted_mean(piece: Tensor, start: int, prompt_len: int, kept: Tensor | None) -> Tensor:
    """The mean so far in which row i counts i + 1 times; right when the prompt is finished.

    `piece` `[n, D]` are the rows from `start` on, `kept` is what the call before returned -> `[D]`.
    """
    raise NotImplementedError


def narrow_mean(rows: Tensor) -> Tensor:
    """The mean of bfloat16 rows `[n, D]`, added one by one; no wider number may be kept between.

    -> `[D]` float32.
    """
    raise NotImplementedError


def pieces_of(rows: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows in one piece, one by one, and in pieces of two."""
    return [rows.split(n) for n in (len(rows), 1, 2)]


def check_1(max_pool) -> None:
    rows = torch.tensor([[-5.0, 1], [-3, 4], [-4, 2], [-9, 0], [-7, 3]])
    for pieces in pieces_of(rows):
        kept = None
        for piece in pieces:
            kept = max_pool(piece, kept)
        assert kept.tolist() == [-3, 4], f"pieces of {len(pieces[0])}: {kept.tolist()}"


def check_2(weighted_mean) -> None:
    rows = torch.tensor([[6.0, 0], [3, 0], [2, 5]])
    for pieces in pieces_of(rows):
        kept, start = None, 0
        for piece in pieces:
            kept = weighted_mean(piece, start, len(rows), kept)
            start += len(piece)
        torch.testing.assert_close(kept, torch.tensor([3.0, 2.5]))


def check_3(narrow_mean) -> None:
    assert narrow_mean(torch.ones(4096, 1, dtype=torch.bfloat16)).tolist() == [1.0]
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(2000, 8, generator=generator) + 0.5).bfloat16()
    error = (narrow_mean(rows) - rows.double().mean(0)).abs().max().item()
    assert error < 3e-3, f"the error is {error}"


EXERCISES = [(max_pool, check_1), (weighted_mean, check_2), (narrow_mean, check_3)]
