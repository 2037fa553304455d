"""The chapters as Jupyter notebooks: `python -m chapters.tools.notebooks [chapters]`.

Cells become code cells with their checked output under them; quotes stay markdown, since the
package is imported and not retyped. Notebooks are not kept in git: the markdown is the source.
"""

import argparse
import re
from pathlib import Path

import jupytext
from nbformat import NotebookNode, v4

from chapters.tools import cells
from chapters.tools.generated import chapters

OUT = cells.ROOT / "chapters/notebooks"

SETUP = """\
# As the tests of the book do: run in the repository root, one thread, four digits.
import os, pathlib, sys
import torch

here = pathlib.Path.cwd()
os.chdir(next(p for p in [here, *here.parents] if (p / "nanopool").is_dir()))
sys.path += [".", "tests"]
torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_printoptions(precision=4, sci_mode=False)
"""


def notebook(path: Path) -> NotebookNode:
    """One chapter as a notebook."""
    text = path.read_text()
    blocks = cells.parse(text)
    runnable = [block for block in blocks if isinstance(block, cells.Cell)]
    for block in reversed(blocks):
        text = _without_fence(text, block)
    text = text.replace("```sh\n", "```sh .noeval\n")  # a shell command is text too
    book = jupytext.reads(with_links(text), fmt="md")
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for cell, block in zip(code, runnable, strict=True):
        cell.metadata = {"tags": ["skip-execution"]} if block.skip else {}  # nbclient's tag
        if block.output:
            cell.outputs = [v4.new_output("stream", name="stdout", text=block.output.body)]
    book.cells.insert(1, v4.new_code_cell(SETUP))
    book.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return book


def _without_fence(text: str, block: cells.Block) -> str:
    """Take out a cell's output, and mark a quote so that jupytext leaves it in the markdown."""
    if isinstance(block, cells.Quote):
        return f"{text[: block.fence.start]}```python .noeval\n{text[block.fence.body_start :]}"
    if isinstance(block, cells.Cell) and block.output:
        return text[: block.fence.end] + text[block.output.end :]
    return text


def with_links(text: str) -> str:
    """Relative links as seen from the notebooks' folder; a link to a chapter opens its notebook."""

    def moved(match: re.Match) -> str:
        target = match[1]
        if target is None or re.match(r"\w+:|#", target):  # code, or no file
            return match[0]
        if re.fullmatch(r"\d\d-[\w-]+\.md", target):
            return f"]({target[:-3]}.ipynb"
        return f"](../{target}"

    return re.sub(r"^```.*?^```|\]\(([^)#\s]+)", moved, text, flags=re.DOTALL | re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="default: every chapter")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    for path in args.files or chapters():
        target = OUT / f"{path.stem}.ipynb"
        jupytext.write(notebook(path), target, fmt="ipynb")
        print(target)


if __name__ == "__main__":
    main()
