"""Tiny random checkpoints in the layouts of sentence-transformers.

Layout "new" is what version 6 of the library saves, "old" a rewriting of that. Importing this
module adds its builders to those of `checkpoints`.
"""

import json
from pathlib import Path

import checkpoints
import tiny_tokenizers
import torch
from checkpoints import builder, edit_json, old_config, read_json
from safetensors.torch import load_file, save_file
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.base.modules.transformer import TRANSFORMER_TASK_DEFAULTS
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling

POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
OLD_TYPES = {
    "SpladePooling": "sentence_transformers.sparse_encoder.models.SpladePooling",
    "MLMTransformer": "sentence_transformers.sparse_encoder.models.MLMTransformer",
}
PROMPTS = {"query": "query : ", "document": ""}


# From the new layout to the old one


def age(folder: Path) -> None:
    """Rewrites a folder saved by version 6 as 2.x kept it; a sparse one as 5.x did."""
    backbone = read_json(folder / "sentence_bert_config.json")
    modules = read_json(folder / "modules.json")
    for module in modules:
        name = module["type"].rpartition(".")[2]
        if name == "Transformer" and backbone["transformer_task"] == "fill-mask":
            name = "MLMTransformer"
        module["type"] = OLD_TYPES.get(name, f"sentence_transformers.models.{name}")
        config = folder / module["path"] / "config.json"
        if name == "Pooling":
            age_pooling(config)
        if name == "Dense":
            edit_json(config, drop=("module_input_name", "module_output_name"))
            dense_as_bin(config.parent)
        if name == "Normalize":
            config.unlink()
            config.parent.rmdir()
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    limit = read_json(folder / "tokenizer_config.json")["model_max_length"]
    (folder / "sentence_bert_config.json").unlink()
    edit_json(folder / "sentence_bert_config.json", max_seq_length=limit, do_lower_case=False)
    backbone_limit = read_json(folder / "config.json")["max_position_embeddings"]
    edit_json(folder / "tokenizer_config.json", model_max_length=backbone_limit)
    sparse = backbone["transformer_task"] == "fill-mask"
    version = {"sentence_transformers": "5.1.0" if sparse else "2.7.0", "transformers": "4.51.3"}
    drop = ("similarity_fn_name",) if sparse else ("similarity_fn_name", "model_type")
    edit_json(folder / "config_sentence_transformers.json", drop=drop, __version__=version)
    old_config(folder)


def age_pooling(config: Path) -> None:
    """1_Pooling/config.json with one flag per mode."""
    new = read_json(config)
    modes = new["pooling_mode"]
    modes = [modes] if isinstance(modes, str) else modes
    flags = {flag: mode in modes for mode, flag in POOLING_FLAGS.items()}
    old = {"word_embedding_dimension": new["embedding_dimension"], **flags}
    config.write_text(json.dumps(old | {"include_prompt": new["include_prompt"]}, indent=2))


def dense_as_bin(folder: Path) -> None:
    """Dense weights in pytorch_model.bin, as before sentence-transformers 2.3."""
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def plain_text(base: str, task: str = "feature-extraction", **settings) -> Transformer:
    """The backbone module over `base`, told that a text is a text.

    Left to itself, version 6 renders every text by the chat template where the tokenizer has one,
    and saves that.
    """
    modalities, output = TRANSFORMER_TASK_DEFAULTS[task]
    return Transformer(
        base,
        transformer_task=task,
        modality_config=modalities,
        module_output_name=output,
        **settings,
    )


# SentenceTransformer


@builder
def sentence_transformer(
    folder: Path,
    *,
    backbone: str = "bert",
    pooling: str | list[str] = "mean",
    dense: int | None = None,
    activation: str = "Tanh",
    normalize: bool = True,
    include_prompt: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int = 64,
    chat: bool = False,
    layout: str = "new",
    seed: int = 0,
    **overrides,
) -> Path:
    """Transformer + Pooling (+ Dense to `dense` features) (+ Normalize) over `backbone`.

    `chat` leaves a decoder's chat template in force (see `plain_text`): new layout only.
    """
    base = checkpoints.build(backbone, folder / "base", seed=seed, **overrides)
    modes = [pooling] if isinstance(pooling, str) else pooling
    module = Transformer if chat else plain_text
    transformer = module(str(base), max_seq_length=max_seq_length)
    modules = [transformer, Pooling(32, tuple(modes), include_prompt)]
    if dense is not None:
        width = 32 * len(modes)
        modules.append(Dense(width, dense, activation_function=getattr(torch.nn, activation)()))
        checkpoints.randomise(modules[-1], seed + 1)
    if normalize:
        modules.append(Normalize())
    model = SentenceTransformer(
        modules=modules,
        prompts=PROMPTS if prompts is None else prompts,
        default_prompt_name=default_prompt_name,
        device="cpu",
    )
    return save(model, folder, base, layout)


def save(model, folder: Path, base: Path, layout: str) -> Path:
    """Saves the model, removes the `base` that it was made from, ages it if asked."""
    assert layout in ("new", "old"), layout
    model.save(str(folder), create_model_card=False)
    for file in base.iterdir():
        file.unlink()
    base.rmdir()
    if layout == "old":
        age(folder)
    return folder


