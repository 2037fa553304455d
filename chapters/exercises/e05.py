"""Exercises of chapter 05. Replace a `raise NotImplementedError`, then run its test."""

import torch
from torch import Tensor
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings


def first_length(ids: list[int], sep: int) -> int | None:
    """The tokens of a pair's first text, with its [SEP]; None where the ids are one text.

    Ids are `[CLS] a [SEP] b [SEP]` or `[CLS] a [SEP]`, as BERT's tokenizer makes them.
    """
    raise NotImplementedError


def positions(lens: list[int], pad: int) -> Tensor:
    """The positions `[T]` of packed RoBERTa texts; no loop over tokens."""
    raise NotImplementedError


def ours(name: str) -> tuple[str, str | None]:
    """Where a tensor of an old BERT file goes: (parameter of our BertModel, shard id or None).

    Names may have the prefix `bert.`, and `gamma` and `beta` for a norm's weight and bias.
    """
    raise NotImplementedError


def check_1(first_length) -> None:
    assert first_length([2, 7, 8, 3, 9, 8, 3], 3) == 4
    assert first_length([2, 3, 9, 3], 3) == 2
    assert first_length([2, 7, 3, 3], 3) == 3  # the second text is empty
    assert first_length([2, 7, 8, 3], 3) is None


def check_2(positions) -> None:
    for lens, pad in (([3, 2], 1), ([1, 4, 2], 0), ([5], 1)):
        expected = [
            RobertaEmbeddings.create_position_ids_from_input_ids(torch.full((1, n), 9), pad)[0]
            for n in lens
        ]
        assert positions(lens, pad).tolist() == torch.cat(expected).tolist()


def check_3(ours) -> None:
    layer = "encoder.layer.3"
    cases = {
        "bert.embeddings.LayerNorm.gamma": ("embeddings.LayerNorm.weight", None),
        f"{layer}.attention.self.key.weight": (f"{layer}.attention.qkv.weight", "self.key"),
        f"bert.{layer}.attention.self.value.bias": (f"{layer}.attention.qkv.bias", "self.value"),
        f"bert.{layer}.attention.output.LayerNorm.beta": (
            f"{layer}.attention.output.LayerNorm.bias",
            None,
        ),
        f"{layer}.intermediate.dense.weight": (f"{layer}.intermediate.dense.weight", None),
    }
    for name, expected in cases.items():
        assert ours(name) == expected, name


EXERCISES = [(first_length, check_1), (positions, check_2), (ours, check_3)]
