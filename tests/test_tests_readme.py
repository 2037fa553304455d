"""README.md of the tests names every case once, and only tests that exist."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "README.md").read_text()


def test_every_test_that_the_table_names_exists():
    missing = []
    for line in TABLE.splitlines():
        file = None
        for named, test in re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", line):
            file = named or file
            if not (named or test):
                continue
            functions = {
                node.name
                for node in ast.walk(ast.parse((HERE / file).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            if test and test not in functions:
                missing.append(f"{file}::{test}")
    assert missing == []


def test_no_case_is_named_twice():
    cases = re.findall(r"^\| ([A-G]\d+) \|", TABLE, flags=re.MULTILINE)
    assert len(cases) == len({*cases}) == 61
