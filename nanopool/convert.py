"""Which class runs and as what: architecture, runner, convert, and what is refused. Chapter 06.

Called by resolve.py only.
"""

from typing import Any

from nanopool.checkpoint import Checkpoint
from nanopool.checks import check_value
from nanopool.config import EngineConfig
from nanopool.models import FAMILIES, ModelSpec, spec_for


def said(value: Any) -> Any:
    """None where an argument leaves the choice to the model."""
    return None if value in ("auto", "none") else value


def find_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The first architecture that nanopool has; BGE-M3 is known by its two extra files.

    Raises ValueError where config.json names none, or an encoder that generates.
    """
    names = checkpoint.hf_config.architectures or ()
    spec = next((spec for name in names if (spec := spec_for(name))), None)
    if spec is None or (spec.encoder_only and spec.runner == "generate"):
        raise ValueError(
            f"architectures={list(names)} in config.json: none is supported; families: "
            f"{', '.join(FAMILIES)}; hf_overrides={{'architectures': ['BertModel']}} names another"
        )
    is_bge_m3 = spec.architecture == "XLMRobertaModel" and checkpoint.has_bge_m3_heads
    return spec_for("BgeM3EmbeddingModel") if is_bge_m3 and not checkpoint.is_overridden else spec


def file_conversion(kind: str | None, spec: ModelSpec) -> str | None:
    """What modules.json makes of a class; None where it already is that. Raises ValueError."""
    if kind == "SparseEncoder" and spec.adapter != "MaskedLM":
        raise ValueError(f"modules.json: SpladePooling needs a MaskedLM, not {spec.architecture}")
    is_embedder = spec.adapter in ("EmbeddingModel", "BgeM3Model")
    if kind in ("SentenceTransformer", "MultiVectorEncoder") and not is_embedder:
        return "embed"
    return "classify" if kind == "CrossEncoder" else None


def check_runner(user: EngineConfig, spec: ModelSpec, runner: str) -> None:
    """Raises ValueError where the class cannot be run or converted as the caller says."""
    name, convert = spec.architecture, f"convert={user.convert!r}"
    if runner == "generate" and spec.runner == "pooling":
        raise ValueError(f"Embedding models do not support runner='generate': {name} only pools")
    if runner == "generate" and (said(user.convert) or user.pooler_config):
        raise ValueError(f"{name}: {convert} or a pooler_config needs runner='pooling'")
    if runner != spec.runner and user.convert == "none":
        raise ValueError(f"{name} does not support runner='pooling' with {convert}: use 'embed'")
    if spec.runner == "pooling" and said(user.convert) not in (None, *spec.tasks):
        raise ValueError(
            f"{convert}: {name} already is a pooling model, for {list(spec.tasks)}; "
            "hf_overrides={'architectures': [...]} loads its backbone as another class"
        )


def check_supported(files: Checkpoint, spec: ModelSpec) -> None:
    """Raises ValueError for what a folder asks of a model and nanopool does not do."""
    known = {"quantization_config": (None,), "position_embedding_type": (None, "absolute")}
    known |= {"is_decoder": (None, False)} if spec.encoder_only else {"is_causal": (None, True)}
    known |= {"add_cross_attention": (None, False)}
    for name, values in known.items():
        check_value(f"config.json: {name}", getattr(files.hf_config, name, None), values)
    for kind in getattr(files.hf_config, "layer_types", None) or ():
        check_value("config.json: layer_types", kind, ("full_attention",))
    if (message := files.backbone.get("modality_config", {}).get("message")) is None:
        return
    if "CrossEncoder" not in (files.kind, files.settings.get("model_type")):
        raise ValueError(
            f"{files.backbone_file}: modality_config sends every text through the chat template, "
            "which is not supported: remove its 'message' entry to embed texts as they are"
        )
    check_value(f"{files.backbone_file}: message: format", message.get("format"), ("flat",))
