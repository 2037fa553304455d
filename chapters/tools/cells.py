"""The one parser of the book: what a chapter runs, what it quotes, what it may not contain.

A chapter is plain markdown. Three kinds of fence matter:

- ```` ```python ````: a cell. It is run, in order, in one namespace per document.
- ```` ```text ```` right after a cell: what it prints; numbers equal at the printed precision.
- ```` ```python src="nanopool/parallel.py:LocalTP.all_reduce" ````: a quote, equal to that source.

`<!-- skip: gpu -->` on the line above a cell keeps it for machines with a CUDA device. Any other
Python fence is a mistake of the author, and reported: a cell that nobody runs is a cell that nobody
checks.
"""

import difflib
import io
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from chapters.tools.quotes import read_quote

ROOT = Path(__file__).resolve().parents[2]
PAGE_PRECISION = 4  # what a page shows
CHECK_PRECISION = 6  # what a check compares: see `same_number`

FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)`*[ ]*$", re.M | re.S
)
PYTHON_LIKE = re.compile(
    r"^[ \t>*\-]*(`{3,}|~{3,})[ ]*\{?\.?(py|python|python3|pycon)\b", re.M | re.I
)
SKIP = re.compile(r"<!-- skip: (\w+) -->\n\Z")
QUOTE = re.compile(r'python src="([^"]+)"')
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?(?![\w])")


@dataclass(frozen=True)
class Fence:
    """One fence of a document: its info string, its text, and the offsets of both."""

    info: str
    body: str
    start: int  # of the opening ticks
    body_start: int
    end: int  # behind the closing ticks


@dataclass(frozen=True)
class Cell:
    """Code that is run, and the fence that holds what it printed (None: it prints nothing)."""

    fence: Fence
    line: int  # of its first line of code, counted from 1
    output: Fence | None
    skip: str | None


@dataclass(frozen=True)
class Quote:
    """Source that must equal the package's."""

    fence: Fence
    line: int
    target: str  # "nanopool/layers/linear.py:RowParallelLinear.forward"


@dataclass(frozen=True)
class Stray:
    """A Python fence that would not be run."""

    fence: Fence
    line: int
    reason: str


Block = Cell | Quote | Stray


def parse(text: str) -> list[Block]:
    """The cells, quotes and strays of a document, in order."""
    fences = [
        Fence(m["info"].strip(), m["body"], m.start(), m.start("body"), m.end())
        for m in FENCE.finditer(text)
    ]
    return sorted([*_blocks(text, fences), *_strays(text, fences)], key=lambda b: b.fence.start)


def _blocks(text: str, fences: list[Fence]) -> Iterator[Block]:
    for fence, after in zip(fences, [*fences, None][1:], strict=True):
        line = text.count("\n", 0, fence.body_start) + 1
        if fence.info == "python":
            skip = SKIP.search(text[: fence.start])
            gap = text[fence.end : after.start].strip() if after else "end"
            output = after if after and not gap and after.info == "text" else None
            yield Cell(fence, line, output, skip[1] if skip else None)
        elif quote := QUOTE.fullmatch(fence.info):
            yield Quote(fence, line, quote[1])
        elif re.match(r"\W*py", fence.info, re.I):
            yield Stray(fence, line, f"a Python fence that is not run: ```{fence.info}")


def _strays(text: str, fences: list[Fence]) -> Iterator[Stray]:
    """Python fences that `FENCE` does not see: indented, quoted with >, or made of tildes."""
    starts = {fence.start for fence in fences}
    for match in PYTHON_LIKE.finditer(text):
        inside = any(fence.start <= match.start() < fence.end for fence in fences)
        if match.start() in starts or inside:
            continue
        line = text.count("\n", 0, match.start()) + 1
        fence = Fence(match[0], "", match.start(), match.end(), match.end())
        yield Stray(fence, line, f"a Python fence that is not run: {match[0]!r}; start it with ```")


