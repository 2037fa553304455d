"""An embedding table on two ranks, step by step, with nothing but torch. Chapter 01.

Run it: python chapters/demos/vocab_parallel_embedding.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = "the a cat sits on mat and big small plays dog with".split()
V, D, R = len(VOCAB), 4, 2  # vocabulary, hidden size, ranks
ROWS = V // R  # rows of the table that each rank holds


def full_table() -> Tensor:
    """`[V, D]`: row i is 10 * i + [0, 1, 2, 3], so that a vector tells its id."""
    ids = torch.arange(V, dtype=torch.float32)
    return 10 * ids.unsqueeze(1) + torch.arange(D)


def tokenize(text: str) -> Tensor:
    """Words -> ids `[1, T]`."""
    return torch.tensor([[VOCAB.index(word) for word in text.split()]])


def look_up(ids: Tensor, shard: Tensor, start: int) -> Tensor:
    """What one rank can say about `ids`: its own rows, and zero for the rows of others."""
    mask = (ids >= start) & (ids < start + ROWS)
    print("1. Mask: which ids are mine?")
    print(mask)

    local = (ids - start) * mask
    print("2. Local index: the row in my shard, and row 0 for an id that is not mine")
    print(local)

    rows = F.embedding(local, shard)
    print("3. Rows looked up: right for my ids, wrong for the others")
    print(rows)

    share = rows * mask.unsqueeze(-1)
    print("4. The wrong rows zeroed: my share of the sum")
    print(share)
    return share


def main() -> None:
    table, text = full_table(), "cat dog"
    ids = tokenize(text)
    print(f"Ids of {text!r}:")
    print(ids)

    shares = []
    for rank in range(R):
        start = rank * ROWS
        print(f"\nRank {rank} holds rows [{start}, {start + ROWS}):", *VOCAB[start : start + ROWS])
        shares.append(look_up(ids, table.narrow(0, start, ROWS), start))

    total = sum(shares)
    print("\nAll-reduce: the sum of the shares, which every rank now holds")
    print(total)

    embedding = nn.Embedding.from_pretrained(table)
    equal = torch.equal(total, embedding(ids))
    assert equal, f"the sharded look-up differs from nn.Embedding: {embedding(ids)}"
    print("Equal to nn.Embedding with the whole table:", equal)


if __name__ == "__main__":
    main()
