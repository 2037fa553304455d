"""What the tests ask of the whole book: links resolve, code is quoted, numbers were printed.

`python -m chapters.tools.checks` shows which classes no chapter quotes, and the share of quoted
lines.
"""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chapters.tools import cells
from chapters.tools.generated import documents
from chapters.tools.quotes import code_lines, first_line, read_quote

TAUGHT = ("parallel.py", "batch.py", "layers", "models", "engine")  # by chapters 00 to 10

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
DIGITS = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Coverage:
    """How much of one source file the book quotes."""

    path: str
    source: str
    quoted: frozenset[int]  # line numbers

    @cached_property
    def lines(self) -> set[int]:
        return code_lines(self.source)

    @cached_property
    def classes(self) -> dict[str, bool]:
        """Every class of the file: is a line of it quoted?"""
        nodes = [n for n in ast.parse(self.source).body if isinstance(n, ast.ClassDef)]
        spans = {node.name: range(first_line(node), node.end_lineno + 1) for node in nodes}
        return {name: not self.quoted.isdisjoint(span) for name, span in spans.items()}


def coverage(parts: tuple[str, ...] = TAUGHT, root: Path = cells.ROOT) -> list[Coverage]:
    """The quoted lines of each file of some parts of the package."""
    quoted = defaultdict(set)
    for page in documents(root):
        for block in cells.parse(page.read_text()):
            if isinstance(block, cells.Quote):
                source = read_quote(root, block.target)
                quoted[source.path].update(source.lines)
    files = [file for part in parts for file in _python_files(root / "nanopool" / part)]
    names = [str(file.relative_to(root)) for file in files]
    return [
        Coverage(name, file.read_text(), frozenset(quoted[name]))
        for name, file in zip(names, files, strict=True)
    ]


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def quoted_share(files: list[Coverage]) -> float:
    """Quoted lines of code / lines of code."""
    return sum(len(f.lines & f.quoted) for f in files) / sum(len(f.lines) for f in files)


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file, heading or line does not exist."""
    text = cells.FENCE.sub("", page.read_text())
    targets = [target for target in LINK.findall(text) if not re.match(r"\w+:", target)]
    return [f"{page}: {target}" for target in targets if not _resolves(page, target)]


def _resolves(page: Path, target: str) -> bool:
    path, _, fragment = target.partition("#")
    file = page.parent / path if path else page
    if not file.exists():
        return False
    if not fragment:
        return True
    if line := re.fullmatch(r"L(\d+)(?:-L\d+)?", fragment):
        return int(line[1]) <= len(file.read_text().splitlines())
    return fragment in {
        _slug(heading) for heading in re.findall(r"^#+ (.+)$", file.read_text(), re.M)
    }


def _slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def unprinted_numbers(page: Path) -> list[str]:
    """Numbers in prose, from 10 up or with decimals, that stand in no fence of the page."""
    text = page.read_text()
    shown = {
        n.replace(",", "") for f in cells.FENCE.finditer(text) for n in DIGITS.findall(f["body"])
    }
    prose = cells.FENCE.sub("", text)
    prose = re.sub(
        r"<!-- (facts|chapters|files|contents|bench).*?<!-- /\1 -->", "", prose, flags=re.S
    )
    prose = re.sub(r"^#.*$|<sub>.*</sub>|\[[^\]]*\]\([^)]*\)|https?://\S+", "", prose, flags=re.M)
    numbers = [number.rstrip(",").replace(",", "") for number in DIGITS.findall(prose)]
    return [n for n in numbers if ("." in n or len(n) > 1) and n not in shown]


def main() -> None:
    files = coverage()
    for file in files:
        missing = [name for name, is_quoted in file.classes.items() if not is_quoted]
        share = f"{len(file.lines & file.quoted)}/{len(file.lines)} lines"
        print(f"{file.path}: {share}" + (f", not quoted: {', '.join(missing)}" if missing else ""))
    print(f"together: {quoted_share(files):.0%}")


if __name__ == "__main__":
    main()
