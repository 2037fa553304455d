"""The book as a whole: links, quotes, demos, figures, and proof that its checks catch a change.

What a chapter prints is checked where it stands: pytest collects the chapters themselves
(conftest.py).
"""

import ast
import io
import re
import runpy
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from chapters.tools import cells, checks, draw, generated, quotes, svg, update
from chapters.tools.notebooks import notebook
from nanopool.batch import Batch
from nanopool.config import SamplingParams
from nanopool.engine.block_manager import BlockManager
from nanopool.engine.scheduler import Scheduler
from nanopool.engine.sequence import Request, Sequence
from nanopool.pooler.metadata import PoolingCursor

ROOT = cells.ROOT
DOCUMENTS = generated.documents()
CHAPTERS = generated.chapters()
DEMOS = sorted((ROOT / "chapters/demos").glob("*.py"))
FIGURES = sorted((ROOT / "chapters/figures").glob("[0-9]*.svg"))
PLOTS = sorted((ROOT / "chapters/figures").glob("bench-*.svg"))  # what bench.py measured
FIRST = ROOT / "chapters/01-vocab-parallel-embedding.md"

each_document = pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("page", CHAPTERS, ids=lambda path: path.stem)
each_demo = pytest.mark.parametrize("demo", DEMOS, ids=lambda path: path.stem)
each_figure = pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.stem)


@each_document
def test_links_resolve(page):
    assert checks.broken_links(page) == []


@each_document
def test_generated_sections_are_up_to_date(page):
    text = page.read_text()
    assert text == generated.with_sections(text, page), "run python -m chapters.tools.update"


@each_document
def test_numbers_in_prose_were_printed(page):
    assert checks.unprinted_numbers(page) == []


@each_chapter
def test_chapter_names_its_code_and_its_test(page):
    facts = generated.SECTION.search(page.read_text())["body"]
    assert "**Code:**" in facts and "**Tests:**" in facts


@each_chapter
def test_quotes_are_short(page):
    assert update.long_quotes(page) == []


def test_every_class_is_quoted():
    files = checks.coverage()
    missing = [
        f"{f.path}:{name}" for f in files for name, quoted in f.classes.items() if not quoted
    ]
    assert not missing


def test_half_of_the_lines_are_quoted():
    assert checks.quoted_share(checks.coverage()) >= 0.5


def printed_by(demo: Path) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(demo), run_name="__main__")
    return printed.getvalue()


@each_demo
def test_demo_prints_what_its_chapter_shows(demo):
    number = re.search(r"Chapter (\d\d)\.", demo.read_text())[1]
    pages = [page for page in CHAPTERS if page.name.startswith(number)]
    blocks = [block for page in pages for block in cells.parse(page.read_text())]
    outputs = [b.output.body for b in blocks if isinstance(b, cells.Cell) and b.output]
    printed = printed_by(demo)
    assert printed.rstrip().endswith("True")
    assert any(cells.same_output(output, printed) for output in outputs)


@each_demo
def test_demo_is_one_short_file_that_needs_only_torch(demo):
    source = demo.read_text()
    assert len(source.splitlines()) <= 120
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert all(name.partition(".")[0] == "torch" for name in names), names


@each_figure
def test_figure_is_drawn_and_shown_by_its_chapter(figure):
    pages = [page for page in CHAPTERS if page.name[:2] == figure.name[:2]]
    text = "".join(page.read_text() for page in pages)
    assert f'"{figure.stem}"' in text, "no cell draws it"
    assert f"](figures/{figure.name})" in text, "no page shows it"


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.stem)
def test_plot_is_shown_by_a_page(plot):
    pages = [ROOT / "README.md", *CHAPTERS]
    assert any(f"figures/{plot.name})" in page.read_text() for page in pages)


@each_figure
def test_figure_fits_a_page_in_light_and_dark(figure):
    root = ElementTree.fromstring(figure.read_text())
    assert int(root.get("width")) <= svg.PAGE_WIDTH
    assert "prefers-color-scheme: dark" in figure.read_text()


def scheduled_run():
    """Two generations on a pool of six blocks: (steps, sequences after the second, manager)."""
    manager = BlockManager(6, 4, enable_prefix_caching=True)
    scheduler = Scheduler(8, 2, True, manager)
    for name in "AB":
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        scheduler.add(Sequence(Request(name, (1, 2, 3, 4, 5), params, max_new_tokens=3)))
    sequences, steps = list(scheduler.waiting), []
    for _ in range(2):
        steps.append(scheduler.schedule())
        caught_up = [seq.num_new_tokens == n for seq, n in steps[-1]]
        scheduler.update(steps[-1], [7 if done else None for done in caught_up])
    return steps, sequences, manager


