"""Exercises of chapter 18. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Iterable

import torch
from torch import Tensor


def chunk_means(pieces: Iterable[Tensor], chunk_size: int) -> Tensor:
    """Pieces `[k, D]` of one prompt's rows, in order -> `[chunks, D]`, the last chunk may be short.

    At no time are more than `chunk_size` old rows kept, or their sum.
    """
    raise NotImplementedError


def overlapping(n: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """(first, end) of pieces of at most `size` of n tokens; neighbours share `overlap` of them.

    All but the last are `size` long; no piece lies inside another.
    """
    raise NotImplementedError


def sentence_means(
    rows: Tensor, spans: list[tuple[int, int]], sentences: list[tuple[int, int]]
) -> Tensor:
    """Mean rows `[sentences, D]`, of the tokens whose first character lies in each sentence.

    `spans` are the characters (first, end) of each row's token, (0, 0) for special tokens, which
    belong to no sentence; `sentences` are character ranges with at least one token each.
    """
    raise NotImplementedError


def check_1(chunk_means) -> None:
    rows = torch.arange(22.0).view(11, 2)
    for size in (1, 3, 4, 20):
        expected = torch.stack([chunk.mean(0) for chunk in rows.split(size)])
        for lens in ([11], [1] * 11, [2, 7, 2], [5, 6]):
            torch.testing.assert_close(chunk_means(iter(rows.split(lens)), size), expected)


def check_2(overlapping) -> None:
    assert overlapping(8, 4, 0) == [(0, 4), (4, 8)]
    assert overlapping(8, 4, 2) == [(0, 4), (2, 6), (4, 8)]
    assert overlapping(9, 4, 2) == [(0, 4), (2, 6), (4, 8), (6, 9)]
    assert overlapping(4, 4, 3) == [(0, 4)]
    assert overlapping(2, 4, 1) == [(0, 2)]


def check_3(sentence_means) -> None:
    rows = torch.tensor([[100.0], [1], [2], [6], [8], [100]])
    spans = [(0, 0), (0, 3), (3, 4), (5, 7), (8, 9), (0, 0)]  # "yes. no ."
    means = sentence_means(rows, spans, [(0, 4), (5, 9)])
    assert means.tolist() == [[1.5], [7.0]], means


EXERCISES = [(chunk_means, check_1), (overlapping, check_2), (sentence_means, check_3)]
