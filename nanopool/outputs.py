"""What the methods of LLM return. Chapter 00."""

import warnings
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class PoolingOutput:
    """A pooled result, `data`, and its forms: the names that one task's method gives it. Chapter 11."""

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


@dataclass(frozen=True)
class PoolingRequestOutput:
    """The answer to one pooling request; `chunks` are the token and character ranges of late chunking. Chapter 11."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
    chunks: tuple = ()


def warn_unless_finite(outputs: list[PoolingRequestOutput]) -> None:
    """One warning that names every result with inf or NaN; its neighbours are right."""
    bad = [o.request_id for o in outputs if not torch.isfinite(o.outputs.data).all()]
    if bad:
        warnings.warn(
            f"inf or NaN in the result of request {', '.join(bad)}; the other results are not affected "
            "(a dtype of wider range may help: bfloat16 or float32)",
            stacklevel=4,
        )
