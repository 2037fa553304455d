"""Exercises of chapter 15. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanopool import PoolingParams
from nanopool.pooler.metadata import PoolingCursor, PoolingMetadata, PoolingState
from nanopool.pooler.poolers import DispatchPooler, Pooler

RowPooler = Callable[[Tensor, list[int]], list[Tensor]]


def dispatch_once(
    poolers: dict[str, RowPooler], hidden: Tensor, query_lens: list[int], tasks: list[str]
) -> list[Tensor]:
    """One output a request, in their order, with one call of each pooler that is needed.

    `hidden` `[T, D]` holds `query_lens[i]` rows of request i. A pooler takes packed rows and their
    query_lens, and returns one output for each.
    """
    raise NotImplementedError


def head_calls(requests: list[tuple[str, int | None, bool]]) -> int:
    """How often heads run in a step of (task, dimensions, finished), in the order of the step.

    Tasks are `embed` (a SequencePooler) and `token_embed` (a TokenPooler with ALL).
    """
    raise NotImplementedError


class MaxPooler(Pooler):
    """`embed`: the largest number of each column, over all rows of a prompt."""

    tasks = ("embed",)

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        raise NotImplementedError


def check_1(dispatch_once) -> None:
    calls = []

    def pooler(sign: float) -> RowPooler:
        def pool(hidden: Tensor, query_lens: list[int]) -> list[Tensor]:
            calls.append(sign)
            return [sign * rows.sum() for rows in hidden.split(query_lens)]

        return pool

    poolers = {"embed": pooler(1), "token_embed": pooler(-1), "classify": pooler(0)}
    tasks = ["embed", "token_embed", "embed", "token_embed"]
    outputs = dispatch_once(poolers, torch.arange(8.0).unsqueeze(1), [1, 3, 2, 2], tasks)
    assert [x.item() for x in outputs] == [0, -6, 9, -13], outputs
    assert sorted(calls) == [-1, 1], f"the poolers were called {len(calls)} times"


def check_2(head_calls) -> None:
    embed, tokens = ("embed", None, True), ("token_embed", None, True)
    assert head_calls([embed, embed, embed]) == 1
    assert head_calls([tokens, tokens, tokens]) == 3
    assert head_calls([embed, tokens, embed]) == 3
    assert head_calls([embed, ("embed", 8, True), embed]) == 2
    assert head_calls([("embed", 8, False), ("token_embed", None, False)]) == 0


def check_3(pooler_class) -> None:
    pooler = DispatchPooler({"embed": pooler_class()})
    states = PoolingState(), PoolingState()
    rows = torch.tensor([[-1.0, 5], [-3, 2], [-2, 9], [7, 0]])
    first = metadata_of((1, 2), (0, 0), (1, 3), states)
    assert [x if x is None else x.tolist() for x in pooler(rows[:3], first)] == [[-1, 5], None]
    second = metadata_of((1,), (2,), (3,), states[1:])
    assert [x.tolist() for x in pooler(rows[3:], second)] == [[7, 9]]


def metadata_of(query_lens, starts, prompt_lens, states) -> PoolingMetadata:
    """A step of `embed` requests with these many rows, from these positions on."""
    edges = torch.tensor([0, *query_lens]).cumsum(0)
    cursor = PoolingCursor(edges[:-1], edges[1:] - 1, query_lens, starts, prompt_lens)
    params = (PoolingParams(task="embed"),) * len(query_lens)
    return PoolingMetadata(cursor, params, states, ((),) * len(query_lens))


EXERCISES = [(dispatch_once, check_1), (head_calls, check_2), (MaxPooler, check_3)]
