"""A column-parallel linear layer, a row-parallel one, and why they come in pairs. Chapter 02.

Run it: python chapters/demos/parallel_linear.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor

R = 2  # ranks
IN, HIDDEN, OUT = 4, 6, 3


def numbers(rows: int, columns: int, start: int) -> Tensor:
    """A matrix of small whole numbers, from -4 to 4, so that every sum is exact."""
    return (torch.arange(rows * columns).view(rows, columns) * 5 + start) % 9 - 4.0


def column_parallel(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Each rank holds some output features: rows of `weight`, and their part of the bias."""
    parts = []
    for rank, (w, b) in enumerate(zip(weight.chunk(R, 0), bias.chunk(R), strict=True)):
        y = F.linear(x, w, b)
        print(f"rank {rank}: x {list(x.shape)}, weight {list(w.shape)} -> y {list(y.shape)}")
        print(y)
        parts.append(y)
    return parts


def row_parallel(parts: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Each rank holds some input features: columns of `weight`; its product is a partial sum."""
    sums = []
    for rank, (x, w) in enumerate(zip(parts, weight.chunk(R, 1), strict=True)):
        y = F.linear(x, w)
        print(f"rank {rank}: x {list(x.shape)}, weight {list(w.shape)} -> partial {list(y.shape)}")
        print(y)
        sums.append(y)
    return sums


def main() -> None:
    x = numbers(2, IN, 1)
    up, up_bias = numbers(HIDDEN, IN, 2), torch.arange(HIDDEN) - 2.0
    down, down_bias = numbers(OUT, HIDDEN, 3), torch.tensor([10.0, 20.0, 30.0])

    print("Column-parallel: every rank sees all of x and computes some features of y")
    parts = column_parallel(x, up, up_bias)
    whole = F.linear(x, up, up_bias)
    print("side by side they are y, and nothing was sent:", torch.equal(torch.cat(parts, 1), whole))

    print("\nReLU works on each number alone, so each rank applies it to its own part")
    parts = [part.relu() for part in parts]

    print("\nRow-parallel: every rank holds its part of the input already")
    sums = row_parallel(parts, down)
    total = sum(sums) + down_bias
    print("all-reduce adds the partial sums; the bias is added once, after it")
    print(total)

    wrong = sum(partial + down_bias for partial in sums)
    print(f"with the bias on every rank it would be counted {R} times; the surplus:")
    print(wrong - total)

    plain = F.linear(whole.relu(), down, down_bias)
    print("\nThe same two layers in one piece:")
    print(plain)
    equal = torch.equal(total, plain)
    assert equal, "the sharded layers differ from the plain ones"
    print("Equal, with one all-reduce for two layers:", equal)


if __name__ == "__main__":
    main()
