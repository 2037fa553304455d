"""Tiny random checkpoints in the layout of the real ones: Hugging Face models.

`build(kind, folder, **overrides)` fills a folder and returns it. Each builder sets a few facts by
keyword; every other keyword goes into the Hugging Face config. The weights are random, a function
of `seed`, wide enough for logits to differ; no bias is 0, no norm weight 1. D is 32, H is 4, there
are 2 layers.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import references
import tiny_tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MARGIN = 1e-3  # between the two best logits, so that rounding never changes a greedy token
BUILDERS: dict[str, Callable[..., Path]] = {}


def builder(function: Callable[..., Path]) -> Callable[..., Path]:
    """Registers `function` under its name for `build` and the `checkpoint` fixture."""
    BUILDERS[function.__name__] = function
    return function


def build(kind: str, folder: Path, **overrides) -> Path:
    """The checkpoint `kind` in `folder`; returns the folder.

    st_checkpoints is imported when it is needed, since sentence-transformers takes seconds.
    """
    if kind not in BUILDERS:
        import_module("st_checkpoints")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return BUILDERS[kind](Path(folder), **overrides)


def randomise(model: torch.nn.Module, seed: int = 0, std: float = 0.3) -> None:
    """Fills every parameter: matrices ~ N(0, std), norm weights ~ N(1, 0.2), biases ~ N(0, 0.2).

    The queries and keys of encoders are 3 times as wide: attention then tells tokens apart.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name.lower() and name.endswith("weight")
            scale = std if parameter.dim() > 1 else 0.2
            scale *= 3 if name.endswith(("query.weight", "key.weight")) else 1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + 1 if norm else noise)


# How a folder keeps its files


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    return json.loads(path.read_text())


def edit_json(path: Path, drop: tuple[str, ...] = (), **values) -> None:
    """Sets `values` in a JSON object and removes the keys in `drop`; makes the file if need be."""
    content = read_json(path) if path.exists() else {}
    content = {key: value for key, value in content.items() if key not in drop} | values
    path.write_text(json.dumps(content, indent=2))


def rename_weights(folder: Path, rename: Callable[[str], str | None], extra=None) -> None:
    """Renames the tensors of model.safetensors (None drops one) and adds those of `extra`."""
    path = folder / "model.safetensors"
    named = ((rename(name), tensor) for name, tensor in load_file(path).items())
    tensors = {name: tensor for name, tensor in named if name is not None} | (extra or {})
    save_file(tensors, path, metadata={"format": "pt"})


def store_weights(folder: Path, weights: str) -> None:
    """Rewrites model.safetensors: "safetensors" (as it is), "bin", "sharded" or "sharded_bin"."""
    if weights == "safetensors":
        return
    path = folder / "model.safetensors"
    tensors, stem = load_file(path), "pytorch_model" if weights.endswith("bin") else "model"
    suffix = "bin" if weights.endswith("bin") else "safetensors"
    path.unlink()
    names = sorted(tensors)
    shards = [names[0::3], names[1::3], names[2::3]] if weights.startswith("sharded") else [names]
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file, content = f"{stem}{part}.{suffix}", {name: tensors[name] for name in shard}
        weight_map |= dict.fromkeys(shard, file)
        if suffix == "bin":
            torch.save(content, folder / file)
        else:
            save_file(content, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}}
        edit_json(folder / f"{stem}.{suffix}.index.json", **index, weight_map=weight_map)


def old_config(folder: Path) -> None:
    """config.json as transformers 4 wrote it: torch_dtype, rope_theta and rope_scaling."""
    config = read_json(folder / "config.json")
    changes = {"torch_dtype": config["dtype"], "transformers_version": "4.51.3"}
    if rope := config.get("rope_parameters"):
        theta = rope.pop("rope_theta")
        scaling = None if rope["rope_type"] == "default" else rope
        changes |= {"rope_theta": theta, "rope_scaling": scaling}
    edit_json(folder / "config.json", drop=("dtype", "rope_parameters"), **changes)


# Decoders

ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


