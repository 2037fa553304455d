"""Two growing sequences share one pool of key/value blocks, each in pieces. Chapter 03.

Run it: python chapters/demos/paged_kv.py
"""

import torch
from torch import Tensor

N, BLOCK, D = 6, 4, 2  # blocks in the pool, slots in a block, size of a key
LENGTHS = {"A": 6, "B": 5}  # prompt lengths; three more tokens each will follow


def key_of(name: str, position: int) -> Tensor:
    """A key that tells whose it is: A's count from 10, B's from 20, and the second number is -1."""
    return torch.tensor([{"A": 10.0, "B": 20.0}[name] + position, -1.0])


class Pool:
    """N blocks of BLOCK slots; `tables` says which blocks a sequence owns, in order."""

    def __init__(self) -> None:
        self.keys = torch.zeros(N, BLOCK, D)
        self.free = list(range(N))
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def append(self, name: str) -> None:
        """Store the next key of a sequence; a new block only when the last one is full."""
        table = self.tables.setdefault(name, [])
        position = self.lengths.get(name, 0)
        if position == len(table) * BLOCK:
            table.append(self.free.pop(0))
        slot = self.slot(name, position)
        self.keys.flatten(0, 1)[slot] = key_of(name, position)
        self.lengths[name] = position + 1
        if position >= LENGTHS[name]:
            block, offset = table[position // BLOCK], position % BLOCK
            print(f"  {name} position {position}: block {block}, offset {offset}, slot {slot}")

    def slot(self, name: str, position: int) -> int:
        """The row of the flat pool `[N * BLOCK, D]` where a position lies."""
        return self.tables[name][position // BLOCK] * BLOCK + position % BLOCK

    def gather(self, name: str) -> Tensor:
        """A sequence's keys in order, `[length, D]`, through its table."""
        slots = torch.tensor([self.slot(name, i) for i in range(self.lengths[name])])
        print(f"{name}: table {self.tables[name]}, slots {slots.tolist()}")
        return self.keys.flatten(0, 1).index_select(0, slots)


def attend(query: Tensor, keys: Tensor) -> Tensor:
    """One query `[D]` against keys `[length, D]` that serve as values too."""
    return (keys @ query / D**0.5).softmax(0) @ keys


def main() -> None:
    pool = Pool()
    print(f"{N} blocks of {BLOCK} slots. Prompts first:")
    for name, length in LENGTHS.items():
        for _ in range(length):
            pool.append(name)
        blocks = pool.tables[name]
        spare = len(blocks) * BLOCK - length
        print(f"  {name}: {length} tokens in blocks {blocks}, {spare} slots spare")

    print("Now they grow, one token each in turn:")
    for _ in range(3):
        for name in LENGTHS:
            pool.append(name)

    print("The pool, first number of each key; 0 is an empty slot:")
    print(pool.keys[..., 0])
    print("Free blocks:", pool.free)

    query = torch.tensor([0.1, 0.0])
    equal = True
    for name in LENGTHS:
        paged = pool.gather(name)
        contiguous = torch.stack([key_of(name, i) for i in range(pool.lengths[name])])
        print(f"attention through the table: {attend(query, paged)}")
        print(f"attention on one piece:      {attend(query, contiguous)}")
        equal = equal and torch.equal(attend(query, paged), attend(query, contiguous))
    assert equal, "a block table leads to other keys than the sequence's own"
    print("Equal:", equal)


if __name__ == "__main__":
    torch.set_printoptions(precision=4, sci_mode=False)
    main()
