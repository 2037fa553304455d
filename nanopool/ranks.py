"""The ranks of one LLM: the same target on every rank, called as one.

A target is what `build(tp)` returns: the Engine, or any object whose methods every rank calls with
the same arguments. `ThreadRanks`, `ProcessRanks` and `TorchrunRanks` have one interface: `call`,
`target` (this process's rank, rank 0 except under torchrun) and `shutdown`.
"""

from collections.abc import Callable
from typing import Any

import torch

from nanopool.parallel import LocalGroup, SingleTP, TensorParallel, run_threads

Build = Callable[[TensorParallel], Any]


class ThreadRanks:
    """Ranks that are threads of this process; one rank needs no thread at all."""

    def __init__(self, build: Build, size: int) -> None:
        self.group = LocalGroup(size)
        self.targets = self._run(build)
        self.target = self.targets[0]

    def call(self, method: str, *args: Any) -> Any:
        """Runs a method on every rank's target; returns what rank 0's returns.

        After an error every target is reset, and the next call works.
        """
        try:
            return self._run(lambda tp: getattr(self.targets[tp.rank], method)(*args))[0]
        except BaseException:
            for target in self.targets:
                target.reset()
            raise

    def _run(self, fn: Build) -> list[Any]:
        if self.group.size > 1:
            return run_threads(fn, self.group)
        with torch.inference_mode():
            return [fn(SingleTP())]

    def shutdown(self) -> None:
        """Nothing outlives a call here."""
