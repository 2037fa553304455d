"""PoolingParams and PoolerConfig: what goes together, what was removed, who wins. Chapter 11."""

import json
import pickle
import re
from dataclasses import replace

import pytest

from nanopool.config import EngineConfig, PoolerConfig
from nanopool.pooler.params import (
    ALLOWED_PARAMS,
    POOLING_TASKS,
    LateChunkingParams,
    LateInteractionParams,
    PoolingParams,
    load_activation,
)
from nanopool.resolve import resolve

VALUES = {
    "use_activation": False,
    "dimensions": 8,
    "step_tag_id": 5,
    "returned_token_ids": (0, 1),
    "late_chunking_params": LateChunkingParams(4),
    "late_interaction_params": LateInteractionParams("score_doc", "key"),
}
ALLOWED = {
    "embed&token_classify": ["use_activation"],
    "embed": ["use_activation", "dimensions"],
    "classify": ["use_activation"],
    "token_embed": ["use_activation", "dimensions", "step_tag_id"],
    "token_classify": ["use_activation", "step_tag_id", "returned_token_ids"],
    "plugin": [],
}
ALLOWED["token_embed"] += ["late_chunking_params", "late_interaction_params"]
STEP_PARAMS = ("step_tag_id", "returned_token_ids")


@pytest.fixture
def model(tmp_path):
    """model(**facts) -> the ModelConfig of a Matryoshka decoder as an embedder, facts replaced."""
    content = {"architectures": ["LlamaModel"], "model_type": "llama", "hidden_size": 64}
    content |= {"matryoshka_dimensions": [8, 16, 64]}
    (tmp_path / "config.json").write_text(json.dumps(content))

    def get(tasks=POOLING_TASKS, **facts):
        pooler = {k: facts.pop(k) for k in PoolerConfig.__dataclass_fields__ if k in facts}
        config = resolve(EngineConfig(tmp_path, pooler_config=PoolerConfig(**pooler)))
        spec = replace(config.spec, tasks=tasks, encoder_only=facts.pop("encoder_only", False))
        return replace(config, spec=spec, **{"num_labels": 3} | facts)

    return get


def refuses(text):
    return pytest.raises(ValueError, match=re.escape(text))


# Which parameter goes with which task


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("tok_pooling_type", ["ALL", "STEP"])
@pytest.mark.parametrize("task", POOLING_TASKS)
def test_matrix(task, tok_pooling_type, name, model):
    config = model(tok_pooling_type=tok_pooling_type)
    params = PoolingParams(**{name: VALUES[name]})
    allowed = name in ALLOWED[task] and (tok_pooling_type == "STEP" or name not in STEP_PARAMS)
    if allowed:
        resolved = params.resolve(task, config)
        assert (resolved.task, getattr(resolved, name)) == (task, VALUES[name])
        return
    with refuses(f"does not support ['{name}']") as error:
        params.resolve(task, config)
    method = "LAST" if task in ("embed", "classify") else tok_pooling_type
    assert f"task='{task}' with {method} pooling" in str(error.value)


def test_the_matrix_is_the_code_s():
    assert {task: set(names) for task, names in ALLOWED.items()} == ALLOWED_PARAMS


@pytest.mark.parametrize("cls", [PoolingParams, PoolerConfig])
@pytest.mark.parametrize(
    ("arguments", "replacement"),
    [
        ({"task": "score"}, "use 'classify'"),
        ({"task": "encode"}, "use 'token_embed' or 'token_classify'"),
        ({"normalize": True}, "use_activation=True"),
        ({"normalize": False}, "use_activation=False"),
        ({"softmax": False}, "use_activation=False"),
    ],
)
def test_removed_names(cls, arguments, replacement):
    with refuses(replacement) as error:
        cls(**arguments)
    ((name, value),) = arguments.items()
    assert f"{name}={value!r} was removed" in str(error.value)


@pytest.mark.parametrize("task", ["score", "encode"])
def test_removed_tasks_of_a_request(task, model):
    with refuses("was removed"):
        PoolingParams().resolve(task, model())


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError, match="normalise"):
        PoolingParams(normalise=True)
    with pytest.raises(TypeError, match="pooling"):
        PoolerConfig(pooling="MEAN")


