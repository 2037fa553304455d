"""Exercises of chapter 04. Replace a `raise NotImplementedError`, then run its test."""

from types import SimpleNamespace

import torch
import transformers
from torch import Tensor

from nanopool.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from nanopool.models import spec_for
from nanopool.models.qwen3 import Qwen3Model
from nanopool.parallel import simulate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x `[T, D]` over the root of (mean square + eps), times weight `[D]`; in x's dtype."""
    raise NotImplementedError


def to_halves(weight: Tensor, heads: int) -> Tensor:
    """A q projection `[heads * d, D]` whose rotary pairs are neighbours, reordered.

    With the new rows the pairs are (i, i + d/2) of each head.
    """
    raise NotImplementedError


def rank_parameters(hf: transformers.Qwen3Config, ranks: int) -> int:
    """The parameters of a `Qwen3Model` (without LM head) on one of `ranks` ranks."""
    raise NotImplementedError


def check_1(rms_norm) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(8, generator=generator)
    expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected)
    large = torch.full((1, 8), 300.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(large, torch.ones(8).half(), 1e-6), torch.ones(1, 8).half())
    assert rms_norm(torch.zeros(1, 8), weight, 1e-6).isfinite().all()


def check_2(to_halves) -> None:
    """Scores of turned queries and keys are those of the original pairing."""
    generator = torch.Generator().manual_seed(0)
    H, d, D = 2, 8, 6
    weights = torch.randn(2, H * d, D, generator=generator)
    x = torch.randn(5, D, generator=generator)
    config = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    cos, sin = RotaryEmbedding(config, d, 5)(torch.arange(5), torch.float32)

    def neighbours(heads: Tensor) -> Tensor:
        first, second = heads[..., ::2], heads[..., 1::2]
        return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)

    def project(weight: Tensor) -> Tensor:
        return (x @ weight.T).view(5, H, d)

    q, k = (neighbours(project(weight)) for weight in weights)
    ours_q, ours_k = (apply_rotary(project(to_halves(w, H)), cos, sin) for w in weights)
    expected = torch.einsum("ihd,jhd->hij", q, k)
    torch.testing.assert_close(torch.einsum("ihd,jhd->hij", ours_q, ours_k), expected)


def check_3(rank_parameters) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 2, "head_dim": 12}
    for kv_heads in (1, 4):
        heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
        hf = transformers.Qwen3Config(vocab_size=101, **sizes, **heads)
        facts = {"spec": spec_for("Qwen3ForCausalLM"), "head_dim": hf.head_dim, "max_model_len": 8}
        config = SimpleNamespace(hf_config=hf, **facts)
        for ranks in (1, 2, 4):
            model = simulate(lambda tp, config=config: Qwen3Model(config, tp), ranks)[0]
            expected = sum(parameter.numel() for parameter in model.parameters())
            assert rank_parameters(hf, ranks) == expected, f"K = {kv_heads}, R = {ranks}"


EXERCISES = [(rms_norm, check_1), (to_halves, check_2), (rank_parameters, check_3)]
