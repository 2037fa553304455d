"""What a pooling request and a pooler may be told, and which of it goes together. Chapter 11.

On the ground floor: config.py, llm.py and the poolers use it.
"""

from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanopool.checks import check_fields, check_value, freeze_ids

if TYPE_CHECKING:
    from nanopool.config import ModelConfig

# In the order in which a model that offers several picks its default.
POOLING_TASKS = ("embed&token_classify", "embed", "classify", "token_embed", "token_classify")
REMOVED_TASKS = {"score": "'classify'", "encode": "'token_embed' or 'token_classify'"}
SCORE_TYPES = {
    "embed": "bi-encoder",
    "classify": "cross-encoder",
    "token_embed": "late-interaction",
}
SEQ_POOLING_TYPES, TOK_POOLING_TYPES = ("CLS", "LAST", "MEAN"), ("ALL", "STEP")

LATE_PARAMS = frozenset({"late_chunking_params", "late_interaction_params"})
STEP_PARAMS = frozenset({"step_tag_id", "returned_token_ids"})
MODEL_PARAMS = LATE_PARAMS | STEP_PARAMS | {"dimensions", "use_activation"}
ALLOWED_PARAMS = {
    "embed&token_classify": frozenset({"use_activation"}),
    "embed": frozenset({"use_activation", "dimensions"}),
    "classify": frozenset({"use_activation"}),
    "token_embed": LATE_PARAMS | {"use_activation", "dimensions", "step_tag_id"},
    "token_classify": STEP_PARAMS | {"use_activation"},
}
COMMON_RULES = {"use_activation": bool, "dimensions": 1, "step_tag_id": 0}


def check_task(task: str | None) -> None:
    """Raises ValueError for a removed task, naming its replacement, and for an unknown one."""
    if task in REMOVED_TASKS:
        raise ValueError(f"task={task!r} was removed: use {REMOVED_TASKS[task]}")
    check_value("task", task, (*POOLING_TASKS, None))


def check_removed_names(**given: Any) -> None:
    """Raises ValueError where one of the old names of `use_activation` was given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} was removed: use use_activation={value!r}")


@dataclass(frozen=True)
class LateChunkingParams:
    """Late chunking of one `token_embed` request: means of `chunk_size` rows. Chapter 18."""

    chunk_size: int

    def __post_init__(self):
        check_fields(self, {"chunk_size": 1})


@dataclass(frozen=True)
class LateInteractionParams:
    """A `token_embed` request as a part of MaxSim: a query to keep or a document. Chapter 17."""

    mode: str
    query_key: str
    query_uses: int | None = None

    def __post_init__(self):
        rules = {"mode": ("cache_query", "score_doc"), "query_key": str, "query_uses": 1}
        check_fields(self, rules)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """What the caller says about the model's pooler and, after `resolve`, what holds. Chapter 11.

    `pooling_type` is a shortcut that moves into `seq_pooling_type` or `tok_pooling_type`.
    Raises ValueError for unknown or removed names and for a `logit_sigma` of 0.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    enable_flash_late_interaction: bool = True
    normalize: InitVar[Any] = None
    softmax: InitVar[Any] = None

    def __post_init__(self, normalize, softmax):
        check_removed_names(normalize=normalize, softmax=softmax)
        check_task(self.task)
        check_fields(self, COMMON_RULES | POOLER_RULES)
        freeze_ids(self, "returned_token_ids")
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma=0 would divide by zero: use None to leave logits as is")
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


