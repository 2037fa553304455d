"""MaxSim without its matrix of dots, as a Triton kernel (ColBERT, arXiv 2004.12832). Chapter 17."""

from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanopool.batch import cumulative, to_device


def flash_maxsim(queries: list[Tensor], documents: list[Tensor]) -> Tensor:
    """`maxsim` of late_interaction.py: rows `[q, E]` and `[n, E]` of each pair -> `[pairs]`.

    A program scores a pair tile by tile and keeps nothing but the best dot of each query row.
    """
    packed = (*pack(queries), *pack(documents))
    scores = packed[0].new_empty(len(queries), dtype=torch.float32)
    score_pair[(len(queries),)](*packed, scores, packed[0].size(1), 32, 64)
    return scores


def pack(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All rows as one tensor `[*, E]`, and first row and end of each part: `[pairs, 2]`.

    A query that stands in many pairs is packed once.
    """
    distinct = list(dict.fromkeys(parts))  # a tensor's hash is its identity
    edges = cumulative(tuple(map(len, distinct)))
    spans = dict(zip(distinct, pairwise(edges), strict=True))
    rows = torch.cat(distinct)
    return rows, to_device(np.array([spans[part] for part in parts]), rows.device)


@triton.jit
def score_pair(
    queries, query_spans, documents, document_spans, scores, E, Q: tl.constexpr, N: tl.constexpr
):
    """The sum over query rows of the best dot with a document row, in float32."""
    pair = tl.program_id(0)
    first, last = tl.load(query_spans + 2 * pair), tl.load(query_spans + 2 * pair + 1)
    start, end = tl.load(document_spans + 2 * pair), tl.load(document_spans + 2 * pair + 1)
    total = tl.zeros([Q], tl.float32)
    for q in range(first, last, Q):
        rows = q + tl.arange(0, Q)
        best = tl.full([Q], float("-inf"), tl.float32)
        for n in range(start, end, N):
            columns = n + tl.arange(0, N)
            dots = tile_dots(queries, rows, last, documents, columns, end, E)
            dots = tl.where(columns[None, :] < end, dots, float("-inf"))
            dots = tl.where(dots == dots, dots, float("inf"))  # a maximum would hide a NaN
            best = tl.maximum(best, tl.max(dots, 1))
        total += tl.where(rows < last, best, 0.0)
    tl.store(scores + pair, tl.sum(total))


@triton.jit
def tile_dots(a, rows, a_end, b, columns, b_end, E, C: tl.constexpr = 64):
    """Dots of rows of a and rows of b, C dimensions at a time, without TF32's rounding."""
    dots = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for e in range(0, E, C):
        x = load_tile(a, rows, a_end, e, E, C)
        y = load_tile(b, columns, b_end, e, E, C)
        dots = tl.dot(x, tl.trans(y), dots, input_precision="ieee")
    return dots


@triton.jit
def load_tile(base, rows, end, e, E, C: tl.constexpr):
    """Dimensions e to e + C of some rows of a packed `[*, E]`; zero outside."""
    dims = e + tl.arange(0, C)
    inside = (rows < end)[:, None] & (dims < E)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * E + dims[None, :], inside, 0.0)
