"""What the caller says (EngineConfig, SamplingParams), what was resolved (ModelConfig). Chapter 06.

On the ground floor: every part of the package may read these. Nothing here reads a file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import torch

from nanopool.checks import Natural, Number, Positive, TokenIds, check_fields, check_fraction
from nanopool.pooler.params import CommonParams, SeqPoolingType, TokPoolingType

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanopool.checkpoint import STModule
    from nanopool.models import ModelSpec
    from nanopool.multi_vector import MultiVectorConfig


ClassifierRows = tuple[tuple[int, ...], int | None]  # of an LM head: (added, subtracted)


@dataclass(frozen=True)
class SamplingParams:
    """How one generate request picks its tokens; read by the sampler and the scheduler. Chapter 07.

    `temperature` 0 is greedy, `top_k` 0 is off. Raises ValueError for values out of range.
    """

    temperature: Annotated[float, 0.0] = 1.0
    top_p: Number = 1.0
    top_k: Natural = 0
    max_tokens: Positive = 16
    ignore_eos: bool = False
    stop_token_ids: TokenIds | None = None
    seed: Natural | None = None

    def __post_init__(self):
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)  # vLLM: -1 is off
        check_fields(self)
        check_fraction("top_p", self.top_p)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig(CommonParams):
    """What the caller says about the model's pooler and, after `resolve`, what holds. Chapter 11.

    `pooling_type` is a shortcut that moves into `seq_pooling_type` or `tok_pooling_type`.
    Raises ValueError for unknown or removed names and for a `logit_sigma` of 0.
    """

    pooling_type: Literal[SeqPoolingType, TokPoolingType] | None = None
    seq_pooling_type: SeqPoolingType | None = None
    tok_pooling_type: TokPoolingType | None = None
    logit_mean: Number | None = None
    logit_sigma: Number | None = None
    enable_chunked_processing: bool = False
    max_embed_len: Positive | None = None
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
        target = "seq" if self.pooling_type in get_args(SeqPoolingType) else "tok"
        object.__setattr__(self, f"{target}_pooling_type", self.pooling_type)
        object.__setattr__(self, "pooling_type", None)


@dataclass(frozen=True)
class EngineConfig:
    """The keyword arguments of LLM, checked; resolve.py makes a ModelConfig of it. Chapter 06.

    None means "the model and the machine decide". It pickles, for ranks that are processes,
    unless `hf_overrides` is a callable that does not. Raises ValueError naming the argument.
    """

    model: str | Path
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    pooler_config: PoolerConfig | None = None
    hf_overrides: dict | Callable | None = None  # a callable takes and returns the config
    tokenizer: str | Path | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    max_model_len: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    max_num_seqs: Positive = 256
    block_size: Positive | None = None
    num_kv_blocks: Positive | None = None
    gpu_memory_utilization: Number = 0.9
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    enforce_eager: bool = False
    tensor_parallel_size: Positive = 1
    tp_backend: Literal["thread", "process"] | None = None
    seed: Natural = 0

    def __post_init__(self):
        check_fields(self)
        check_fraction("gpu_memory_utilization", self.gpu_memory_utilization)


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
    num_labels: int = 0
    activation: str = "classify"  # sigmoid for one label, else softmax; or a class of torch.nn
    default_task: str | None = None
    ignored_end: int | None = None  # a token whose rows at the end do not classify
    classifier_rows: ClassifierRows | None = None
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
    def head_dim(self) -> int:
        """d: a decoder's config may name it, else it is D / H."""
        hf = self.hf_config
        return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