BAD_COMMON = [
    ("task", "embedding"),
    ("use_activation", 1),
    ("use_activation", "yes"),
    ("dimensions", 0),
    ("dimensions", True),
    ("dimensions", 8.0),
    ("step_tag_id", -1),
    ("step_tag_id", "<extra_0>"),
    ("returned_token_ids", 3),
    ("returned_token_ids", "01"),
    ("returned_token_ids", (0, -1)),
]
BAD_REQUESTS = [
    ("extra_kwargs", {}),
    ("output_kind", "DELTA"),
    ("late_chunking_params", 4),
    ("late_chunking_params", {"chunk_size": 4}),
    ("late_interaction_params", "score_doc"),
]
BAD_POOLERS = [
    ("pooling_type", "MAX"),
    ("pooling_type", "cls"),
    ("seq_pooling_type", "ALL"),
    ("tok_pooling_type", "MEAN"),
    ("logit_mean", "0"),
    ("logit_sigma", 0.0),
    ("logit_sigma", True),
    ("max_embed_len", 0),
    ("enable_chunked_processing", None),
    ("enable_flash_late_interaction", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_REQUESTS)
def test_bad_requests(name, value):
    with refuses(f"{name}="):
        PoolingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD_COMMON + BAD_POOLERS)
def test_bad_poolers(name, value):
    with refuses(f"{name}="):
        PoolerConfig(**{name: value})


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "4", None])
def test_bad_chunk_size(size):
    with refuses(f"chunk_size={size!r}"):
        LateChunkingParams(size)


@pytest.mark.parametrize("arguments", [("cache", "key"), ("score_doc", 3), ("cache_query", "k", 0)])
def test_bad_late_interaction(arguments):
    with pytest.raises(ValueError, match=r"mode=|query_key=|query_uses="):
        LateInteractionParams(*arguments)


def test_late_chunking_stands_alone():
    chunks, document = LateChunkingParams(4), LateInteractionParams("score_doc", "key")
    with refuses("cannot be combined"):
        PoolingParams(late_chunking_params=chunks, dimensions=8)
    with refuses("cannot be combined"):
        PoolingParams(late_chunking_params=chunks, late_interaction_params=document)


# Tasks that are offered


def test_task_not_offered(model):
    with refuses("Unsupported task 'classify'. Supported tasks: ['embed', 'token_embed']") as error:
        PoolingParams().resolve("classify", model(tasks=("embed", "token_embed")))
    assert "convert='classify'" in str(error.value)


def test_no_pooling_task_on_a_generator(model):
    with refuses("runner='pooling'"):
        PoolingParams().resolve("embed", model(runner="generate"))


# Dimensions


@pytest.mark.parametrize("dimensions", [8, 16, 64])
def test_dimensions_of_the_list(dimensions, model):
    assert PoolingParams(dimensions=dimensions).resolve("embed", model()).dimensions == dimensions


@pytest.mark.parametrize("dimensions", [1, 32, 65])
def test_dimensions_outside_the_list(dimensions, model):
    with refuses(f"dimensions={dimensions}: the model offers one of (8, 16, 64)"):
        PoolingParams(dimensions=dimensions).resolve("token_embed", model())


def test_dimensions_without_a_list(model):
    config = model(matryoshka_dimensions=None)
    assert PoolingParams(dimensions=1).resolve("embed", config).dimensions == 1
    assert PoolingParams(dimensions=64).resolve("embed", config).dimensions == 64
    with refuses("dimensions=65"):
        PoolingParams(dimensions=65).resolve("embed", config)


def test_dimensions_of_a_model_that_was_not_trained_for_them(model):
    with refuses("hf_overrides={'is_matryoshka': True}"):
        PoolingParams(dimensions=8).resolve("embed", model(matryoshka=False))


# Request over PoolerConfig over the default

MERGES = [
    (None, None, True),
    (None, False, False),
    (None, True, True),
    (True, False, True),
    (False, True, False),
    (False, None, False),
]


