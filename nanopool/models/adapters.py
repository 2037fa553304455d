"""Heads and poolers around a backbone.

What makes a Qwen3 a generator, an embedder or a reranker. Chapter 06.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.batch import Batch
from nanopool.config import ModelConfig
from nanopool.layers.embed_head import ParallelLMHead
from nanopool.models.heads import Dense, LMHeadRows, MLMHead
from nanopool.models.loader import Weights
from nanopool.parallel import TensorParallel
from nanopool.pooler.heads import ClassifierHead, EmbeddingHead, RowMap, get_classifier_activation
from nanopool.pooler.late_interaction import LateInteractionPooler, select_maxsim
from nanopool.pooler.poolers import DispatchPooler, Head, Pooler, SequencePooler, TokenPooler
from nanopool.pooler.special import (
    ConcatPooler,
    RowFilter,
    SpladePooler,
    without_ends,
    without_skipped,
)


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


class PoolingAdapter(Adapter):
    """What pooling adapters share: Dense modules as `project`, and a pooler. Chapters 14 and 15."""

    ignored = (*Adapter.ignored, "lm_head", "pooler", "cls")

    def __init__(
        self, backbone: nn.Module, config: ModelConfig, tp: TensorParallel, weights: Weights
    ):
        super().__init__(backbone)
        self.hidden_size = config.hf_config.hidden_size
        self.dense = nn.ModuleDict()
        for module in (module for module in config.modules if module.name == "Dense"):
            prefix = f"dense.{module.path.name}"
            self.dense[module.path.name] = Dense(module.config)
            weights.add(module.path, f"{prefix}.")
            if f"{prefix}.linear.weight" in weights:
                self.sources[prefix] = f"{prefix}.linear"
        poolers = self.build_poolers(config, weights)
        poolers["plugin"] = TokenPooler("plugin", "ALL", lambda rows, _: rows)
        self.pooler = DispatchPooler(
            {task: poolers[task] for task in (*config.spec.tasks, "plugin")}
        )

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        """A pooler for each task that this adapter knows; the heads are made here too."""
        raise NotImplementedError

    def add_linear(self, source: str, size: int, bias: bool) -> nn.Linear:
        """A head of `size` outputs under its name in the checkpoint."""
        name = source.replace(".", "_")
        self.sources[name] = source
        self.add_module(name, nn.Linear(self.hidden_size, size, bias=bias))
        return self.get_submodule(name)

    def project(self, rows: Tensor) -> Tensor:
        for dense in self.dense.values():
            rows = dense(rows)
        return rows


def embedding_poolers(
    config: ModelConfig, project: RowMap | None, project_tokens: RowMap | None
) -> dict[str, Pooler]:
    """`embed` and `token_embed`: pooled or single rows, projected and normalised."""
    dtype, pooling = config.head_dtype, config.pooler
    head, token_head = EmbeddingHead(dtype, project), EmbeddingHead(dtype, project_tokens)
    tokens = TokenPooler("token_embed", pooling.tok_pooling_type, token_head)
    if config.multi_vector is not None:
        tokens = RowFilter(tokens, without_skipped)
    embed = SequencePooler("embed", pooling.seq_pooling_type, head)
    return {"embed": embed, "token_embed": late_interaction(tokens, config)}


def late_interaction(tokens: Pooler, config: ModelConfig) -> Pooler:
    fused = config.pooler.enable_flash_late_interaction
    return LateInteractionPooler(tokens, select_maxsim(config.device, fused))


def classifier_head(config: ModelConfig, classifier: RowMap) -> Head:
    """A classifier with the activation and calibration that the folder and the user say."""
    activation = get_classifier_activation(config.activation)
    calibration = config.pooler.logit_mean, config.pooler.logit_sigma
    return ClassifierHead(config.head_dtype, classifier, activation, *calibration)


def token_classifier(config: ModelConfig, classifier: RowMap) -> dict[str, Pooler]:
    """`token_classify` alone."""
    head = classifier_head(config, classifier)
    method = config.pooler.tok_pooling_type
    return {"token_classify": TokenPooler("token_classify", method, head)}


class EmbeddingModel(PoolingAdapter):
    """Any backbone as an embedder. Chapters 14 and 15."""

    ignored = (*PoolingAdapter.ignored, "classifier", "score")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        return embedding_poolers(config, self.project, self.project)


class TanhPoolingModel(PoolingAdapter):
    """BERT's own pooler as an embedding: tanh(dense(CLS)), not normalised. Chapter 05."""

    ignored = (*Adapter.ignored, "lm_head", "cls", "classifier")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        dense = self.add_linear("pooler.dense", self.hidden_size, bias=True)
        return embedding_poolers(config, lambda rows: dense(rows).tanh(), None)


