"""Wrong calls and wrong folders: each is a ValueError that names the argument, the value and a way
out (FileNotFoundError for what is not there, Python's TypeError for an unknown keyword), and the
same LLM then gives the right answer to a good request.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import assert_close, start
from checkpoints import edit_json
from safetensors.torch import load_file, save_file

from nanopool import (
    LLM,
    LateChunkingParams,
    LateInteractionParams,
    PoolerConfig,
    PoolingParams,
    SamplingParams,
)

QUIET = {"use_tqdm": False}
LONG = "paris " * 300
IDS = [7, 8, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=4)
POOL = {"block_size": 4, "num_kv_blocks": 8}
SMALL = {"suffix": "Model", "std": 0.2}


def embedding(llm: LLM) -> Any:
    return llm.embed([IDS, "a dog"] if llm.model_config.spec.encoder_only else [IDS], **QUIET)


def pair(llm: LLM) -> Any:
    return llm.score("a dog", "the cat", **QUIET)


def token_rows(llm: LLM) -> Any:
    return llm.encode([IDS], pooling_task="token_embed", **QUIET)


@dataclass(frozen=True)
class Kind:
    """A checkpoint, its settings, and the good request that must go on working."""

    checkpoint: str
    facts: dict
    settings: dict
    good: Callable[[LLM], Any]


KINDS = {
    "encoder": Kind("sentence_transformer", {}, {}, embedding),
    "embedder": Kind("qwen3", SMALL, POOL, embedding),
    "shorter": Kind("qwen3", SMALL | {"matryoshka_dimensions": [8, 16]}, POOL, embedding),
    "generator": Kind("qwen3", {}, POOL, lambda llm: llm.generate([IDS], GREEDY, **QUIET)),
    "cross-encoder": Kind("bert_classifier", {}, {}, pair),
    "classifier": Kind(
        "bert_classifier", {"labels": 3}, {}, lambda llm: llm.classify("a dog", **QUIET)
    ),
    "multi-vector": Kind("hf_colbert", {}, {}, pair),
    "steps": Kind("qwen2_process_reward", SMALL, POOL, lambda llm: llm.reward([IDS], **QUIET)),
    "reward": Kind("qwen2_reward", SMALL, POOL, lambda llm: llm.reward([IDS], **QUIET)),
}


def answer(kind: Kind, llm: LLM) -> list:
    outputs = kind.good(llm)
    if llm.model_config.runner == "generate":
        return [output.outputs[0].token_ids for output in outputs]
    return [output.outputs.data for output in outputs]


@pytest.fixture(scope="module")
def shared(checkpoint):
    """shared(name) -> (kind, its one LLM, what it answered when it was new)."""
    made = {}

    def get(name: str) -> tuple[Kind, LLM, list]:
        if name not in made:
            kind = KINDS[name]
            llm = start(checkpoint(kind.checkpoint, **kind.facts), **kind.settings)
            made[name] = kind, llm, answer(kind, llm)
        return made[name]

    yield get
    for _, llm, _ in made.values():
        llm.shutdown()


def refuses(error: pytest.ExceptionInfo, *words: str) -> None:
    """The message holds every word."""
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


# Calls: (kind, call, words of the message)


def encoding(**arguments):
    """The call for a good text and the model's first task, with arguments that are not good."""
    return lambda llm: llm.encode("no", **arguments)