def test_figures_are_drawn_from_real_objects():
    steps, sequences, manager = scheduled_run()
    slices = [seq.slice(1) for seq in sequences]
    batch = Batch.build(slices, manager.block_size, torch.device("cpu"))
    cursor = PoolingCursor.build(batch, (6, 9))
    boxes = {"a": (0, 0, "texts", "str"), "b": (1, 1, "ids", "int")}
    figures = [
        draw.sharded_matrix(torch.eye(4).split(2, 1), "shards", dim=1, notes=["rank 0", "rank 1"]),
        draw.packed_rows(batch, "AB", "rows"),
        draw.block_table(sequences, manager, "blocks"),
        draw.schedule(steps, "steps", notes={(0, "C"): "waits"}),
        draw.rows_by_step({"all": [(0, 2), (0, 3)], "new": [(0, 2), (2, 1)]}, "rows"),
        draw.blocks_over_time({"embed": [1, 2], "generate": [2, 4, 6]}, 6, "time"),
        draw.pooling_cursor(cursor, "AB", "cursor"),
        draw.token_spans("abc", {"all": [(0, 3, "sum")], "each": [(1, 1, 7), (2, 1, 8)]}, "spans"),
        draw.maxsim_matrix(torch.eye(2), ["a", "b"], ["c", "d"], "scores"),
        draw.flow(boxes, [("a", "b", "tokenizer")], "flow", colors={"b": 1}),
    ]
    for figure in figures:
        assert int(ElementTree.fromstring(figure).get("width")) <= svg.PAGE_WIDTH


def test_a_figure_with_overlapping_texts_is_refused():
    canvas = svg.Canvas()
    canvas.text(10, 10, "one")
    canvas.text(14, 12, "two")
    with pytest.raises(ValueError, match="overlap"):
        canvas.svg("a bad figure")


GOOD = """
```python
import torch
x = torch.arange(3) / 3
print(x, 7)
```

```text
tensor([0.0000, 0.3333, 0.6667]) 7
```
"""

BAD = {
    "a changed last digit": (GOOD.replace("0.6667", "0.6668"), "prints something else"),
    "a changed integer": (GOOD.replace(" 7\n```\n", " 8\n```\n"), "prints something else"),
    "a lost output": (GOOD.partition("```text")[0], "no ```text fence follows"),
    "an output of a silent cell": (GOOD.replace("print(x, 7)", "x"), "prints something else"),
    "a cell that raises": (GOOD.replace("/ 3", "/ y"), "NameError"),
    "a fence with attributes": (GOOD.replace("```python", "```python title=x"), "not run"),
    "another name of Python": (GOOD.replace("```python", "```py"), "not run"),
    "an indented fence": (GOOD.replace("```python", "  ```python"), "not run"),
    "tildes": (GOOD.replace("```python", "~~~python"), "not run"),
    "an unknown reason to skip": ("<!-- skip: slow -->" + GOOD, "the only reason to skip is gpu"),
    "a quote of nothing": ('```python src="nanopool/batch.py:Bath"\n```\n', "has no Bath"),
    "an old quote": (
        '```python src="nanopool/batch.py:SEGMENT_BIT"\nSEGMENT_BIT = 3\n```\n',
        "differs",
    ),
}


def first_problem(text: str, path: Path = FIRST, root: Path = ROOT) -> str | None:
    """What a check of this text says first; None when all is right."""
    namespace = cells.start_namespace()
    found = (cells.problem_of(block, namespace, path, root) for block in cells.parse(text))
    return next((problem for problem in found if problem), None)


def test_a_good_document_has_no_problem():
    assert first_problem(GOOD) is None


@pytest.mark.parametrize("text, words", BAD.values(), ids=BAD.keys())
def test_a_bad_document_is_caught(text, words):
    assert words in first_problem(text)


@pytest.mark.parametrize(
    "page, printed, equal",
    [
        ("0.6667", "0.666640", False),
        ("0.6667", "0.666651", True),
        ("0.67", "0.68", False),
        ("0.1234", "0.1235", True),  # rounded by the cell itself: one unit of the fourth decimal
        ("0.1234", "0.1236", False),
        ("20.", "21.", False),
        ("[2, 10]", "[2, 11]", False),
        ("-0.0000", "0.000000", True),
        ("1", "1.0", False),
        ("[ 1.5, nan]", "[1.5000,    nan]", True),
        ("rank0", "rank1", False),
    ],
)
def test_numbers_are_compared_at_the_printed_precision(page, printed, equal):
    assert cells.same_output(page, printed) is equal


