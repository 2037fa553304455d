"""Embedding a long text: pieces that become one vector, or chunks with a vector each. Chapter 18.

Chunked prefill, the third thing called chunking, is the scheduler's.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nanopool.engine.sequence import Request
from nanopool.inputs import InputProcessor, Prompt
from nanopool.outputs import Chunk, LateChunking
from nanopool.pooler.params import LateChunkingParams


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


def join(pieces: list[Request], results: dict[str, Any]) -> Any:
    """The pieces' vectors `[D]` -> their mean by numbers of tokens, normalised where they are.

    vLLM leaves the mean as it is, shorter than 1. A request that was not split keeps its result.
    """
    if len(pieces) == 1:
        return results[pieces[0].request_id]
    vectors = torch.stack([results[piece.request_id] for piece in pieces]).float()  # [pieces, D]
    lens = [max(0, len(p.token_ids) - p.pooling.prompt_prefix_len) for p in pieces]
    weights = vectors.new_tensor(lens)
    mean = weights @ vectors / weights.sum()
    return F.normalize(mean, dim=0) if pieces[0].pooling.use_activation else mean


def late_chunks(
    inputs: InputProcessor, prompt: Prompt, params: LateChunkingParams | None
) -> LateChunking | None:
    """Which tokens of the prompt, and which characters of its text, each chunk stands for."""
    if params is None:
        return None
    spans, n, chunks = char_spans(inputs, prompt), len(prompt.token_ids), []
    for first in range(0, n, params.chunk_size):
        end = min(first + params.chunk_size, n)
        inside = [span for span in spans[first:end] if span[0] < span[1]]
        chars = (inside[0][0], inside[-1][1]) if inside else None
        chunks.append(Chunk((first, end), chars))
    return LateChunking(tuple(chunks), n)


def char_spans(inputs: InputProcessor, prompt: Prompt) -> list[tuple[int, int]]:
    """The characters (first, end) of its text that each token stands for, the frame not counted.

    None are known for token ids, and for a tokenizer in plain Python.
    """
    frame = prompt.frame
    records = prompt.text and inputs.tokenize(frame, [prompt.text]).encodings
    spans = [*records[0].offsets] if records else []
    start = int(prompt.token_ids[: len(frame.marker)] != frame.marker)  # it stands behind [CLS]
    spans[start:start] = [(0, 0)] * len(frame.marker)
    return [(max(0, a - len(frame.prefix)), b - len(frame.prefix)) for a, b in spans]
