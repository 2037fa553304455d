"""The exercise of chapter 00. Replace the `raise NotImplementedError`, then run its test."""


def count_steps(prompt_len: int, max_tokens: int, budget: int) -> int:
    """Steps that one request takes alone, with at most `budget` tokens a step.

    max_tokens 0 is a pooling request; a generation meets no stop token and no prefix cache.
    """
    raise NotImplementedError


def check_1(count_steps) -> None:
    assert count_steps(5, 0, 2048) == 1
    assert count_steps(5, 1, 2048) == 1, "the step that ends the prompt gives a token"
    assert count_steps(5, 2, 2048) == 2
    assert count_steps(5, 2, 3) == 3
    assert count_steps(6, 0, 3) == 2
    assert count_steps(7, 8, 3) == 10


EXERCISES = [(count_steps, check_1)]
