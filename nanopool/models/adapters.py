"""Heads and poolers around a backbone.

What makes a Qwen3 a generator, an embedder or a reranker. Chapter 06.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.batch import Batch
from nanopool.config import ModelConfig
from nanopool.layers.activation import get_activation
from nanopool.layers.embed_head import ParallelLMHead
from nanopool.layers.linear import ShardedModule, copy_exactly
from nanopool.layers.norm import LayerNorm
from nanopool.models.loader import Weights
from nanopool.parallel import TensorParallel
from nanopool.pooler.heads import ClassifierHead, EmbeddingHead, RowMap, get_classifier_activation
from nanopool.pooler.late_interaction import LateInteractionPooler, select_maxsim
from nanopool.pooler.params import load_activation
from nanopool.pooler.poolers import DispatchPooler, Head, Pooler, SequencePooler, TokenPooler
from nanopool.pooler.special import (
    ConcatPooler,
    RowFilter,
    SpladePooler,
    without_ends,
    without_skipped,
)

DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"


class Adapter(nn.Module):
    """A backbone as `model`, heads beside it, and what the loader must know of them. Chapter 06.

    `sources`: our name of a parameter, or of a module -> the checkpoint's, where they differ.
    `ignored`: names, or parts of names, of tensors that this model does not need.
    """

    ignored: tuple[str, ...] = ("position_ids", "rotary_emb")

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.model = backbone
        self.sources: dict[str, str] = {}

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        return self.model(batch, kv_caches)  # [T, D]

    def tie_weights(self) -> None:
        """Share parameters that are one tensor; called once they have storage."""

    def source(self, module: str, attribute: str, shard_id: str | None) -> str:
        """The checkpoint's name of one shard of a parameter."""
        module = module.removeprefix("model.")
        if shard_id is not None:
            module = f"{module.rpartition('.')[0]}.{shard_id}"
        name = f"{module}.{attribute}"
        for ours, theirs in self.sources.items():
            if f"{name}.".startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
        return name


class CausalLM(Adapter):
    """The generator: logits of the rows that the runner picks. Chapters 01 and 04."""

    def __init__(
        self, backbone: nn.Module, config: ModelConfig, tp: TensorParallel, weights: Weights
    ):
        super().__init__(backbone)
        hf = config.hf_config
        self.tied = hf.tie_word_embeddings
        self.lm_head = ParallelLMHead(hf.vocab_size, hf.hidden_size, tp)
        if self.tied:
            self.ignored = (*self.ignored, "lm_head")

    def tie_weights(self) -> None:
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # [B, D] -> [B, V]


class Dense(nn.Linear):
    """One sentence-transformers Dense module: a linear map and an activation. Chapter 14."""

    def __init__(self, settings: dict):
        sizes = settings["in_features"], settings["out_features"]
        super().__init__(*sizes, bias=settings.get("bias", True))
        self.act = load_activation(settings.get("activation_function", DEFAULT_ACTIVATION))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class PoolingAdapter(Adapter):
    """What all pooling adapters share:
    the folder's Dense modules as `project`, and a pooler. Chapters 14 and 15.
    """

    ignored = (*Adapter.ignored, "lm_head", "pooler", "cls")

    def __init__(
        self, backbone: nn.Module, config: ModelConfig, tp: TensorParallel, weights: Weights
    ):
        super().__init__(backbone)
        self.dense = nn.ModuleDict()
        for module in (module for module in config.modules if module.name == "Dense"):
            prefix = f"dense.{module.path.name}"
            self.dense[module.path.name] = Dense(module.config)
            weights.add(module.path, f"{prefix}.")
            if f"{prefix}.linear.weight" in weights:
                self.sources[prefix] = f"{prefix}.linear"
        poolers = self.build_poolers(config, weights)
        self.pooler = DispatchPooler({task: poolers[task] for task in config.spec.tasks})

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        """A pooler for each task that this adapter knows; the heads are made here too."""
        raise NotImplementedError

    def project(self, rows: Tensor) -> Tensor:
        for dense in self.dense.values():
            rows = dense(rows)
        return rows


