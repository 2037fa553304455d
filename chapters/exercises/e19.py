"""Exercises of chapter 19. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def collect(steps: Iterable[tuple[list[str], list[Any]]]) -> dict[str, Any]:
    """Steps of (request ids, outputs or None), side by side -> {id: output} of finished requests.

    Raises ValueError for a step whose lists differ in length, and for a second output of one id.
    """
    raise NotImplementedError


def activation_of(scores: Tensor) -> str:
    """`[n, L]` scores of a classifier -> "softmax", "sigmoid" or "none", as far as one can tell."""
    raise NotImplementedError


def pipeline(stages: list[Callable], batches: list) -> list[list]:
    """Runs each batch through all stages; in a step every stage handles one batch, or none.

    Returns what came out of the last stage in each step: [] where nothing did.
    """
    raise NotImplementedError


def check_1(collect) -> None:
    steps = [(["a", "b"], [None, 2]), (["a", "c"], [1, None]), (["c"], [None])]
    assert collect(steps) == {"b": 2, "a": 1}
    for wrong in ([(["a", "b"], [1])], [(["a"], [1]), (["a"], [1])]):
        try:
            collect(wrong)
        except ValueError:
            continue
        raise AssertionError(f"{wrong} was accepted")


def check_2(activation_of) -> None:
    logits = torch.tensor([[2.0, -1, 0.5], [0, 3, 1]])
    assert activation_of(logits.softmax(-1)) == "softmax"
    assert activation_of(logits.sigmoid()) == "sigmoid"
    assert activation_of(logits) == "none"
    assert activation_of(logits[:, :1].sigmoid()) == "sigmoid"
    assert activation_of(torch.ones(3, 1)) == "softmax"


def check_3(pipeline) -> None:
    log = []

    def stage(name: str):
        return lambda x: log.append(f"{name}{x}") or x + 1

    assert pipeline([stage("a"), stage("b")], [10, 20, 30]) == [[], [12], [22], [32]]
    assert sorted(log) == ["a10", "a20", "a30", "b11", "b21", "b31"], log
    assert pipeline([stage("a")], [1, 2]) == [[2], [3]]


EXERCISES = [(collect, check_1), (activation_of, check_2), (pipeline, check_3)]
