"""Exercises of chapter 16. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable

import torch
from torch import Tensor

Index = dict[int, list[tuple[int, float]]]
Encoded = tuple[Tensor, dict[int, float], Tensor]  # dense [D], lexical weights, rows [n, D]


def splade(rows: Tensor, head: Callable[[Tensor], Tensor], piece: int, mode: str) -> Tensor:
    """The weights of one prompt by "max" or "sum": rows `[n, D]` -> `[V]`.

    `head` maps `[m, D]` to logits `[m, V]` and gets at most `piece` rows at a time.
    """
    raise NotImplementedError


def build_index(vectors: Tensor) -> Index:
    """For each word with a weight in some text, its (text, weight) pairs: `[texts, V]` -> Index."""
    index: Index = {}
    for text, word in vectors.nonzero().tolist():
        index.setdefault(word, []).append((text, vectors[text, word].item()))
    return index


def search(index: Index, query: Tensor) -> dict[int, float]:
    """{text: dot product with the query `[V]`}, for texts that share a word with it."""
    raise NotImplementedError


def hybrid(query: Encoded, document: Encoded, weights: tuple[float, float, float]) -> float:
    """A weighted sum of dense, lexical and late-interaction score, as BGE-M3's authors have it.

    Dense: the dot product. Lexical: over the ids of both, the sum of products. Late interaction:
    for each query row its best dot product, divided by the number of query rows.
    """
    raise NotImplementedError


def check_1(splade) -> None:
    rows = torch.tensor([[2.0, -1, 0], [-1, -2, 4], [6, -1, 1], [1, -3, -5]])
    expected = {"max": rows.relu().log1p().amax(0), "sum": rows.relu().log1p().sum(0)}
    for mode, weights in expected.items():
        for piece in (1, 3, 4):
            sizes = []

            def head(x: Tensor, sizes: list = sizes) -> Tensor:
                sizes.append(len(x))
                return x.clone()

            torch.testing.assert_close(splade(rows, head, piece, mode), weights)
            assert max(sizes) <= piece, f"the head got {max(sizes)} rows"


def check_2(search) -> None:
    index = build_index(torch.tensor([[0.0, 2, 0, 1], [3, 0, 0, 0], [0, 1, 0, 0]]))
    assert search(index, torch.tensor([0.0, 2, 5, 1])) == {0: 5.0, 2: 2.0}
    assert search(index, torch.tensor([0.0, 0, 5, 0])) == {}


def check_3(hybrid) -> None:
    query = torch.tensor([0.6, 0.8]), {7: 0.5, 9: 2.0}, torch.tensor([[1.0, 0], [0, 1]])
    document = torch.tensor([0.8, 0.6]), {9: 1.5, 3: 4.0}, torch.tensor([[0.6, 0.8], [0, 1]])
    parts = [hybrid(query, document, one) for one in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    torch.testing.assert_close(torch.tensor(parts), torch.tensor([0.96, 3.0, 0.8]))
    assert abs(hybrid(query, document, (0.4, 0.2, 0.4)) - 1.304) < 1e-5


EXERCISES = [(splade, check_1), (search, check_2), (hybrid, check_3)]