@builder
def qwen3_embedding(folder: Path, *, layout: str = "old", **overrides) -> Path:
    """Qwen3-Embedding: LAST + Normalize, <|endoftext|> appended, an instruction as query prompt.

    The published folders are old: config.json says Qwen3ForCausalLM though no name begins with
    `model.`, and there is no sentence_bert_config.json.
    """
    tokenizer = tiny_tokenizers.qwen_bpe(end_token=True)
    facts = {"tokenizer": tokenizer, "tied": True}
    base = checkpoints.build("qwen3", folder / "base", **facts | overrides)
    modules = [plain_text(str(base)), Pooling(32, "lasttoken"), Normalize()]
    instruction = "Instruct: Given a search query, retrieve the answer\nQuery:"
    prompts = {"query": instruction, "document": ""}
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    save(model, folder, base, layout)
    if layout == "old":
        (folder / "sentence_bert_config.json").unlink()
        edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
        edit_json(folder / "config_sentence_transformers.json", similarity_fn_name="cosine")
    return folder


# CrossEncoder

PAIR_TEMPLATE = """\
{%- macro text(role) -%}
{{ messages | selectattr("role", "eq", role) | map(attribute="content") | first | default("") }}
{%- endmacro -%}
<|im_start|>system
{{ text("system") }}<|im_end|>
<|im_start|>user
<Query>: {{ text("query") }}
<Document>: {{ text("document") }}<|im_end|>
<|im_start|>assistant
"""


@builder
def cross_encoder(
    folder: Path,
    *,
    backbone: str = "bert_classifier",
    labels: int = 1,
    activation_fn: str | None = None,
    layout: str = "new",
    **overrides,
) -> Path:
    """A sequence classifier as a CrossEncoder; `activation_fn` names a class of torch.nn.

    `layout` "old" (before 4.0) and "4" are plain Hugging Face folders that keep it in config.json.
    """
    if layout != "new":
        checkpoints.build(backbone, folder, labels=labels, **overrides)
        if activation_fn is not None:
            name = f"torch.nn.modules.{'linear' if activation_fn == 'Identity' else 'activation'}"
            path = f"{name}.{activation_fn}"
            version_4 = {"sentence_transformers": {"activation_fn": path, "version": "4.1.0"}}
            before = {"sbert_ce_default_activation_function": path}
            edit_json(folder / "config.json", **(version_4 if layout == "4" else before))
        return folder
    base = checkpoints.build(backbone, folder / "base", labels=labels, **overrides)
    activation = None if activation_fn is None else getattr(torch.nn, activation_fn)()
    model = CrossEncoder(str(base), activation_fn=activation, device="cpu")
    return save(model, folder, base, layout)


