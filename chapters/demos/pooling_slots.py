"""One packed tensor of hidden states, three requests: find their rows, and pool them. Chapter 12.

Run it: python chapters/demos/pooling_slots.py
"""

import torch
from torch import Tensor

D = 2
PROMPTS = {"A": 2, "B": 5, "C": 3}  # request: length of its prompt
METHODS = ("CLS", "LAST", "MEAN")


def hidden_row(name: str, position: int) -> Tensor:
    """What the model computes for a token: [100 for A, 200 for B, ... + position, position]."""
    owner = 100.0 * (1 + list(PROMPTS).index(name))
    return torch.tensor([owner + position, position])


def pool_naively(name: str) -> dict[str, Tensor]:
    """The request alone and in one piece: `[n, D]` -> `[D]` by each method."""
    rows = torch.stack([hidden_row(name, i) for i in range(PROMPTS[name])])
    return {"CLS": rows[0], "LAST": rows[-1], "MEAN": rows.mean(0)}


class State:
    """What a request keeps between the steps of its prompt: never the rows themselves."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.sum = torch.zeros(D)
        self.computed = 0


def pool_step(
    step: list[tuple[str, int]], states: dict[str, State]
) -> dict[str, dict[str, Tensor]]:
    """One step gives each (request, n) its next n rows; the vectors of those that are complete."""
    rows, lengths = [], []
    for name, n in step:
        start = states[name].computed
        rows += [hidden_row(name, start + i) for i in range(n)]
        lengths.append(n)
    hidden = torch.stack(rows)  # [T, D]
    print("hidden states, packed:")
    print(hidden)

    ends = torch.tensor(lengths).cumsum(0)
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), ends))
    first_rows, last_rows = cu_seqlens[:-1], cu_seqlens[1:] - 1
    print("cu_seqlens:", cu_seqlens.tolist())
    print("first rows:", first_rows.tolist(), " last rows:", last_rows.tolist())

    done = {}
    for i, (name, n) in enumerate(step):
        state = states[name]
        own = hidden[cu_seqlens[i] : cu_seqlens[i + 1]]  # [n, D]
        if state.first is None:
            state.first = own[0].clone()
        state.sum += own.sum(0)
        state.computed += n
        print(f"  {name}: {state.computed} of {PROMPTS[name]} tokens, sum {state.sum.tolist()}")
        if state.computed == PROMPTS[name]:
            mean = state.sum / state.computed
            done[name] = {"CLS": state.first, "LAST": hidden[last_rows[i]], "MEAN": mean}
    return done


def main() -> None:
    print("Prompts:", PROMPTS)
    states = {name: State() for name in PROMPTS}
    results = {}

    print("\nStep 0: a budget of 6 tokens holds A, the first 4 of B, and nothing of C")
    results |= pool_step([("A", 2), ("B", 4)], states)
    print("\nStep 1: the rest of B, and C")
    results |= pool_step([("B", 1), ("C", 3)], states)

    print("\nB's first row now came from step 0, its last row from step 1")
    equal = True
    for name in PROMPTS:
        naive = pool_naively(name)
        for method in METHODS:
            vector = results[name][method]
            print(f"{name} {method:4} {vector.tolist()}  alone {naive[method].tolist()}")
            equal = equal and torch.equal(vector, naive[method])
    assert equal, "a packed, cut prompt is pooled differently from the same prompt alone"
    print("Equal:", equal)


if __name__ == "__main__":
    main()
