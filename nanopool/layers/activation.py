"""Activations by the name that a config gives them. Chapters 04 and 05."""

from collections.abc import Callable

import transformers
from torch import Tensor


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """transformers' own of `hidden_act`; ValueError for a name that it does not know."""
    known = transformers.activations.ACT2FN
    if name not in known:
        raise ValueError(f"hidden_act = {name!r} is not known; known are {sorted(known)}")
    return known[name]


def get_gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """act(gate) * up, of the two halves of `[T, 2F]` (arXiv 2002.05202) -> `[T, F]`."""
    act = get_activation(name)

    def act_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    return act_and_mul
