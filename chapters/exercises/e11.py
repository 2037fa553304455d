"""Exercises of chapter 11. Replace a `raise NotImplementedError`, then run its test."""

from typing import Any

from nanopool.pooler.params import ALLOWED_PARAMS, PoolingParams


def merge(*opinions: Any) -> Any:
    """The first of the opinions, the strongest first, that is one; None when nobody has any."""
    raise NotImplementedError


def refused(task: str, params: PoolingParams, tok_pooling_type: str) -> list[str]:
    """Names of the parameters that were given and that the task does not take, sorted."""
    raise NotImplementedError


def score_type(tasks: tuple[str, ...], num_labels: int, owner_task: str | None) -> str | None:
    """How a model with these tasks scores, None if it does not.

    The owner's task, if there is one, decides. Else the order is cross-encoder, bi-encoder, late
    interaction.
    """
    raise NotImplementedError


def check_1(merge) -> None:
    assert merge(None, False, True) is False
    assert merge(None, None, True) is True
    assert merge(0, 5) == 0, "zero is an opinion"
    assert merge(None, None) is None
    assert merge((), (1,)) == ()


def check_2(refused) -> None:
    for name, value in {"dimensions": 8, "use_activation": False, "step_tag_id": 3}.items():
        params = PoolingParams(**{name: value})
        for task, allowed in ALLOWED_PARAMS.items():
            assert refused(task, params, "STEP") == ([] if name in allowed else [name])
    assert refused("token_classify", PoolingParams(step_tag_id=3), "ALL") == ["step_tag_id"]
    both = PoolingParams(returned_token_ids=[1], dimensions=4)
    assert refused("classify", both, "ALL") == ["dimensions", "returned_token_ids"]
    assert refused("plugin", PoolingParams(), "ALL") == []


def check_3(score_type) -> None:
    embedder, classifier = ("embed", "token_embed"), ("classify", "token_classify")
    assert score_type(embedder, 2, None) == "bi-encoder"
    assert score_type(embedder, 2, "token_embed") == "late-interaction"
    assert score_type(("token_embed",), 2, None) == "late-interaction"
    assert score_type(classifier, 1, None) == "cross-encoder"
    assert score_type(classifier, 3, None) is None
    assert score_type(("token_classify",), 1, None) is None
    assert score_type(classifier, 1, "token_classify") is None


EXERCISES = [(merge, check_1), (refused, check_2), (score_type, check_3)]
