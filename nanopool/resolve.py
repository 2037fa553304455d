"""From what the caller says (EngineConfig) and what the folder says (Checkpoint) to what holds.

Precedence, fact by fact: user, then files, then model class, then the global default. Chapter 06.
"""

import warnings
from dataclasses import replace
from typing import Any

import torch

from nanopool.checkpoint import Checkpoint
from nanopool.checks import check_value
from nanopool.config import EngineConfig, ModelConfig, to_dtype
from nanopool.models import FAMILIES, ModelSpec, convert_spec, spec_for
from nanopool.pooler.params import POOLING_TASKS, PoolerConfig, check_dimensions, load_activation

SIGMOID = "torch.nn.modules.activation.Sigmoid"
PROBLEM_TYPES = {
    "regression": "torch.nn.modules.linear.Identity",
    "single_label_classification": "classify",
    "multi_label_classification": SIGMOID,
}
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
NOTHING = (None, "")


def resolve(config: EngineConfig) -> ModelConfig:
    """Every fact about the model, with its source in `sources`.

    Raises ValueError naming the argument or the file, FileNotFoundError where there is no model.
    """
    checkpoint = Checkpoint.open(config.model, config.hf_overrides)
    return Resolver(config, checkpoint, find_spec(checkpoint)).resolve()


