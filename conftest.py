"""The book as tests: every cell and quote of README.md and the chapters is one pytest item."""

from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Region, Sybil

from chapters.tools import cells

FAILED = "__failed_line__"


def parse(document: Document) -> list[Region]:
    """Sybil's view of one document: a region for each block that our parser finds."""
    return [
        Region(block.fence.start, block.fence.end, block, evaluate)
        for block in cells.parse(document.text)
    ]


def evaluate(example: Example) -> str | None:
    """What is wrong with one block; after a document's first failure the rest is skipped."""
    namespace = example.namespace
    if FAILED in namespace:
        pytest.skip(f"line {namespace[FAILED]} of this document failed")
    if cells.is_skipped(example.parsed):
        pytest.skip("needs a CUDA device")
    problem = cells.problem_of(example.parsed, namespace, Path(example.path))
    if problem:
        namespace[FAILED] = example.line
    return problem


def setup(namespace: dict[str, Any]) -> None:
    """Before a document: its own namespace, seed and working folder."""
    namespace |= cells.start_namespace()


pytest_collect_file = Sybil(
    parsers=[parse], patterns=["README.md", "chapters/*.md", "chapters/answers/*.md"], setup=setup
).pytest()
