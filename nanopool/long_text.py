"""Embedding a long text: pieces that become one vector, or chunks with a vector each. Chapter 18.

Chunked prefill, the third thing called chunking, is the scheduler's.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopool.engine.sequence import Request
from nanopool.inputs import Frame, InputProcessor, Prompt, Truncation
from nanopool.outputs import Chunk, LateChunking, PoolingRequestOutput
from nanopool.pooler.params import LateChunkingParams, PoolingParams

Span = tuple[int, int]


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
    outputs: list[PoolingRequestOutput | None],
    pairs: list[tuple[Prompt, PoolingParams]],
    spans_of: Callable[[Prompt], list[Span]],
) -> list[PoolingRequestOutput | None]:
    """The outputs; those of late chunking with what each of their rows stands for."""
    return [
        replace(output, late_chunking=late_chunks(len(prompt.token_ids), spans_of(prompt), late))
        if output and (late := params.late_chunking_params)
        else output
        for output, (prompt, params) in zip(outputs, pairs, strict=True)
    ]


def late_chunks(n: int, spans: list[Span], params: LateChunkingParams) -> LateChunking:
    """Chunks of n tokens whose characters are `spans` (none are known: an empty list)."""
    chunks = []
    for first in range(0, n, params.chunk_size):
        end = min(first + params.chunk_size, n)
        inside = [(a, b) for a, b in spans[first:end] if a < b]
        chars = (min(a for a, _ in inside), max(b for _, b in inside)) if inside else None
        chunks.append(Chunk((first, end), chars))
    return LateChunking(tuple(chunks), n)


def char_spans(
    inputs: InputProcessor, truncation: Truncation, frame: Frame, prompt: Prompt
) -> list[Span]:
    """The characters (first, end) of its text that each token stands for, the frame not counted.

    None are known for token ids, and for a tokenizer in plain Python.
    """
    records = prompt.text and inputs.tokenize(truncation, frame, [prompt.text]).encodings
    spans = [*records[0].offsets] if records else []
    spans[1:1] = [(0, 0)] * len(frame.marker)
    return [(max(0, a - len(frame.prefix)), b - len(frame.prefix)) for a, b in spans]
