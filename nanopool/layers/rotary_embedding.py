"""Rotary position embedding (arXiv 2104.09864), half-split as in Hugging Face. Chapter 04."""

import torch
import transformers
from torch import Tensor


def inverse_frequencies(config, head_dim: int) -> tuple[Tensor, float]:
    """([d/2] angles per position, factor on cos and sin) from a config's `rope_parameters`.

    The default form is theta^(-2i/d); linear, llama3 and yarn are transformers' own functions
    (transformers/modeling_rope_utils.py). ValueError for a type that they do not know.
    """
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    if rope_type not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"rope_type = {rope_type!r} is not supported; use default, linear, llama3 or yarn"
        )
    return transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")


class RotaryEmbedding:
    """cos and sin of every position; a model looks up a step's rows once. Chapter 04."""

    def __init__(self, config, head_dim: int, max_positions: int):
        with torch.device("cpu"):  # models are built on the meta device, but these are values
            frequencies, scaling = inverse_frequencies(config, head_dim)
            positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)  # [positions, d/2]
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling  # [positions, d]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions `[T]` -> cos, sin, each `[T, 1, d/2]`."""
        if self.table.device != positions.device or self.table.dtype != dtype:
            self.table = self.table.to(positions.device, dtype)
        return self.table[positions].unsqueeze(1).chunk(2, dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) of `[T, H, d]`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
