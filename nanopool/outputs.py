"""What the methods of LLM return. Chapter 00."""

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text. Chapter 07."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one generate request. Chapter 07."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """A pooled result, `data`, under the names that each method gives it. Chapter 11."""

    data: Tensor

    @cached_property
    def embedding(self) -> list[float]:
        """`embed`: the vector as a list, built when read."""
        return self.data.tolist()

    @cached_property
    def probs(self) -> list[float]:
        """`classify`: one number a label."""
        return self.data.tolist()

    @property
    def score(self) -> float:
        """`score`: how relevant the second text is to the first."""
        return self.data.item()


class Chunk(NamedTuple):
    """Which tokens, and which characters of the text, one vector of late chunking stands for.

    Both as (first, end); no characters where a chunk holds special tokens only.
    """

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None


class LateChunking(NamedTuple):
    """What the rows of a late-chunked result stand for. Chapter 18."""

    chunks: tuple[Chunk, ...]
    input_tokens: int


@dataclass(frozen=True)
class PoolingRequestOutput:
    """The answer to one pooling request. Chapter 11.

    `outputs` is a PoolingOutput, or what an IOProcessor made of its requests' outputs.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True
    late_chunking: LateChunking | None = None


Outputs = list[PoolingRequestOutput | None]  # None: on ranks other than 0


def warn_unless_finite(outputs: Outputs) -> Outputs:
    """The outputs, and one warning that names those with inf or NaN; their neighbours are right."""
    bad = [o.request_id for o in outputs if o and not torch.isfinite(o.outputs.data).all()]
    if bad:
        text = f"inf or NaN in the result of request {', '.join(bad)}; the other results are right"
        warnings.warn(f"{text} (dtype='float32' may help)", stacklevel=3)
    return outputs


def lexical_weights(output: PoolingRequestOutput, tokenizer: Any) -> dict[int, float]:
    """BGE-M3's sparse result (`token_classify`, or the joined task) as {token id: weight}. Ch. 16.

    The largest weight of each token that occurs, above 0; without cls, eos, pad and unk.
    """
    cls, eos = tokenizer.cls_token_id, tokenizer.eos_token_id
    ids = output.prompt_token_ids
    ids = ids[ids[0] == cls : len(ids) - (ids[-1] == eos)]
    values = output.outputs.data.tolist()
    pairs = zip(ids, values[len(values) - len(ids) :], strict=True)
    unused = {cls, eos, tokenizer.pad_token_id, tokenizer.unk_token_id}
    ascending = sorted(pairs, key=lambda pair: pair[1])  # the largest of a token comes last
    return {token: weight for token, weight in ascending if weight > 0 and token not in unused}
