"""Qwen3 (arXiv 2505.09388), and with it Qwen2 and Llama: one decoder. Chapter 04."""

from torch import Tensor, nn

from nanopool.batch import Batch
from nanopool.config import ModelConfig
from nanopool.layers.activation import get_gated_activation
from nanopool.layers.attention import Attention
from nanopool.layers.embed_head import VocabParallelEmbedding
from nanopool.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanopool.layers.norm import RMSNorm
from nanopool.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from nanopool.parallel import TensorParallel


class Qwen3Attention(nn.Module):
    """Project, normalise q and k (Qwen3 only), rotate, attend, project back. Chapter 04."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf, spec = config.hf_config, config.spec
        H, K, d = hf.num_attention_heads, hf.num_key_value_heads, config.head_dim
        out_bias = spec.qkv_bias is None and getattr(hf, "attention_bias", False)
        qkv_bias = out_bias if spec.qkv_bias is None else spec.qkv_bias
        heads = {"q_proj": H, "k_proj": K, "v_proj": K}
        self.qkv_proj = QKVParallelLinear(hf.hidden_size, heads, d, qkv_bias, tp)
        self.o_proj = RowParallelLinear(H * d, hf.hidden_size, out_bias, tp, "H * head_dim")
        self.q_norm = RMSNorm(d, hf.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, hf.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.attn = Attention(d, causal=True)
        self.head_dim = d

    def forward(self, x: Tensor, rotary: tuple, batch: Batch, kv_cache: Tensor) -> Tensor:
        parts = self.qkv_proj(x).split(list(self.qkv_proj.sizes.values()), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # [T, H or K, d]
        q = apply_rotary(self.q_norm(q), *rotary)
        k = apply_rotary(self.k_norm(k), *rotary)
        return self.o_proj(self.attn(q, k, v, batch, kv_cache))  # [T, D]


class Qwen3MLP(nn.Module):
    """down(silu(gate(x)) * up(x)). Chapter 04."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        D, F, bias = hf.hidden_size, hf.intermediate_size, getattr(hf, "mlp_bias", False)
        parts = {"gate_proj": F, "up_proj": F}
        self.gate_up_proj = MergedColumnParallelLinear(D, parts, bias, tp, "intermediate_size")
        self.down_proj = RowParallelLinear(F, D, bias, tp, "intermediate_size")
        self.act_and_mul = get_gated_activation(hf.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_and_mul(self.gate_up_proj(x)))


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each on normalised input, added to the residual (pre-norm). Chapter 04."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        self.input_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)
        self.self_attn = Qwen3Attention(config, tp)
        self.post_attention_layernorm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)
        self.mlp = Qwen3MLP(config, tp)

    def forward(self, x: Tensor, rotary: tuple, batch: Batch, kv_cache: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, batch, kv_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Model(nn.Module):
    """Embedding, layers, norm: `model(batch, kv_caches) -> hidden [T, D]`. Chapter 04."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        self.embed_tokens = VocabParallelEmbedding(hf.vocab_size, hf.hidden_size, tp)
        layers = range(hf.num_hidden_layers)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, tp) for _ in layers)
        self.norm = RMSNorm(hf.hidden_size, hf.rms_norm_eps)
        self.rotary = RotaryEmbedding(hf, config.head_dim, config.max_model_len)

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embed_tokens(batch.input_ids)  # [T] -> [T, D]
        rotary = self.rotary(batch.positions, x.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rotary, batch, kv_cache)
        return self.norm(x)
