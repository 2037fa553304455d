"""What the caller says (EngineConfig, SamplingParams), what was resolved (ModelConfig). Chapter 06.

On the ground floor: every part of the package may read these. Nothing here reads a file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanopool.checks import check_fields, check_fraction, check_value, freeze_ids
from nanopool.pooler.params import SEQ_POOLING_TYPES, CommonParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanopool.checkpoint import STModule
    from nanopool.models import ModelSpec
    from nanopool.multi_vector import MultiVectorConfig

DTYPES = ("float32", "bfloat16", "float16", "float", "half")


def to_dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    """A dtype given by itself or by name. Raises ValueError naming the argument `name`."""
    if isinstance(value, str):
        check_value(name, value, DTYPES)
        value = getattr(torch, value)
    check_value(name, value, (torch.float32, torch.bfloat16, torch.float16))
    return value


@dataclass(frozen=True)
class SamplingParams:
    """How one generate request picks its tokens; read by the sampler and the scheduler. Chapter 07.

    `temperature` 0 is greedy, `top_k` 0 is off. Raises ValueError for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)  # vLLM: -1 is off
        rules = {"temperature": 0.0, "top_k": 0, "max_tokens": 1, "ignore_eos": bool, "seed": 0}
        check_fields(self, rules)
        check_fraction("top_p", self.top_p)
        freeze_ids(self, "stop_token_ids")


@dataclass(frozen=True, kw_only=True)
class PoolerConfig(CommonParams):
    """What the caller says about the model's pooler and, after `resolve`, what holds. Chapter 11.

    `pooling_type` is a shortcut that moves into `seq_pooling_type` or `tok_pooling_type`.
    Raises ValueError for unknown or removed names and for a `logit_sigma` of 0.
    """

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    enable_flash_late_interaction: bool = True

    def __post_init__(self, normalize: Any, softmax: Any):
        super().__post_init__(normalize, softmax)
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma=0.0 would divide by zero: None leaves logits as they are")
        if self.pooling_type is None:
            return
        if self.seq_pooling_type or self.tok_pooling_type:
            raise ValueError(
                f"pooling_type={self.pooling_type!r} is a shortcut: give it alone, or use "
                "seq_pooling_type and tok_pooling_type"
            )
        target = "seq" if self.pooling_type in SEQ_POOLING_TYPES else "tok"
        object.__setattr__(self, f"{target}_pooling_type", self.pooling_type)
        object.__setattr__(self, "pooling_type", None)


@dataclass(frozen=True)
class EngineConfig:
    """The keyword arguments of LLM, checked; resolve.py makes a ModelConfig of it. Chapter 06.

    None means "the model and the machine decide". It pickles, for ranks that are processes,
    unless `hf_overrides` is a callable that does not. Raises ValueError naming the argument.
    """

    model: str | Path
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: PoolerConfig | None = None
    hf_overrides: "dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig] | None" = None
    tokenizer: str | Path | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    block_size: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    tp_backend: str | None = None
    seed: int = 0

    def __post_init__(self):
        check_fields(self, ENGINE_RULES)
        check_fraction("gpu_memory_utilization", self.gpu_memory_utilization)


ENGINE_RULES = {
    "model": str | Path,
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed", "classify"),
    "pooler_config": PoolerConfig,
    "hf_overrides": dict | Callable,
    "tokenizer": str | Path,
    "dtype": str | torch.dtype,
    "device": str | torch.device,
    "tp_backend": ("thread", "process"),
    "seed": 0,
}
SIZES = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_kv_blocks")
ENGINE_RULES |= dict.fromkeys((*SIZES, "tensor_parallel_size"), 1)
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager")
ENGINE_RULES |= dict.fromkeys(SWITCHES, bool)


@dataclass(frozen=True)
class ModelConfig:
    """Every resolved fact about a model; made once by resolve.py, read everywhere. Chapter 06.

    `sources` says where a fact came from: "user", a file, "class BertModel" or "default".
    """

    folder: Path
    hf_config: "PretrainedConfig"
    spec: "ModelSpec"
    runner: str
    convert: str
    device: torch.device
    dtype: torch.dtype
    head_dtype: torch.dtype
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    pooler: PoolerConfig
    num_labels: int
    activation: str  # a class of torch.nn, or "classify": sigmoid for one label, else softmax
    default_task: str | None = None
    classifier_rows: tuple[tuple[int, ...], int | None] | None = None  # of the LM head: (+, -)
    modules: "tuple[STModule, ...]" = ()  # the Dense modules, in order
    embedding_size: int = 0
    matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] | None = None
    splade: str | None = None  # "max" or "sum" over the tokens
    multi_vector: "MultiVectorConfig | None" = None
    do_lower_case: bool = False
    include_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] | None = None  # None: pairs do not go through it
    default_prompt_name: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Folder and class, then a line for each fact: name, value, source."""
        facts = vars(self.pooler) | vars(self)
        lines = (f"  {name} = {facts[name]!r}  ({file})" for name, file in self.sources.items())
        return "\n".join((f"{self.folder} as {self.spec.architecture}", *lines))

    @property
    def is_encoder_only(self) -> bool:
        return self.spec.encoder_only
