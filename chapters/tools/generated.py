"""The parts of README.md and the chapters that are written by code, each between two markers.

    <!-- chapters -->                        README: the chapter map
    <!-- files -->                           README: the file map, with lines of code
    <!-- contents -->                        chapters/README: the chapters with their reading times
    <!-- facts: PATH ...; after NN ... -->   a chapter's first line: its code, its test, its demo,
                                             and the chapters to read before

A section ends with `<!-- /NAME -->`. `python -m chapters.tools.update` writes what stands between,
and the line above each quote that says where it comes from (`<sub>`), which nobody types.
"""

import ast
import math
import os
import re
from pathlib import Path

from chapters.tools import cells
from chapters.tools.quotes import code_lines

SECTION = re.compile(
    r"(?P<open><!-- (?P<name>chapters|files|contents|facts)(?:: (?P<args>[^>]*))? -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /(?P=name) -->)",
    re.S,
)


def with_sections(text: str, path: Path, root: Path = cells.ROOT) -> str:
    """The document with each generated section as it must be now."""

    def section(match: re.Match) -> str:
        if match["name"] == "facts":
            body = facts_line(match["args"], path, root)
        else:
            tables = {"chapters": chapter_map, "files": file_map, "contents": contents}
            body = tables[match["name"]](root)
        return f"{match['open']}{body}\n{match['close']}"

    return SECTION.sub(section, with_captions(text, path, root))


def with_captions(text: str, path: Path, root: Path) -> str:
    """The document with the line above each quote that links its source."""
    quotes = [block for block in cells.parse(text) if isinstance(block, cells.Quote)]
    for quote in reversed(quotes):
        before = re.sub(r"<sub>.*</sub>\n\Z", "", text[: quote.fence.start])
        file, _, name = quote.target.partition(":")
        caption = f"<sub>{link(root / file, path, file)} · `{name}`</sub>\n"
        text = before + caption + text[quote.fence.start :]
    return text


def documents(root: Path = cells.ROOT) -> list[Path]:
    """Everything that is checked: both README.md, the chapters, their answers."""
    front = [root / "README.md", root / "chapters/README.md"]
    return [
        *filter(Path.exists, front),
        *chapters(root),
        *sorted((root / "chapters/answers").glob("*.md")),
    ]


def chapters(root: Path = cells.ROOT) -> list[Path]:
    """The chapters, in order: chapters/NN-name.md."""
    return sorted((root / "chapters").glob("[0-9][0-9]-*.md"))


def title(path: Path) -> str:
    """`# 01. Vocab-parallel embedding` -> `Vocab-parallel embedding`."""
    return re.match(r"# \d+\. (.+)", path.read_text())[1]


def link(target: Path, page: Path, text: str) -> str:
    """A markdown link to a file, relative to the page that shows it."""
    return f"[{text}]({os.path.relpath(target, page.parent)})"


def facts_line(args: str, page: Path, root: Path) -> str:
    """One line that says where a chapter's code, tests and demos are, and what it builds on."""
    code, _, after = args.partition("; after ")
    number = page.name[:2]
    tests = sorted((root / "tests").glob(f"test_{number}_*.py"))
    names = set(re.findall(r"\bdemos(?:/| import )(\w+)", page.read_text()))
    demos = [root / f"chapters/demos/{name}.py" for name in sorted(names)]
    parts = {
        "Code": [code_link(root / path, page, root) for path in code.split()],
        "Tests": [link(path, page, f"`{path.name}`") for path in tests],
        "Demo": [link(path, page, f"`{path.name}`") for path in demos],
        "Read before": [
            link(chapter, page, f"{n} {title(chapter)}")
            for n in after.split()
            for chapter in chapters(root)
            if chapter.name.startswith(n)
        ],
    }
    return " · ".join(f"**{name}:** {', '.join(items)}" for name, items in parts.items() if items)


def code_link(path: Path, page: Path, root: Path) -> str:
    """A file of the package with its lines of code."""
    lines = len(code_lines(path.read_text()))
    return link(path, page, f"`{path.relative_to(root)}`") + f" ({lines} lines of code)"


def built_here(page: Path) -> list[str]:
    """The files that a chapter's facts line names."""
    match = SECTION.search(page.read_text())
    return match["args"].partition(";")[0].split() if match and match["name"] == "facts" else []


def chapter_map(root: Path) -> str:
    """README's table of chapters: title, the code it explains, its tests."""
    readme = root / "README.md"
    rows = ["| | chapter | code | tests |", "| --- | --- | --- | --- |"]
    for page in chapters(root):
        number = page.name[:2]
        code = [link(root / path, readme, f"`{Path(path).name}`") for path in built_here(page)]
        tests = sorted((root / "tests").glob(f"test_{number}_*.py"))
        links = [link(path, readme, f"`{path.name}`") for path in tests]
        name = link(page, readme, title(page))
        rows.append(f"| {number} | {name} | {', '.join(code)} | {', '.join(links)} |")
    return "\n".join(rows)


def file_map(root: Path) -> str:
    """README's table of the package: lines of code, what a file is, which chapters explain it."""
    readme = root / "README.md"
    rows = ["| file | lines of code | what it is | chapter |", "| --- | ---: | --- | --- |"]
    total = 0
    for path in sorted((root / "nanopool").rglob("*.py"), key=lambda p: (len(p.parts), p)):
        text = path.read_text()
        lines = len(code_lines(text))
        total += lines
        name = str(path.relative_to(root))
        pages = [page for page in chapters(root) if name in built_here(page)]
        links = ", ".join(link(page, readme, page.name[:2]) for page in pages)
        rows.append(
            f"| {link(path, readme, f'`{name}`')} | {lines} | {first_sentence(text)} | {links} |"
        )
    return "\n".join([*rows, f"| together | {total:,} | | |"])


def contents(root: Path) -> str:
    """The table of contents in chapters/README.md: titles, minutes, answers."""
    page = root / "chapters/README.md"
    rows = ["| | chapter | minutes | exercises |", "| --- | --- | ---: | --- |"]
    for path in chapters(root):
        number = path.name[:2]
        answers = root / f"chapters/answers/{number}.md"
        name = link(path, page, title(path))
        rows.append(f"| {number} | {name} | {minutes(path)} | {link(answers, page, 'answers')} |")
    return "\n".join(rows)


def minutes(page: Path) -> int:
    """Reading time: 200 words of prose a minute, 20 lines of code or output, up to the next 5."""
    text = page.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = text.count("\n") - prose.count("\n")
    return 5 * math.ceil((len(prose.split()) / 200 + lines / 20) / 5)


def first_sentence(source: str) -> str:
    """What a module says it is, without the chapter it names."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    sentence = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.\d])\.(?:\s|$)| \(?[Cc]hapters? \d", sentence)[0].rstrip(";.")
