"""From what the caller says (EngineConfig) and what the folder says (Checkpoint) to what holds.

Precedence, fact by fact: user, then files, then model class, then the global default. Chapter 06.
"""

import re
import warnings
from dataclasses import replace
from typing import Any

import torch

from nanopool.checkpoint import NOTHING, SETTINGS_FILE, Checkpoint
from nanopool.checks import check_value
from nanopool.config import EngineConfig, ModelConfig, PoolerConfig
from nanopool.convert import check_runner, classifier_rows, file_conversion, find_spec, said
from nanopool.models import convert_spec
from nanopool.pooler.params import POOLING_TASKS, check_dimensions, check_offered, load_activation

CONFIG = "config.json"
DTYPE_NAMES = ("float32", "bfloat16", "float16", "float", "half")
DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
SIGMOID = "torch.nn.modules.activation.Sigmoid"
PROBLEM_TYPES = {
    "regression": "torch.nn.modules.linear.Identity",
    "single_label_classification": "classify",
    "multi_label_classification": SIGMOID,
}
WIDTHS = ("embedding_size", "colbert_dim", "dim", "projection_dim")


def resolve(config: EngineConfig) -> ModelConfig:
    """Every fact about the model, with its source in `sources`.

    Raises ValueError naming the argument or the file, FileNotFoundError where there is no model.
    """
    return Resolver(config, Checkpoint.open(config.model, config.hf_overrides)).resolve()


def to_dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    """A dtype given by itself or by name. Raises ValueError naming the argument `name`."""
    check_value(name, value, (*DTYPES, *dict.fromkeys(DTYPES.values())))
    return DTYPES.get(value, value)


