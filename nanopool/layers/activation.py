"""Activations by the name that a config gives them. Chapters 04 and 05."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def get_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function behind `hidden_act`; ValueError for a name that is not known."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act = {name!r} is not known; known are {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def get_gated_activation(name: str) -> Callable[[Tensor], Tensor]:
    """act(gate) * up, of the two halves of `[T, 2F]` (arXiv 2002.05202) -> `[T, F]`."""
    act = get_activation(name)

    def act_and_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate).mul_(up)

    return act_and_mul
