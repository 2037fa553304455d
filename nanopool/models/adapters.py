"""Heads and poolers around a backbone.

What makes a Qwen3 a generator, an embedder or a reranker. Chapter 06.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nanopool.batch import Batch
from nanopool.checks import check_value
from nanopool.config import ModelConfig
from nanopool.layers.embed_head import ParallelLMHead
from nanopool.models.heads import Dense, LMHeadRows, MLMHead
from nanopool.models.loader import Weights
from nanopool.pooler.heads import ClassifierHead, EmbeddingHead, RowMap, classify_activation
from nanopool.pooler.late_interaction import LateInteractionPooler
from nanopool.pooler.params import load_activation
from nanopool.pooler.poolers import DispatchPooler, Pooler, TokenPooler
from nanopool.pooler.special import ConcatPooler, Keep, SpladePooler, without_ends, without_skipped


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

    def source(self, name: str, shard_id: str | None) -> str:
        """The checkpoint's name of one shard of a parameter."""
        name = name.removeprefix("model.")
        if shard_id is not None:
            parent, _, attribute = name.rsplit(".", 2)
            name = f"{parent}.{shard_id}.{attribute}"
        for ours, theirs in self.sources.items():
            if f"{name}.".startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
        return name


class CausalLM(Adapter):
    """The generator: logits of the rows that the runner picks. Chapters 01 and 04."""

    def __init__(self, backbone: nn.Module, config: ModelConfig, weights: Weights):
        super().__init__(backbone)
        hf = config.hf_config
        self.tied = hf.tie_word_embeddings and weights.are_equal("lm_head", "embed_tokens")
        self.lm_head = ParallelLMHead(hf.vocab_size, hf.hidden_size, backbone.embed_tokens.tp)

    def tie_weights(self) -> None:
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # [B, D] -> [B, V]


class PoolingAdapter(Adapter):
    """What pooling adapters share: the folder's Dense modules, a pooler. Chapters 14 and 15."""

    ignored = (*Adapter.ignored, "lm_head", "pooler", "cls")

    def __init__(self, backbone: nn.Module, config: ModelConfig, weights: Weights):
        super().__init__(backbone)
        self.hidden_size = config.hf_config.hidden_size
        self.dense = nn.Sequential()
        for module in config.modules:
            self.dense.add_module(module.path.name, Dense(module.config))
            weights.add(module.path, f"dense.{module.path.name}.")
        poolers = self.build_poolers(config, weights)
        self.pooler = DispatchPooler({task: poolers[task] for task in config.spec.tasks})

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        """A pooler for each task that this adapter knows; the heads are made here too."""
        raise NotImplementedError

    def add_linear(self, source: str, size: int, bias: bool) -> nn.Linear:
        """A head of `size` outputs under its name in the checkpoint, which is then not ignored."""
        name = source.replace(".", "_")
        self.sources[name] = source
        self.ignored = tuple(part for part in self.ignored if part != source.partition(".")[0])
        self.add_module(name, nn.Linear(self.hidden_size, size, bias=bias))
        return self.get_submodule(name)


def embedding_poolers(
    config: ModelConfig, project: RowMap, project_tokens: RowMap, keep: Keep | None = None
) -> dict[str, Pooler]:
    """`embed` and `token_embed`: pooled or single rows, projected and normalised.

    `keep` chooses among the single rows; ValueError where STEP has chosen already.
    """
    pooling, dtype = config.pooler, config.head_dtype
    if keep is not None:
        check_value("tok_pooling_type", pooling.tok_pooling_type, ("ALL",))
    heads = EmbeddingHead(dtype, project), EmbeddingHead(dtype, project_tokens)
    poolers = DispatchPooler.for_embedding(pooling, *heads, keep).poolers
    fused = pooling.enable_flash_late_interaction
    return poolers | {"token_embed": LateInteractionPooler(poolers["token_embed"], fused)}


def classifier_head(config: ModelConfig, classifier: RowMap) -> ClassifierHead:
    """A classifier with the activation and calibration that the folder and the user say."""
    by_labels = config.activation == "classify"
    activation = classify_activation if by_labels else load_activation(config.activation)
    calibration = config.pooler.logit_mean or 0.0, config.pooler.logit_sigma or 1.0
    return ClassifierHead(config.head_dtype, classifier, activation, *calibration)


def token_classifier(config: ModelConfig, classifier: RowMap) -> dict[str, Pooler]:
    """`token_classify` alone."""
    head = classifier_head(config, classifier)
    return {"token_classify": TokenPooler(config.pooler.tok_pooling_type, head)}


class EmbeddingModel(PoolingAdapter):
    """Any backbone as an embedder. Chapters 14 and 15."""

    ignored = (*PoolingAdapter.ignored, "classifier", "score")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        keep = None if config.multi_vector is None else without_skipped
        return embedding_poolers(config, self.dense, self.dense, keep)