@pytest.mark.parametrize(("asked", "configured", "expected"), MERGES)
@pytest.mark.parametrize("task", [task for task in POOLING_TASKS if task != "plugin"])
def test_use_activation(task, asked, configured, expected, model):
    params = PoolingParams(use_activation=asked).resolve(task, model(use_activation=configured))
    assert params.use_activation is expected


def test_other_defaults_of_the_pooler(model):
    config = model(dimensions=16, step_tag_id=5, returned_token_ids=[1, 2], tok_pooling_type="STEP")
    embed = PoolingParams().resolve("embed", config)
    assert (embed.dimensions, embed.step_tag_id, embed.returned_token_ids) == (16, None, None)
    steps = PoolingParams(step_tag_id=6).resolve("token_classify", config)
    assert (steps.dimensions, steps.step_tag_id, steps.returned_token_ids) == (None, 6, (1, 2))
    assert PoolingParams(dimensions=8).resolve("embed", config).dimensions == 8


def test_resolving_twice_changes_nothing(model):
    config = model(use_activation=False, dimensions=16)
    once = PoolingParams(task="embed").resolve("embed", config)
    assert once.resolve("embed", config) == once


# Who reads the prefix cache

READERS = [
    ("embed", "LAST", False, True),
    ("classify", "LAST", False, True),
    ("embed", "LAST", True, False),
    ("embed", "MEAN", False, False),
    ("classify", "CLS", False, False),
    ("token_embed", "LAST", False, False),
    ("token_classify", "LAST", False, False),
    ("embed&token_classify", "LAST", False, False),
]


@pytest.mark.parametrize(("task", "seq_pooling_type", "encoder_only", "reads"), READERS)
def test_prefix_cache(task, seq_pooling_type, encoder_only, reads, model):
    config = model(seq_pooling_type=seq_pooling_type, encoder_only=encoder_only)
    assert PoolingParams().resolve(task, config).skip_reading_prefix_cache is not reads
    for asked in (True, False):
        params = PoolingParams(skip_reading_prefix_cache=asked).resolve(task, config)
        assert params.skip_reading_prefix_cache is (asked or not reads)


# The objects themselves


def test_pooling_type_is_a_shortcut():
    for name in ("CLS", "LAST", "MEAN"):
        config = PoolerConfig(pooling_type=name)
        assert (config.seq_pooling_type, config.tok_pooling_type) == (name, None)
    for name in ("ALL", "STEP"):
        config = PoolerConfig(pooling_type=name)
        assert (config.seq_pooling_type, config.tok_pooling_type) == (None, name)
    for other in ({"seq_pooling_type": "CLS"}, {"tok_pooling_type": "ALL"}):
        with refuses("pooling_type='MEAN' is a shortcut"):
            PoolerConfig(pooling_type="MEAN", **other)


def test_params_are_values():
    params = PoolingParams(returned_token_ids=[1, 2], late_chunking_params=LateChunkingParams(3))
    assert params.returned_token_ids == (1, 2)
    assert hash(params) == hash(replace(params))
    assert pickle.loads(pickle.dumps(params)) == params
    config = PoolerConfig(pooling_type="STEP", logit_mean=1, logit_sigma=0.5)
    assert replace(config) == config == pickle.loads(pickle.dumps(config))
    with pytest.raises(AttributeError):
        params.task = "embed"


# Activations that files name


@pytest.mark.parametrize("name", ["Tanh", "GELU", "Sigmoid", "ReLU"])
def test_activations_of_torch(name):
    assert type(load_activation(f"torch.nn.modules.activation.{name}")).__name__ == name


def test_softmax_is_over_the_labels():
    assert load_activation("torch.nn.modules.activation.Softmax").dim == -1


REFUSED = ["torch.nn.Tanh", "torch.nn.functional.relu", "torch.nn.parameter.Parameter"]
REFUSED += ["torch.nn.modules.linear.Linear", "torch.nn.modules.linear.Tanh", "os.system", "Tanh"]
REFUSED += ["torch.nn.modules.activation.os", "torch.nn.modules.os.system", ""]


@pytest.mark.parametrize("name", REFUSED)
def test_no_other_activation(name):
    with refuses(f"activation {name!r}"):
        load_activation(name)
