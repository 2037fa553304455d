"""The ranks of one LLM: the same target on every rank, called as if it were one.

A target is what `build(tp)` returns: an Engine, or in tests any object whose methods every rank can
call with the same arguments.
"""

import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from nanopool.parallel import DistTP, LocalGroup, RankLost, TensorParallel, report_error, run_ranks

Build = Callable[[TensorParallel], Any]


class Ranks:
    """What the LLM holds (chapter 02); `target` is this process's own, None after `shutdown`.

    As it stands for ranks that are processes, which a failed call ends.
    """

    target: Any = None
    tp: DistTP | None = None

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method on every rank's target; returns what this process's own returns.

        Raises the error of the rank that failed first, and RuntimeError after `shutdown`.
        """
        if self.target is None:
            raise RuntimeError("this LLM is shut down: make a new one")
        with self._running():
            return self._call(method, args)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Around everything that ranks do together."""
        try:
            with torch.inference_mode():
                yield
        except BaseException as error:
            self._failed(error)
            raise

    def _call(self, method: str, args: tuple) -> Any:
        """Runs the method on every rank."""
        return self.tp.run(getattr(self.target, method), *args)

    def _failed(self, error: BaseException) -> None:
        """Brings the ranks into a state in which the next call is right, or refused."""
        self.shutdown()

    def shutdown(self) -> None:
        """Ends the ranks; a second time does nothing."""
        self.target = self.tp = None


class ThreadRanks(Ranks):
    """Ranks that are threads of this process. After a failed call they are ready for the next."""

    def __init__(self, build: Build, size: int) -> None:
        self.group = LocalGroup(size)
        self.targets: list[Any] = []
        with self._running():
            self.targets = run_ranks(build, self.group)
        self.target = self.targets[0]

    def _call(self, method: str, args: tuple) -> Any:
        return run_ranks(lambda tp: getattr(self.targets[tp.rank], method)(*args), self.group)[0]

    def _failed(self, error: BaseException) -> None:
        for target in self.targets:
            target.reset()

    def shutdown(self) -> None:
        super().shutdown()
        self.targets = []


class ProcessRanks(Ranks):
    """Ranks that are processes: this one is rank 0, the others run nanopool/worker.py.

    A worker gets the pickled `build` and then the calls through its stdin, and ends when that
    closes. A failed call, Ctrl-C too, ends them all: nothing frees a rank from a collective.
    """

    def __init__(self, build: Build, size: int) -> None:
        folder = TemporaryDirectory(prefix="nanopool-", ignore_cleanup_errors=True)
        path = str(Path(folder.name, "store"))
        self.workers: list[subprocess.Popen] = []
        self._end = weakref.finalize(self, end_workers, self.workers, folder)
        with self._running():
            for rank in range(1, size):
                self.workers.append(start_worker(rank, size, path))
            self._send(build)
            store = dist.FileStore(path, size)
            self.tp = DistTP(0, size, store, partial(find_lost, self.workers))
            self.target = self.tp.run(build, self.tp)

    def _send(self, message: Any) -> None:
        frame = pickle.dumps(message)
        for worker in self.workers:
            with suppress(OSError):  # it has ended: waiting for it tells why
                pickle.dump(frame, worker.stdin)
                worker.stdin.flush()

    def _call(self, method: str, args: tuple) -> Any:
        self._send((method, args))
        return super()._call(method, args)

    def shutdown(self) -> None:
        self._end()
        super().shutdown()


class TorchrunRanks(Ranks):
    """The processes that torchrun started, on one machine or many: this one is one of them.

    Every rank makes the same calls, and all of them run with rank 0's arguments.
    """

    def __init__(self, build: Build, size: int) -> None:
        store, rank, world_size = next(dist.rendezvous("env://"))
        if size not in (1, world_size):
            raise ValueError(
                f"tensor_parallel_size={size}, but torchrun started {world_size} processes: "
                "leave the argument out or start as many"
            )
        number = store.add(f"nanopool/{rank}", 1)  # of this LLM, the same on every rank
        self.tp = DistTP(rank, world_size, dist.PrefixStore(f"nanopool/{number}", store))
        with self._running():
            self.target = self.tp.run(build, self.tp)

    def _call(self, method: str, args: tuple) -> Any:
        return super()._call(*self.tp.broadcast((method, args)))

    def _failed(self, error: BaseException) -> None:
        report_error(self.tp.store, self.tp.rank, error)
        super()._failed(error)


def start_worker(rank: int, size: int, path: str) -> subprocess.Popen:
    """A process that imports what this one can and takes its share of the cores.

    Its session is its own, since Ctrl-C is rank 0's to handle.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
        "LOCAL_RANK": str(rank),  # as torchrun says it: which GPU is this rank's
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size)),
    }
    command = [sys.executable, "-u", "-m", "nanopool.worker", str(rank), str(size), path]
    return subprocess.Popen(  # what it prints goes to stderr, which is 2
        command, stdin=subprocess.PIPE, stdout=2, env=environment, start_new_session=True
    )


def find_lost(workers: list[subprocess.Popen]) -> RankLost | None:
    """An error that names the workers which have ended; none does so while the pipe is open."""
    ended = [
        f"rank {rank} (process {worker.pid}) ended with exit code {worker.returncode}"
        for rank, worker in enumerate(workers, start=1)
        if worker.poll() is not None
    ]
    return RankLost("; ".join(ended)) if ended else None


def end_workers(workers: list[subprocess.Popen], folder: TemporaryDirectory) -> None:
    """Closes the pipes, which ends the workers, and kills those that do not hear it."""
    for worker in workers:
        with suppress(OSError):
            worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(timeout=2)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    folder.cleanup()
