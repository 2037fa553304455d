"""What a pooling request and a pooler may be told, and which of it goes together. Chapter 11.

On the ground floor: config.py, llm.py and the poolers use it.
"""

from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from nanopool.checks import Natural, Positive, TokenIds, check_fields, check_value

if TYPE_CHECKING:
    from nanopool.config import ModelConfig

SEQUENCE_TASKS = ("embed", "classify")  # one row a request
REMOVED_TASKS = {"score": "'classify'", "encode": "'token_embed' or 'token_classify'"}
SeqPoolingType, TokPoolingType = Literal["CLS", "LAST", "MEAN"], Literal["ALL", "STEP"]

LATE_PARAMS = {"late_chunking_params", "late_interaction_params"}
STEP_PARAMS = {"step_tag_id", "returned_token_ids"}
ALLOWED_PARAMS = {
    "embed&token_classify": {"use_activation"},
    "embed": {"use_activation", "dimensions"},
    "classify": {"use_activation"},
    "token_embed": {"use_activation", "dimensions", "step_tag_id", *LATE_PARAMS},
    "token_classify": {"use_activation", *STEP_PARAMS},
    "plugin": set(),  # every pooling model offers it: hidden rows as they are
}
POOLING_TASKS = (*ALLOWED_PARAMS,)  # a model that offers several has the first as its default


def check_task(task: str | None) -> None:
    """Raises ValueError for a removed task, naming its replacement, and for an unknown one."""
    if str(task) in REMOVED_TASKS:
        raise ValueError(f"task={task!r} was removed: use {REMOVED_TASKS[task]}")
    check_value("task", task, (*POOLING_TASKS, None))


@dataclass(frozen=True)
class LateChunkingParams:
    """Late chunking of one `token_embed` request: means of `chunk_size` rows. Chapter 18."""

    chunk_size: Positive

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True)
class LateInteractionParams:
    """A `token_embed` request as a part of MaxSim: a query to keep or a document. Chapter 17."""

    mode: Literal["cache_query", "score_doc"]
    query_key: str
    query_uses: Positive | None = None

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class CommonParams:
    """What a request may ask for and a PoolerConfig may set as the default. Chapter 11.

    Raises ValueError for values that no model takes, and for the removed names, which are
    parameters only so that the message can say what to use.
    """

    task: str | None = None
    use_activation: bool | None = None
    dimensions: Positive | None = None
    step_tag_id: Natural | None = None
    returned_token_ids: TokenIds | None = None
    normalize: InitVar[Any] = None
    softmax: InitVar[Any] = None

    def __post_init__(self, normalize: Any, softmax: Any):
        for name, value in (("normalize", normalize), ("softmax", softmax)):
            if value is not None:
                raise ValueError(f"{name}={value!r} was removed: use use_activation={value!r}")
        check_task(self.task)
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PoolingParams(CommonParams):
    """What one pooling request asks for. Chapter 11.

    The caller gives the fields up to `output_kind`, the engine fills those after it.
    """

    late_chunking_params: LateChunkingParams | None = None
    late_interaction_params: LateInteractionParams | None = None
    extra_kwargs: Literal[None] = None
    output_kind: Literal["FINAL_ONLY"] = "FINAL_ONLY"
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    prompt_prefix_len: Natural = 0  # rows of the prompt's prefix that MEAN leaves out
    skip_token_ids: TokenIds = ()  # tokens whose rows ColBERT drops

    def __post_init__(self, normalize: Any, softmax: Any):
        super().__post_init__(normalize, softmax)
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
        pooler, allowed = config.pooler, ALLOWED_PARAMS[task]
        if pooler.tok_pooling_type != "STEP":
            allowed = allowed - STEP_PARAMS
        others = set.union(*ALLOWED_PARAMS.values()) - allowed
        if refused := sorted(name for name in others if getattr(self, name) is not None):
            method = pooler.seq_pooling_type if task in SEQUENCE_TASKS else pooler.tok_pooling_type
            raise ValueError(
                f"task={task!r} with {method} pooling only supports {sorted(allowed)} parameters, "
                f"does not support {refused}"
            )
        check_dimensions(self.dimensions, config)
        filled = {n: getattr(pooler, n) for n in allowed - LATE_PARAMS if getattr(self, n) is None}
        may_read = reads_prefix_cache(task, config) and not self.skip_reading_prefix_cache
        resolved = replace(self, task=task, skip_reading_prefix_cache=not may_read, **filled)
        check_ids(resolved, config)
        return resolved


def check_ids(params: PoolingParams, config: "ModelConfig") -> None:
    """Raises ValueError for a step tag that is no token, or a column that is no label."""
    if params.step_tag_id not in (None, config.spec.step_tag_id):
        check_value("step_tag_id", params.step_tag_id, range(config.hf_config.vocab_size))
    for column in params.returned_token_ids or ():
        check_value("returned_token_ids", column, range(config.num_labels))


def check_offered(task: str, config: "ModelConfig") -> None:
    """Raises ValueError unless the model pools and its class offers `task`."""
    check_task(task)
    if config.runner != "pooling":
        raise ValueError(f"task={task!r} needs a pooling model: use LLM(..., runner='pooling')")
    if task not in (*config.spec.tasks, "plugin"):
        raise ValueError(
            f"Unsupported task {task!r}. Supported tasks: {list(config.spec.tasks)}; a decoder "
            "offers others with convert='embed' or, if it has a trained head, convert='classify'"
        )


def check_dimensions(dimensions: int | None, config: "ModelConfig") -> None:
    """Raises ValueError unless the model was trained for vectors of `dimensions` (Matryoshka)."""
    if dimensions is None:
        return
    if not config.matryoshka:
        raise ValueError(
            f"dimensions={dimensions}: the model's config.json does not say that it was trained "
            "for shorter vectors (Matryoshka); hf_overrides={'is_matryoshka': True} says so"
        )
    known = config.matryoshka_dimensions or range(1, config.embedding_size + 1)
    if dimensions not in known:
        raise ValueError(f"dimensions={dimensions}: the model offers one of {known}")


def reads_prefix_cache(task: str, config: "ModelConfig") -> bool:
    """Whether a request may skip rows that an earlier one computed: only LAST needs no others."""
    is_causal = not config.spec.encoder_only
    return is_causal and task in SEQUENCE_TASKS and config.pooler.seq_pooling_type == "LAST"


def load_activation(path: str) -> torch.nn.Module:
    """The activation whose full class name a file gives, as torch.nn.modules.activation.Tanh.

    Raises ValueError unless it is a class of `torch.nn.modules.` that needs no arguments.
    """
    name = path.rpartition(".")[2]
    cls = getattr(torch.nn, name, torch.nn.Module)
    with suppress(TypeError):
        if f"{cls.__module__}.{name}" == path and path.startswith("torch.nn.modules."):
            return cls(dim=-1) if name == "Softmax" else cls()
    raise ValueError(
        f"activation {path!r} is not a class of torch.nn.modules. that needs no arguments: "
        "change the file that names it, no other code is loaded"
    )