def test_every_number_of_a_chapter_is_checked():
    """Each number that chapter 01 prints, changed by one in its last digit, is seen."""
    namespace = cells.start_namespace()
    blocks = [b for b in cells.parse(FIRST.read_text()) if isinstance(b, cells.Cell)]
    for block in blocks:
        printed = cells.run(block, namespace, FIRST, cells.CHECK_PRECISION)
        page = block.output.body if block.output else ""
        for match in cells.NUMBER.finditer(page):
            digit = match.start() + re.search(r"\d(?=\D*$)", match[0]).start()
            changed = f"{page[:digit]}{(int(page[digit]) + 1) % 10}{page[digit + 1 :]}"
            assert not cells.same_output(changed, printed), changed


QUOTED = "nanopool/layers/embed_head.py:VocabParallelEmbedding.forward"

FIGURE = """
```python
from chapters.tools import draw
import torch

draw.save(draw.sharded_matrix(torch.eye(4).split(2), title="an identity"), "93-eye")
```
"""


def test_pytest_fails_on_a_changed_number_quote_or_figure(tmp_path):
    """A copy of the book with four pages: one is good, each of the others has one change."""
    shutil.copytree(ROOT / "chapters/tools", tmp_path / "chapters/tools")
    shutil.copytree(ROOT / "nanopool", tmp_path / "nanopool")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "chapters/figures").mkdir()
    quote = f'```python src="{QUOTED}"\n{quotes.read_quote(ROOT, QUOTED).text}```\n'
    source = tmp_path / "nanopool/layers/embed_head.py"
    source.write_text(source.read_text().replace("(ids < self.end)", "(self.end > ids)"))
    figure = tmp_path / "chapters/figures/93-eye.svg"
    figure.write_text("<svg/>")
    pages = {"90-good": GOOD, "91-number": GOOD.replace(" 7\n```\n", " 8\n```\n") + GOOD}
    pages |= {"92-quote": quote, "93-figure": FIGURE}
    for name, text in pages.items():
        (tmp_path / f"chapters/{name}.md").write_text(text)

    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "chapters"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    failed = re.findall(r"FAILED chapters/([\w-]+)\.md", report)
    assert failed == ["91-number", "92-quote", "93-figure"], report
    assert "3 failed, 1 passed, 1 skipped" in report  # of a document only the first failure
    assert "-    mask = (ids >= self.start) & (ids < self.end)" in report
    assert "draws another 93-eye.svg" in report and figure.read_text() == "<svg/>"


def test_update_repairs_what_changed(tmp_path):
    page = tmp_path / "99-page.md"
    page.write_text(
        GOOD.replace("0.6667", "0.5") + '\n```python src="nanopool/batch.py:SEGMENT_BIT"\n```\n'
    )
    text = update.updated(page)
    assert "0.6667" in text and "\nSEGMENT_BIT = 30\n" in text
    assert first_problem(text) is None


def test_quotes_can_be_parts():
    target = "nanopool/layers/embed_head.py:ParallelLMHead"
    whole = quotes.read_quote(ROOT, target)
    head = quotes.read_quote(ROOT, f"{target}:head")
    assert whole.text.startswith(head.text) and "def forward" not in head.text
    assert quotes.read_quote(ROOT, f"{target}:1-1").lines == whole.lines[:1]
    method = quotes.read_quote(ROOT, f"{target}.forward").text
    assert method.startswith("def forward") and whole.text.endswith("[B, V]\n")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_cell_of_a_chapter_is_a_cell_of_its_notebook(path):
    code = [cell.source for cell in notebook(path).cells if cell.cell_type == "code"]
    blocks = [block for block in cells.parse(path.read_text()) if isinstance(block, cells.Cell)]
    assert code[1:] == [block.fence.body.rstrip("\n") for block in blocks]


@pytest.mark.slow
def test_a_notebook_runs():
    nbclient = pytest.importorskip("nbclient")
    book = notebook(FIRST)
    shown = [cell.outputs[0].text for cell in book.cells if cell.get("outputs")]
    folder = {"metadata": {"path": str(ROOT / "chapters")}}
    nbclient.NotebookClient(book, resources=folder).execute()
    outputs = [cell.outputs for cell in book.cells if cell.get("outputs")]
    streams = ["".join(o.text for o in group if o.get("name") == "stdout") for group in outputs]
    assert all(map(cells.same_output, shown, filter(None, streams)))
