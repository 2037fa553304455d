"""The exercises of the chapters: skipped until tried. `pytest tests/test_exercises.py -k 01-2`."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "chapters/exercises"


def exercises():
    """Each exercise of each chapter, named by chapter and number."""
    for path in sorted(FOLDER.glob("e[0-9][0-9].py")):
        module = importlib.import_module(f"chapters.exercises.{path.stem}")
        for number, (solution, check) in enumerate(module.EXERCISES, 1):
            yield pytest.param(solution, check, id=f"{path.stem[1:]}-{number}")


@pytest.mark.parametrize("solution, check", exercises())
def test_exercise(solution, check):
    try:
        check(solution)
    except NotImplementedError:
        pytest.skip("not tried yet")
