"""One decoder layer on two ranks: what each rank computes, and the two sums that cross. Chapter 04.

Run it: python chapters/demos/decoder_layer.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

R = 2  # ranks
T, D, H, d, WIDTH = 3, 8, 4, 2, 6  # tokens, hidden size, heads, head size, width of the MLP
Weights = dict[str, Tensor]


def numbers(rows: int, columns: int, start: int) -> Tensor:
    """A matrix of small numbers, from -0.4 to 0.4."""
    return ((torch.arange(rows * columns).view(rows, columns) * 5 + start) % 9 - 4.0) / 10


def layer_weights() -> Weights:
    """One layer, as a checkpoint holds it."""
    shapes = {
        "q": (H * d, D),
        "k": (H * d, D),
        "v": (H * d, D),
        "o": (D, H * d),
        "gate": (WIDTH, D),
        "up": (WIDTH, D),
        "down": (D, WIDTH),
    }
    return {name: numbers(*shape, start) for start, (name, shape) in enumerate(shapes.items())}


def shard(weights: Weights, rank: int) -> Weights:
    """A rank's part: columns of the matrices that end a block (o, down), rows of all others."""
    return {
        name: weight.chunk(R, 1 if name in ("o", "down") else 0)[rank]
        for name, weight in weights.items()
    }


def rms_norm(x: Tensor) -> Tensor:
    """Every row to a mean square of one."""
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def attention(x: Tensor, weights: Weights) -> Tensor:
    """Causal attention over the heads that these weights hold, `[T, D]` -> `[T, D]`."""
    q, k, v = (F.linear(x, weights[name]).view(T, -1, d).transpose(0, 1) for name in "qkv")
    scores = q @ k.transpose(1, 2) / d**0.5  # [heads, T, T]
    later = torch.ones(T, T).triu(1).bool()
    mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v  # [heads, T, d]
    return F.linear(mixed.transpose(0, 1).reshape(T, -1), weights["o"])


def mlp(x: Tensor, weights: Weights) -> Tensor:
    """SwiGLU over the features that these weights hold, `[T, D]` -> `[T, D]`."""
    gate, up = F.linear(x, weights["gate"]), F.linear(x, weights["up"])  # [T, width]
    return F.linear(F.silu(gate) * up, weights["down"])


def decoder_layer(x: Tensor, weights: Weights) -> Tensor:
    """The layer in one piece: two blocks, each added to its own input."""
    x = x + attention(rms_norm(x), weights)
    return x + mlp(rms_norm(x), weights)


def decoder_layer_on_ranks(x: Tensor, weights: Weights) -> Tensor:
    """The same layer on R ranks. Norms and additions are done by every rank, on the whole x."""
    shards = [shard(weights, rank) for rank in range(R)]
    for block in (attention, mlp):
        normed = rms_norm(x)
        print(f"\nnorm, first token: the same on every rank\n{normed[0]}")
        parts = [block(normed, own) for own in shards]
        for rank, part in enumerate(parts):
            print(f"{block.__name__} on rank {rank}, a partial sum {list(part.shape)}\n{part[0]}")
        x = x + sum(parts)
        print(f"all-reduce, then added to the input\n{x[0]}")
    return x


def main() -> None:
    x, weights = numbers(T, D, 8), layer_weights()
    print(f"x {list(x.shape)}, first token\n{x[0]}")
    print("\nWeights in the checkpoint, and on each rank")
    for name, weight in weights.items():
        print(f"  {name:4} {list(weight.shape)} -> {list(shard(weights, 0)[name].shape)}")

    total = decoder_layer_on_ranks(x, weights)

    plain = decoder_layer(x, weights)
    print(f"\nThe same layer in one piece, first token\n{plain[0]}")
    equal = torch.allclose(total, plain, atol=1e-6)
    assert equal, "the layer on two ranks differs from the layer in one piece"
    print("Equal, with two all-reduces a layer:", equal)


if __name__ == "__main__":
    torch.set_printoptions(precision=4, sci_mode=False)
    main()