def start_namespace() -> dict[str, Any]:
    """What a document's cells share; folder, seed and threads as every chapter expects them.

    Cells run in the repository root and may import `checkpoints` of the tests (tiny models).
    """
    os.chdir(ROOT)
    sys.path += [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return {"__name__": "__main__"}


def run(cell: Cell, namespace: dict[str, Any], path: Path, precision: int) -> str:
    """Run one cell from the repository root; what it printed, without trailing blanks."""
    torch.set_printoptions(precision=precision, sci_mode=False)
    code = compile("\n" * (cell.line - 1) + cell.fence.body, str(path), "exec")
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            exec(code, namespace)
    finally:
        torch.set_printoptions(profile="default", sci_mode=None)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def problem_of(
    block: Block, namespace: dict[str, Any], path: Path, root: Path = ROOT
) -> str | None:
    """What is wrong with a block, in words for the author; None when it is right. Runs cells."""
    if isinstance(block, Stray):
        return block.reason
    if isinstance(block, Quote):
        return _quote_problem(block, root)
    if block.skip not in (None, "gpu"):
        return f"<!-- skip: {block.skip} -->: the only reason to skip is gpu"
    if is_skipped(block):
        return None
    figures = read_figures(path)
    try:
        printed = run(block, namespace, path, CHECK_PRECISION)
    except Exception:
        return "the cell raised\n" + traceback.format_exc(limit=-4)
    return _figure_problem(figures, read_figures(path)) or _output_problem(block, printed)


def is_skipped(block: Block) -> bool:
    """A cell for another machine than this one."""
    return isinstance(block, Cell) and block.skip == "gpu" and not torch.cuda.is_available()


def _quote_problem(quote: Quote, root: Path) -> str | None:
    try:
        source = read_quote(root, quote.target).text
    except (LookupError, OSError, ValueError) as error:
        return str(error)
    if source == quote.fence.body:
        return None
    return f"the quote differs from {quote.target}\n" + diff(quote.fence.body, source)


def _output_problem(cell: Cell, printed: str) -> str | None:
    if cell.output is None:
        return f"the cell prints, but no ```text fence follows:\n{printed}" if printed else None
    if same_output(cell.output.body, printed):
        return None
    return "the cell prints something else\n" + diff(cell.output.body, printed + "\n")


def diff(page: str, now: str) -> str:
    """A unified diff from what the page says to what is true now."""
    lines = difflib.unified_diff(page.splitlines(), now.splitlines(), "page", "now", lineterm="")
    return textwrap.indent("\n".join(lines), "  ")


def same_output(page: str, printed: str) -> bool:
    """Equal text with equal numbers at the page's precision; the width of blanks does not count."""
    if _words(page) != _words(printed):
        return False
    pairs = zip(NUMBER.findall(page), NUMBER.findall(printed), strict=True)
    return all(same_number(a, b) for a, b in pairs)


def _words(text: str) -> str:
    """The text with # for each number, and blanks made alike: torch pads columns to their width."""
    text = " ".join(NUMBER.sub("#", text).split())
    return re.sub(r"([\[(]) ", r"\1", text)


def same_number(page: str, printed: str) -> bool:
    """Whole numbers must be equal; others when `printed` rounds to `page`.

    A check prints tensors with two digits more than the page shows. So a value on the edge of
    rounding, which another processor may round the other way, passes, and a changed last digit does
    not. Where a cell rounds by itself there are no such digits: from four decimals on, one unit in
    the last is allowed.
    """
    if "." not in page + printed and "e" not in page + printed:
        return page == printed
    if ("." in page) != ("." in printed) or ("e" in page) != ("e" in printed):
        return False
    unit = _unit(page)
    is_rounded_by_cell = _unit(printed) >= unit and unit < 0.5e-3
    tolerance = unit * (1.01 if is_rounded_by_cell else 0.51) + 1e-6 * abs(float(page))
    return abs(float(page) - float(printed)) <= tolerance


def _unit(number: str) -> float:
    """The value of one in the last printed digit: 0.25 -> 0.01, 1.5e-3 -> 1e-4."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals)


def read_figures(path: Path) -> dict[Path, bytes]:
    """The figure files of a document: those that begin with its number."""
    number = re.match(r"\d*", path.stem)[0]
    files = (path.parent / "figures").glob(f"{number}-*.svg")
    return {file: file.read_bytes() for file in files} if number else {}


def _figure_problem(before: dict[Path, bytes], after: dict[Path, bytes]) -> str | None:
    """Which figures a cell drew differently; puts the old ones back."""
    changed = [file for file in after if after[file] != before.get(file)]
    for file in changed:
        if file in before:
            file.write_bytes(before[file])
        else:
            file.unlink()
    if not changed:
        return None
    names = ", ".join(sorted(file.name for file in changed))
    return f"the cell draws another {names}; run python -m chapters.tools.update"
