"""README shows what its commands print; its snippet, links and tables are checked with the book."""

import re
import subprocess
import sys

from chapters.tools import cells

README = (cells.ROOT / "README.md").read_text()


def shown_after(command: str) -> str:
    """The text fence behind the fence of a shell command."""
    match = re.search(
        rf"^```sh\n{re.escape(command)}\n```\n+```text\n(.*?)^```$", README, re.M | re.S
    )
    assert match, f"README shows no output of {command!r}"
    return match[1]


def test_readme_shows_what_the_example_prints():
    command = [sys.executable, "example.py"]
    run = subprocess.run(command, cwd=cells.ROOT, check=True, capture_output=True, text=True)
    shown = shown_after("make example")
    assert cells.same_output(shown, run.stdout), cells.diff(shown, run.stdout)


def test_readme_has_a_snippet_of_six_lines():
    snippet = next(block for block in cells.parse(README) if isinstance(block, cells.Cell))
    assert len([line for line in snippet.fence.body.splitlines() if line]) == 6
    assert snippet.output


def test_readme_names_every_make_target_that_the_makefile_has():
    makefile = (cells.ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.M), target
