"""Five pooling methods, each fed a prompt piece by piece.

Which rows, and how they become one. Chapter 13.
"""

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import pick, to_device
from nanopool.pooler.metadata import PoolingMetadata

ACCUMULATION_BYTES = 16 * 2**20


class CLSPool:
    """The row of the first token. Kept when the prompt is not finished in this step."""

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
        """hidden `[T, D]` -> `[B, D]`; rows of unfinished requests are not final."""
        cursor = metadata.cursor
        rows = hidden[cursor.first_rows]  # [B, D]
        if not cursor.is_partial:
            return rows
        for i, state in enumerate(metadata.states):
            if cursor.starts[i] == 0:
                state.value = rows[i].clone()
            rows[i] = state.value
        return rows


class LastPool:
    """The row of the last token: the only one that has seen the whole prompt of a causal model."""

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
        """hidden `[T, D]` -> `[B, D]`; rows of unfinished requests are not final."""
        return hidden[metadata.cursor.last_rows]


class MeanPool:
    """The mean of the rows, as a running float32 sum divided by the prompt length at the end.

    Rows of a prompt that the folder excludes (`include_prompt: false`) count neither above nor
    below the line.
    """

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
        """hidden `[T, D]` -> `[B, D]` float32; rows of unfinished requests are not final."""
        cursor = metadata.cursor
        skipped = [params.prompt_prefix_len for params in metadata.params]
        sums = segment_sums(hidden, cursor.query_lens, cursor.starts, skipped)  # [B, D]
        if cursor.is_partial:
            for i, state in enumerate(metadata.states):
                if cursor.starts[i] > 0:
                    sums[i] += state.value
                state.value = sums[i].clone()
        counts = [max(1, n - s) for n, s in zip(cursor.prompt_lens, skipped, strict=True)]
        return sums / to_device(np.array(counts, dtype=np.float32), hidden.device).unsqueeze(1)


def segment_sums(hidden: Tensor, lens: tuple[int, ...], starts, skipped: list[int]) -> Tensor:
    """Sums of each request's rows without the first `skipped` of its prompt: `[T, D]` -> `[B, D]`.

    Rows are widened in pieces of 16 MiB, so that a long step needs no float32 copy of all its rows.
    """
    B = len(lens)
    owners = np.repeat(np.arange(B), lens)
    if any(skipped):
        ends = np.cumsum(lens)
        positions = np.arange(ends[-1]) - np.repeat(ends - lens - starts, lens)
        owners = np.where(positions < np.repeat(skipped, lens), B, owners)
    owners = to_device(owners, hidden.device)  # [T]
    sums = torch.zeros(B + 1, hidden.size(1), dtype=torch.float32, device=hidden.device)
    piece = max(1, ACCUMULATION_BYTES // (4 * hidden.size(1)))
    for rows, segment in zip(hidden.split(piece), owners.split(piece), strict=True):
        sums.index_add_(0, segment, rows.float())
    return sums[:B]


class AllPool:
    """Every row; pieces of an unfinished prompt are kept, as copies that outlive the step."""

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        """hidden `[T, D]` -> for each request `[n, D]`, or None while it is unfinished."""
        outputs: list[Tensor | None] = []
        pieces = hidden.split(metadata.cursor.query_lens)
        for i, piece in enumerate(pieces):
            kept = metadata.states[i].rows
            kept.append(piece.clone())
            is_finished = metadata.cursor.finished[i]
            outputs.append(self.finish(torch.cat(kept), metadata, i) if is_finished else None)
        return outputs

    def finish(self, rows: Tensor, metadata: PoolingMetadata, i: int) -> Tensor:
        """What becomes of request i's rows `[n, D]` when all are there."""
        return rows


class StepPool(AllPool):
    """The rows of the tokens that close a reasoning step (`step_tag_id`): process reward models."""

    def finish(self, rows: Tensor, metadata: PoolingMetadata, i: int) -> Tensor:
        tag = metadata.params[i].step_tag_id
        if tag is None:
            return rows
        return pick(rows, np.flatnonzero(metadata.token_ids(i) == tag))  # [steps, D]


SEQUENCE_METHODS = {"CLS": CLSPool, "LAST": LastPool, "MEAN": MeanPool}
TOKEN_METHODS = {"ALL": AllPool, "STEP": StepPool}
