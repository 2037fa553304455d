"""Linear layers split over tensor-parallel ranks (Megatron-LM, arXiv 1909.08053). Chapter 02."""

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


def copy_exactly(target: Tensor, loaded: Tensor) -> None:
    """Copy without broadcasting; ValueError when the shapes differ."""
    if target.shape != loaded.shape:
        raise ValueError(f"its shape is {list(loaded.shape)}, not {list(target.shape)}")
    target.copy_(loaded)


def narrow(loaded: Tensor, dim: int, full: int, start: int, size: int) -> Tensor:
    """A rank's part of a checkpoint's tensor; ValueError unless its whole length is `full`."""
    if loaded.size(dim) != full:
        raise ValueError(f"its shape is {list(loaded.shape)}, but dimension {dim} must be {full}")
    return loaded.narrow(dim, start, size)


class ShardedModule(nn.Module):
    """A layer whose weights are parts of a checkpoint's. The loader calls it. Chapters 01, 02, 06.

    A parameter is filled shard by shard. `shard_ids` names the tensors that make it up: siblings
    of this module in the checkpoint ("q_proj", "k_proj", "v_proj"), or None, the module's own name.
    """

    shard_ids: tuple[str | None, ...] = (None,)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's part of `loaded`, here all of it; ValueError when it does not fit."""
        copy_exactly(param.data, loaded)

    def extra_repr(self) -> str:
        return f"weight {list(self.weight.shape)}"


class ParallelLinear(ShardedModule):
    """This rank's weight `[out, in]` and perhaps a bias `[out]` of a split product. Chapter 02."""

    def __init__(self, in_features: int, out_features: int, bias: bool, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class MergedColumnParallelLinear(ParallelLinear):
    """Several column-parallel products as one matrix, such as gate and up. Chapter 02.

    `parts` says how many rows each has, and `pieces` into how many equal pieces it is cut, one for
    each rank unless said otherwise. A rank holds a piece of each part, one below the other.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str | None, int],
        bias: bool,
        tp: TensorParallel,
        what: str,
        pieces: dict[str | None, int] | None = None,
    ):
        self.shard_ids = tuple(parts)
        self.parts = parts
        self.pieces = pieces or dict.fromkeys(parts, tp.size)
        self.sizes = {name: divide(parts[name], self.pieces[name], what) for name in parts}
        super().__init__(in_features, sum(self.sizes.values()), bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's rows of one part `[n, in]` (a bias: `[n]`) to their place.

        Where there are fewer pieces than ranks, neighbours hold the same one.
        """
        places = param.data.split(list(self.sizes.values()))
        rows, size = self.parts[shard_id], self.sizes[shard_id]
        piece = self.tp.rank * self.pieces[shard_id] // self.tp.size
        shard = narrow(loaded, 0, rows, piece * size, size)
        copy_exactly(places[self.shard_ids.index(shard_id)], shard)

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

    `heads` says how many each projection has, by its name in the checkpoint: H, K and K.
    K key/value heads fewer than R ranks are replicated: R/K neighbouring ranks hold the same head.
    """

    def __init__(
        self, hidden: int, heads: dict[str, int], head_dim: int, bias: bool, tp: TensorParallel
    ):
        H, K, _ = heads.values()
        self.num_heads = divide(H, tp.size, "num_attention_heads")
        if K % tp.size and tp.size % K:
            raise ValueError(
                f"num_key_value_heads = {K} and tensor_parallel_size = {tp.size}: one must be "
                "divisible by the other; choose another tensor_parallel_size"
            )
        self.num_kv_heads = max(1, K // tp.size)
        parts = {name: count * head_dim for name, count in heads.items()}
        pieces = {name: min(count, tp.size) for name, count in heads.items()}
        super().__init__(hidden, parts, bias, tp, "num_heads", pieces)


class RowParallelLinear(ParallelLinear):
    """Input features split over ranks; all_reduce adds up, the bias comes after. Chapter 02."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, tp: TensorParallel, what: str
    ):
        super().__init__(divide(in_features, tp.size, what), out_features, bias, tp)

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        """Copy this rank's columns of `[out, in]`; a bias is whole on every rank."""
        if param.dim() == 2:
            size = param.size(1)
            loaded = narrow(loaded, 1, size * self.tp.size, self.tp.rank * size, size)
        copy_exactly(param.data, loaded)

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)  # [T, in] -> [T, out]
        y = self.tp.all_reduce(F.linear(x, self.weight))  # [T, in/R] -> [T, out]
        return y if self.bias is None else y.add_(self.bias)
