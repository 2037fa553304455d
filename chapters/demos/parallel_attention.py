"""Attention split by heads: a rank computes whole heads and never needs the others. Chapter 02.

Run it: python chapters/demos/parallel_attention.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

T, D, H, K, d = 3, 8, 4, 2, 2  # tokens, hidden size, query heads, key/value heads, head size


def numbers(rows: int, columns: int, start: int) -> Tensor:
    """A matrix of small numbers, from -0.4 to 0.4."""
    return ((torch.arange(rows * columns).view(rows, columns) * 5 + start) % 9 - 4.0) / 10


def attention(x: Tensor, q_proj: Tensor, k_proj: Tensor, v_proj: Tensor) -> Tensor:
    """Causal attention with as many heads as the weights hold: `[T, D]` -> `[T, heads * d]`."""
    q = F.linear(x, q_proj).view(T, -1, d)  # [T, heads, d]
    k = F.linear(x, k_proj).view(T, -1, d)  # [T, kv heads, d]
    v = F.linear(x, v_proj).view(T, -1, d)
    queries_per_kv_head = q.size(1) // k.size(1)
    k = k.repeat_interleave(queries_per_kv_head, 1)  # [T, heads, d]
    v = v.repeat_interleave(queries_per_kv_head, 1)
    hidden = torch.ones(T, T).triu(1).bool()  # keys that come later
    outputs = []
    for head in range(q.size(1)):
        scores = q[:, head] @ k[:, head].T / d**0.5  # [T, T]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(weights @ v[:, head])  # [T, d]
    return torch.cat(outputs, 1)


def kv_shard(weight: Tensor, rank: int, size: int) -> Tensor:
    """A rank's key (or value) heads; with fewer heads than ranks, neighbours hold the same one."""
    if K >= size:
        return weight.chunk(size, 0)[rank]
    return weight.chunk(K, 0)[rank * K // size]


def attention_on_ranks(x: Tensor, weights: list[Tensor], size: int) -> Tensor:
    """The whole attention block on `size` ranks: `[T, D]` -> `[T, D]`."""
    q_proj, k_proj, v_proj, o_proj = weights
    partial_sums = []
    for rank in range(size):
        q = q_proj.chunk(size, 0)[rank]
        k, v = kv_shard(k_proj, rank, size), kv_shard(v_proj, rank, size)
        first = rank * H // size
        query_heads = list(range(first, first + q.size(0) // d))
        kv_heads = sorted({head * K // H for head in query_heads})
        print(f"rank {rank}: query heads {query_heads}, key/value heads {kv_heads}")
        heads = attention(x, q, k, v)  # [T, heads * d]
        partial = F.linear(heads, o_proj.chunk(size, 1)[rank])  # row-parallel: [T, D]
        print(f"  its heads {list(heads.shape)}, times its columns of o_proj {list(partial.shape)}")
        print(" ", partial[0])
        partial_sums.append(partial)
    total = sum(partial_sums)
    print("all-reduce: the sum of the partial results; again the first token")
    print(total[0])
    return total


def main() -> None:
    x = numbers(T, D, 1)
    weights = [
        numbers(H * d, D, 2),
        numbers(K * d, D, 3),
        numbers(K * d, D, 4),
        numbers(D, H * d, 5),
    ]
    q_proj, k_proj, v_proj, o_proj = weights
    print(f"One rank: query heads {list(range(H))}, key/value heads {list(range(K))}")
    plain = F.linear(attention(x, q_proj, k_proj, v_proj), o_proj)
    print("first token of the output")
    print(plain[0])

    for size in (2, 4):
        print(f"\n{size} ranks, {K} key/value heads")
        total = attention_on_ranks(x, weights, size)
        equal = torch.allclose(total, plain, atol=1e-6)
        assert equal, f"{size} ranks differ from one"
        print("Equal:", equal)


if __name__ == "__main__":
    torch.set_printoptions(precision=4, sci_mode=False)
    main()
