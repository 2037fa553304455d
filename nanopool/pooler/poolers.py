"""A pooler is a method and a head; a dispatcher picks one by task. Chapter 15."""

from collections.abc import Callable, Mapping
from itertools import groupby

import torch
from torch import Tensor

from nanopool.batch import pick
from nanopool.pooler.metadata import PoolingMetadata
from nanopool.pooler.methods import SEQUENCE_METHODS, TOKEN_METHODS, StepPool
from nanopool.pooler.params import PoolingParams

Head = Callable[[Tensor, PoolingParams], Tensor]


class Pooler:
    """What a model's `pooler` offers; called by the model runner on rank 0. Chapter 15."""

    def __init__(self, *tasks: str):
        self.tasks = set(tasks)

    def get_supported_tasks(self) -> set[str]:
        """The tasks that a request may name."""
        return self.tasks

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        """Fields of PoolingParams to set before a request of this task enters a batch."""
        return {}

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        """hidden `[T, D]` -> one output a request, in their order; None: a prompt is unfinished."""
        raise NotImplementedError


class SequencePooler(Pooler):
    """One vector a request: a sequence method, then a head on the finished rows. Chapter 15."""

    def __init__(self, task: str, method: str, head: Head):
        super().__init__(task)
        self.method = SEQUENCE_METHODS[method]()
        self.head = head

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        pooled = self.method(hidden, metadata)  # [B, D]
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


class TokenPooler(Pooler):
    """One matrix a request: a token method, late chunking if asked for, a head. Chapter 15."""

    def __init__(self, task: str, method: str, head: Head):
        super().__init__(task)
        self.method = TOKEN_METHODS[method]()
        self.head = head

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return {"requires_token_ids": True} if isinstance(self.method, StepPool) else {}

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        pairs = zip(self.method(hidden, metadata), metadata.params, strict=True)
        return [None if rows is None else self._finish(rows, params) for rows, params in pairs]

    def _finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        if params.late_chunking_params is not None:
            rows = mean_chunks(rows, params.late_chunking_params.chunk_size)
        return self.head(rows, params)


def mean_chunks(rows: Tensor, chunk_size: int) -> Tensor:
    """Late chunking (arXiv 2409.04701): float32 means of `chunk_size` rows, the last may be short.

    `[n, D]` -> `[ceil(n / chunk_size), D]`.
    """
    return torch.stack([chunk.float().mean(0) for chunk in rows.split(chunk_size)])


class DispatchPooler(Pooler):
    """Sends each request to the pooler of its task; a step may mix tasks. Chapter 15."""

    def __init__(self, poolers: Mapping[str, Pooler]):
        super().__init__(*poolers)
        for task, pooler in poolers.items():
            if task not in (offered := pooler.get_supported_tasks()):
                raise ValueError(f"{type(pooler).__name__} offers {sorted(offered)}, not {task!r}")
        self.poolers = dict(poolers)

    @classmethod
    def for_embedding(cls, seq_method: str, tok_method: str, head: Head) -> "DispatchPooler":
        """`embed` and `token_embed` with one head."""
        embed = SequencePooler("embed", seq_method, head)
        return cls({"embed": embed, "token_embed": TokenPooler("token_embed", tok_method, head)})

    @classmethod
    def for_seq_cls(cls, seq_method: str, head: Head, token_head: Head) -> "DispatchPooler":
        """`classify` and `token_classify`; the token task always takes all rows."""
        tokens = TokenPooler("token_classify", "ALL", token_head)
        return cls(
            {"classify": SequencePooler("classify", seq_method, head), "token_classify": tokens}
        )

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


class PoolerWrapper(Pooler):
    """A pooler that changes what another returns. Chapters 16 and 17."""

    def __init__(self, inner: Pooler):
        super().__init__(*inner.get_supported_tasks())
        self.inner = inner

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return self.inner.get_pooling_updates(task)
