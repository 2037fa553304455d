"""Which class runs and as what: architecture, runner, convert, and what is refused. Chapter 06.

Called by resolve.py only.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanopool.checkpoint import Checkpoint, load_tokenizer
from nanopool.checks import check_value
from nanopool.config import ClassifierRows, EngineConfig
from nanopool.models import BGE_M3, FAMILIES, ModelSpec, spec_for

ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
UNREAD = ("tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
TWO_WAY = "from_2_way_softmax"
LENGTHS = ("query_length", "document_length")


def said(value: Any) -> Any:
    """None where an argument leaves the choice to the model."""
    return None if value in ("auto", "none") else value


def find_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The first architecture that nanopool has; BGE-M3 is known by its two extra files.

    Raises ValueError where config.json names none, or an encoder that generates, and for what the
    folder asks besides and nanopool does not do.
    """
    names = checkpoint.hf_config.architectures or ()
    spec = next((spec for name in names if (spec := spec_for(name))), None)
    if spec is None or (spec.encoder_only and spec.runner == "generate"):
        raise ValueError(
            f"architectures={list(names)} in config.json: none is supported; families: "
            f"{', '.join(FAMILIES)}; hf_overrides={{'architectures': [...]}} names another"
        )
    is_roberta = checkpoint.hf_config.model_type in ROBERTA_TYPES
    spec = replace(spec, starts_after_padding_idx=is_roberta)
    check_supported(checkpoint, spec)
    heads = [checkpoint.folder / f"{name}_linear.pt" for name in ("sparse", "colbert")]
    is_bge_m3 = spec.architecture == "XLMRobertaModel" and all(head.is_file() for head in heads)
    return replace(spec, **BGE_M3) if is_bge_m3 and not checkpoint.is_overridden else spec


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


def classifier_rows(files: Checkpoint, tokenizer: str | Path | None) -> ClassifierRows | None:
    """(ids added, id subtracted): LM head rows, by LogitScore or by a reranker's hf_overrides.

    Raises ValueError for a method that is not known or has too few tokens.
    """
    facts, score = vars(files.hf_config), files.module("LogitScore")
    tokens = facts.get("classifier_from_token") or ()
    method = TWO_WAY if facts.get("is_original_qwen3_reranker") else facts.get("method")
    if score and not tokens:
        return (score.config["true_token_id"],), score.config.get("false_token_id")
    if not tokens and method is None:
        return None
    check_value("method", method, (TWO_WAY, "no_post_processing"))
    if not tokens or (method == TWO_WAY and len(tokens) != 2):
        raise ValueError(
            f"classifier_from_token={tokens!r}: {method} needs the tokens for false and true "
            "in hf_overrides, such as ['no', 'yes']"
        )
    vocab = load_tokenizer(tokenizer or files.folder).get_vocab()
    if unknown := [token for token in tokens if token not in vocab]:
        raise ValueError(f"classifier_from_token={unknown}: not single tokens of the tokenizer")
    ids = tuple(vocab[token] for token in tokens)
    return (ids[1:], ids[0]) if method == TWO_WAY else (ids, None)


def check_supported(files: Checkpoint, spec: ModelSpec) -> None:
    """Raises ValueError for what a folder asks of a model and nanopool does not do."""
    known = {"quantization_config": (None,), "position_embedding_type": (None, "absolute")}
    known |= {"is_decoder": (None, False)} if spec.encoder_only else {"is_causal": (None, True)}
    known |= {"add_cross_attention": (None, False)}
    for name, values in known.items():
        check_value(f"config.json: {name}", getattr(files.hf_config, name, None), values)
    for kind in getattr(files.hf_config, "layer_types", None) or ():
        check_value("config.json: layer_types", kind, ("full_attention",))
    check_backbone(files)
    check_modules(files)


def check_backbone(files: Checkpoint) -> None:
    """Raises ValueError for what sentence_bert_config.json says and nanopool does not do."""
    file, stated = files.backbone_file, files.backbone
    for name in UNREAD if files.kind == "MultiVectorEncoder" else (*UNREAD, *LENGTHS):
        check_value(f"{file}: {name}", stated.get(name) or None, (None,))
    for name, value in (stated.get("processing_kwargs") or {}).items():
        if name != "chat_template":
            check_value(f"{file}: processing_kwargs: {name}", value or None, (None,))
    modalities = stated.get("modality_config") or {}
    output = modalities.get("text", {}).get("method_output_name")
    check_value(f"{file}: method_output_name", output, (None, "last_hidden_state", "logits"))
    if (message := modalities.get("message")) is None:
        return
    if "CrossEncoder" not in (files.kind, files.settings.get("model_type")):
        raise ValueError(
            f"{file}: modality_config sends every text through the chat template, "
            "which is not supported: remove its 'message' entry to embed texts as they are"
        )
    check_value(f"{file}: message: format", message.get("format"), ("flat",))


def check_modules(files: Checkpoint) -> None:
    """Raises ValueError for a Dense or Normalize that reads or writes elsewhere, or adds."""
    row = "token_embeddings" if files.kind == "MultiVectorEncoder" else "sentence_embedding"
    written = (None, row, "scores") if files.kind == "CrossEncoder" else (None, row)
    wanted = {"module_input_name": (None, row), "module_output_name": written}
    wanted |= {"use_residual": (None, False)}
    for module in files.modules or ():
        for name in wanted if module.name in ("Dense", "Normalize") else ():
            check_value(f"{module.file}: {name}", module.config.get(name), wanted[name])
