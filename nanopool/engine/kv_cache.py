"""How large the KV pool is, and the pool itself. Chapters 03 and 10."""

import math

import torch
from torch import Tensor

from nanopool.config import EngineConfig, ModelConfig
from nanopool.parallel import TensorParallel

GIB = 2**30
CPU_POOL_BYTES = 2 * GIB


def kv_cache_shape(config: ModelConfig, tp: TensorParallel, num_blocks: int) -> tuple[int, ...]:
    """`[layers, 2, N, block, max(1, K/R), d]`: keys and values of the decoder on one rank."""
    hf = config.hf_config
    kv_heads = max(1, hf.num_key_value_heads // tp.size)
    return hf.num_hidden_layers, 2, num_blocks, config.block_size, kv_heads, config.head_dim


def blocks_on_cpu(max_num_seqs: int, max_model_len: int, block_size: int, bytes_each: int) -> int:
    """What the largest batch can use, at most 2 GiB, at least one sequence of max_model_len."""
    per_sequence = -(-max_model_len // block_size)
    return max(per_sequence, min(max_num_seqs * per_sequence, CPU_POOL_BYTES // bytes_each))


def blocks_on_gpu(total: int, free: int, mine: int, utilization: float, bytes_each: int) -> int:
    """Blocks that fit beside this process's peak use (all in bytes).

    `utilization` is the share of the device that this process may take. What other processes hold
    is not charged to it, but neither can it be used. ValueError with the numbers when nothing is
    left.
    """
    blocks = int(min(total * utilization - mine, free)) // bytes_each
    if blocks > 0:
        return blocks
    raise ValueError(
        f"no memory for KV blocks: gpu_memory_utilization={utilization} of {total / GIB:.1f} GiB, "
        f"{mine / GIB:.1f} GiB used by the model, {free / GIB:.1f} GiB free; raise "
        "gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
    )


def kv_pool_size(config: ModelConfig, engine: EngineConfig, tp: TensorParallel, peak: int) -> int:
    """The pool's size N, the same on every rank.

    It is what the caller says, else the least that any rank can hold beside its `peak` bytes.
    """
    if config.spec.encoder_only:
        return 0
    if engine.num_kv_blocks is not None:
        return engine.num_kv_blocks
    bytes_each = math.prod(kv_cache_shape(config, tp, num_blocks=1)) * config.dtype.itemsize
    if config.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(config.device)
        blocks = blocks_on_gpu(total, free, peak, engine.gpu_memory_utilization, bytes_each)
    else:
        lens = config.max_model_len, config.block_size
        blocks = blocks_on_cpu(engine.max_num_seqs, *lens, bytes_each)
    return int(tp.all_gather(torch.tensor([blocks], device=config.device)).min())


def allocate_kv_caches(config: ModelConfig, tp: TensorParallel, num_blocks: int) -> list[Tensor]:
    """One pool a decoder layer, parts of one tensor; none at all for an encoder-only model."""
    if config.spec.encoder_only:
        return []
    shape = kv_cache_shape(config, tp, num_blocks)
    try:
        return [*torch.empty(shape, dtype=config.dtype, device=config.device)]
    except (RuntimeError, TypeError) as error:  # no memory, or no int64
        gib = math.prod(shape) * config.dtype.itemsize / GIB
        raise ValueError(f"num_kv_blocks = {num_blocks} needs {gib:.1f} GiB: lower it") from error
