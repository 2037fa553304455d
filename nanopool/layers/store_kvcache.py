"""Keys and values to their slots of the KV pool, as a Triton kernel. Chapter 03."""

import triton
import triton.language as tl
from torch import Tensor


def store_kvcache_triton(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """`store_kvcache` of layers/attention.py in one launch: a program for each of the T rows.

    k and v `[T, K, d]` may be parts of one qkv tensor: rows are found by their stride.
    """
    k, v = k.flatten(1), v.flatten(1)  # [T, K * d]
    width = k.size(1)
    strides = (*k.stride(), *v.stride())
    block = triton.next_power_of_2(width)
    store_row[(len(k),)](k, v, kv_cache[0], kv_cache[1], slot_mapping, *strides, width, block)


@triton.jit
def store_row(
    k, v, k_pool, v_pool, slots, k_row, k_column, v_row, v_column, width, BLOCK: tl.constexpr
):
    """Copies one row of k and v; slot -1 is a row of no sequence. Offsets pass 2^31: 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    keys = tl.load(k + row * k_row + columns * k_column, inside)
    values = tl.load(v + row * v_row + columns * v_column, inside)
    tl.store(k_pool + slot * width + columns, keys, inside)
    tl.store(v_pool + slot * width + columns, values, inside)
