"""Five pooling methods, each fed a prompt piece by piece.

Which rows, and how they become one. Chapter 13.
"""

import numpy as np
import torch
from torch import Tensor

from nanopool.batch import pick, to_device
from nanopool.pooler.metadata import PoolingMetadata

ACCUMULATION_BYTES = 16 * 2**20


def cls_pool(hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
    """CLS: the row of the first token. Kept when the prompt is not finished in this step.

    hidden `[T, D]` -> `[B, D]`; rows of unfinished requests are not final.
    """
    cursor = metadata.cursor
    rows = hidden[cursor.first_rows]  # [B, D]
    if not cursor.is_partial:
        return rows
    for i, state in enumerate(metadata.states):
        if cursor.starts[i] == 0:
            state.value = rows[i].clone()
        rows[i] = state.value
    return rows


def last_pool(hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
    """LAST: the row of the last token, the only one that has seen all of a causal model's prompt.

    hidden `[T, D]` -> `[B, D]`; rows of unfinished requests are not final.
    """
    return hidden[metadata.cursor.last_rows]


def mean_pool(hidden: Tensor, metadata: PoolingMetadata) -> Tensor:
    """MEAN: a running float32 sum of the rows, divided by the prompt length at the end.

    Rows of a prompt that the folder excludes (`include_prompt: false`) count neither above nor
    below the line. hidden `[T, D]` -> `[B, D]`; rows of unfinished requests are not final.
    """
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


def all_pool(hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
    """ALL: every row; pieces of an unfinished prompt are kept, as copies that outlive the step.

    hidden `[T, D]` -> for each request `[n, D]`, or None while it is unfinished.
    """
    outputs: list[Tensor | None] = []
    for i, piece in enumerate(hidden.split(metadata.cursor.query_lens)):
        kept = metadata.states[i].rows
        kept.append(piece.clone())
        outputs.append(torch.cat(kept) if metadata.cursor.finished[i] else None)
    return outputs


def step_pool(hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
    """STEP: the rows of the tokens that close a reasoning step (`step_tag_id`).

    Process reward models. hidden `[T, D]` -> for each request `[steps, D]`, or None.
    """
    outputs = all_pool(hidden, metadata)
    for i, rows in enumerate(outputs):
        tag = metadata.params[i].step_tag_id
        if rows is not None and tag is not None:
            outputs[i] = pick(rows, np.flatnonzero(metadata.token_ids(i) == tag))
    return outputs


SEQUENCE_METHODS = {"CLS": cls_pool, "LAST": last_pool, "MEAN": mean_pool}
TOKEN_METHODS = {"ALL": all_pool, "STEP": step_pool}