class ColBERTModel(PoolingAdapter):
    """A linear map of every row to a small vector (arXiv 2004.12832). Chapter 17."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        name = "colbert_linear" if "colbert_linear.weight" in weights else "linear"
        size = len(weights[f"{name}.weight"]) if f"{name}.weight" in weights else 0
        return embedding_poolers(config, None, self.add_linear(name, size, bias=False))


class ClassificationModel(PoolingAdapter):
    """Cross-encoders, classifiers and rerankers, by sequence or token. Chapters 14 and 17."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        heads = (classifier_head(config, m) for m in self.build_classifier(config, weights))
        return DispatchPooler.for_seq_cls(config.pooler.seq_pooling_type, *heads).poolers

    def build_classifier(self, config: ModelConfig, weights: Weights) -> tuple[RowMap, RowMap]:
        """The maps from pooled rows and from single rows to logits.

        tanh belongs to the map, not to the activation: `use_activation=False` keeps it.
        """
        spec = config.spec
        if self.dense:
            return self.project, self.project
        if config.classifier_rows is not None:
            tied = config.hf_config.tie_word_embeddings
            self.classifier = LMHeadRows(self.hidden_size, *config.classifier_rows)
            self.sources["classifier"] = "embed_tokens" if tied else "lm_head"
            return self.classifier, self.classifier
        has_bias = spec.dense_name is not None or f"{spec.classifier_name}.bias" in weights
        classifier = self.add_linear(spec.classifier_name, config.num_labels, has_bias)
        if spec.dense_name is None:
            return classifier, classifier
        dense = self.add_linear(spec.dense_name, self.hidden_size, bias=True)

        def classify(rows: Tensor) -> Tensor:
            return classifier(dense(rows).tanh())

        return classify, classify if spec.classifies_tokens_with_dense else classifier


class TokenClassificationModel(PoolingAdapter):
    """`token_classify` with a linear classifier: named entities. Chapter 13."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        name = "score" if "score.weight" in weights else "classifier"
        classifier = self.add_linear(name, config.num_labels, f"{name}.bias" in weights)
        return token_classifier(config, classifier)


class RewardModel(PoolingAdapter):
    """A two-layer score for every token, or for the tokens that close a step. Chapter 13."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        first = nn.Linear(self.hidden_size, self.hidden_size)
        second = nn.Linear(self.hidden_size, config.num_labels)
        self.score = nn.Sequential(first, nn.ReLU(), second)
        return token_classifier(config, self.score)


class MaskedLM(PoolingAdapter):
    """SPLADE weights, hidden rows or vocabulary logits of a masked language model. Chapter 16."""

    ignored = (*Adapter.ignored, "pooler", "seq_relationship")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        self.mlm_head = MLMHead(config)
        self.name_head(config.hf_config.tie_word_embeddings, weights)
        logits = TokenPooler("token_classify", "ALL", classifier_head(config, self.mlm_head))
        embed = SpladePooler(self.mlm_head, config.hf_config.vocab_size, config.splade)
        return embedding_poolers(config, None, None) | {"embed": embed, "token_classify": logits}

    def name_head(self, tied: bool, weights: Weights) -> None:
        """BERT's or RoBERTa's names; the bias has two, and files may hold both."""
        is_bert = "cls.predictions.transform.dense.weight" in weights
        head, norm = ("cls.predictions", "LayerNorm") if is_bert else ("lm_head", "layer_norm")
        transform = f"{head}.transform" if is_bert else head
        decoder, bias = f"{head}.decoder.weight", f"{head}.decoder.bias"
        self.sources = {
            "mlm_head.dense": f"{transform}.dense",
            "mlm_head.LayerNorm": f"{transform}.{norm}",
            "mlm_head.decoder.weight": "embeddings.word_embeddings.weight" if tied else decoder,
            "mlm_head.decoder.bias": bias if bias in weights else f"{head}.bias",
        }
        self.ignored = (*self.ignored, f"{head}.bias", *([decoder] if tied else []))


class BgeM3Model(PoolingAdapter):
    """Dense, sparse and multi-vector outputs of one pass (BGE-M3, arXiv 2402.03216). Chapter 16."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        hf, dtype = config.hf_config, config.head_dtype
        for name in ("sparse_linear", "colbert_linear"):
            weights.add(config.folder / f"{name}.pt", f"{name}.")
        sparse = self.add_linear("sparse_linear", 1, bias=True)
        project = self.add_linear("colbert_linear", self.hidden_size, bias=True)
        embed = embedding_poolers(config, None, None)["embed"]
        rows = TokenPooler("token_embed", "ALL", EmbeddingHead(dtype, project))
        head = ClassifierHead(dtype, lambda rows: sparse(rows).squeeze(-1), F.relu)  # [n, D] -> [n]
        weights_of_tokens = TokenPooler("token_classify", "ALL", head)
        lexical = RowFilter(weights_of_tokens, without_ends(hf.bos_token_id, hf.eos_token_id))
        rows = RowFilter(rows, without_ends(hf.bos_token_id, None))
        return {
            "embed": embed,
            "token_embed": late_interaction(rows, config),
            "token_classify": lexical,
            "embed&token_classify": ConcatPooler(embed, lexical, "embed&token_classify"),
        }
