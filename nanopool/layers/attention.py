"""Attention over packed rows with a paged KV cache.

One function, backends by what the machine has. Chapter 03.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.batch import Batch, Run
from nanopool.layers.flash_attention import flash_backend


class Attention(nn.Module):
    """The attention of one layer; holds no weight. Called by every model's layers; chapter 03."""

    def __init__(self, head_dim: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.scale = head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv_cache: Tensor | None):
        """q `[T, H, d]`, k and v `[T, K, d]` -> `[T, H * d]`.

        New keys and values are stored before any row attends.
        """
        if kv_cache is not None:
            store_kvcache(k, v, kv_cache, batch.slot_mapping)
        out = varlen_attention(q, k, v, batch, self.causal, self.scale, kv_cache)
        return out.flatten(1)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    causal: bool,
    scale: float,
    kv_cache: Tensor | None = None,
) -> Tensor:
    """q `[T, H, d]`, k and v `[T, K, d]`, kv_cache `[2, N, block, K, d]` -> `[T, H, d]`.

    Each sequence attends to its own keys only; causal rows see keys up to their own position (mask
    aligned to the lower right). flash-attention's varlen call on CUDA in half precision, PyTorch's
    SDPA elsewhere.
    """
    backend = backend_for(q, kv_cache)
    return backend(q, k, v, batch, causal, scale, kv_cache)


def backend_for(x: Tensor, kv_cache: Tensor | None) -> Callable[..., Tensor]:
    """The attention for heads `[..., d]` like x and a pool like this one."""
    block_size = None if kv_cache is None else kv_cache.size(2)
    return select_backend(x.device.type, x.dtype, x.size(-1), block_size)


@cache
def select_backend(
    device: str, dtype: torch.dtype, head_dim: int, block_size: int | None
) -> Callable[..., Tensor]:
    """The attention of this machine: flash_attn, else torch's varlen_attn, else SDPA."""
    if device != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return sdpa_attention
    return flash_backend(head_dim, block_size) or sdpa_attention


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    causal: bool,
    scale: float,
    kv_cache: Tensor | None,
) -> Tensor:
    """The readable reference: one call of scaled_dot_product_attention a run."""
    outputs = [attend(q, k, v, run, causal, scale, kv_cache) for run in batch.runs]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, H, d]


def attend(
    q: Tensor, k: Tensor, v: Tensor, run: Run, causal: bool, scale: float, kv_cache: Tensor | None
) -> Tensor:
    """One run: `count` sequences of `query_len` rows, each against `key_len` keys.

    q `[T, H, d]`, k and v `[T, K, d]` -> `[count * query_len, H, d]`.
    """
    H, K, d = q.size(1), k.size(1), q.size(2)
    shape = (run.count, run.query_len)
    q = q[run.rows].unflatten(0, shape).transpose(1, 2)  # [count, H, query_len, d]
    if run.slots is None:
        k, v = (x[run.rows].unflatten(0, shape)[:, : run.key_len].transpose(1, 2) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=K < H
        )
        return out.transpose(1, 2).reshape(-1, H, d)
    k, v = (gather(pool, run).transpose(1, 2) for pool in kv_cache)  # [count, K, key_len, d]
    mask = None if run.mask is None else run.mask.to(q.dtype)
    if run.query_len == 1:  # the heads of one KV head as rows: K and V are not repeated
        q = q.reshape(run.count, K, H // K, d)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.size(1) > K)
    return out.reshape(-1, H, d) if run.query_len == 1 else out.transpose(1, 2).reshape(-1, H, d)


def gather(pool: Tensor, run: Run) -> Tensor:
    """A run's keys or values, through their slots.

    pool `[N, block, K, d]` -> `[count, key_len, K, d]`.
    """
    rows = pool.flatten(2).flatten(0, 1).index_select(0, run.slots)
    return rows.view(run.count, run.key_len, *pool.shape[2:])


def store_kvcache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v `[T, K, d]` to their slots of `[2, N, block, K, d]`; slot -1 writes nothing."""
    if k.is_cuda:
        from nanopool.layers.store_kvcache import store_kvcache_triton

        return store_kvcache_triton(k, v, kv_cache, slot_mapping)
    kept = slot_mapping >= 0
    for rows, pool in ((k, kv_cache[0]), (v, kv_cache[1])):
        pool.flatten(0, 1).index_copy_(0, slot_mapping[kept], rows[kept])
