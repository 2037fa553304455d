"""Tensor parallelism: what a layer knows of its rank, and how ranks combine their tensors."""

import pickle
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TURN = timedelta(seconds=0.1)
TIMEOUT = timedelta(hours=1)


class TensorParallel:
    """One rank's place in its group; every layer with split weights holds one (chapter 02).

    All ranks call the same operations in the same order. An operation returns when every rank has
    called it, and raises where another rank has failed. As they stand, for one rank alone, all are
    the identity.
    """

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, with the same bits on each; x keeps its values."""
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's x (of one shape), concatenated along dim in rank order."""
        return x

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, any picklable object, on every rank; treat it as frozen."""
        return value

    def barrier(self) -> None:
        """Waits until every rank is here."""


class SingleTP(TensorParallel):
    """The only rank."""


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


def run_ranks(fn: Callable[[TensorParallel], T], group: LocalGroup) -> list[T]:
    """fn(tp) on every rank, each in a thread of its own unless it is alone; results by rank.

    The caller's thread only waits, so that Ctrl-C, which lands there, never hits a rank inside the
    barrier. A failing rank frees those that wait for it. Its error, the first of all, is raised
    here when no rank runs any more; the next run finds the group as new.
    """
    if group.size == 1:
        with torch.inference_mode():
            return [fn(SingleTP())]
    group.barrier = threading.Barrier(group.size)
    results: list[Any] = [None] * group.size
    errors: list[BaseException] = []
    running: list[int] = []
    ended: SimpleQueue[int] = SimpleQueue()

    def fail(error: BaseException) -> None:
        errors.append(error)
        group.barrier.abort()

    def run(rank: int) -> None:
        running.append(rank)
        try:
            with torch.inference_mode():
                results[rank] = fn(LocalTP(rank, group)) if not errors else None
        except BaseException as error:
            fail(error)
        running.remove(rank)
        ended.put(rank)

    try:
        for rank in range(group.size):
            threading.Thread(target=run, args=(rank,), daemon=True).start()
        for _ in range(group.size):
            ended.get()
    except BaseException as error:
        fail(error)
    while running:  # a thread that starts later finds the error and does nothing
        with suppress(KeyboardInterrupt):
            time.sleep(0.001)
    if errors:
        raise errors[0]
    return results


def simulate(fn: Callable[[TensorParallel], T], size: int) -> list[T]:
    """Runs fn(tp) on `size` ranks that are threads of this process; results by rank."""
    return run_ranks(fn, LocalGroup(size))


class RankLost(RuntimeError):
    """Another rank ended without saying why."""


FindLost = Callable[[], RankLost | None]


class DistTP(TensorParallel):
    """A rank that is a process: gloo for CPU tensors and objects, NCCL for CUDA (chapter 02).

    Its groups meet in `store` and are not torch's default group, so that a process can hold many.
    `find_lost` is asked while waiting, and returns an error when it knows of a rank that has ended.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, find_lost: FindLost = lambda: None):
        self.rank = rank
        self.size = size
        self.store = store
        self.find_lost = find_lost
        store.set(f"rank {rank}", b"here")
        while not store.check([f"rank {other}" for other in range(size)]):
            self.check()
            time.sleep(0.01)
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, TIMEOUT)
        self.groups = {"cpu": gloo}
        weakref.finalize(self, self.groups.clear)  # its threads must end before Python does

    @cached_property
    def nccl(self) -> dist.ProcessGroup:
        """Made with the first CUDA tensor, on the current device."""
        store = dist.PrefixStore("nccl", self.store)
        group = dist.ProcessGroupNCCL(store, self.rank, self.size, TIMEOUT)
        threading.Thread(target=self._abort_after_failure, args=(group,), daemon=True).start()
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        self._wait(self._group(x).allreduce([total]), x.is_cuda)
        return total

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(self._group(x).allgather([parts], [x]), x.is_cuda)
        return torch.cat(parts, dim)

    def broadcast(self, value: Any) -> Any:
        data = bytearray(pickle.dumps(value) if self.rank == 0 else b"")
        length = torch.tensor([len(data)])
        self._wait(self.groups["cpu"].broadcast(length, 0))
        data = data or bytearray(length.item())
        self._wait(self.groups["cpu"].broadcast(torch.frombuffer(data, dtype=torch.uint8), 0))
        return value if self.rank == 0 else pickle.loads(data)

    def barrier(self) -> None:
        self._wait(self.groups["cpu"].barrier())

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """fn(*args) on every rank; what another rank raises late belongs to this call."""
        result = fn(*args)
        self.barrier()
        return result

    def check(self) -> None:
        """Raises the error of the rank that failed first, if one did."""
        lost = self.find_lost()  # before the report is read: a rank reports first, then ends
        if self.store.check(["failure"]):
            raise pickle.loads(self.store.get("failure"))
        if lost:
            raise lost

    def _group(self, x: Tensor) -> dist.ProcessGroup:
        return self.nccl if x.is_cuda else self.groups["cpu"]

    def _wait(self, work: dist.Work, on_stream: bool = False) -> None:
        """Waits in short turns, so that Ctrl-C and a failed rank are noticed; a stream queues."""
        if on_stream:
            work.wait()
            return
        turns_after_failure = 20
        while turns_after_failure:
            try:
                work.wait(TURN)
                return
            except RuntimeError as error:
                reason = str(error)
            self.check()
            if work.is_completed():  # a connection broke: which rank failed is soon known
                turns_after_failure -= 1
                time.sleep(TURN.total_seconds())
        raise RankLost(f"rank {self.rank} lost another rank: {reason}")

    def _abort_after_failure(self, group: dist.ProcessGroup) -> None:
        """A thread's work: frees the stream of this rank, which would wait for the failed one."""
        try:
            while True:
                self.check()
                time.sleep(1)
        except BaseException:
            group.abort()


def report_error(store: dist.Store, rank: int, error: BaseException) -> None:
    """Tells the other ranks why this one fails; they raise the error that was reported first."""
    if isinstance(error, RankLost) or store.add("failures", 1) > 1:
        return
    note = f"raised on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # another process could not read it
        error = RuntimeError(repr(error))
    error.add_note(note)
    store.set("failure", pickle.dumps(error))