class TanhPoolingModel(EmbeddingModel):
    """BERT's own pooler as an embedding: tanh(dense(CLS)), not normalised. Chapter 05."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        dense = self.add_linear("pooler.dense", self.hidden_size, bias=True)
        return embedding_poolers(config, nn.Sequential(dense, nn.Tanh()), nn.Identity())


class ColBERTModel(PoolingAdapter):
    """A linear map of every row to a small vector (arXiv 2004.12832). Chapter 17."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        name = "colbert_linear" if "colbert_linear.weight" in weights else "linear"
        size = len(weights[f"{name}.weight"]) if f"{name}.weight" in weights else 0
        linear = self.add_linear(name, size, bias=False)
        return embedding_poolers(config, self.dense, linear, without_skipped)


class ClassificationModel(PoolingAdapter):
    """Cross-encoders, classifiers and rerankers, by sequence or token. Chapters 14 and 17."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        heads = (classifier_head(config, m) for m in self.build_classifier(config, weights))
        return DispatchPooler.for_seq_cls(config.pooler, *heads).poolers

    def build_classifier(self, config: ModelConfig, weights: Weights) -> tuple[RowMap, RowMap]:
        """The maps from pooled rows and from single rows to logits.

        tanh belongs to the map, not to the activation: `use_activation=False` keeps it.
        """
        spec = config.spec
        if self.dense:
            return self.dense, self.dense
        if config.classifier_rows is not None:
            self.classifier = LMHeadRows(self.hidden_size, *config.classifier_rows)
            tied = config.hf_config.tie_word_embeddings and "lm_head.weight" not in weights
            self.sources["classifier"] = "embed_tokens" if tied else "lm_head"
            return self.classifier, self.classifier
        has_bias = spec.dense_name is not None or f"{spec.classifier_name}.bias" in weights
        classifier = self.add_linear(spec.classifier_name, config.num_labels, has_bias)
        if spec.dense_name is None:
            return classifier, classifier
        dense = self.add_linear(spec.dense_name, self.hidden_size, bias=True)
        classify = nn.Sequential(dense, nn.Tanh(), classifier)
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
        D, L = self.hidden_size, config.num_labels
        self.score = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, L))
        return token_classifier(config, self.score)


class MaskedLM(PoolingAdapter):
    """SPLADE weights, hidden rows or vocabulary logits of a masked language model. Chapter 16."""

    ignored = (*Adapter.ignored, "pooler", "seq_relationship")

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        self.mlm_head = MLMHead(config)
        self.name_head(config.hf_config.tie_word_embeddings, weights)
        rows = embedding_poolers(config, self.dense, self.dense)
        embed = SpladePooler(self.mlm_head, config.hf_config.vocab_size, config.splade)
        logits = TokenPooler("ALL", classifier_head(config, self.mlm_head))
        return rows | {"embed": embed, "token_classify": logits}

    def name_head(self, tied: bool, weights: Weights) -> None:
        """BERT's or RoBERTa's names; the bias has two, and files may hold both."""
        is_bert = "cls.predictions.transform.dense.weight" in weights
        head, norm = ("cls.predictions", "LayerNorm") if is_bert else ("lm_head", "layer_norm")
        transform = f"{head}.transform" if is_bert else head
        decoder, bias = f"{head}.decoder.weight", f"{head}.decoder.bias"
        embedding = "embeddings.word_embeddings.weight"
        self.sources = {
            "mlm_head.dense": f"{transform}.dense",
            "mlm_head.LayerNorm": f"{transform}.{norm}",
            "mlm_head.decoder.weight": embedding if tied and decoder not in weights else decoder,
            "mlm_head.decoder.bias": bias if bias in weights else f"{head}.bias",
        }
        self.ignored = (*self.ignored, f"{head}.bias")


class BgeM3Model(PoolingAdapter):
    """Dense, sparse and multi-vector outputs of one pass (BGE-M3, arXiv 2402.03216). Chapter 16."""

    def build_poolers(self, config: ModelConfig, weights: Weights) -> dict[str, Pooler]:
        bos, eos = config.hf_config.bos_token_id, config.hf_config.eos_token_id
        for name in ("sparse_linear", "colbert_linear"):
            weights.add(config.folder / f"{name}.pt", f"{name}.")
        project = self.add_linear("colbert_linear", self.hidden_size, bias=True)
        poolers = embedding_poolers(config, self.dense, project, without_ends(bos, None))
        sparse = nn.Sequential(self.add_linear("sparse_linear", 1, bias=True), nn.Flatten(0))
        head = ClassifierHead(config.head_dtype, sparse, F.relu)  # [n, D] -> [n]
        lexical = TokenPooler("ALL", head, without_ends(bos, eos))
        hybrid = ConcatPooler(poolers["embed"], lexical)
        return poolers | {"token_classify": lexical, "embed&token_classify": hybrid}
