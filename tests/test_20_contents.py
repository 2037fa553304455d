"""The table of contents: its statements name headings and tests that exist. Chapter 20."""

import re

from chapters.tools import cells, generated

PAGE = cells.ROOT / "chapters/README.md"
TEXT = PAGE.read_text()


def test_every_statement_says_where_it_is_run():
    """A heading of a chapter (test_chapters follows the link), and tests that exist."""
    tests = "".join(path.read_text() for path in (cells.ROOT / "tests").glob("test_*.py"))
    statements = TEXT.partition("## Two articles")[2]
    rows = [line for line in statements.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| statement", "| ---"))]
    assert len(rows) > 60
    for row in rows:
        assert re.search(r"\]\(\d\d-[a-z0-9-]+\.md#[a-z0-9-]+\)", row), row
        missing = [name for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in tests]
        assert not missing, missing


def test_every_object_is_in_its_file():
    objects = TEXT.partition("## The objects")[2].partition("## The papers")[0]
    for line in objects.splitlines():
        files = re.findall(r"\]\(\.\./(\S+?)\)", line)
        source = "".join((cells.ROOT / file).read_text() for file in files)
        for name in re.findall(r"`([A-Z]\w+)`", line.partition("](")[0]):
            assert f"class {name}" in source, name


def test_every_chapter_has_exercises_and_answers():
    for page in generated.chapters():
        number = page.name[:2]
        assert (page.parent / f"answers/{number}.md").exists(), page.name
        assert (page.parent / f"exercises/e{number}.py").exists(), page.name
