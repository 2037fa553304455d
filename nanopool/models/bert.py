"""BERT (arXiv 1810.04805) and RoBERTa: encoders named as the checkpoint names them. Chapter 05."""

import torch
from torch import Tensor, nn

from nanopool.batch import Batch, decode_segments
from nanopool.config import ModelConfig
from nanopool.layers.activation import get_activation
from nanopool.layers.attention import Attention
from nanopool.layers.embed_head import VocabParallelEmbedding
from nanopool.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from nanopool.parallel import TensorParallel

QKV_NAMES = ("self.query", "self.key", "self.value")


class BertEmbeddings(nn.Module):
    """Word + position + segment embedding, LayerNorm; segments are in bit 30 of ids. Chapter 05."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        self.word_embeddings = VocabParallelEmbedding(hf.vocab_size, hf.hidden_size, tp)
        self.position_embeddings = nn.Embedding(hf.max_position_embeddings, hf.hidden_size)
        self.token_type_embeddings = nn.Embedding(hf.type_vocab_size, hf.hidden_size)
        self.padding_idx = hf.pad_token_id if config.spec.starts_after_padding_idx else None
        self.LayerNorm = nn.LayerNorm(hf.hidden_size, hf.layer_norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        ids, segments = decode_segments(batch.input_ids)
        positions = batch.positions
        if self.padding_idx is not None:
            positions = roberta_positions(ids, positions, self.padding_idx)
        x = self.word_embeddings(ids)  # [T] -> [T, D]
        x = x + self.token_type_embeddings(segments)
        x = x + self.position_embeddings(positions)
        return self.LayerNorm(x)


def roberta_positions(ids: Tensor, positions: Tensor, padding_idx: int) -> Tensor:
    """`[T]`: positions that begin after the padding index. Chapter 05.

    A `<pad>` written in a text is not counted and stands at the padding index itself.
    """
    counts = (ids != padding_idx).long()  # [T]
    seen = counts.cumsum(0)
    first_rows = torch.arange(len(ids), device=ids.device) - positions
    before = (seen - counts)[first_rows]  # counted in the sequences before
    return (seen - before) * counts + padding_idx


class BertSelfOutput(nn.Module):
    """LayerNorm(x + dense(y)): closes both halves of a layer (post-norm). Chapter 05."""

    def __init__(self, in_features: int, config: ModelConfig, tp: TensorParallel, what: str):
        super().__init__()
        hf = config.hf_config
        self.dense = RowParallelLinear(in_features, hf.hidden_size, True, tp, what)
        self.LayerNorm = nn.LayerNorm(hf.hidden_size, hf.layer_norm_eps)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(y).add_(x))


class BertAttention(nn.Module):
    """Bidirectional self-attention of one layer. Chapter 05."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        H, D, self.head_dim = hf.num_attention_heads, hf.hidden_size, config.head_dim
        self.qkv = QKVParallelLinear(D, dict.fromkeys(QKV_NAMES, H), self.head_dim, True, tp)
        self.attn = Attention(self.head_dim, causal=False)
        self.output = BertSelfOutput(D, config, tp, "hidden_size")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))  # [T, 3, H, d]
        return self.output(self.attn(*qkv.unbind(1), batch, None), x)


class BertIntermediate(nn.Module):
    """The wide half of the MLP. Chapter 05."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        hf = config.hf_config
        D, width = hf.hidden_size, hf.intermediate_size
        self.dense = ColumnParallelLinear(D, width, True, tp, "intermediate_size")
        self.act = get_activation(hf.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class BertLayer(nn.Module):
    """Attention, then MLP, each closed by a residual and a LayerNorm. Chapter 05."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        width = config.hf_config.intermediate_size
        self.attention = BertAttention(config, tp)
        self.intermediate = BertIntermediate(config, tp)
        self.output = BertSelfOutput(width, config, tp, "intermediate_size")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = self.attention(x, batch)
        return self.output(self.intermediate(x), x)


class BertModel(nn.Module):
    """Embeddings and layers: `model(batch, []) -> hidden [T, D]`. Chapter 05."""

    def __init__(self, config: ModelConfig, tp: TensorParallel):
        super().__init__()
        layers = range(config.hf_config.num_hidden_layers)
        self.embeddings = BertEmbeddings(config, tp)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(BertLayer(config, tp) for _ in layers)}
        )

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embeddings(batch)
        for layer in self.encoder["layer"]:
            x = layer(x, batch)
        return x