@builder
def cross_encoder_dense(folder: Path, *, pooling: str = "mean", seed: int = 0, **overrides) -> Path:
    """A CrossEncoder of Transformer + Pooling + Dense(1) that writes `scores`, over a BertModel."""
    base = checkpoints.build("bert", folder / "base", seed=seed, **overrides)
    head = Dense(32, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    checkpoints.randomise(head, seed + 1)
    model = CrossEncoder(modules=[plain_text(str(base)), Pooling(32, pooling), head], device="cpu")
    return save(model, folder, base, "new")


@builder
def logit_score(folder: Path, *, two_tokens=True, prompt=None, **overrides) -> Path:
    """A CrossEncoder of a Qwen3 LM + LogitScore; the chat template has roles query and document.

    `two_tokens=False` leaves false_token_id null; `prompt` is the default prompt (system message).
    """
    tokenizer = tiny_tokenizers.qwen_bpe()
    tokenizer.chat_template = PAIR_TEMPLATE
    facts = {"tokenizer": tokenizer, "tied": True}
    base = checkpoints.build("qwen3", folder / "base", **facts | overrides)
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    modules = [
        Transformer(str(base), transformer_task="text-generation"),
        LogitScore(yes, no if two_tokens else None),
    ]
    named = {} if prompt is None else {"prompts": {"query": prompt}, "default_prompt_name": "query"}
    model = CrossEncoder(modules=modules, device="cpu", **named)
    return save(model, folder, base, "new")


# Sparse


@builder
def sparse_encoder(
    folder: Path,
    *,
    strategy: str = "max",
    activation: str = "relu",
    layout: str = "new",
    **overrides,
) -> Path:
    """A SparseEncoder: BertForMaskedLM + SpladePooling.

    `strategy` is "max" or "sum", `activation` "relu" or "log1p_relu" (a second log1p).
    """
    base = checkpoints.build("bert_mlm", folder / "base", **overrides)
    modules = [plain_text(str(base), "fill-mask"), SpladePooling(strategy, activation)]
    return save(SparseEncoder(modules=modules, device="cpu"), folder, base, layout)


@builder
def bge_m3(folder: Path, *, weights: str = "bin", seed: int = 0, **overrides) -> Path:
    """BGE-M3: XLMRobertaModel, CLS + Normalize (old), sparse_linear.pt and colbert_linear.pt."""
    facts = {"pooling": "cls", "layout": "old", "prompts": {}}
    sentence_transformer(folder, backbone="xlm_roberta", seed=seed, **facts | overrides)
    checkpoints.store_weights(folder, weights)
    for offset, (name, rows) in enumerate({"sparse": 1, "colbert": 32}.items()):
        head = torch.nn.Linear(32, rows)
        checkpoints.randomise(head, seed + 1 + offset)
        torch.save(head.state_dict(), folder / f"{name}_linear.pt")
    return folder


# Multi-vector

SKIPLIST = [".", ",", "?", "!"]
COLBERT_DIM = 20


def projection(seed: int) -> Dense:
    """A bias-free Dense over token embeddings."""
    identity = torch.nn.Identity()
    dense = Dense(32, COLBERT_DIM, False, identity, module_input_name="token_embeddings")
    checkpoints.randomise(dense, seed + 1)
    return dense


@builder
def hf_colbert(
    folder: Path,
    *,
    query_length: int = 32,
    document_length: int = 48,
    attend: bool = False,
    mask_punctuation: bool = True,
    seed: int = 0,
    **overrides,
) -> Path:
    """Stanford's ColBERT: HF_ColBERT with `bert.` names, `linear.weight` and artifact.metadata."""
    weights = overrides.pop("weights", "safetensors")
    checkpoints.build("bert", folder, prefix="bert.", seed=seed, **overrides)
    linear = {"linear.weight": projection(seed).linear.weight.detach().clone()}
    checkpoints.rename_weights(folder, str, linear)
    checkpoints.store_weights(folder, weights)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    edit_json(
        folder / "artifact.metadata",
        query_token_id="[unused0]",
        doc_token_id="[unused1]",
        query_token="[Q]",
        doc_token="[D]",
        dim=COLBERT_DIM,
        similarity="cosine",
        query_maxlen=query_length,
        doc_maxlen=document_length,
        mask_punctuation=mask_punctuation,
        attend_to_mask_tokens=attend,
    )
    return folder


@builder
def multi_vector_encoder(
    folder: Path,
    *,
    query_length: int | None = 32,
    document_length: int | None = 48,
    expansion: str | None = "fixed",
    attend: bool = False,
    skiplist: list[str] = SKIPLIST,
    prompts: dict[str, str] | None = None,
    seed: int = 0,
    **overrides,
) -> Path:
    """A MultiVectorEncoder as version 6 saves it: Transformer, Dense, MultiVectorMask, Normalize.

    `expansion` is "fixed", "min" or None; `query_length` is the width or, without, a query's limit.
    """
    base = checkpoints.build("bert", folder / "base", seed=seed, **overrides)
    tokenizer = tiny_tokenizers.wordpiece()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[unused0]", "[unused1]"]})
    tokenizer.save_pretrained(base)
    settings = {"document_length": document_length, "query_length": query_length}
    if expansion is not None:
        width = settings.pop("query_length")
        settings["query_expansion"] = {"strategy": expansion, "attend": attend, "length": width}
    modules = [
        plain_text(str(base), **settings),
        projection(seed),
        MultiVectorMask(skiplist),
        Normalize("token_embeddings"),
    ]
    markers = {"query": "[unused0] ", "document": "[unused1] "} if prompts is None else prompts
    model = MultiVectorEncoder(modules=modules, prompts=markers, device="cpu")
    return save(model, folder, base, "new")


@builder
def pylate(
    folder: Path,
    *,
    query_length: int = 32,
    document_length: int = 48,
    expansion: bool = True,
    attend: bool = False,
    skiplist: list[str] | None = SKIPLIST,
    model_type: str | None = "ColBERT",
    seed: int = 0,
    **overrides,
) -> Path:
    """A PyLate folder: Transformer + pylate Dense, "[Q] " and "[D] " added tokens, flat settings.

    PyLate 3 writes `model_type`; before, there is none.
    """
    tokenizer = tiny_tokenizers.wordpiece()
    tokenizer.add_tokens(["[Q] ", "[D] "])
    checkpoints.build("bert", folder, vocab_size=len(tokenizer), seed=seed, **overrides)
    tokenizer.save_pretrained(folder)
    old_config(folder)
    weight = projection(seed).linear.weight.detach().clone()
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    types = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": types[path]}
        for i, path in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    edit_json(
        folder / "1_Dense" / "config.json",
        in_features=32,
        out_features=COLBERT_DIM,
        bias=False,
        activation_function="torch.nn.modules.linear.Identity",
        use_residual=False,
    )
    edit_json(folder / "sentence_bert_config.json", max_seq_length=127, do_lower_case=False)
    edit_json(
        folder / "config_sentence_transformers.json",
        **({} if model_type is None else {"model_type": model_type}),
        prompts={},
        default_prompt_name=None,
        similarity_fn_name="MaxSim",
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=query_length,
        document_length=document_length,
        attend_to_expansion_tokens=attend,
        do_query_expansion=expansion,
        **({} if skiplist is None else {"skiplist_words": skiplist}),
    )
    return folder