POOLER_RULES = {
    "pooling_type": SEQ_POOLING_TYPES + TOK_POOLING_TYPES,
    "seq_pooling_type": SEQ_POOLING_TYPES,
    "tok_pooling_type": TOK_POOLING_TYPES,
    "logit_mean": float("-inf"),
    "logit_sigma": float("-inf"),
    "enable_chunked_processing": bool,
    "max_embed_len": 1,
    "enable_flash_late_interaction": bool,
}


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What one pooling request asks for. Chapter 11.

    The caller gives the fields up to `output_kind`, the engine fills those after it.
    Raises ValueError for removed names and for values that no model takes.
    """

    task: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    late_chunking_params: LateChunkingParams | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: None = None
    output_kind: str = "FINAL_ONLY"
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    prompt_prefix_len: int = 0  # rows of the prompt's prefix that MEAN leaves out
    normalize: InitVar[Any] = None
    softmax: InitVar[Any] = None

    def __post_init__(self, normalize, softmax):
        check_removed_names(normalize=normalize, softmax=softmax)
        check_task(self.task)
        check_fields(self, COMMON_RULES | PARAMS_RULES)
        freeze_ids(self, "returned_token_ids")
        if self.late_chunking_params and (self.dimensions or self.late_interaction_params):
            raise ValueError(
                f"late_chunking_params={self.late_chunking_params} cannot be combined with "
                "dimensions or late_interaction_params: leave one of them out"
            )

    def resolve(self, task: str, config: "ModelConfig") -> "PoolingParams":
        """These parameters for `task`: verified, and filled from PoolerConfig, then True.

        Raises ValueError where this model does not offer the task, or the task does not take a
        parameter that was given.
        """
        check_offered(task, config)
        pooler = config.pooler
        allowed = ALLOWED_PARAMS[task]
        if pooler.tok_pooling_type != "STEP":
            allowed -= STEP_PARAMS
        if refused := sorted(
            name for name in MODEL_PARAMS - allowed if getattr(self, name) is not None
        ):
            hint = (
                "; step parameters need tok_pooling_type='STEP'" if STEP_PARAMS & {*refused} else ""
            )
            raise ValueError(
                f"task={task!r} only supports {sorted(allowed)} parameters, "
                f"does not support {refused}{hint}"
            )
        if self.dimensions is not None:
            check_dimensions(self.dimensions, config)
        filled = {n: getattr(pooler, n) for n in allowed - LATE_PARAMS if getattr(self, n) is None}
        if self.skip_reading_prefix_cache is None:
            filled["skip_reading_prefix_cache"] = not reads_prefix_cache(task, config)
        return replace(self, task=task, **filled)


PARAMS_RULES = {
    "late_chunking_params": LateChunkingParams,
    "late_interaction_params": LateInteractionParams,
    "extra_kwargs": (None,),
    "output_kind": ("FINAL_ONLY",),
}


def check_offered(task: str, config: "ModelConfig") -> None:
    """Raises ValueError unless the model pools and its class offers `task`."""
    check_task(task)
    if config.runner != "pooling":
        raise ValueError(f"task={task!r} needs a pooling model: use LLM(..., runner='pooling')")
    if task not in config.spec.tasks:
        convert = "classify" if "classify" in task else "embed"
        raise ValueError(
            f"Unsupported task {task!r}. Supported tasks: {list(config.spec.tasks)}; "
            f"LLM(..., convert={convert!r}) makes a decoder offer it"
        )


def check_dimensions(dimensions: int, config: "ModelConfig") -> None:
    """Raises ValueError unless the model was trained for vectors of `dimensions` (Matryoshka)."""
    known, size = config.matryoshka_dimensions, config.embedding_size
    if not config.matryoshka:
        raise ValueError(
            f"dimensions={dimensions}: the model's config.json does not say that it was trained "
            "for shorter vectors (Matryoshka); hf_overrides={'is_matryoshka': True} says so"
        )
    if dimensions not in (known or range(1, (size or dimensions) + 1)):
        raise ValueError(
            f"dimensions={dimensions}: the model offers {list(known) if known else f'1 to {size}'}"
        )


def reads_prefix_cache(task: str, config: "ModelConfig") -> bool:
    """Whether a request may skip rows that an earlier one computed: only LAST needs no others."""
    if task not in ("embed", "classify") or config.spec.encoder_only:
        return False
    return config.pooler.seq_pooling_type == "LAST"


def load_activation(path: str) -> torch.nn.Module:
    """The activation whose full class name a file gives, as torch.nn.modules.activation.Tanh.

    Raises ValueError unless it is a class of `torch.nn.modules.` that needs no arguments.
    """
    name = path.rpartition(".")[2]
    cls = getattr(torch.nn, name, torch.nn.Module)
    try:
        if f"{cls.__module__}.{name}" == path and path.startswith("torch.nn.modules."):
            return cls(dim=-1) if name == "Softmax" else cls()
    except TypeError as error:
        raise ValueError(f"activation {path!r} needs arguments: no file can give them") from error
    raise ValueError(
        f"activation {path!r} is not a class of torch.nn.modules.: no other code is loaded, "
        "change the file that names it"
    )