def decoder(
    folder: Path,
    family: str,
    suffix: str = "ForCausalLM",
    *,
    tokenizer=None,
    kv_heads: int = 2,
    tied: bool = False,
    rope: str = "default",
    seed: int = 0,
    std: float = 0.5,
    dtype: str = "float32",
    weights: str = "safetensors",
    config_layout: str = "new",
    **config,
) -> Path:
    """Saves family + suffix with 512 positions and the byte-level vocabulary.

    `rope` is a key of ROPES, `weights` as in `store_weights`, `config_layout` "new" or "old".
    """
    tokenizer = tokenizer or tiny_tokenizers.qwen_bpe()
    facts = SIZES | {
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
        "vocab_size": BPE_VOCAB,
        "intermediate_size": 60,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(transformers, f"{family}Config")(**facts | config)
    model = getattr(transformers, family + suffix)(config).eval()
    settle(model, seed, std, getattr(torch, dtype))
    if model.can_generate():
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    store_weights(folder, weights)
    if config_layout == "old":
        old_config(folder)
    return folder


def settle(model: transformers.PreTrainedModel, seed: int, std: float, dtype: torch.dtype) -> None:
    """Random weights in `dtype`, with which greedy generation in float32 meets no near tie."""
    prompts = references.random_prompts(model.config.vocab_size)
    for attempt in range(100):
        randomise(model.float(), seed + attempt, std)
        model.to(dtype).float()
        if not model.can_generate() or references.greedy(model, prompts, 32)[1] > MARGIN:
            model.to(dtype)
            return
    raise AssertionError("no seed gives clear greedy tokens")


@builder
def qwen3(folder: Path, **overrides) -> Path:
    """Qwen3ForCausalLM: q/k norm, head_dim 12 (not D/H)."""
    return decoder(folder, "Qwen3", **{"head_dim": 12} | overrides)


@builder
def qwen2(folder: Path, **overrides) -> Path:
    """Qwen2ForCausalLM: biases on q, k and v; head size D/H = 8."""
    return decoder(folder, "Qwen2", **overrides)


@builder
def llama(folder: Path, **overrides) -> Path:
    """LlamaForCausalLM: no norm and no bias in attention; head_dim 12, <|begin_of_text|> first."""
    facts = {"tokenizer": tiny_tokenizers.llama_bpe(), "head_dim": 12}
    return decoder(folder, "Llama", **facts | overrides)


# Encoders

ENCODER = SIZES | {"intermediate_size": 60}
ROBERTA = ENCODER | {
    "max_position_embeddings": 130,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES = {
    "Bert": (
        ENCODER | {"vocab_size": WORD_VOCAB, "max_position_embeddings": 128},
        tiny_tokenizers.wordpiece,
    ),
    "Roberta": (ROBERTA | {"vocab_size": BPE_VOCAB}, tiny_tokenizers.roberta_bpe),
    "XLMRoberta": (ROBERTA | {"vocab_size": WORD_VOCAB}, tiny_tokenizers.unigram),
}


def old_encoder_name(name: str) -> str:
    """A parameter's name as the first BERT checkpoints had it."""
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def encoder(
    folder: Path,
    family: str,
    suffix: str = "Model",
    *,
    seed: int = 0,
    std: float = 0.18,
    dtype: str = "float32",
    weights: str = "safetensors",
    prefix: str = "",
    gamma: bool = False,
    position_ids: bool = False,
    **config,
) -> Path:
    """Saves family + suffix; `prefix` (of all names), `gamma` and `position_ids` are old habits."""
    defaults, tokenizer = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**defaults | config)
    model = getattr(transformers, family + suffix)(config).eval()
    randomise(model, seed, std)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    extra = {}
    if position_ids:
        ids = torch.arange(config.max_position_embeddings)[None]
        extra[f"{prefix}embeddings.position_ids"] = ids
    rename = old_encoder_name if gamma else str
    rename_weights(folder, lambda name: prefix + rename(name), extra)
    store_weights(folder, weights)
    return folder


@builder
def bert(folder: Path, **overrides) -> Path:
    """BertModel, its unused `pooler` too; `prefix="bert."`, `gamma`, `position_ids` age it."""
    return encoder(folder, "Bert", **overrides)


@builder
def roberta(folder: Path, **overrides) -> Path:
    """RobertaModel: positions begin at 2, 130 of them for 128 tokens; byte-level BPE."""
    return encoder(folder, "Roberta", **overrides)


@builder
def xlm_roberta(folder: Path, **overrides) -> Path:
    """XLMRobertaModel: as `roberta`, with a Unigram tokenizer."""
    return encoder(folder, "XLMRoberta", **overrides)


# Encoders with a head

NER_LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def label_config(labels: int | list[str]) -> dict:
    """Config keys for `labels` classes; a list names them."""
    names = [f"LABEL_{i}" for i in range(labels)] if isinstance(labels, int) else labels
    id2label = dict(enumerate(names))
    return {"id2label": id2label, "label2id": {name: i for i, name in id2label.items()}}


@builder
def bert_classifier(folder: Path, *, labels=1, **overrides) -> Path:
    """BertForSequenceClassification: pooler (dense, tanh), then classifier."""
    return encoder(folder, "Bert", "ForSequenceClassification", **label_config(labels) | overrides)


@builder
def roberta_classifier(folder: Path, *, labels=1, **overrides) -> Path:
    """RobertaForSequenceClassification: classifier.dense, tanh, classifier.out_proj."""
    return encoder(
        folder, "Roberta", "ForSequenceClassification", **label_config(labels) | overrides
    )


@builder
def xlm_roberta_classifier(folder: Path, *, labels=1, **overrides) -> Path:
    """XLMRobertaForSequenceClassification, as bge-reranker-v2-m3."""
    return encoder(
        folder, "XLMRoberta", "ForSequenceClassification", **label_config(labels) | overrides
    )


@builder
def bert_ner(folder: Path, *, labels=NER_LABELS, **overrides) -> Path:
    """BertForTokenClassification with names in id2label."""
    return encoder(folder, "Bert", "ForTokenClassification", **label_config(labels) | overrides)


@builder
def roberta_ner(folder: Path, *, labels=NER_LABELS, **overrides) -> Path:
    """RobertaForTokenClassification with names in id2label."""
    return encoder(folder, "Roberta", "ForTokenClassification", **label_config(labels) | overrides)


MLM_BIAS = ("cls.predictions.bias", "cls.predictions.decoder.bias")
MLM_BIASES = {"predictions": MLM_BIAS[:1], "decoder": MLM_BIAS[1:], "both": MLM_BIAS}


@builder
def bert_mlm(folder: Path, *, tied=True, bias=None, pretraining=False, **overrides) -> Path:
    """BertForMaskedLM; `bias` is a key of MLM_BIASES: the names that hold the decoder's bias.

    By default "predictions" where the decoder is tied, else "both": untied, transformers 5 reads
    cls.predictions.decoder.bias alone, and takes zeros where it is missing.

    `pretraining` adds what BertForPreTraining leaves behind: bert.pooler and cls.seq_relationship.
    """
    weights = overrides.pop("weights", "safetensors")
    encoder(folder, "Bert", "ForMaskedLM", tie_word_embeddings=tied, **overrides)
    tensors = load_file(folder / "model.safetensors")
    used = tensors[MLM_BIAS[0] if tied else MLM_BIAS[1]]
    names = MLM_BIASES[bias or ("predictions" if tied else "both")]
    extra = {name: used.clone() for name in names}
    if pretraining:
        shapes = {"bert.pooler.dense": (32, 32), "cls.seq_relationship": (2, 32)}
        extra |= {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
        extra |= {f"{name}.bias": torch.ones(shape[0]) for name, shape in shapes.items()}
    rename_weights(folder, lambda name: None if name in MLM_BIAS else name, extra)
    store_weights(folder, weights)
    return folder


# Decoders with a head


@builder
def qwen3_reranker(folder: Path, **overrides) -> Path:
    """Qwen3-Reranker as published: a Qwen3ForCausalLM that answers yes or no (single tokens)."""
    tokenizer = tiny_tokenizers.qwen_bpe(max_length=1024)
    facts = {"tokenizer": tokenizer, "max_position_embeddings": 1024, "tied": True}
    return qwen3(folder, **facts | overrides)


@builder
def qwen3_classifier(folder: Path, *, labels=1, **overrides) -> Path:
    """Qwen3ForSequenceClassification, `score` without a bias; as a converted Qwen3-Reranker."""
    facts = {"head_dim": 12} | label_config(labels)
    return decoder(folder, "Qwen3", "ForSequenceClassification", **facts | overrides)


@builder
def qwen2_classifier(folder: Path, *, labels=1, **overrides) -> Path:
    """Qwen2ForSequenceClassification: with one label a sequence-level reward model."""
    return decoder(folder, "Qwen2", "ForSequenceClassification", **label_config(labels) | overrides)


def reward(folder: Path, architecture: str, labels: int, seed: int = 0, **overrides) -> Path:
    """A Qwen2 with the head of Qwen's reward models: score.2(relu(score.0))."""
    qwen2(folder, seed=seed, **overrides)
    head = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, labels)
    )
    randomise(head, seed + 1)
    extra = {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    rename_weights(folder, lambda name: None if name == "lm_head.weight" else name, extra)
    remote = {"AutoModel": f"modeling_qwen2_rm.{architecture}"}
    remote |= {"AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig"}
    facts = {"architectures": [architecture], "auto_map": remote}
    edit_json(folder / "config.json", **facts, **label_config(labels))
    return folder


@builder
def qwen2_reward(folder: Path, **overrides) -> Path:
    """Qwen2ForRewardModel: one raw value per token; the config names remote code (not there)."""
    return reward(folder, "Qwen2ForRewardModel", 1, **overrides)


@builder
def qwen2_process_reward(folder: Path, **overrides) -> Path:
    """Qwen2ForProcessRewardModel: two logits per token, read at the step tag <extra_0>."""
    return reward(folder, "Qwen2ForProcessRewardModel", 2, **overrides)