class Resolver:
    """One resolution: collects ModelConfig's fields and where each came from. Chapter 06."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.user = config
        self.pooler = config.pooler_config or PoolerConfig()
        self.files = checkpoint
        self.hf_config = checkpoint.hf_config
        self.spec = find_spec(checkpoint)
        self.facts: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def pick(self, name: str, user=None, files=NOTHING, by_class=None, default=None) -> Any:
        """Sets and returns a fact: the first of four that is not None. `files` is (value, file)."""
        by_class = (by_class, f"class {self.spec.architecture}")
        for value, source in ((user, "user"), files, by_class, (default, "default")):
            if value is not None:
                self.facts[name], self.sources[name] = value, source
                return value
        return None

    def stated(self, name: str) -> Any:
        """What config.json, with `hf_overrides`, says of a key that not every config has."""
        return getattr(self.hf_config, name, None)

    def resolve(self) -> ModelConfig:
        """Raises ValueError as its parts do."""
        self.choose_class()
        self.choose_pooler()
        self.choose_classifier()
        self.choose_embedding()
        self.choose_length()
        self.choose_device()
        self.choose_schedule()
        self.facts |= {"pooler": self.pooler, "sources": self.sources}
        config = ModelConfig(self.files.folder, self.hf_config, self.spec, **self.facts)
        check_dimensions(self.pooler.dimensions, config)
        if self.pooler.task:
            check_offered(self.pooler.task, config)
        return config

    def choose_class(self) -> None:
        """runner, convert, and the spec after the conversion."""
        asked, kind = said(self.user.convert), self.files.kind
        runner = said(self.user.runner) or (asked and "pooling")
        runner = self.pick("runner", runner, (kind and "pooling", "modules.json"), self.spec.runner)
        check_runner(self.user, self.spec, runner)
        if self.files.is_overridden or runner == "generate":
            kind = None
        by_files = file_conversion(kind, self.spec)
        by_class = "none" if runner == self.spec.runner else "embed"
        convert = self.pick("convert", asked, (by_files, "modules.json"), by_class)
        if convert == by_files or convert not in ("none", *self.spec.tasks):
            self.spec = convert_spec(self.spec, convert)
        if kind == "MultiVectorEncoder":
            self.spec = replace(self.spec, tasks=("token_embed",))

    def choose_pooler(self) -> None:
        """Pooling types, flag and step tag (the rest stays the user's), the default task."""
        user, tasks, files = self.pooler, self.spec.tasks, self.files
        found = {
            "seq_pooling_type": NOTHING if user.seq_pooling_type else files.pooling_type(),
            "tok_pooling_type": NOTHING,
            "use_activation": files.normalizes() if "token_embed" in tasks else NOTHING,
            "step_tag_id": NOTHING,
        }
        for name, in_files in found.items():
            self.pick(name, getattr(user, name), in_files, getattr(self.spec, name))
        self.pooler = replace(user, **{name: self.facts.pop(name, None) for name in found})
        offered = next((task for task in POOLING_TASKS if task in tasks), None)
        self.pick("default_task", user.task, by_class=offered)

    def choose_classifier(self) -> None:
        """Labels, activation, and the LM head rows that make the classifier of some rerankers."""
        if not any("classify" in task for task in self.spec.tasks):
            return
        stated = NOTHING if self.spec.num_labels else (self.hf_config.num_labels, CONFIG)
        if rows := classifier_rows(self.files, self.user.tokenizer):
            self.facts["classifier_rows"] = rows
            stated = len(rows[0]), "classifier_rows"
        elif self.files.kind == "CrossEncoder" and (dense := self.files.dense_modules()):
            stated = dense[-1].config["out_features"], dense[-1].file
        elif self.spec.adapter == "MaskedLM":
            stated = self.hf_config.vocab_size, CONFIG
        elif not self.spec.encoder_only:  # transformers takes the last row before the padding
            self.facts["ignored_end"] = self.hf_config.pad_token_id
        labels = self.pick("num_labels", None, stated, self.spec.num_labels)
        if labels == 0 and "classify" in self.spec.tasks:
            warnings.warn("num_labels=0 in config.json: the activation is sigmoid", stacklevel=2)
        problem = self.stated("problem_type")
        check_value("config.json: problem_type", problem, (None, *PROBLEM_TYPES))
        stated = (PROBLEM_TYPES[problem], CONFIG) if problem else self.files.activation_fn()
        default = "classify" if labels else SIGMOID
        if (activation := self.pick("activation", files=stated, default=default)) != "classify":
            load_activation(activation)

    def choose_embedding(self) -> None:
        """Projection, sizes, prompts, SPLADE and ColBERT settings."""
        files, tasks, is_mlm = self.files, self.spec.tasks, self.spec.adapter == "MaskedLM"
        is_asked = "token_embed" in tasks or files.kind == "CrossEncoder"
        dense = files.dense_modules() if is_asked else ()
        default = self.hf_config.vocab_size if is_mlm else self.hf_config.hidden_size
        widths = [(self.stated(name), CONFIG) for name in WIDTHS]
        widths += [(module.config["out_features"], module.file) for module in dense[-1:]]
        widths += [(default, CONFIG)]
        self.pick("embedding_size", files=next(width for width in widths if width[0]))
        self.pick("modules", files=(dense or None, "modules.json"))
        self.pick("splade", files=files.splade(), by_class="max" if is_mlm else None)
        shorter = tuple(self.stated("matryoshka_dimensions") or ()) or None
        self.pick("matryoshka_dimensions", files=(shorter, CONFIG))
        self.pick("matryoshka", files=(self.stated("is_matryoshka"), CONFIG), default=bool(shorter))
        name, prompts = files.settings.get("default_prompt_name"), files.settings.get("prompts")
        prompts = {name: text or "" for name, text in (prompts or {}).items()}
        check_value(f"{SETTINGS_FILE}: default_prompt_name", name, (None, *prompts))
        self.pick("default_prompt_name", files=(name, SETTINGS_FILE))
        self.pick("prompts", files=(prompts or None, SETTINGS_FILE))
        lower = files.backbone.get("do_lower_case"), files.backbone_file
        self.pick("do_lower_case", files=lower, default=False)
        if not self.pick("include_prompt", files=files.include_prompt(), default=True):
            pooling = self.pooler.seq_pooling_type
            check_value("include_prompt=false with seq_pooling_type", pooling, ("MEAN", "LAST"))
        self.facts["chat_template_kwargs"] = files.chat_template_kwargs
        if tasks == ("token_embed",):
            self.facts["multi_vector"] = files.multi_vector()

    def choose_length(self) -> None:
        """max_model_len: the least limit in the files, or less if the user says so; end tokens."""
        limit, file = self.hf_config.max_position_embeddings, CONFIG
        if self.spec.starts_after_padding_idx:
            limit -= self.hf_config.pad_token_id + 1
        stated, source = self.files.length_limit()
        is_asked = self.spec.encoder_only or self.files.modules is not None
        if is_asked and stated is not None and stated < limit:
            limit, file = int(stated), source
        user, longest = self.user.max_model_len, self.pooler.max_embed_len or 0
        if user is not None and user > limit:
            raise ValueError(f"max_model_len={user} is above the limit of {file}: at most {limit}")
        length = self.pick("max_model_len", user, (limit, file))
        if longest > length and not self.pooler.enable_chunked_processing:
            raise ValueError(
                f"max_embed_len={longest} is above max_model_len={length}: "
                "pass enable_chunked_processing=True as well"
            )
        stated = self.files.fact("generation_config.json", "eos_token_id")
        eos = self.pick("eos_token_ids", files=stated, default=self.hf_config.eos_token_id)
        self.facts["eos_token_ids"] = (eos,) if isinstance(eos, int) else tuple(eos or ())

    def choose_device(self) -> None:
        """Device and dtypes; dtype "auto" is float32 on a CPU and never float16."""
        on_cuda = torch.cuda.is_available()
        device = str(said(self.user.device) or ("cuda" if on_cuda else "cpu"))
        if not re.fullmatch(r"(cpu|cuda)(:\d+)?" if on_cuda else "cpu", device):
            raise ValueError(f"device={device!r} is not available: use 'cpu' or 'auto'")
        own = self.stated("dtype") if device != "cpu" else None
        if own == torch.float16:
            own = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        own, asked = (own, CONFIG), said(self.user.dtype)
        dtype = to_dtype("dtype", self.pick("dtype", asked, own, default=torch.float32))
        stated = self.stated("head_dtype"), CONFIG
        head = self.pick("head_dtype", files=stated, default=torch.float32)
        head = dtype if head == "model" else to_dtype("config.json: head_dtype", head)
        self.facts |= {"device": torch.device(device), "dtype": dtype, "head_dtype": head}

    def choose_schedule(self) -> None:
        """Step budget, block size, and two switches that are off for encoders."""
        user, is_encoder, device = self.user, self.spec.encoder_only, self.facts["device"]
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if is_encoder and getattr(user, name):
                warnings.warn(f"{name}=True: encoders have none, it stays off", stacklevel=2)
            self.pick(name, None if is_encoder else getattr(user, name), by_class=not is_encoder)
        budget, block_size = (8192, 256) if device.type == "cuda" else (2048, 16)
        length = self.facts["max_model_len"]
        if not self.facts["enable_chunked_prefill"]:
            budget = max(budget, length)
        budget = self.pick("max_num_batched_tokens", user.max_num_batched_tokens, default=budget)
        if is_encoder and budget < length:
            raise ValueError(
                f"max_num_batched_tokens={budget} is below max_model_len={length}, and an encoder "
                "takes a prompt whole: raise the one or lower the other"
            )
        self.pick("block_size", user.block_size, default=block_size)
