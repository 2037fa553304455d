"""Rewrite what code knows: printed outputs, quotes, figures, generated sections.

`python -m chapters.tools.update [FILES]` rewrites them, by default in README.md and all chapters;
with `--check` it changes nothing, reports the first problem of each, and exits with status 1.
"""

import argparse
import sys
import traceback
from pathlib import Path

from chapters.tools import cells
from chapters.tools.generated import documents, with_sections
from chapters.tools.quotes import LONGEST, read_quote

Edit = tuple[int, int, str]  # replace [start, end) of the text


def updated(path: Path, root: Path = cells.ROOT) -> str:
    """The document as it must be now; runs its cells, which may rewrite its figures."""
    text = path.read_text()
    namespace = cells.start_namespace()
    edits = [edit for block in cells.parse(text) for edit in _edits(block, namespace, path, root)]
    for start, end, new in reversed(edits):
        text = text[:start] + new + text[end:]
    return with_sections(text, path, root)


def _edits(block: cells.Block, namespace: dict, path: Path, root: Path) -> list[Edit]:
    if isinstance(block, cells.Stray):
        raise ValueError(f"{path}:{block.line}: {block.reason}")
    if isinstance(block, cells.Quote):
        fence = block.fence
        end = fence.body_start + len(fence.body)
        return [(fence.body_start, end, read_quote(root, block.target).text)]
    if cells.is_skipped(block):
        return []
    return _output_edits(block, cells.run(block, namespace, path, cells.PAGE_PRECISION))


def _output_edits(cell: cells.Cell, printed: str) -> list[Edit]:
    end = cell.fence.end
    if cell.output and printed:
        start = cell.output.body_start
        return [(start, start + len(cell.output.body), printed + "\n")]
    if cell.output:
        return [(end, cell.output.end, "")]
    return [(end, end, f"\n\n```text\n{printed}\n```")] if printed else []


def problems(path: Path, root: Path = cells.ROOT) -> list[str]:
    """What is wrong with a document, as `path:line: problem`; stops at its first wrong block."""
    text = path.read_text()
    namespace = cells.start_namespace()
    found = []
    for block in cells.parse(text):
        problem = cells.problem_of(block, namespace, path, root)
        if problem:
            found.append(f"{path}:{block.line}: {problem}")
            break
    now = with_sections(text, path, root)
    if now != text:
        found.append(f"{path}: a generated section is out of date\n{cells.diff(text, now)}")
    return found


def long_quotes(path: Path, root: Path = cells.ROOT) -> list[str]:
    """Advice for the author: quotes that are longer than a reader takes in at once."""
    quotes = [block for block in cells.parse(path.read_text()) if isinstance(block, cells.Quote)]
    lengths = {quote: len(quote.fence.body.splitlines()) for quote in quotes}
    return [
        f"{path}:{quote.line}: {quote.target} has {length} lines; quote at most {LONGEST} at once"
        for quote, length in lengths.items()
        if length > LONGEST
    ]


def rewrite(path: Path) -> list[str]:
    """Write one document anew; what could not be done."""
    try:
        text = updated(path)
    except Exception:
        return [f"{path}: not updated\n{traceback.format_exc(limit=-4)}"]
    if text != path.read_text():
        path.write_text(text)
        print(f"{path}: rewritten")
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: every document")
    parser.add_argument("--check", action="store_true", help="report only")
    args = parser.parse_args()
    files = [file.resolve() for file in args.files] or documents()
    bad = [problem for file in files for problem in (problems if args.check else rewrite)(file)]
    for line in [advice for file in files for advice in long_quotes(file)] + bad:
        print(line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