def embedding_poolers(
    config: ModelConfig, project: RowMap | None, project_tokens: RowMap | None
) -> dict[str, Pooler]:
    """`embed` and `token_embed`: pooled or single rows, projected and normalised."""
    dtype, pooling = config.head_dtype, config.pooler
    tokens = TokenPooler(
        "token_embed", pooling.tok_pooling_type, EmbeddingHead(dtype, project_tokens)
    )
    if config.multi_vector is not None:
        tokens = RowFilter(tokens, without_skipped)
    head = EmbeddingHead(dtype, project)
    return {
        "embed": SequencePooler("embed", pooling.seq_pooling_type, head),
        "token_embed": late_interaction(tokens, config),
    }


def late_interaction(tokens: Pooler, config: ModelConfig) -> Pooler:
    fused = config.pooler.enable_flash_late_interaction
    return LateInteractionPooler(tokens, select_maxsim(config.device, fused))


def classifier_head(config: ModelConfig, classifier: RowMap | None) -> Head:
    """A classifier with the activation and calibration that the folder and the user say."""
    return ClassifierHead(
        config.head_dtype,
        classifier,
        get_classifier_activation(config.activation),
        config.pooler.logit_mean,
        config.pooler.logit_sigma,
    )


class EmbeddingModel(PoolingAdapter):
    """Any backbone as an embedder. Chapters 14 and 15."""

    ignored = (*PoolingAdapter.ignored, "classifier", "score")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        return embedding_poolers(config, self.project, self.project)


class TanhPoolingModel(PoolingAdapter):
    """BERT's own pooler as an embedding: tanh(dense(CLS)), not normalised. Chapter 05."""

    ignored = (*Adapter.ignored, "lm_head", "cls", "classifier")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        D = config.hf_config.hidden_size
        self.pooler_dense = nn.Linear(D, D)
        self.sources["pooler_dense"] = "pooler.dense"
        return embedding_poolers(config, lambda rows: self.pooler_dense(rows).tanh(), None)


class ColBERTModel(PoolingAdapter):
    """A linear map of every row to a small vector (arXiv 2004.12832). Chapter 17."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        name = "colbert_linear" if "colbert_linear.weight" in weights else "linear"
        self.sources["linear"] = name
        E = len(weights[f"{name}.weight"]) if f"{name}.weight" in weights else 0
        self.linear = nn.Linear(config.hf_config.hidden_size, E, bias=False)
        return embedding_poolers(config, None, self.linear)


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


class ClassificationModel(PoolingAdapter):
    """`classify` and `token_classify`:
    cross-encoders, classifiers, rerankers. Chapters 14 and 17.
    """

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        heads = (classifier_head(config, m) for m in self.build_classifier(config, weights))
        return DispatchPooler.for_seq_cls(config.pooler.seq_pooling_type, *heads).poolers

    def build_classifier(self, config: ModelConfig, weights: Weights) -> tuple[RowMap, RowMap]:
        """The maps from pooled rows and from single rows to logits."""
        hf, spec = config.hf_config, config.spec
        if self.dense:
            return self.project, self.project
        if config.classifier_rows is not None:
            self.classifier = LMHeadRows(hf.hidden_size, *config.classifier_rows)
            self.sources["classifier"] = "embed_tokens" if hf.tie_word_embeddings else "lm_head"
            return self.classifier, self.classifier
        self.sources["classifier"] = spec.classifier_name
        has_bias = f"{spec.classifier_name}.bias" in weights or spec.dense_name is not None
        self.classifier = nn.Linear(hf.hidden_size, config.num_labels, bias=has_bias)
        if spec.dense_name is None:
            return self.classifier, self.classifier
        self.sources["dense_layer"] = spec.dense_name
        self.dense_layer = nn.Linear(hf.hidden_size, hf.hidden_size)
        per_token = self.classify_pooled if spec.classifies_tokens_with_dense else self.classifier
        return self.classify_pooled, per_token

    def classify_pooled(self, rows: Tensor) -> Tensor:
        """tanh belongs to the head, not to the activation: `use_activation=False` keeps it."""
        return self.classifier(self.dense_layer(rows).tanh())


class TokenClassificationModel(PoolingAdapter):
    """`token_classify` with a linear classifier: named entities. Chapter 13."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        name = self.sources["classifier"] = "score" if "score.weight" in weights else "classifier"
        has_bias = f"{name}.bias" in weights
        self.classifier = nn.Linear(config.hf_config.hidden_size, config.num_labels, bias=has_bias)
        head = classifier_head(config, self.classifier)
        return {
            "token_classify": TokenPooler("token_classify", config.pooler.tok_pooling_type, head)
        }


