"""Tensor parallelism: what a layer knows of its rank, and how ranks combine their tensors."""

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class TensorParallel(ABC):
    """One rank's place in its group; every layer with split weights holds one (chapter 02).

    All ranks call the same operations in the same order. An operation returns when every rank has
    called it, and raises where another rank has failed.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with the same bits on each; x keeps its values."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x (of one shape), concatenated along dim in rank order."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, any picklable object, on every rank; treat it as frozen."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank is here."""


class SingleTP(TensorParallel):
    """The only rank: every operation is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        return None


class LocalGroup:
    """What ranks in threads share: a slot for each rank's value, and a barrier to meet at."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Puts this rank's value down and combines the values of all ranks, in rank order."""
        self.slots[rank] = value
        self.barrier.wait()  # every slot is filled
        result = combine(self.slots)
        self.barrier.wait()  # every rank has read: values and slots may change again
        return result


class LocalTP(TensorParallel):
    """A rank that is a thread of this process (chapters 01 and 02; the default on a CPU)."""

    def __init__(self, rank: int, group: LocalGroup) -> None:
        self.rank = rank
        self.size = group.size
        self.group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.exchange(self.rank, x, sum)

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return self.group.exchange(self.rank, x, lambda slots: torch.cat(slots, dim))

    def broadcast(self, value: Any) -> Any:
        return self.group.exchange(self.rank, value, lambda slots: slots[0])

    def barrier(self) -> None:
        self.group.barrier.wait()


def run_threads(fn: Callable[[TensorParallel], T], group: LocalGroup) -> list[T]:
    """fn(tp) on every rank, results by rank; rank 0 is the caller's thread, where Ctrl-C lands.

    A failing rank frees those that wait for it. Its error, the first of all, is raised here when
    every thread has ended; the group can then be used again.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def fail(error: BaseException) -> None:
        errors.append(error)
        group.barrier.abort()

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = fn(LocalTP(rank, group))
        except BaseException as error:
            fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, group.size)]
    try:
        for thread in threads:
            thread.start()
        run(0)
    except KeyboardInterrupt as error:
        fail(error)
    while running := [thread for thread in threads if thread.is_alive()]:
        try:
            running[0].join()
        except KeyboardInterrupt as error:
            fail(error)
    if errors:
        group.barrier.reset()
        raise errors[0]
    return [results[rank] for rank in range(group.size)]


def simulate(fn: Callable[[TensorParallel], T], size: int) -> list[T]:
    """Runs fn(tp) on `size` ranks that are threads of this process; results by rank."""
    return run_threads(fn, LocalGroup(size))
