"""A pooler is a method and a head; a dispatcher picks one by task. Chapter 15."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import pick
from nanopool.config import PoolerConfig
from nanopool.pooler.metadata import PoolingMetadata
from nanopool.pooler.methods import SEQUENCE_METHODS, TOKEN_METHODS
from nanopool.pooler.params import PoolingParams

Head = Callable[[Tensor, PoolingParams], Tensor]
Keep = Callable[[Tensor, PoolingParams], Tensor]  # token ids [n] of a prompt -> bool [n]


class Pooler:
    """From the hidden states of a step to one output a request. Chapter 15.

    A model's `pooler` is called by the model runner on rank 0; `tasks` are those that it can serve.
    """

    tasks: tuple[str, ...] = ()

    def get_supported_tasks(self) -> set[str]:
        """The tasks that a request may name."""
        return set(self.tasks)

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        """Fields of PoolingParams to set before a request of this task enters a batch."""
        return {}

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        """hidden `[T, D]` -> one output a request, in their order; None: a prompt is unfinished."""
        raise NotImplementedError


@dataclass(frozen=True)
class SequencePooler(Pooler):
    """One vector a request: a sequence method, then a head on the finished rows. Chapter 15."""

    method: str
    head: Head
    tasks = ("embed", "classify")

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        pooled = SEQUENCE_METHODS[self.method](hidden, metadata)  # [B, D]
        outputs: list[Tensor | None] = [None] * len(pooled)
        for params, rows in rows_by_params(metadata).items():
            picked = pooled if len(rows) == len(outputs) else pick(pooled, rows)
            for i, output in zip(rows, self.head(picked, params), strict=True):
                outputs[i] = output
        return outputs


def rows_by_params(metadata: PoolingMetadata) -> Mapping[PoolingParams, list[int]]:
    """The finished requests, grouped by equal params, so that a head runs once a group."""
    groups: dict[PoolingParams, list[int]] = {}
    for i, finished in enumerate(metadata.cursor.finished):
        if finished:
            groups.setdefault(metadata.params[i], []).append(i)
    return groups


@dataclass(frozen=True)
class TokenPooler(Pooler):
    """One matrix a request: a token method, late chunking or a choice of rows, a head. Chapter 15.

    `keep` drops rows by their token ids; late-chunked rows are means over all tokens and pass.
    """

    method: str
    head: Head
    keep: Keep | None = None
    tasks = ("token_embed", "token_classify", "plugin")

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        reads_ids = self.method == "STEP" or self.keep is not None
        return {"requires_token_ids": True} if reads_ids else {}

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        pooled = enumerate(TOKEN_METHODS[self.method](hidden, metadata))
        return [None if rows is None else self._finish(rows, metadata, i) for i, rows in pooled]

    def _finish(self, rows: Tensor, metadata: PoolingMetadata, i: int) -> Tensor:
        params = metadata.params[i]
        if params.late_chunking_params is not None:
            rows = mean_chunks(rows, params.late_chunking_params.chunk_size)
        elif self.keep is not None:
            rows = pick(rows, np.flatnonzero(self.keep(metadata.token_ids(i), params)))
        return self.head(rows, params)


def mean_chunks(rows: Tensor, chunk_size: int) -> Tensor:
    """Late chunking (arXiv 2409.04701): float32 means of `chunk_size` rows, the last may be short.

    `[n, D]` -> `[ceil(n / chunk_size), D]`.
    """
    size = min(int(chunk_size), len(rows))
    return torch.stack([chunk.float().mean(0) for chunk in rows.split(size)])


class DispatchPooler(Pooler):
    """Sends each request to the pooler of its task; a step may mix tasks. Chapter 15.

    Whatever else it holds, it answers `plugin` with the hidden rows as they are.
    """

    def __init__(self, poolers: Mapping[str, Pooler]):
        as_they_are = TokenPooler("ALL", lambda rows, params: rows)
        self.poolers = {**poolers, "plugin": as_they_are}
        self.tasks = tuple(self.poolers)
        for task, pooler in self.poolers.items():
            if task not in (offered := pooler.get_supported_tasks()):
                raise ValueError(f"{type(pooler).__name__} offers {sorted(offered)}, not {task!r}")

    @classmethod
    def for_embedding(
        cls, config: PoolerConfig, head: Head, token_head: Head, keep: Keep | None = None
    ) -> Self:
        """`embed` and `token_embed`, of whose rows `keep` may drop some."""
        tokens = TokenPooler(config.tok_pooling_type, token_head, keep)
        return cls({"embed": SequencePooler(config.seq_pooling_type, head), "token_embed": tokens})

    @classmethod
    def for_seq_cls(cls, config: PoolerConfig, head: Head, token_head: Head) -> Self:
        """`classify` and `token_classify`; the token task always takes all rows."""
        classify = SequencePooler(config.seq_pooling_type, head)
        return cls({"classify": classify, "token_classify": TokenPooler("ALL", token_head)})

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return self.poolers[task].get_pooling_updates(task)

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        tasks = [params.task for params in metadata.params]
        if len(set(tasks)) == 1:
            return self.poolers[tasks[0]](hidden, metadata)
        outputs: list[Tensor | None] = []
        row = 0
        for task, group in groupby(tasks):
            part = slice(len(outputs), len(outputs) + len(list(group)))
            end = row + sum(metadata.cursor.query_lens[part])
            outputs += self.poolers[task](hidden[row:end], metadata[part])
            row = end
        return outputs
