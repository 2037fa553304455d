"""The table of architectures: what each declares, without importing a model. Chapter 06.

A Hugging Face architecture name is a family and a suffix (`Qwen2` + `ForTokenClassification`). The
family says which backbone runs and how it attends; the suffix says which head and pooler stand on
it. `spec_for` joins the two, so a new family brings every suffix with it. Chapter 06 reads this
table.
"""

from dataclasses import dataclass, replace
from importlib import import_module


@dataclass(frozen=True)
class ModelSpec:
    """What a model declares; read by resolve.py and by `load_class`. Chapter 06."""

    architecture: str
    backbone: str  # "module:Class" inside nanopool.models
    adapter: str = "CausalLM"  # class in nanopool.models.adapters, which holds heads and pooler
    runner: str = "generate"  # "generate" or "pooling"
    tasks: tuple[str, ...] = ("generate",)
    encoder_only: bool = False
    seq_pooling_type: str = "LAST"
    tok_pooling_type: str = "ALL"
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: the config's `attention_bias` decides
    use_activation: bool = True  # where neither the user nor a file says otherwise
    num_labels: int | None = None  # None: the config's
    step_tag_id: int | None = None
    starts_after_padding_idx: bool = False  # positions count from pad_token_id + 1 (RoBERTa)
    dense_name: str | None = None  # a tanh layer before the classifier, under the checkpoint's name
    classifier_name: str = "score"
    classifies_tokens_with_dense: bool = False


FAMILIES = {
    "Qwen3": ModelSpec("", "qwen3:Qwen3Model", qk_norm=True),
    "Qwen2": ModelSpec("", "qwen3:Qwen3Model", qkv_bias=True),
    "Llama": ModelSpec("", "qwen3:Qwen3Model"),
    "Bert": ModelSpec(
        "",
        "bert:BertModel",
        encoder_only=True,
        seq_pooling_type="CLS",
        dense_name="pooler.dense",
        classifier_name="classifier",
    ),
}
FAMILIES["Roberta"] = FAMILIES["XLMRoberta"] = replace(
    FAMILIES["Bert"],
    dense_name="classifier.dense",
    classifier_name="classifier.out_proj",
    classifies_tokens_with_dense=True,
)


def pooling(adapter: str, *tasks: str, **facts) -> dict:
    """What a suffix adds to a family's spec."""
    return {"runner": "pooling", "adapter": adapter, "tasks": tasks, **facts}


EMBED, CLASSIFY = ("embed", "token_embed"), ("classify", "token_classify")
REWARD = ("RewardModel", "token_classify")
EXTRA_0 = 151651  # the step token of Qwen2.5-Math-PRM
SUFFIXES = {
    "ForCausalLM": {},
    "ForMaskedLM": pooling("MaskedLM", *EMBED, "token_classify"),
    "ForTextEncoding": pooling("EmbeddingModel", *EMBED),
    "EmbeddingModel": pooling("EmbeddingModel", *EMBED),
    "ForSequenceClassification": pooling("ClassificationModel", *CLASSIFY),
    "ForTokenClassification": pooling("TokenClassificationModel", "token_classify"),
    "ForProcessRewardModel": pooling(
        *REWARD, tok_pooling_type="STEP", num_labels=2, step_tag_id=EXTRA_0
    ),
    "ForRewardModel": pooling(*REWARD, use_activation=False, num_labels=1),
    "ForRewardModeling": pooling("EmbeddingModel", *EMBED),
    "PoolingModel": pooling("TanhPoolingModel", *EMBED, use_activation=False),
    "Model": pooling("EmbeddingModel", *EMBED),
}
BGE_M3 = pooling("BgeM3Model", "embed&token_classify", *EMBED, "token_classify")
COLBERT = pooling("ColBERTModel", "token_embed")
NAMED = {"BgeM3EmbeddingModel": ("XLMRoberta", BGE_M3), "HF_ColBERT": ("Bert", COLBERT)}


def spec_for(architecture: str) -> ModelSpec | None:
    """The spec of a Hugging Face architecture name, or None where family or suffix is unknown."""
    if architecture in NAMED:
        family, facts = NAMED[architecture]
        return replace(FAMILIES[family], architecture=architecture, **facts)
    for suffix, facts in SUFFIXES.items():
        family = architecture.removesuffix(suffix)
        if family != architecture and family in FAMILIES:
            return replace(FAMILIES[family], architecture=architecture, **facts)
    return None


def convert_spec(spec: ModelSpec, convert: str) -> ModelSpec:
    """A generative spec turned into an embedder or a classifier (vLLM: `--convert`)."""
    suffix = {"embed": "EmbeddingModel", "classify": "ForSequenceClassification"}[convert]
    return replace(spec, **SUFFIXES[suffix])


def load_class(spec: ModelSpec) -> tuple[type, type]:
    """(backbone class, adapter class) of a spec:
    the one place where a model is imported by name.
    """
    module, name = spec.backbone.split(":")
    backbone = getattr(import_module(f"nanopool.models.{module}"), name)
    return backbone, getattr(import_module("nanopool.models.adapters"), spec.adapter)
