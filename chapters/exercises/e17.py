"""Exercises of chapter 17. Replace a `raise NotImplementedError`, then run its test."""

import torch
from torch import Tensor

from nanopool.pooler.late_interaction import maxsim


def padded_maxsim(query: Tensor, documents: list[Tensor]) -> Tensor:
    """Rows `[q, E]` against documents `[n, E]` of different n -> `[documents]`.

    One matrix product for all of them; no loop over documents after the padding.
    """
    raise NotImplementedError


def best_rows(query: Tensor, document: Tensor, size: int) -> Tensor:
    """Rows `[q, E]` and `[n, E]` -> `[q]`: the document row that each query row chose.

    Never more than `size` columns of the similarities at a time; the first of equals wins.
    """
    raise NotImplementedError


def yes_probability(head: Tensor, hidden: Tensor, yes: int, nos: list[int]) -> Tensor:
    """P(yes) against several words for no, from `head` `[V, D]` and `hidden` `[D]`: a scalar.

    Only by a sigmoid of one number.
    """
    raise NotImplementedError


def check_1(padded_maxsim) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4)
    documents = [torch.randn(n, 4) for n in (1, 5, 2)] + [-query[:1].repeat(2, 1)]
    expected = maxsim([query] * 4, documents)
    torch.testing.assert_close(padded_maxsim(query, documents), expected)


def check_2(best_rows) -> None:
    torch.manual_seed(0)
    query, document = torch.randn(4, 3), torch.randn(7, 3)
    document[6] = document[1]
    expected = (query @ document.T).argmax(1)
    for size in (1, 2, 3, 7, 20):
        assert best_rows(query, document, size).tolist() == expected.tolist(), size


def check_3(yes_probability) -> None:
    torch.manual_seed(0)
    head, hidden = torch.randn(12, 5), torch.randn(5)
    for nos in ([3], [3, 8], [0, 1, 2, 11]):
        expected = (head[[7, *nos]] @ hidden).softmax(0)[0]
        torch.testing.assert_close(yes_probability(head, hidden, 7, nos), expected)


EXERCISES = [(padded_maxsim, check_1), (best_rows, check_2), (yes_probability, check_3)]
