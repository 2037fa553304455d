"""Exercises of chapter 06. Replace a `raise NotImplementedError`, then run its test."""

import pytest


def choose_runner(runner: str, convert: str, has_modules: bool, by_class: str) -> str:
    """ "generate" or "pooling": what the caller says (or "auto"), the folder, the class."""
    raise NotImplementedError


def contract(
    parameters: dict[str, list[str]], tensors: set[str], ignored: set[str]
) -> tuple[list[str], list[str]]:
    """(tensors that are missing, tensors that nobody asked for), both sorted.

    `parameters` says of which tensors each is made. `ignored` are parts of names, between dots.
    """
    raise NotImplementedError


def shards(weight_map: dict[str, str]) -> dict[str, list[str]]:
    """{tensor: file} of an index -> {file: its tensors}, both in the order of the index.

    ValueError for a file that is not in the index's own folder.
    """
    raise NotImplementedError


def check_1(choose_runner) -> None:
    assert choose_runner("auto", "auto", False, "generate") == "generate"
    assert choose_runner("auto", "auto", True, "generate") == "pooling"
    assert choose_runner("generate", "auto", True, "generate") == "generate"
    assert choose_runner("auto", "classify", False, "generate") == "pooling"
    assert choose_runner("auto", "none", False, "generate") == "generate"
    assert choose_runner("auto", "none", False, "pooling") == "pooling"
    assert choose_runner("pooling", "auto", False, "generate") == "pooling"


def check_2(contract) -> None:
    parameters = {"embed": ["words.weight"], "head": ["words.weight"], "qkv": ["q", "k", "v"]}
    assert contract(parameters, {"words.weight", "q", "k", "v"}, set()) == ([], [])
    assert contract(parameters, {"words.weight", "q", "v"}, set()) == (["k"], [])
    extra = {"words.weight", "q", "k", "v", "lm_head.bias", "a.pooler.dense", "poolers.dense"}
    assert contract(parameters, extra, {"lm_head", "pooler"}) == ([], ["poolers.dense"])


def check_3(shards) -> None:
    assert shards({"a": "1.bin", "b": "2.bin", "c": "1.bin"}) == {
        "1.bin": ["a", "c"],
        "2.bin": ["b"],
    }
    for file in ("../1.bin", "/etc/passwd", "sub/1.bin"):
        with pytest.raises(ValueError):
            shards({"a": "1.bin", "b": file})


EXERCISES = [(choose_runner, check_1), (contract, check_2), (shards, check_3)]
