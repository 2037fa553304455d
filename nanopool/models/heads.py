"""Heads with weights of their own beside a backbone. Chapters 14, 16 and 17."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.config import ModelConfig
from nanopool.layers.activation import get_activation
from nanopool.layers.linear import ShardedModule, copy_exactly
from nanopool.pooler.params import load_activation

DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"  # of a sentence-transformers Dense


class Dense(nn.Module):
    """One sentence-transformers Dense module: a linear map and an activation. Chapter 14."""

    def __init__(self, settings: dict):
        super().__init__()
        sizes = settings["in_features"], settings["out_features"]
        self.linear = nn.Linear(*sizes, bias=settings.get("bias", True))
        self.act = load_activation(settings.get("activation_function", DEFAULT_ACTIVATION))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


class LMHeadRows(ShardedModule):
    """A classifier cut out of an LM head: rows `plus`, less row `minus`, in float32. Chapter 17.

    sigmoid(h (W_yes - W_no)) is the softmax over (no, yes) at yes: a language model that reranks.
    """

    def __init__(self, hidden: int, plus: tuple[int, ...], minus: int | None):
        super().__init__()
        self.plus, self.minus = list(plus), minus
        self.weight = nn.Parameter(torch.empty(len(plus), hidden))

    def weight_loader(self, param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
        rows = loaded[self.plus].float()  # [L, D]
        minus = 0 if self.minus is None else loaded[self.minus].float()
        copy_exactly(param.data, rows - minus)

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight)  # [n, D] -> [n, L]


class MLMHead(nn.Module):
    """Rows to vocabulary logits. Called by SpladePooler in pieces; chapter 16."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hf = config.hf_config
        self.dense = nn.Linear(hf.hidden_size, hf.hidden_size)
        # RoBERTa's head takes no other, whatever the config says.
        self.act = get_activation("gelu" if config.spec.starts_after_padding_idx else hf.hidden_act)
        self.LayerNorm = nn.LayerNorm(hf.hidden_size, hf.layer_norm_eps)
        self.decoder = nn.Linear(hf.hidden_size, hf.vocab_size)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.dense(rows.to(self.dense.weight.dtype))
        return self.decoder(self.LayerNorm(self.act(rows)))  # [n, D] -> [n, V]
