"""Linear layers whose weights are split over tensor-parallel ranks (Megatron-LM, arXiv 1909.08053).

Chapter 02.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.parallel import TensorParallel


def divide(total: int, parts: int, what: str) -> int:
    """total / parts; ValueError naming both when it is not whole."""
    if total % parts:
        raise ValueError(
            f"{what} = {total} is not divisible by tensor_parallel_size = {parts}; "
            f"choose a tensor_parallel_size that divides {total}"
        )
    return total // parts


def check_size(found: int, expected: int) -> None:
    """ValueError when a checkpoint's tensor is not as long as the config says.

    The loader adds the names.
    """
    if found != expected:
        raise ValueError(f"found {found} where the config says {expected}")


class ParallelLinear(nn.Module):
    """What every split linear layer has:
    this rank's weight, perhaps a bias, and where its shards come from.

    A parameter is filled shard by shard: `shard_ids` names the checkpoint tensors that make it up
    (one unnamed tensor, or "q", "k", "v"), and `weight_loader` copies one of them to its place.
    """

    shard_ids: tuple[str | None, ...] = (None,)

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        raise NotImplementedError


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel products as one matrix:
    gate and up of an MLP. No communication; chapter 02.

    Rank r holds rows [r * n/R, (r+1) * n/R) of each part, one part below the other.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str | None, int],
        bias: bool,
        tp: TensorParallel,
        what: str,
    ):
        self.shard_ids = tuple(parts)
        self.parts = parts
        self.sizes = {name: self.shard_size(name, size, tp, what) for name, size in parts.items()}
        super().__init__(in_features, sum(self.sizes.values()), bias, tp)

    def shard_size(self, shard_id: str | None, size: int, tp: TensorParallel, what: str) -> int:
        """How many of a part's rows this rank holds."""
        return divide(size, tp.size, what)

    def shard_index(self, shard_id: str | None) -> int:
        """Which of the equal pieces of a part this rank holds."""
        return self.tp.rank

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's rows of one part `[n, in]` (a bias: `[n]`) to their place."""
        check_size(loaded.size(0), self.parts[shard_id])
        names = list(self.sizes)
        offset = sum(self.sizes[name] for name in names[: names.index(shard_id)])
        size = self.sizes[shard_id]
        shard = loaded.narrow(0, self.shard_index(shard_id) * size, size)
        param.data.narrow(0, offset, size).copy_(shard)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # [T, in] -> [T, out/R]


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Output features split over ranks: each rank computes its columns of y = x W^T. Chapter 02."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, what: str
    ):
        super().__init__(in_features, {None: out_features}, bias, tp, what)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The q, k and v projections as one product, split by heads. Chapter 02.

    K key/value heads fewer than R ranks are replicated: R/K neighbouring ranks hold the same head.
    """

    def __init__(self, hidden: int, H: int, K: int, d: int, bias: bool, tp: TensorParallel):
        if K % tp.size and tp.size % K:
            raise ValueError(
                f"num_key_value_heads = {K} and tensor_parallel_size = {tp.size}: "
                "one must be divisible by the other; choose another tensor_parallel_size"
            )
        self.num_heads = divide(H, tp.size, "num_attention_heads")
        self.num_kv_heads = max(1, K // tp.size)
        self.kv_replicas = max(1, tp.size // K)
        self.head_dim = d
        parts = {"q": H * d, "k": K * d, "v": K * d}
        super().__init__(hidden, parts, bias, tp, "num_attention_heads")

    def shard_size(self, shard_id: str | None, size: int, tp: TensorParallel, what: str) -> int:
        return self.head_dim * (self.num_heads if shard_id == "q" else self.num_kv_heads)

    def shard_index(self, shard_id: str | None) -> int:
        return self.tp.rank if shard_id == "q" else self.tp.rank // self.kv_replicas


class RowParallelLinear(ParallelLinear):
    """Input features split over ranks:
    partial sums are added by all_reduce, the bias once, after it. Chapter 02.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, what: str
    ):
        super().__init__(divide(in_features, tp.size, what), out_features, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's columns of `[out, in]`; a bias is whole on every rank."""
        if param.dim() == 2:
            size = param.size(1)
            check_size(loaded.size(1), size * self.tp.size)
            loaded = loaded.narrow(1, self.tp.rank * size, size)
        param.data.copy_(loaded)

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)  # [T, in] -> [T, out]
        y = self.tp.all_reduce(F.linear(x, self.weight))  # [T, in/R] -> [T, out]
        return y if self.bias is None else y.add_(self.bias)
