"""Break one line of the package at a time: `python tests/mutations.py`. Some test must notice each.

Every mutant is a copy of the package and its tests in a folder of its own, where the chosen tests
run. They must pass on a copy that is not broken.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutant:
    """In `file`, the only `old` becomes `new`; `tests` are what pytest runs."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "prefix key without its parent",
        "engine/block_manager.py",
        "return parent, seq.token_ids[",
        "return ROOT, seq.token_ids[",
        ("test_08_block_manager.py::test_equal_tokens_after_other_parents_are_not_equal_blocks",),
    ),
    Mutant(
        "slots one position too low",
        "batch.py",
        "slots = slots_of(tables, owners, positions, block_size)",
        "slots = slots_of(tables, owners, np.maximum(positions - 1, 0), block_size)",
        ("test_bug_cases.py::test_b4_keys_that_are_not_written_yet_are_not_read",),
    ),
    Mutant(
        "cu_seqlens_k of the queries",
        "batch.py",
        '"cu_seqlens_k": cumulative(key_lens)',
        '"cu_seqlens_k": cumulative(query_lens)',
        ("test_10_model_runner.py::test_dead_rows_are_stored_nowhere",),
    ),
    Mutant(
        "a bias on every rank",
        "layers/linear.py",
        "y = self.tp.all_reduce(F.linear(x, self.weight))",
        "y = self.tp.all_reduce(F.linear(x, self.weight, self.bias))",
        ("test_bug_cases.py::test_f1_f2_a_bias_is_added_once_and_split_with_its_columns",),
    ),
    Mutant(
        "bit 30 one token late",
        "batch.py",
        "second = np.arange(start, start + len(ids)) >= num_first_segment",
        "second = np.arange(start, start + len(ids)) > num_first_segment",
        ("test_05_encoders.py::test_segment_ids_of_packed_pairs_equal_transformers",),
    ),
    Mutant(
        "dimensions cut after normalising",
        "pooler/heads.py",
        "rows = rows[..., : params.dimensions].float()",
        "rows = F.normalize(rows.float(), dim=-1)[..., : params.dimensions]\n        return rows",
        ("test_bug_cases.py::test_d8_dimensions_are_cut_and_then_normalised",),
    ),
    Mutant(
        "prompts finished too early",
        "pooler/metadata.py",
        "start + n == prompt_len for",
        "start + n <= prompt_len for",
        ("test_bug_cases.py::test_b6_an_unfinished_request_has_one_place_in_the_outputs",),
    ),
    Mutant(
        "MaxSim over rows of the next document",
        "pooler/flash_maxsim.py",
        'dots = tl.where(columns[None, :] < end, dots, float("-inf"))',
        "dots = tl.where(columns[None, :] < end, dots, 0.0)",
        ("test_03_kernels.py::test_maxsim_where_every_dot_is_negative",),
    ),
)


def run_tests(tests: tuple[str, ...], mutant: Mutant | None = None) -> bool:
    """Whether the tests pass on a copy of the package, broken by the mutant."""
    with TemporaryDirectory(prefix="nanopool-mutant-") as name:
        folder = Path(name)
        for part in ("nanopool", "tests"):
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        if mutant is not None:
            file = folder / "nanopool" / mutant.file
            text = file.read_text()
            assert text.count(mutant.old) == 1, f"{mutant.file} has changed: {mutant.old}"
            file.write_text(text.replace(mutant.old, mutant.new))
        chosen = [f"tests/{test}" for test in tests]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *chosen],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    assert result.returncode in (0, 1), result.stdout + result.stderr  # 1: some test failed
    return result.returncode == 0


def survivors() -> list[str]:
    """The mutants that no test noticed. Raises AssertionError where the tests fail anyway."""
    every = tuple(test for mutant in MUTANTS for test in mutant.tests)
    with ThreadPoolExecutor(2) as pool:
        unbroken = pool.submit(run_tests, every)
        passed = pool.map(lambda mutant: run_tests(mutant.tests, mutant), MUTANTS)
        found = [mutant.name for mutant, ok in zip(MUTANTS, passed, strict=True) if ok]
        assert unbroken.result(), "the tests fail without a mutant"
    return found


if __name__ == "__main__":
    if found := survivors():
        raise SystemExit(f"no test noticed: {', '.join(found)}")
    print(f"{len(MUTANTS)} mutants, each noticed")
