"""flash-attention (arXiv 2205.14135) over packed rows and paged keys. Chapter 03.

One kernel serves every sequence of a step, whatever its lengths, and reads keys and values where
they lie. Two libraries have it, under different names.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from nanopool.batch import Batch

PAGE = 256  # the kernels read pages of 256 tokens, or of a multiple


def flash_backend(head_dim: int, block_size: int | None) -> Callable[..., Tensor] | None:
    """The attention of layers/attention.py as one kernel; None where this machine has none.

    Before Ampere, for odd head sizes or small pages, no kernel will do.
    """
    fits = head_dim % 8 == 0 and head_dim <= 256 and (block_size or PAGE) % PAGE == 0
    if not fits or torch.cuda.get_device_capability() < (8, 0):
        return None
    with suppress(ImportError):
        from flash_attn import flash_attn_varlen_func

        return partial(flash_attention, flash_attn_varlen_func, flash_attn_options)
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" in inspect.signature(varlen_attn).parameters:
            return partial(flash_attention, varlen_attn, torch_options)
    return None


def flash_attention(
    kernel, options, q: Tensor, k: Tensor, v: Tensor, batch: Batch, causal: bool, scale: float, pool
) -> Tensor:
    """As `varlen_attention`: keys from the pages of `pool`, or of this step where there is none."""
    tables = None
    if pool is not None:
        (k, v), tables = pool, batch.block_tables  # [N, block, K, d] each, [B, M]
    elif batch.key_rows is not None:
        k, v = k[batch.key_rows], v[batch.key_rows]
    lens = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k)
    return kernel(q, k, v, *lens, **options(batch, causal, scale, tables))  # [T, H, d]


def flash_attn_options(batch: Batch, causal: bool, scale: float, tables: Tensor | None) -> dict:
    """The package flash_attn: causal masks are aligned to the lower right (since 2.1)."""
    return {"softmax_scale": scale, "causal": causal, "block_table": tables}


def torch_options(batch: Batch, causal: bool, scale: float, tables: Tensor | None) -> dict:
    """torch: causal is a window that ends at the row itself, and pages ask for each length."""
    window = (-1, 0) if causal else (-1, -1)
    used = None if tables is None else batch.seqused_k
    pages = {"block_table": tables, "seqused_k": used}
    return {"scale": scale, "window_size": window, "enable_gqa": True, **pages}