class RewardModel(PoolingAdapter):
    """A two-layer score for every token, or for the tokens that close a step. Chapter 13."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        D = config.hf_config.hidden_size
        self.score = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, config.num_labels))
        head = classifier_head(config, self.score)
        return {
            "token_classify": TokenPooler("token_classify", config.pooler.tok_pooling_type, head)
        }


class MLMHead(nn.Module):
    """Rows to vocabulary logits:
    dense, activation, LayerNorm, decoder. Used by SPLADE; chapter 16.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        hf = config.hf_config
        self.dense = nn.Linear(hf.hidden_size, hf.hidden_size)
        self.act = get_activation(hf.hidden_act)
        self.LayerNorm = LayerNorm(hf.hidden_size, hf.layer_norm_eps)
        self.decoder = nn.Linear(hf.hidden_size, hf.vocab_size)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.dense(rows.to(self.dense.weight.dtype))
        return self.decoder(self.LayerNorm(self.act(rows)))  # [n, D] -> [n, V]


class MaskedLM(PoolingAdapter):
    """SPLADE as `embed`, hidden rows as `token_embed`, vocabulary logits as `token_classify`.

    Chapter 16.
    """

    ignored = (*Adapter.ignored, "pooler", "seq_relationship")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        self.mlm_head = MLMHead(config)
        self._name_head(config.hf_config.tie_word_embeddings, weights)
        head = classifier_head(config, self.mlm_head)
        return {
            "embed": SpladePooler(self.mlm_head, config.hf_config.vocab_size, config.splade),
            "token_embed": embedding_poolers(config, None, None)["token_embed"],
            "token_classify": TokenPooler("token_classify", "ALL", head),
        }

    def _name_head(self, tied: bool, weights: Weights) -> None:
        """The head under BERT's or RoBERTa's names; its bias has two, and files may hold both."""
        head = "cls.predictions" if "cls.predictions.bias" in weights else "lm_head"
        is_bert = head == "cls.predictions"
        bias = f"{head}.decoder.bias"
        self.sources = {
            "mlm_head.decoder.weight": f"{head}.decoder.weight",
            "mlm_head.decoder.bias": bias if bias in weights else f"{head}.bias",
            "mlm_head.dense": f"{head}.transform.dense" if is_bert else f"{head}.dense",
            "mlm_head.LayerNorm": f"{head}.transform.LayerNorm"
            if is_bert
            else f"{head}.layer_norm",
        }
        self.ignored = (*self.ignored, f"{head}.bias")
        if tied:
            self.sources["mlm_head.decoder.weight"] = "embeddings.word_embeddings.weight"
            self.ignored = (*self.ignored, f"{head}.decoder.weight")


class BgeM3Model(PoolingAdapter):
    """Dense, sparse and multi-vector outputs of one pass (BGE-M3, arXiv 2402.03216). Chapter 16."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        hf, dtype = config.hf_config, config.head_dtype
        self.sparse_linear = nn.Linear(hf.hidden_size, 1)
        self.colbert_linear = nn.Linear(hf.hidden_size, hf.hidden_size)
        for name in ("sparse_linear", "colbert_linear"):
            weights.add(config.folder / f"{name}.pt", f"{name}.")
        poolers = embedding_poolers(config, None, None)
        rows = TokenPooler("token_embed", "ALL", EmbeddingHead(dtype, self.colbert_linear))
        weights = TokenPooler(
            "token_classify", "ALL", ClassifierHead(dtype, self.sparse_weights, F.relu)
        )
        sparse = RowFilter(weights, without_ends(hf.bos_token_id, hf.eos_token_id))
        tokens = late_interaction(RowFilter(rows, without_ends(hf.bos_token_id, None)), config)
        joined = ConcatPooler(poolers["embed"], sparse, "embed&token_classify")
        return poolers | {
            "token_embed": tokens,
            "token_classify": sparse,
            "embed&token_classify": joined,
        }

    def sparse_weights(self, rows: Tensor) -> Tensor:
        return self.sparse_linear(rows).squeeze(-1)  # [n, D] -> [n]