class Resolver:
    """One resolution: collects ModelConfig's fields and where each came from. Chapter 06."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec):
        self.user = config
        self.pooler = config.pooler_config or PoolerConfig()
        self.files = checkpoint
        self.hf_config = checkpoint.hf_config
        self.spec = spec
        self.facts: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def pick(self, name: str, user=None, files=NOTHING, by_class=None, default=None) -> Any:
        """Sets and returns a fact: the first of four that is not None. `files` is (value, file)."""
        by_class = (by_class, f"class {self.spec.architecture}")
        for value, source in ((user, "user"), files, by_class, (default, "default")):
            if value is not None:
                self.facts[name], self.sources[name] = value, source
                return value
        self.facts[name] = None

    def resolve(self) -> ModelConfig:
        """Raises ValueError as its parts do."""
        self.choose_class()
        check_supported(self.hf_config, self.spec)
        self.choose_pooler()
        self.choose_classifier()
        self.choose_embedding()
        self.choose_length()
        self.choose_device()
        self.choose_schedule()
        config = ModelConfig(
            self.files.folder, self.hf_config, self.spec, **self.facts, sources=self.sources
        )
        if self.pooler.dimensions is not None:
            check_dimensions(self.pooler.dimensions, config)
        return config

    def choose_class(self) -> None:
        """runner, convert, and the spec after the conversion."""
        asked, kind = said(self.user.convert), self.files.kind
        runner = said(self.user.runner) or (asked and "pooling")
        runner = self.pick("runner", runner, (kind and "pooling", "modules.json"), self.spec.runner)
        check_runner(self.user, self.spec, runner)
        default = "none" if runner == self.spec.runner else "embed"
        by_files = None if self.files.is_overridden else file_conversion(kind, self.spec)
        by_files = None if runner == "generate" else by_files
        convert = self.pick("convert", asked, (by_files, "modules.json"), default)
        if convert not in ("none", *self.spec.tasks):
            self.spec = convert_spec(self.spec, convert)
        if kind == "multi_vector" and not self.files.is_overridden:
            self.spec = replace(self.spec, tasks=("token_embed",))

    def choose_pooler(self) -> None:
        """Pooling types, flag and step tag (the rest stays the user's), the default task."""
        user, spec, files = self.pooler, self.spec, self.files
        found = {
            "seq_pooling_type": NOTHING if user.seq_pooling_type else files.pooling_type(),
            "tok_pooling_type": NOTHING,
            "use_activation": files.normalizes() if "token_embed" in spec.tasks else NOTHING,
            "step_tag_id": NOTHING,
        }
        for name, in_files in found.items():
            self.pick(name, getattr(user, name), in_files, getattr(spec, name))
        self.pooler = replace(user, **{name: self.facts.pop(name) for name in found})
        self.facts["pooler"] = self.pooler
        if user.task not in (None, *spec.tasks):
            raise ValueError(f"Unsupported task {user.task!r}. Supported tasks: {list(spec.tasks)}")
        order = ("token_classify",) if "ForTokenClassification" in spec.architecture else ()
        offered = [task for task in (*order, *POOLING_TASKS) if task in spec.tasks]
        self.pick("default_task", user.task, by_class=offered[0] if offered else None)

    def choose_classifier(self) -> None:
        """Labels, activation, and the LM head rows that make the classifier of some rerankers."""
        rows = self.facts["classifier_rows"] = self.classifier_rows()
        dense = self.files.dense_modules() if self.files.kind == "classify" else ()
        stated = (len(rows[0]), "classifier_rows") if rows else NOTHING
        if dense:
            stated = dense[-1].config["out_features"], dense[-1].file
        labels = self.hf_config.num_labels
        labels = self.pick("num_labels", None, stated, self.spec.num_labels, labels)
        problem = getattr(self.hf_config, "problem_type", None)
        check_value("problem_type in config.json", problem, (*PROBLEM_TYPES, None))
        stated = (
            (PROBLEM_TYPES.get(problem), "config.json") if problem else self.files.activation_fn()
        )
        if labels == 0 and "classify" in self.spec.tasks:
            warnings.warn("num_labels=0 in config.json: the activation is sigmoid", stacklevel=2)
        default = "classify" if labels else SIGMOID
        if (activation := self.pick("activation", None, stated, None, default)) != "classify":
            load_activation(activation)

    def classifier_rows(self) -> tuple[tuple[int, ...], int | None] | None:
        """(ids added, id subtracted): LM head rows, by LogitScore or by a reranker's hf_overrides.

        Raises ValueError for a method that is not known or has too few tokens.
        """
        facts, score = self.hf_config, self.files.module("LogitScore")
        tokens = getattr(facts, "classifier_from_token", None) or ()
        method = getattr(facts, "method", None)
        if getattr(facts, "is_original_qwen3_reranker", False):
            method = "from_2_way_softmax"
        if score and not tokens:
            return (score.config["true_token_id"],), score.config.get("false_token_id")
        if not tokens and method is None:
            return None
        check_value("method", method, ("from_2_way_softmax", "no_post_processing"))
        if (len(tokens) != 2 and method == "from_2_way_softmax") or not tokens:
            raise ValueError(
                f"classifier_from_token={tokens!r}: {method} needs the tokens for false and true "
                "in hf_overrides, such as ['no', 'yes']"
            )
        ids = self.token_ids(tokens)
        return (ids, None) if method == "no_post_processing" else (ids[1:], ids[0])

    def token_ids(self, tokens: list[str | int]) -> tuple[int, ...]:
        """Tokens as ids. Raises ValueError for a text that is not one token."""
        import transformers

        folder = self.user.tokenizer or self.files.folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        vocab = tokenizer.get_vocab()
        if unknown := [token for token in tokens if token not in vocab and isinstance(token, str)]:
            raise ValueError(f"classifier_from_token={unknown}: not single tokens of the tokenizer")
        return tuple(vocab.get(token, token) for token in tokens)

    def choose_embedding(self) -> None:
        """Projection, sizes, prompts, SPLADE and ColBERT settings."""
        files, config, adapter = self.files, self.hf_config, self.spec.adapter
        projects = "token_embed" in self.spec.tasks or files.kind == "classify"
        dense = self.facts["modules"] = files.dense_modules() if projects else ()
        names, size = ("embedding_size",), config.hidden_size
        if adapter == "ColBERTModel":
            names, size = ("colbert_dim", "dim", "projection_dim"), None
        size = config.vocab_size if adapter == "MaskedLM" else size
        sizes = [value for name in names if (value := getattr(config, name, None))]
        sizes += [module.config["out_features"] for module in reversed(dense)]
        self.facts["embedding_size"] = (*sizes, size)[0]
        self.pick("splade", None, files.splade(), "max" if adapter == "MaskedLM" else None)
        is_multi_vector = self.spec.tasks == ("token_embed",)
        shorter = getattr(config, "matryoshka_dimensions", None) or ()
        prompts, pooling = files.settings.get("prompts") or {}, files.module("Pooling")
        self.facts |= {
            "matryoshka": bool(shorter or getattr(config, "is_matryoshka", False)),
            "matryoshka_dimensions": tuple(shorter) or None,
            "multi_vector": files.multi_vector() if is_multi_vector else None,
            "do_lower_case": bool(files.backbone.get("do_lower_case")),
            "include_prompt": pooling is None or pooling.config.get("include_prompt", True),
            "prompts": {name: text or "" for name, text in prompts.items()},
            "default_prompt_name": files.settings.get("default_prompt_name"),
        }

    def choose_length(self) -> None:
        """max_model_len: the least limit in the files, or less if the user says so; end tokens."""
        limit, file = self.hf_config.max_position_embeddings, "config.json"
        if self.spec.starts_after_padding_idx:
            limit -= self.hf_config.pad_token_id + 1
        stated, source = self.files.length_limit()
        is_asked = self.spec.encoder_only or self.files.modules is not None
        if is_asked and stated is not None and stated < limit:
            limit, file = int(stated), source
        user, longest = self.user.max_model_len, self.pooler.max_embed_len
        if user is not None and user > limit:
            raise ValueError(
                f"max_model_len={user} is above the {limit} of {file}: use at most that"
            )
        length = self.pick("max_model_len", user, (limit, file))
        if longest and longest > length and not self.pooler.enable_chunked_processing:
            raise ValueError(
                f"max_embed_len={longest} is above max_model_len={length}: "
                "pass enable_chunked_processing=True as well"
            )
        stated = self.files.generation.get("eos_token_id"), "generation_config.json"
        eos = self.pick("eos_token_ids", None, stated, None, self.hf_config.eos_token_id)
        self.facts["eos_token_ids"] = (eos,) if isinstance(eos, int) else tuple(eos or ())

    def choose_device(self) -> None:
        """Device and dtypes; dtype "auto" is float32 on a CPU and never float16."""
        has_cuda = torch.cuda.is_available()
        device = torch.device(said(self.user.device) or ("cuda" if has_cuda else "cpu"))
        if device.type not in (("cpu", "cuda") if has_cuda else ("cpu",)):
            raise ValueError(f"device={str(device)!r} is not available: use 'cpu' or 'auto'")
        own = to_dtype("dtype", getattr(self.hf_config, "dtype", None) or torch.float32)
        if own == torch.float16 and has_cuda:
            own = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        own = torch.float32 if device.type == "cpu" else own
        dtype = to_dtype("dtype", self.pick("dtype", said(self.user.dtype), (own, "config.json")))
        stated = getattr(self.hf_config, "head_dtype", None), "config.json"
        head = self.pick("head_dtype", None, stated, None, torch.float32)
        head = dtype if head == "model" else to_dtype("head_dtype", head)
        self.facts |= {"device": device, "dtype": dtype, "head_dtype": head}

    def choose_schedule(self) -> None:
        """Step budget, block size, and two switches that are off for encoders."""
        user, spec, on_cuda = self.user, self.spec, self.facts["device"].type == "cuda"
        for name in SWITCHES:
            asked = getattr(user, name)
            if spec.encoder_only and asked:
                warnings.warn(f"{name}: no effect, {spec.architecture} is an encoder", stacklevel=2)
            self.pick(name, None if spec.encoder_only else asked, NOTHING, not spec.encoder_only)
        length, budget = self.facts["max_model_len"], 8192 if on_cuda else 2048
        if not self.facts["enable_chunked_prefill"]:
            budget = max(budget, length)
        budget = self.pick("max_num_batched_tokens", user.max_num_batched_tokens, default=budget)
        if spec.encoder_only and budget < length:
            raise ValueError(
                f"max_num_batched_tokens={budget} is below max_model_len={length}, and an encoder "
                "takes a prompt whole: raise the one or lower the other"
            )
        self.pick("block_size", user.block_size, default=256 if on_cuda else 16)


def said(value: Any) -> Any:
    """None where an argument leaves the choice to the model."""
    return None if value in ("auto", "none") else value


def find_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The first architecture that nanopool has; BGE-M3 is known by its two extra files.

    Raises ValueError where config.json names none, or an encoder that generates.
    """
    names = checkpoint.hf_config.architectures
    spec = next((spec for name in names or () if (spec := spec_for(name))), None)
    if spec is None or (spec.encoder_only and spec.runner == "generate"):
        raise ValueError(
            f"architectures={names} in config.json: none is supported; families: "
            f"{', '.join(FAMILIES)}; hf_overrides={{'architectures': ['BertModel']}} names another"
        )
    is_bge_m3 = spec.architecture == "XLMRobertaModel" and checkpoint.has_bge_m3_heads
    return spec_for("BgeM3EmbeddingModel") if is_bge_m3 and not checkpoint.is_overridden else spec


def file_conversion(kind: str | None, spec: ModelSpec) -> str | None:
    """What modules.json makes of the class; None where it already is that. Raises ValueError."""
    if kind == "splade" and spec.adapter != "MaskedLM":
        raise ValueError(f"modules.json: SpladePooling needs a MaskedLM, not {spec.architecture}")
    if kind in (None, "splade", "classify"):
        return "classify" if kind == "classify" else None
    return None if spec.adapter in ("EmbeddingModel", "BgeM3Model") else "embed"


def check_runner(user: EngineConfig, spec: ModelSpec, runner: str) -> None:
    """Raises ValueError where the class cannot be run or converted as the caller says."""
    name, convert = spec.architecture, f"convert={user.convert!r}"
    if runner == "generate" and spec.runner == "pooling":
        raise ValueError(f"Embedding models do not support runner='generate': {name} only pools")
    if runner == "generate" and (said(user.convert) or user.pooler_config):
        raise ValueError(f"{name}: {convert} or a pooler_config needs runner='pooling'")
    if runner != spec.runner and user.convert == "none":
        raise ValueError(
            f"{name} does not support runner='pooling': pass convert='embed' or 'classify'"
        )
    if spec.runner == "pooling" and said(user.convert) not in (None, *spec.tasks):
        raise ValueError(
            f"{convert}: {name} already is a pooling model, for {list(spec.tasks)}; "
            "hf_overrides={'architectures': [...]} loads its backbone as another class"
        )


def check_supported(hf_config: Any, spec: ModelSpec) -> None:
    """Raises ValueError for what a config asks of a model and nanopool does not do."""
    wanted = {"quantization_config": None, "position_embedding_type": "absolute"}
    wanted |= {"is_decoder": False} if spec.encoder_only else {"is_causal": True}
    wanted |= {"add_cross_attention": False}
    for name, value in wanted.items():
        if (found := getattr(hf_config, name, None)) not in (None, value):
            raise ValueError(f"{name}={found!r} in config.json is not supported: only {value!r}")
    if {*(getattr(hf_config, "layer_types", None) or ())} - {"full_attention"}:
        raise ValueError(f"layer_types={hf_config.layer_types} in config.json: only full_attention")
