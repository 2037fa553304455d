"""How a flat `[T, D]` of hidden states is cut into requests. Chapter 12."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from nanopool.batch import Batch
from nanopool.pooler.params import PoolingParams


@dataclass
class PoolingState:
    """What one request keeps between the steps of a long prompt. Chapter 13.

    A preemption starts a new one.

    `value` `[D]` is what a sequence method carries (CLS: the first row; MEAN: an fp32 sum), `rows`
    are the pieces of a token method, `queries` is the call's cache of late interaction, shared by
    all its requests (chapter 17).
    """

    queries: dict[str, list] = field(default_factory=dict)
    value: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class PoolingCursor:
    """Where each request's rows lie in this step, and how far its prompt is computed. Chapter 12.

    first_rows, last_rows: `[B]`, on the device. What is decided by length stays on the CPU as plain
    ints.
    """

    first_rows: Tensor
    last_rows: Tensor
    query_lens: tuple[int, ...]
    starts: tuple[int, ...]
    prompt_lens: tuple[int, ...]

    @classmethod
    def build(cls, batch: Batch, prompt_lens: tuple[int, ...]) -> "PoolingCursor":
        """The cursor of a batch: its cu_seqlens are the row indices already.

        Fewer keys than rows (ColBERT's filled queries) are those of an encoder: it starts at 0.
        """
        B = len(prompt_lens)  # the dead rows of a CUDA graph come after them
        query_lens, edges = batch.query_lens[:B], batch.cu_seqlens_q[: B + 1]
        starts = (max(0, k - q) for k, q in zip(batch.key_lens[:B], query_lens, strict=True))
        return cls(edges[:-1], edges[1:] - 1, query_lens, tuple(starts), prompt_lens)

    @cached_property
    def finished(self) -> tuple[bool, ...]:
        """Whose prompt is wholly computed after this step."""
        ends = zip(self.starts, self.query_lens, self.prompt_lens, strict=True)
        return tuple(start + n == prompt_len for start, n, prompt_len in ends)

    @property
    def is_partial(self) -> bool:
        """Whether any prompt is not computed in this one step."""
        return self.query_lens != self.prompt_lens

    def __getitem__(self, part: slice) -> "PoolingCursor":
        """The cursor of neighbouring requests, for hidden states that begin at their first row."""
        offset = sum(self.query_lens[: part.start])
        rows = self.first_rows[part] - offset, self.last_rows[part] - offset
        lens = self.query_lens[part], self.starts[part], self.prompt_lens[part]
        return PoolingCursor(*rows, *lens)


@dataclass(frozen=True)
class PoolingMetadata:
    """Everything that a pooler knows of a step besides its hidden states.

    Made by the model runner. Chapter 12.
    """

    cursor: PoolingCursor
    params: tuple[PoolingParams, ...]
    states: tuple[PoolingState, ...]
    prompts: tuple[tuple[int, ...], ...]

    def token_ids(self, i: int) -> Tensor:
        """Request i's prompt ids, on the CPU; ValueError unless its pooler asked for them."""
        if not self.params[i].requires_token_ids:
            raise ValueError(
                f"the pooler of task {self.params[i].task!r} reads token ids but did not ask: "
                "its get_pooling_updates must return requires_token_ids=True"
            )
        return torch.tensor(self.prompts[i])

    def __getitem__(self, part: slice) -> "PoolingMetadata":
        facts = self.cursor, self.params, self.states, self.prompts
        return PoolingMetadata(*(values[part] for values in facts))
