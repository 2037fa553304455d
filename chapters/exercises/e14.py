"""Exercises of chapter 14. Replace a `raise NotImplementedError`, then run its test."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def embed_all(
    rows: Tensor, dimensions: list[int], normalise: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Row i `[D]` cut to `dimensions[i]` numbers and normalised, in order.

    `normalise` maps `[n, d]` to `[n, d]`; it is called once for each size that occurs.
    """
    raise NotImplementedError


def calibrate(logits: Tensor, relevance: Tensor) -> tuple[float, float]:
    """(logit_mean, logit_sigma), so that the sigmoid of calibrated logits fits the examples best.

    `logits` `[n]`; `relevance` `[n]` says how probable it is that each document is relevant.
    """
    raise NotImplementedError


def activation_name(config: dict, num_labels: int) -> str:
    """ "sigmoid", "softmax", "identity", or the class that a file names (its last part).

    `config` is a config.json: problem_type, then sbert_ce_default_activation_function, then the
    number of labels. ValueError for a class outside torch.nn.modules.
    """
    raise NotImplementedError


def check_1(embed_all) -> None:
    sizes = []

    def normalise(rows: Tensor) -> Tensor:
        sizes.append(rows.size(1))
        return F.normalize(rows, dim=-1)

    rows = torch.tensor([[3.0, 4, 12], [8, 6, 0], [0, 5, 0], [4, 3, 12]])
    found = embed_all(rows, [2, 3, 2, 2], normalise)
    assert sorted(sizes) == [2, 3], f"normalise was called for the sizes {sizes}"
    expected = [[0.6, 0.8], [0.8, 0.6, 0.0], [0.0, 1.0], [0.8, 0.6]]
    for vector, numbers in zip(found, expected, strict=True):
        torch.testing.assert_close(vector, torch.tensor(numbers))


def check_2(calibrate) -> None:
    logits = torch.tensor([4.0, 6, 8, 10, 12])
    mean, sigma = calibrate(logits, ((logits - 8) / 2).sigmoid())
    assert abs(mean - 8) < 0.05 and abs(sigma - 2) < 0.05, (mean, sigma)


def check_3(activation_name) -> None:
    file = "sbert_ce_default_activation_function"
    tanh = {file: "torch.nn.modules.activation.Tanh"}
    assert activation_name({}, 1) == "sigmoid"
    assert activation_name({}, 3) == "softmax"
    assert activation_name(tanh, 3) == "Tanh"
    assert activation_name(tanh | {"problem_type": "regression"}, 1) == "identity"
    assert activation_name({"problem_type": "multi_label_classification"}, 3) == "sigmoid"
    assert activation_name({"problem_type": "single_label_classification"}, 1) == "sigmoid"
    for path in ("os.system", "torch.nn.modulesx.Tanh"):
        try:
            activation_name({file: path}, 1)
        except ValueError:
            continue
        raise AssertionError(f"{path} was accepted")


EXERCISES = [(embed_all, check_1), (calibrate, check_2), (activation_name, check_3)]
