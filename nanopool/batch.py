"""The tensors of one step, shared by engine, models and layers. Chapters 03 and 10."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SEGMENT_BIT = 30


def encode_segments(ids: np.ndarray, start: int, num_first_segment: int) -> np.ndarray:
    """Set bit 30 of the ids at positions >= num_first_segment; `ids` begin at position `start`."""
    second = np.arange(start, start + len(ids)) >= num_first_segment
    return ids | second.astype(ids.dtype) << SEGMENT_BIT


def decode_segments(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """input_ids `[T]` -> (clean ids `[T]`, segment ids `[T]`, 0 or 1)."""
    return input_ids & ~(1 << SEGMENT_BIT), input_ids >> SEGMENT_BIT


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Host array -> device tensor without a sync.

    A fresh pinned buffer a step: the host allocator reuses it only when the copy from it has ended.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pick(rows: Tensor, index: Sequence[int]) -> Tensor:
    """rows[index] where the host knows the index: nothing waits for the device."""
    return rows[to_device(np.asarray(index, dtype=np.int64), rows.device)]


class Slice(NamedTuple):
    """One sequence's n tokens of a step; they start at `start` and see `key_len` keys."""

    token_ids: np.ndarray  # [n] int32, bit 30 set on a second segment
    start: int
    key_len: int
    block_table: list[int]


class Run(NamedTuple):
    """Neighbouring sequences that plain attention computes in one call. Chapter 03.

    `slots` `[count * key_len]` are rows of the flat KV pool (None: the keys of this very step),
    `mask` is added to the scores (None: nothing to hide, or fresh rows under the model's own causal
    rule).
    """

    rows: slice
    count: int
    query_len: int
    key_len: int
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class Batch:
    """The packed rows of one step, made by the runner, read by every layer. Chapters 03, 10.

    input_ids, positions, slot_mapping: `[T]`; cu_seqlens_q/k: `[B+1]`; block_tables: `[B, M]`.
    Encoder-only models have no slots and no tables. What decides by length reads the plain ints,
    never a device tensor.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    slot_mapping: Tensor | None
    block_tables: Tensor | None
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    block_size: int | None = None
    host_tables: np.ndarray | None = None  # [B, M], what `runs` looks slots up in

    @classmethod
    def build(cls, slices: list[Slice], block_size: int | None, device: torch.device) -> "Batch":
        """Pack the slices, in order; block_size None means that there is no KV cache.

        With a cache, the rows of a slice without blocks are stored nowhere: their slot is -1.
        """
        query_lens = tuple(len(part.token_ids) for part in slices)
        key_lens = tuple(part.key_len for part in slices)
        edges = cumulative(query_lens)
        offsets = np.array([part.start for part in slices]) - edges[:-1]
        owners = np.repeat(np.arange(len(slices)), query_lens)  # [T]
        positions = np.arange(edges[-1]) + offsets[owners]
        tables = slots = None
        if block_size is not None:
            tables = pad_tables([part.block_table for part in slices])
            slots = slots_of(tables, owners, positions, block_size)
            is_dead = np.array([not part.block_table for part in slices])
            slots[is_dead[owners]] = -1
        host = {
            "input_ids": np.concatenate([part.token_ids for part in slices]),
            "positions": positions,
            "cu_seqlens_q": edges,
            "cu_seqlens_k": cumulative(key_lens),
            "slot_mapping": slots,
            "block_tables": tables,
        }
        return cls(
            **{name: x if x is None else to_device(x, device) for name, x in host.items()},
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(key_lens),
            query_lens=query_lens,
            key_lens=key_lens,
            block_size=block_size,
            host_tables=tables,
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The sequences grouped for plain attention, once a step, when the first layer asks."""
        first_row = [0, *accumulate(self.query_lens)]
        return tuple(self._run(i, j, first_row[i]) for i, j in self._groups())

    @cached_property
    def key_rows(self) -> Tensor | None:
        """The rows of this step that an encoder attends to; None: all of them.

        ColBERT leaves the last ones of a query, its [MASK]s, out of sight.
        """
        if self.key_lens == self.query_lens:
            return None
        starts = zip([0, *accumulate(self.query_lens)], self.key_lens, strict=False)
        rows = np.concatenate([np.arange(start, start + n) for start, n in starts])
        return to_device(rows, self.input_ids.device)

    @cached_property
    def seqused_k(self) -> Tensor:
        """The number of keys of each sequence, `[B]` on the device."""
        return self.cu_seqlens_k.diff()

    def _groups(self) -> Iterator[tuple[int, int]]:
        """[i, j) of neighbours with one query length and one key length.

        Decoding sequences may differ by a quarter: a little wasted work, far fewer calls. A prompt
        of one token may be among them, since its key is in the pool as well.
        """
        i, shortest, longest = 0, self.key_lens[0], self.key_lens[0]
        for j, (query_len, key_len) in enumerate(zip(self.query_lens, self.key_lens, strict=True)):
            shortest, longest = min(shortest, key_len), max(longest, key_len)
            slack = shortest // 4 + 16 if query_len == 1 else 0
            if query_len != self.query_lens[i] or longest > shortest + slack:
                yield i, j
                i, shortest, longest = j, key_len, key_len
        yield i, len(self.query_lens)

    def _run(self, i: int, j: int, first_row: int) -> Run:
        count, query_len, key_len = j - i, self.query_lens[i], max(self.key_lens[i:j])
        rows = slice(first_row, first_row + count * query_len)
        fresh = Run(rows, count, query_len, key_len, None, None)
        if key_len <= query_len:  # nothing was cached before
            return fresh
        key_lens = np.array(self.key_lens[i:j])[:, None]  # [count, 1]
        keys = np.minimum(np.arange(key_len), key_lens - 1)  # past the end: the sequence's last
        slots = slots_of(self.host_tables, np.arange(i, j)[:, None], keys, self.block_size)
        if key_lens.min() == key_len:
            key_lens = key_lens[:1]  # equal lengths share one mask
        last_key = key_lens - query_len + np.arange(query_len)  # [count or 1, query_len]
        hidden = np.arange(key_len) > last_key[:, None, :, None]
        mask = np.where(hidden, np.float32("-inf"), np.float32(0))
        device = self.input_ids.device
        return fresh._replace(
            slots=to_device(slots.reshape(-1), device),
            mask=to_device(mask, device) if hidden.any() else None,
        )


def cumulative(lens: tuple[int, ...]) -> np.ndarray:
    """(3, 5) -> [0, 3, 8] as int32, flash-attention's cu_seqlens."""
    return np.array([0, *accumulate(lens)], dtype=np.int32)


def pad_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables of unequal length -> `[B, M]` int32, padded with 0, which nothing reads."""
    padded = np.zeros((len(tables), max(1, *map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def slots_of(
    tables: np.ndarray, owners: np.ndarray, positions: np.ndarray, block_size: int
) -> np.ndarray:
    """The row of the flat KV pool that holds `position` of sequence `owner`."""
    blocks = tables[owners, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size
