"""Embedding a long text: pieces that become one vector, or chunks with a vector each. Chapter 18.

Chunked prefill, the third thing called chunking, is the scheduler's.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanopool.inputs import Frame, Prompt
from nanopool.outputs import Chunk, LateChunking, PoolingOutput, PoolingRequestOutput
from nanopool.pooler.params import PoolingParams


def split(prompt: Prompt, length: int) -> list[Prompt]:
    """Consecutive pieces of at most `length` tokens; special tokens stay where they fell."""
    ids = prompt.token_ids
    if len(ids) <= length:
        return [prompt]
    return [Prompt(ids[i : i + length]) for i in range(0, len(ids), length)]


def finish(
    parts: list[PoolingRequestOutput | None], prompt: Prompt, params: PoolingParams, frame: Frame
) -> PoolingRequestOutput | None:
    """One prompt's output, from those of its pieces."""
    output = parts[0]
    if output is not None and len(parts) > 1:
        data = mean_of_pieces(parts)
        data = F.normalize(data, dim=0) if params.use_activation else data
        output = replace(output, outputs=PoolingOutput(data), prompt_token_ids=[*prompt.token_ids])
    if output is not None and params.late_chunking_params is not None:
        chunks = describe_chunks(prompt, frame, params.late_chunking_params.chunk_size)
        output = replace(output, late_chunking=LateChunking(chunks, len(prompt.token_ids)))
    return output


def mean_of_pieces(parts: list[PoolingRequestOutput]) -> torch.Tensor:
    """The pieces' vectors `[D]`, weighted by their numbers of tokens -> `[D]` float32."""
    vectors = torch.stack([part.outputs.data for part in parts]).float()  # [pieces, D]
    weights = vectors.new_tensor([len(part.prompt_token_ids) for part in parts])
    return weights @ vectors / weights.sum()


def describe_chunks(prompt: Prompt, frame: Frame, chunk_size: int) -> tuple[Chunk, ...]:
    """The ranges of chunks of `chunk_size` tokens; characters count in the text as it was given."""
    n, offset = len(prompt.token_ids), len(frame.prefix)
    spans = [] if prompt.encoding is None else [*prompt.encoding.offsets]
    spans[1:1] = [(0, 0)] * len(frame.marker)
    spans = [(max(0, start - offset), end - offset) for start, end in spans]
    chunks = []
    for first in range(0, n, chunk_size):
        end = min(first + chunk_size, n)
        inside = [(a, b) for a, b in spans[first:end] if a < b]
        chars = (min(a for a, _ in inside), max(b for _, b in inside)) if inside else None
        chunks.append(Chunk((first, end), chars))
    return tuple(chunks)
