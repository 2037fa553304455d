"""Ask an LLM, keep the tensors, compare them at 1e-5: what the tests of results share."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nanopool import LLM, PoolingParams, TensorParallel
from nanopool.batch import Batch, Slice, encode_segments
from nanopool.config import EngineConfig
from nanopool.engine.kv_cache import allocate_kv_caches
from nanopool.models.loader import load_model
from nanopool.resolve import resolve

TOLERANCE = 1e-5


def start(folder: Path, **settings) -> LLM:
    """An LLM on the CPU, whatever the machine has."""
    return LLM(folder, **{"device": "cpu"} | settings)


def ask(llm: LLM, prompts: list, task: str | None = None, params=None, **fields) -> list[Tensor]:
    """The pooled tensors, in input order; `fields` are those of one PoolingParams for all."""
    params = params or PoolingParams(**fields)
    outputs = llm.encode(prompts, params, pooling_task=task, use_tqdm=False)
    return [output.outputs.data for output in outputs]


def ask_once(folder: Path, prompts: list, task: str, settings=None, **fields) -> list[Tensor]:
    """`ask` of an LLM that lives for this one call; `settings` are its own."""
    with start(folder, **settings or {}) as llm:
        return ask(llm, prompts, task, **fields)


def assert_close(actual, expected) -> None:
    """Tensors, numbers or lists of them that differ by at most 1e-5, absolutely or relatively."""
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def pack(prompts: list[list[int]], block_size: int | None, first_segments=None) -> Batch:
    """One step that computes every prompt whole; `first_segments` are the lengths of first texts.

    With a KV cache, each prompt owns the next free blocks.
    """
    first_segments = first_segments or [len(ids) for ids in prompts]
    slices, used = [], 0
    for ids, first in zip(prompts, first_segments, strict=True):
        blocks = 0 if block_size is None else -(-len(ids) // block_size)
        table = list(range(used, used + blocks))
        rows = encode_segments(np.array(ids, dtype=np.int32), 0, first)
        slices.append(Slice(rows, 0, len(ids), table))
        used += blocks
    return Batch.build(slices, block_size, torch.device("cpu"))


@torch.inference_mode()
def forward(
    folder: Path, prompts: list[list[int]], tp: TensorParallel, first_segments=None, **settings
) -> tuple[nn.Module, list[Tensor]]:
    """(model, hidden states [n, D] of each prompt): weights, one batch, KV caches and no engine."""
    config = resolve(EngineConfig(folder, device="cpu", **settings))
    model = load_model(config, tp)
    caches = allocate_kv_caches(config, tp, sum(map(len, prompts)))
    batch = pack(prompts, config.block_size if caches else None, first_segments)
    return model, list(model(batch, caches).split(batch.query_lens))