REQUESTS = {
    # types
    "no prompt": ("encoder", lambda m: m.embed(None), "prompts=None"),
    "a number": ("encoder", lambda m: m.embed(3), "prompts=3"),
    "bytes": ("encoder", lambda m: m.embed(b"dog"), "prompt 0 = b'dog'", "a text"),
    "a mapping": (
        "encoder",
        lambda m: m.embed(m.get_tokenizer()("paris")),
        "prompt 0 = ",
        "give a text",
    ),
    "a byte array": ("encoder", lambda m: m.embed(bytearray(b"dog")), "prompt 0", "give a text"),
    "a tensor of one id": ("encoder", lambda m: m.embed(torch.tensor(5)), "prompts=tensor(5)"),
    "special tokens by number": ("encoder", encoding(add_special_tokens=0), "add_special_tokens=0"),
    "special tokens alone too long": (
        "encoder",
        encoding(truncate_prompt_tokens=1),
        "the limit is 1",
        "special tokens alone",
    ),
    "a template that nothing reads": (
        "embedder",
        lambda m: m.score("a", "b", chat_template="{{ messages }}"),
        "chat_template=",
        "left out",
    ),
    "a column beyond the labels": (
        "steps",
        lambda m: m.reward([IDS], pooling_params=PoolingParams(returned_token_ids=[5])),
        "returned_token_ids=5",
        "from 0 to 1",
    ),
    "a temperature beyond float32": (
        "generator",
        lambda m: m.generate("no", SamplingParams(temperature=10**400)),
        "temperature=",
    ),
    "a tensor": ("encoder", lambda m: m.embed(torch.tensor(IDS)), "prompt 0 = tensor", "int"),
    "None in a list": ("encoder", lambda m: m.embed(["no", None]), "prompt 1 = None", "a text"),
    "float ids": ("encoder", lambda m: m.embed([[1.0, 2.0]]), "prompt 0 = [1.0", "int token ids"),
    "bool ids": ("encoder", lambda m: m.embed([[True]]), "prompt 0 = [True]", "int token ids"),
    "ids too deep": ("encoder", lambda m: m.embed([[IDS]]), "prompt 0 = [[7", "int token ids"),
    "an unknown key": (
        "encoder",
        lambda m: m.embed({"prompt": "no", "multi_modal_data": 1}),
        "keys of prompt 0",
        "multi_modal_data",
    ),
    "ids as the text": ("encoder", lambda m: m.embed({"prompt": IDS}), "prompt of prompt 0", "str"),
    "a text as the ids": (
        "encoder",
        lambda m: m.embed({"prompt_token_ids": "no"}),
        "prompt_token_ids of prompt 0='no'",
        "list",
    ),
    "half a surrogate": ("encoder", lambda m: m.embed("a \ud800 dog"), "prompt 0", "surrogates"),
    # empty, too long, out of range
    "no token": ("encoder", lambda m: m.embed([IDS, []]), "prompt 1 is empty", "give a text"),
    "an empty text": ("generator", lambda m: m.generate(""), "prompt 0 is empty", "give a text"),
    "a long text": (
        "encoder",
        lambda m: m.embed(["no", LONG]),
        "prompt 1 has 302 tokens",
        "64",
        "truncate_prompt_tokens=-1",
    ),
    "one id too many": ("encoder", lambda m: m.embed([[5] * 65]), "prompt 0 has 65", "limit is 64"),
    "no room to generate": ("generator", lambda m: m.generate([[5] * 512]), "512", "limit is 511"),
    "an id above": ("encoder", lambda m: m.embed([IDS, [131]]), "prompt 1 has token id 131", "130"),
    "an id below": ("encoder", lambda m: m.embed([[-1]]), "prompt 0 has token id -1", "from 0"),
    "an id of 64 bits": ("encoder", lambda m: m.embed([[2**40]]), "token id 1099511627776", "130"),
    "more than the pool": (
        "embedder",
        lambda m: m.embed([IDS, [5] * 40]),
        "prompt 1",
        "40 tokens",
        "raise num_kv_blocks",
    ),
    "max_tokens above the pool": (
        "generator",
        lambda m: m.generate([IDS], SamplingParams(max_tokens=40)),
        "max_tokens = 40",
        "raise num_kv_blocks",
    ),
    # tokenization
    "tokenization_kwargs": (
        "encoder",
        encoding(tokenization_kwargs=[1]),
        "tokenization_kwargs=[1]",
        "dict",
    ),
    "max_length": ("encoder", encoding(max_length=3), "max_length", "truncate_prom"),
    "truncate to 0": (
        "encoder",
        encoding(truncate_prompt_tokens=0),
        "truncate_prompt_tokens=0",
        "from 1 to 64",
    ),
    "truncate to 1.0": (
        "encoder",
        encoding(truncate_prompt_tokens=1.0),
        "truncate_prompt_tokens=1.0",
    ),
    "truncate to more": (
        "encoder",
        encoding(truncate_prompt_tokens=65),
        "truncate_prompt_tokens=65",
        "64",
    ),
    "the middle": (
        "encoder",
        encoding(truncation_side="middle"),
        "truncation_side='middle'",
        "'left'",
    ),
    "add_special_tokens": (
        "encoder",
        encoding(add_special_tokens="no"),
        "add_special_tokens='no'",
        "bool",
    ),
    "a prompt's name": ("encoder", encoding(prompt_name="title"), "prompt_name='title'", "'query'"),
    "a name where there is none": (
        "embedder",
        encoding(prompt_name="query"),
        "prompt_name='query'",
        "left out",
    ),
    # params
    "too few params": (
        "encoder",
        lambda m: m.embed(["no", "yes"], pooling_params=[PoolingParams()]),
        "pooling_params: 1 given for 2",
        "a list of 2",
    ),
    "no params at all": ("generator", lambda m: m.generate([IDS], []), "sampling_params: 0 given"),
    "sampling a vector": (
        "encoder",
        encoding(pooling_params=GREEDY),
        "pooling_params=SamplingParams",
        "PoolingParams | None",
    ),
    "params as a dict": (
        "generator",
        lambda m: m.generate([IDS], {"temperature": 0}),
        "sampling_params={'temperature': 0}",
        "SamplingParams | None",
    ),
    "a list for a pair": (
        "cross-encoder",
        lambda m: m.score("a", "b", pooling_params=[PoolingParams()] * 2),
        "pooling_params: 2 given for 1",
    ),
    "dimensions": (
        "shorter",
        encoding(pooling_params=PoolingParams(dimensions=9)),
        "dimensions=9",
        "(8, 16)",
    ),
    "no Matryoshka": (
        "embedder",
        encoding(pooling_params=PoolingParams(dimensions=8)),
        "dimensions=8",
        "is_matryoshka",
    ),
    "dimensions of classes": (
        "classifier",
        encoding(pooling_params=PoolingParams(dimensions=8)),
        "does not support ['dimensions']",
        "use_activation",
    ),
    "steps without STEP": (
        "reward",
        encoding(pooling_params=PoolingParams(step_tag_id=7)),
        "does not support ['step_tag_id']",
        "only supports",
    ),
    "chunks of a vector": (
        "embedder",
        encoding(pooling_params=PoolingParams(late_chunking_params=LateChunkingParams(2))),
        "late_chunking_params",
        "only supports",
    ),
    "a document alone": (
        "multi-vector",
        lambda m: m.encode(
            "no",
            PoolingParams(late_interaction_params=LateInteractionParams("score_doc", "key")),
            pooling_task="token_embed",
        ),
        "query_key = 'key'",
        "encode the query first",
    ),
    # tasks
    "a removed task": (
        "encoder",
        encoding(pooling_task="score"),
        "task='score' was removed",
        "'classify'",
    ),
    "another removed task": (
        "encoder",
        encoding(pooling_task="encode"),
        "task='encode' was removed",
        "'token_embed'",
    ),
    "no task": ("encoder", encoding(pooling_task="sing"), "task='sing'", "'embed'"),
    "a list of tasks": ("encoder", encoding(pooling_task=["embed"]), "task=['embed']", "'embed'"),
    "classes of an embedder": (
        "encoder",
        lambda m: m.classify("no"),
        "Unsupported task 'classify'",
        "['embed', 'token_embed']",
    ),
    "vectors of a classifier": (
        "classifier",
        lambda m: m.embed("no"),
        "Unsupported task 'embed'",
        "['classify', 'token_classify']",
    ),
    "a vector of a ColBERT": (
        "multi-vector",
        lambda m: m.embed("no"),
        "Unsupported task 'embed'",
        "['token_embed']",
    ),
    "text of an encoder": ("encoder", lambda m: m.generate("no"), "runner='pooling'", "'generate'"),
    "vectors of a generator": (
        "generator",
        lambda m: m.embed("no"),
        "task='embed'",
        "runner='pooling'",
    ),
    "data without a processor": (
        "encoder",
        lambda m: m.encode({"data": 5}, pooling_task="plugin"),
        "data=5",
        "LLM(io_processor=...)",
    ),
    "a class for a vector": (
        "encoder",
        lambda m: m.embed(["no", "a"], pooling_params=[None, PoolingParams(task="token_embed")]),
        "pooling_params.task='token_embed'",
        "'embed'",
    ),
    # score
    "no pairs": ("cross-encoder", lambda m: m.score([], []), "data_1 has 0", "1:1, 1:N or N:N"),
    "two and three": ("encoder", lambda m: m.score(["a"] * 2, ["b"] * 3), "2 texts", "N:N"),
    "three and one": ("encoder", lambda m: m.score(["a"] * 3, "b"), "data_1 has 3", "N:N"),
    "nothing to score": ("cross-encoder", lambda m: m.score("a", None), "prompts=None"),
    "a list in a list": (
        "encoder",
        lambda m: m.score([["a"]], "b"),
        "data_1: prompt 0 = ['a']",
        "a text",
    ),
    "a long document": (
        "encoder",
        lambda m: m.score("no", ["yes", LONG]),
        "data_2: prompt 1 has 302 tokens",
        "truncate_prompt_tokens=-1",
    ),
    "no documents, and no scores": (
        "reward",
        lambda m: m.rerank("a", []),
        "does not support the Scoring API",
    ),
    "ids in a pair": (
        "cross-encoder",
        lambda m: m.score(IDS, "no"),
        "a text for a cross-encoder=(7, 8, 9)",
        "of type str",
    ),
    "a long pair": (
        "cross-encoder",
        lambda m: m.score("no", ["yes", LONG]),
        "prompt 1 has 304 tokens",
        "truncate_prompt_tokens=-1",
    ),
    "score of three labels": (
        "classifier",
        lambda m: m.score("a", "b"),
        "num_labels=3",
        "num_labels == 1",
    ),
    "score of a generator": (
        "generator",
        lambda m: m.score("a", "b"),
        "does not support the Scoring API",
        "convert='embed'",
    ),
    "score of rewards": (
        "reward",
        lambda m: m.score("a", "b"),
        "does not support the Scoring API",
        "'embed'",
    ),
    "another task's params": (
        "cross-encoder",
        lambda m: m.score("a", "b", pooling_params=PoolingParams(task="embed")),
        "pooling_params.task='embed'",
        "'classify'",
    ),
    "a broken template": (
        "cross-encoder",
        lambda m: m.score("a", "b", chat_template="{% for %}"),
        "chat_template='{% for %}'",
        "TemplateSyntaxError",
    ),
    "a template of nothing": (
        "cross-encoder",
        lambda m: m.score("a", "b", chat_template="{{ query.text }}"),
        "chat_template='{{ query.text }}'",
        "'query' is undefined",
    ),
    "max_tokens_per_doc": (
        "encoder",
        lambda m: m.score("a", "b", max_tokens_per_doc=1.5),
        "max_tokens_per_doc=1.5",
        "from 0",
    ),
    "ids to shorten": (
        "encoder",
        lambda m: m.score([IDS], "b", max_tokens_per_query=1),
        "max_tokens_per_query=1",
        "of type str",
    ),
    "top_n below 0": (
        "cross-encoder",
        lambda m: m.rerank("a", ["b"], top_n=-1),
        "top_n=-1",
        "at least 0",
    ),
    "top_n of half": (
        "cross-encoder",
        lambda m: m.rerank("a", ["b"], top_n=0.0),
        "top_n=0.0",
        "an integer",
    ),
    "two queries": (
        "cross-encoder",
        lambda m: m.rerank(["a", "b"], ["c", "d"]),
        "the number of queries=2",
        "1",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_wrong_call_is_refused_and_the_next_one_is_right(name, shared):
    kind, call, *words = REQUESTS[name]
    kind, llm, expected = shared(kind)
    with pytest.raises(ValueError) as error:
        call(llm)
    refuses(error, *words)
    found = answer(kind, llm)
    assert_close(found, expected)


UNKNOWN = {
    "LLM": lambda folder: LLM(folder, max_length=3),
    "task of LLM": lambda folder: LLM(folder, task="embed"),
    "PoolingParams": lambda folder: PoolingParams(dimension=3),
    "PoolerConfig": lambda folder: PoolerConfig(pooling="MEAN"),
    "SamplingParams": lambda folder: SamplingParams(temp=0),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_keyword_is_pythons_type_error(name, checkpoint):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        UNKNOWN[name](checkpoint("bert"))


# Folders: (checkpoint, what breaks a copy of it, settings, words of the message)

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


class Code:
    """What a pickle could run."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def config(drop=(), **values):
    return lambda folder: edit_json(folder / CONFIG, drop=drop, **values)


def content(name: str, data: str | bytes):
    return lambda folder: (folder / name).write_bytes(
        data.encode() if isinstance(data, str) else data
    )


def index(weight_map):
    """Shards as an index names them; the weights themselves are in shard.safetensors."""

    def write(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "shard.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return write


def half_an_index(folder: Path) -> None:
    index({})(folder)
    (folder / INDEX).write_text("{")


def binary(value, plain: bool = False):
    def write(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        file = folder / "pytorch_model.bin"
        file.write_bytes(pickle.dumps(value)) if plain else torch.save(value, file)

    return write


def tensors(change):
    def write(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return write


def half(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:90])


def without(pattern: str):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def listed(*modules: dict):
    return content("modules.json", json.dumps(modules))


def same(_: Path) -> None:
    """The folder is good: the settings are wrong."""


FIRST = {"type": "sentence_transformers.models.Transformer", "path": ""}
FOLDERS = {
    "no folder": ("bert", shutil.rmtree, {}, "model=", "neither a folder nor a hub repository"),
    "no config": ("bert", without(CONFIG), {}, "model=", "no config.json"),
    "half a config": ("bert", half(CONFIG), {}, CONFIG, "JSONDecodeError"),
    "a list as config": ("bert", content(CONFIG, "[]"), {}, CONFIG, "of type dict"),
    "no architectures": (
        "bert",
        config(drop=("architectures",)),
        {},
        "architectures=[]",
        "hf_overrides",
    ),
    "unknown architecture": ("bert", config(architectures=["T5Model"]), {}, "['T5Model']", "Bert"),
    "unknown model_type": ("bert", config(model_type="mamba9"), {}, "model_type='mamba9'"),
    "another family": ("bert", config(architectures=["Qwen3Model"]), {}, "model=", "rms_norm_eps"),
    "a size in words": ("bert", config(hidden_size="32"), {}, "model=", "hidden_size"),
    "no heads": ("bert", config(num_attention_heads=0), {}, "model=", "ZeroDivisionError"),
    "another width": ("bert", config(hidden_size=64), {}, "word_embeddings", "[131, 64]"),
    "one layer more": ("bert", config(num_hidden_layers=3), {}, "missing ['encoder.layer.2."),
    "quantised": (
        "bert",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        {},
        "quantization_config={'quant_method': 'gptq'",
        "left out",
    ),
    "int8 weights": (
        "bert",
        tensors(lambda named: {name: x.to(torch.int8) for name, x in named.items()}),
        {},
        "torch.int8",
        "quantised",
    ),
    "unknown rope": (
        "qwen3",
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        {},
        "'spiral'",
        "llama3",
    ),
    "sliding window": (
        "qwen3",
        config(layer_types=["sliding_attention"] * 2),
        {},
        "layer_types='sliding_attention'",
        "full_attention",
    ),
    "no weights": ("bert", without(WEIGHTS), {}, "neither model.safetensors nor pytorch_model.bin"),
    "half the weights": ("bert", half(WEIGHTS), {}, WEIGHTS, "damaged"),
    "no bytes": ("bert", content(WEIGHTS, b""), {}, WEIGHTS, "damaged"),
    "noise": ("bert", content(WEIGHTS, bytes(range(256))), {}, WEIGHTS, "damaged"),
    "a tensor missing": (
        "bert",
        tensors(lambda named: dict([*named.items()][1:])),
        {},
        "missing ['embeddings.LayerNorm.bias']",
    ),
    "tensors of a file with prefixes missing": (
        "bert_classifier",
        tensors(
            lambda named: {n: x for n, x in named.items() if "pooler" not in n and "0" not in n}
        ),
        {},
        "'bert.encoder.layer.0.attention.self.query.weight'",
        "'bert.pooler.dense.bias'",
    ),
    "a tensor too many beside a head": (
        "bert_classifier",
        tensors(lambda named: named | {"bert.pooler.gate.weight": torch.ones(2)}),
        {},
        "not understood ['bert.pooler.gate.weight']",
    ),
    "STEP and a choice of rows": (
        "hf_colbert",
        lambda folder: None,
        {"pooler_config": PoolerConfig(pooling_type="STEP", step_tag_id=7)},
        "tok_pooling_type='STEP'",
    ),
    "a tensor too many": (
        "bert",
        tensors(lambda named: named | {"lora.weight": torch.ones(2)}),
        {},
        "not understood ['lora.weight']",
    ),
    "an index that leaves": (
        "bert",
        index({"a": "../bert/model.safetensors"}),
        {},
        INDEX,
        "outside its folder: '../bert/model.safetensors'",
    ),
    "an absolute index": ("bert", index({"a": "/etc/passwd"}), {}, INDEX, "'/etc/passwd'"),
    "a shard missing": ("bert", index({"a": "2.safetensors"}), {}, "2.safetensors is missing"),
    "an index of numbers": ("bert", index({"a": 3}), {}, "model=", "expected form"),
    "half an index": ("bert", half_an_index, {}, "model=", "JSONDecodeError"),
    "code in a pickle": ("bert", binary({"a": Code()}), {}, "pytorch_model.bin", "tensors"),
    "code in an old pickle": ("bert", binary(Code(), True), {}, "pytorch_model.bin", "tensors"),
    "a list in a pickle": ("bert", binary([torch.ones(3)]), {}, "pytorch_model.bin", "tensors"),
    "a module missing": (
        "bert",
        listed(FIRST, {"type": "sentence_transformers.models.CNN", "path": "1"}),
        {},
        "models.CNN' is not supported",
        "Pooling",
    ),
    "a module of code": ("bert", listed({"type": "os.system", "path": ""}), {}, "'os.system'"),
    "a module that leaves": (
        "bert",
        listed(FIRST, {"type": "sentence_transformers.models.Pooling", "path": "../.."}),
        {},
        "'../..' leaves the folder",
    ),
    "modules of words": ("bert", content("modules.json", '["a"]'), {}, "model=", "'str'"),
    "prompts in a list": (
        "bert",
        content("config_sentence_transformers.json", '{"prompts": ["a"]}'),
        {},
        "model=",
        "'list'",
    ),
    "an activation of code": (
        "bert_classifier",
        config(sentence_transformers={"activation_fn": "os.system"}),
        {},
        "'os.system'",
        "torch.nn.modules.",
    ),
    "an activation with arguments": (
        "bert_classifier",
        config(sentence_transformers={"activation_fn": "torch.nn.modules.linear.Linear"}),
        {},
        "linear.Linear'",
        "needs no arguments",
    ),
    "no tokenizer": ("bert", without("token*"), {}, "tokenizer=", "files are missing"),
    "half a tokenizer": ("bert", half("tokenizer.json"), {}, "tokenizer=", "JSONDecodeError"),
    "tokenizer": ("bert", same, {"tokenizer": "/no/such/place"}, "tokenizer='/no/such/place'"),
    "max_model_len": ("bert", same, {"max_model_len": 129}, "max_model_len=129", "at most 128"),
    "max_num_batched_tokens": (
        "bert",
        same,
        {"max_num_batched_tokens": 9},
        "max_num_batched_tokens=9",
        "raise the one",
    ),
    "tensor_parallel_size": (
        "qwen3",
        same,
        {"tensor_parallel_size": 3},
        "tensor_parallel_size = 3",
        "divisible",
    ),
    "device": ("bert", same, {"device": "tpu"}, "device='tpu'", "'cpu'"),
    "dtype": ("bert", same, {"dtype": "int8"}, "dtype='int8'", "'bfloat16'"),
    "overrides of nothing": ("bert", same, {"hf_overrides": lambda _: None}, "hf_overrides"),
    "generate": ("bert", same, {"runner": "generate"}, "runner='generate'", "BertModel"),
    "convert": ("qwen3", same, {"convert": "reward"}, "convert='reward'", "'embed'"),
    "pooler_config": (
        "bert",
        same,
        {"pooler_config": {"task": "embed"}},
        "pooler_config=",
        "of type P",
    ),
}
assert len(REQUESTS) + len(UNKNOWN) + len(FOLDERS) >= 60


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wrong_folder_is_refused(name, checkpoint, tmp_path):
    kind, spoil, settings, *words = FOLDERS[name]
    folder = shutil.copytree(checkpoint(kind), tmp_path / "model")
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        start(folder, **settings)
    refuses(error, *words)
