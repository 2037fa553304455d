"""Embedding a long text: pieces that become one vector, or chunks with a vector each. Chapter 18.

Chunked prefill, the third thing called chunking, is the scheduler's.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopool.engine.sequence import Request
from nanopool.inputs import Frame, Prompt
from nanopool.outputs import Chunk, LateChunking, PoolingRequestOutput
from nanopool.pooler.params import PoolingParams


def split(request: Request, length: int) -> list[Request]:
    """Consecutive pieces of at most `length` tokens; special tokens stay where they fell."""
    ids = request.token_ids
    if len(ids) <= length:
        return [request]
    pieces = []
    for i in range(0, len(ids), length):
        prefix_len = max(0, request.pooling.prompt_prefix_len - i)  # the prompt is in the first
        pooling = replace(request.pooling, prompt_prefix_len=prefix_len)
        facts = {"request_id": f"{request.request_id}-{i}", "token_ids": ids[i : i + length]}
        pieces.append(replace(request, pooling=pooling, **facts))
    return pieces


def join(results: list[Tensor | None], pieces: list[Request]) -> Tensor | None:
    """The pieces' vectors `[D]` -> their mean by numbers of tokens, normalised where they are.

    vLLM leaves the mean as it is, shorter than 1. None on ranks that hold no results.
    """
    if len(pieces) == 1 or results[0] is None:
        return results[0]
    vectors = torch.stack(results).float()  # [pieces, D]
    weights = vectors.new_tensor([len(piece.token_ids) for piece in pieces])
    mean = weights @ vectors / weights.sum()
    return F.normalize(mean, dim=0) if pieces[0].pooling.use_activation else mean


def add_chunks(
    output: PoolingRequestOutput | None, prompt: Prompt, frame: Frame, params: PoolingParams
) -> PoolingRequestOutput | None:
    """The output, and what the rows of late chunking stand for where the request asked for it.

    Characters count in the text as it was given, without the frame.
    """
    if output is None or params.late_chunking_params is None:
        return output
    n, size = len(prompt.token_ids), params.late_chunking_params.chunk_size
    spans = [] if prompt.encoding is None else [*prompt.encoding.offsets]
    spans[1:1] = [(0, 0)] * len(frame.marker)
    spans = [(max(0, a - len(frame.prefix)), b - len(frame.prefix)) for a, b in spans]
    chunks = []
    for first in range(0, n, size):
        inside = [(a, b) for a, b in spans[first : first + size] if a < b]
        chars = (min(a for a, _ in inside), max(b for _, b in inside)) if inside else None
        chunks.append(Chunk((first, min(first + size, n)), chars))
    return replace(output, late_chunking=LateChunking(tuple(chunks), n))
