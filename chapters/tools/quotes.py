"""Source that chapters quote, by name: `path:Object`, `path:Class.method`, `path:Object:part`.

Object is a class, a function, a method, or an assignment at the top of a module or class. The part
is `head` (a class down to its first method, without it) or a range of the object's lines such as
`1-20`. Several objects of one file are separated by commas, and quoted with an empty line between.
"""

import ast
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LONGEST = 25  # lines a reader takes in at once

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Node = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Source:
    """What one target names: its text, dedented, and its lines in the file, counted from 1."""

    path: str
    text: str
    lines: tuple[int, ...]


def read_quote(root: Path, target: str) -> Source:
    """The source behind a target; LookupError, OSError or ValueError say what is wrong with it."""
    path, _, names = target.partition(":")
    if not names:
        raise ValueError(f"{target!r} names no object; write path:Object, e.g. {path}:Class.method")
    text = (root / path).read_text()
    pieces = [_piece(text, path, name.strip()) for name in names.split(",")]
    lines = tuple(line for first, last in pieces for line in range(first, last + 1))
    return Source(path, "\n".join(_dedented(text, *piece) for piece in pieces), lines)


def _piece(text: str, path: str, name: str) -> tuple[int, int]:
    """First and last line of one object, or of a part of it."""
    name, _, part = name.partition(":")
    node = _find(_parsed(text), name.split("."), f"{path} has no {name}")
    first, last = first_line(node), node.end_lineno
    if not part:
        return first, last
    if part == "head" and isinstance(node, ast.ClassDef):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        last = first_line(methods[0]) - 1 if methods else last
        return first, _skip_blank_lines(text, last)
    if match := re.fullmatch(r"(\d+)-(\d+)", part):
        return first + int(match[1]) - 1, min(last, first + int(match[2]) - 1)
    raise ValueError(f"{path}:{name}:{part}: a part is 'head' (of a class) or lines such as 1-20")


def _find(scope: ast.AST, names: list[str], error: str) -> Node:
    for node in scope.body:
        if names[0] in declared_names(node):
            return node if len(names) == 1 else _find(node, names[1:], error)
    raise LookupError(error)


def declared_names(node: ast.AST) -> list[str]:
    """The names that a statement of a module or class gives to something."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def first_line(node: Node) -> int:
    """Where an object begins, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _skip_blank_lines(text: str, last: int) -> int:
    lines = text.splitlines()
    while not lines[last - 1].strip():
        last -= 1
    return last


def _dedented(text: str, first: int, last: int) -> str:
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : last]) + "\n")


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> set[int]:
    """The lines that count as code: no blank lines, no comments, no docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = [(token.start[0], token.end[0]) for token in tokens if token.type not in LAYOUT]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    for node in ast.walk(_parsed(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines
