"""The package stays small, its arrows point one way, and importing it is cheap."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from chapters.tools.cells import ROOT
from chapters.tools.quotes import code_lines

FOLDERS = ("engine", "layers", "models", "pooler")
FILES = sorted((ROOT / "nanopool").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: module_name(file))


def module_name(file: Path) -> str:
    """nanopool/engine/engine.py -> engine.engine; nanopool/models/__init__.py -> models."""
    parts = file.relative_to(ROOT / "nanopool").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "nanopool"


# Size, in lines of code: no blank lines, comments or docstrings


def size(file: Path) -> int:
    return len(code_lines(file.read_text()))


def test_the_four_folders_grow_no_further():
    """The design wants 1,700; what is above it is named in README."""
    assert sum(size(file) for file in FILES if file.parent.name in FOLDERS) <= 1945


def test_the_package_grows_no_further():
    """The design wants 2,700; what is above it is named in README."""
    assert sum(size(file) for file in FILES) <= 3765


@each_file
def test_a_file_fits_the_eye(file):
    assert size(file) <= 200


@each_file
def test_functions_are_short(file):
    lines = code_lines(file.read_text())
    functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, Function)]
    sizes = {f.name: len(lines & set(range(f.lineno, f.end_lineno + 1))) for f in functions}
    assert {name: size for name, size in sizes.items() if size > 40} == {}


@each_file
def test_no_line_hides_from_the_formatter(file):
    assert "fmt:" not in file.read_text()


# Arrows: which part of the package may import which

PARTS = {
    "ground": ("checks", "config", "batch", "parallel", "ranks", "worker", "pooler.params"),
    "files": ("checkpoint", "multi_vector", "convert", "resolve"),
    "texts": ("inputs", "outputs"),
    "calls": ("scoring", "long_text"),
    "llm": ("llm", "nanopool"),
} | dict.fromkeys(FOLDERS, ())
MAY_IMPORT = {
    "ground": (),
    "layers": ("ground",),
    "pooler": ("ground",),
    "models": ("ground", "layers", "pooler"),
    "files": ("ground", "models"),
    "engine": ("ground", "layers", "pooler", "models", "files"),
    "texts": ("ground", "files"),
    "calls": ("ground", "files", "engine", "texts"),
    "llm": ("ground", "files", "engine", "texts", "calls"),
}
# What may be imported inside a function: optional, or slow and not always needed.
OPTIONAL = {"triton", "flash_attn", "torch.nn.attention.varlen"}
OPTIONAL |= {"huggingface_hub", "transformers", "tokenizers"}


def part_of(module: str) -> str:
    for part, modules in PARTS.items():
        if module in modules:
            return part
    folder = module.partition(".")[0]
    assert folder in FOLDERS, f"nanopool/{module}.py is new: give it a place in PARTS"
    return folder


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"line {node.lineno}: write the import in full"
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in MODULES else node.module for name in names]


MODULES = {f"nanopool.{module_name(file)}": file for file in FILES}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below this one, except what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from statements(child)


def imports_of(file: Path) -> set[str]:
    """The modules of this package that a file imports, without `nanopool.`."""
    nodes = statements(ast.parse(file.read_text()))
    names = {name for node in nodes for name in imported(node)}
    return {name.removeprefix("nanopool.") for name in names if name in MODULES}


@each_file
def test_arrows_point_one_way(file):
    part = part_of(module_name(file))
    wrong = {name for name in imports_of(file) if part_of(name) not in (part, *MAY_IMPORT[part])}
    assert not wrong, f"{part} may import {MAY_IMPORT[part]} only"


def test_there_is_no_import_circle():
    graph = {module_name(file): imports_of(file) for file in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
    TopologicalSorter(MAY_IMPORT).prepare()


def is_optional(name: str) -> bool:
    """An optional or slow package, or a module of ours that is written for Triton."""
    if name in MODULES:
        return any("triton" in imported(node) for node in ast.parse(MODULES[name].read_text()).body)
    return any(name == other or name.startswith(f"{other}.") for other in OPTIONAL)


@each_file
def test_functions_import_only_what_is_optional(file):
    functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, Function)]
    names = {name for f in functions for node in ast.walk(f) for name in imported(node)}
    assert {name for name in names if not is_optional(name)} == set()


def test_one_place_imports_by_name():
    places = [module_name(file) for file in FILES if "import_module(" in file.read_text()]
    assert places == ["models"]


# What `import nanopool` takes


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_needs_neither_triton_nor_flash_attn():
    code = "import sys; sys.modules |= dict.fromkeys(['triton', 'flash_attn']); import nanopool"
    run_python(code)


def test_import_adds_little_to_torch_and_transformers():
    """Nothing of transformers but what `import transformers` loads, and no heavy package."""
    printed = run_python(
        "import sys, torch, transformers; before = set(sys.modules); import nanopool\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    packages = {name.partition(".")[0] for name in printed.split()} - sys.stdlib_module_names
    assert packages <= {"nanopool", "safetensors", "tqdm"}
