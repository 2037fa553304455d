"""Generation that computes everything again for each token, then with a KV cache. Chapter 07.

Run it: python chapters/demos/naive_generate.py
"""

import torch
from torch import Tensor

V, D, MAX_TOKENS = 12, 8, 6  # vocabulary, hidden size, tokens to generate
PROMPT = [2, 10, 7, 1]


def numbers(rows: int, columns: int, start: int) -> Tensor:
    """A matrix of numbers from -0.9 to 0.9 that looks random and is not."""
    i = torch.arange(rows * columns).view(rows, columns) + 3 * start
    return (i * i * (start + 2) % 113 % 19 - 9.0) / 10


class Counter:
    """Multiplies matrices and counts the multiplications of numbers that this takes."""

    def __init__(self) -> None:
        self.count = 0

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a `[n, m]` times b `[m, k]`: n * m * k multiplications."""
        self.count += a.size(0) * a.size(1) * b.size(1)
        return a @ b


class TinyModel:
    """One attention layer with one head between an embedding and an LM head."""

    def __init__(self) -> None:
        self.embedding = numbers(V, D, 1)
        self.positions = numbers(len(PROMPT) + MAX_TOKENS, D, 2)
        self.query, self.key, self.value, self.output = (numbers(D, D, s) for s in range(3, 7))
        self.lm_head = numbers(D, V, 7)

    def embed(self, ids: list[int], start: int) -> Tensor:
        """Ids at positions start, start + 1, ... -> `[n, D]`."""
        return self.embedding[ids] + self.positions[start : start + len(ids)]

    def logits(self, mixed: Tensor, x: Tensor, counter: Counter) -> Tensor:
        """The scores of the next token, from the last row."""
        hidden = x[-1:] + counter.product(mixed[-1:], self.output)
        return counter.product(hidden, self.lm_head)[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, counter: Counter) -> Tensor:
        """Rows of q against all keys; row i of the last n sees the keys up to its own position."""
        scores = counter.product(q, k.T) / D**0.5
        later = torch.ones_like(scores).triu(k.size(0) - q.size(0) + 1).bool()
        return counter.product(scores.masked_fill(later, float("-inf")).softmax(-1), v)


def generate_naively(model: TinyModel) -> tuple[list[int], list[int]]:
    """Every step runs the whole sequence; (tokens, multiplications of each step)."""
    ids, counts = list(PROMPT), []
    for _ in range(MAX_TOKENS):
        counter = Counter()
        x = model.embed(ids, 0)
        q, k, v = (counter.product(x, w) for w in (model.query, model.key, model.value))
        mixed = model.attend(q, k, v, counter)
        ids.append(int(model.logits(mixed, x, counter).argmax()))
        counts.append(counter.count)
        print(f"  computes {len(ids) - 1:2} rows, {counter.count:5} multiplications -> {ids[-1]}")
    return ids, counts


def generate_with_cache(model: TinyModel) -> tuple[list[int], list[int]]:
    """Every step runs only the tokens that are new; keys and values of the others are kept."""
    ids, counts = list(PROMPT), []
    keys, values = torch.empty(0, D), torch.empty(0, D)
    for _ in range(MAX_TOKENS):
        counter = Counter()
        new = ids[len(keys) :]
        x = model.embed(new, len(keys))
        q, k, v = (counter.product(x, w) for w in (model.query, model.key, model.value))
        keys, values = torch.cat((keys, k)), torch.cat((values, v))
        mixed = model.attend(q, keys, values, counter)
        ids.append(int(model.logits(mixed, x, counter).argmax()))
        counts.append(counter.count)
        kept = len(keys) - len(new)
        print(
            f"  computes {len(new):2} rows, reads {kept} from the cache, "
            f"{counter.count:5} multiplications -> {ids[-1]}"
        )
    return ids, counts


def main() -> None:
    model = TinyModel()
    print("Prompt:", PROMPT)
    print("Recompute everything:")
    naive, naive_counts = generate_naively(model)
    print("Keep keys and values:")
    cached, cached_counts = generate_with_cache(model)
    print("Multiplications, naive:     ", sum(naive_counts))
    print("Multiplications, with cache:", sum(cached_counts))
    print("Numbers kept for it:        ", 2 * (len(cached) - 1) * D)
    print("Tokens:", naive[len(PROMPT) :])
    equal = naive == cached
    assert equal, f"the cache changed the tokens: {cached[len(PROMPT) :]}"
    print("Equal:", equal)


if __name__ == "__main__":
    main()
