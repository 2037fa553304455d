"""Ranks that are processes: how they start, fail and end, each test under a watchdog."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from nanopool.parallel import RankLost
from nanopool.ranks import ProcessRanks, ThreadRanks

slow = pytest.mark.slow
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HERE)])}


class Target:
    """A target whose methods fail where a test wants them to."""

    def __init__(self, tp, fails_on=None):
        self.tp = tp
        if tp.rank == fails_on:
            raise FileNotFoundError("no such model")

    def total(self):
        return self.tp.all_reduce(torch.tensor(self.tp.rank + 1.0)).item()

    def everything(self, x):
        total = self.tp.all_reduce(x * (self.tp.rank + 1))
        return total, self.tp.all_gather(total + self.tp.rank, dim=0), self.tp.broadcast("word")

    def process(self):
        facts = [os.getpid(), torch.get_num_threads(), torch.is_inference_mode_enabled()]
        return self.tp.all_gather(torch.tensor([facts]), dim=0).tolist()

    def delayed(self, value, seconds):
        """A worker is slow to read: what rank 0 sends next must not replace it."""
        time.sleep(seconds if self.tp.rank else 0)
        shared = [float(value if isinstance(value, int) else len(value))]
        return self.tp.all_gather(torch.tensor([shared]), dim=0).flatten().tolist()

    def fail(self, rank, late=False):
        if self.tp.rank == rank and not late:
            raise ValueError(f"wrong on rank {rank}")
        self.total()
        if self.tp.rank == rank:
            raise ValueError(f"wrong on rank {rank}")

    def send_signal(self, rank, number):
        """A signal arrives at one rank while the others wait for it."""
        if self.tp.rank == rank:
            threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
            time.sleep(1000)
        self.total()

    def wait_for_ever(self):
        print(f"waiting {os.getpid()}", flush=True)
        time.sleep(1000 if self.tp.rank == 0 else 0)
        self.total()


def resources() -> tuple[int, int]:
    """How many threads and open files this process has (0 where the system does not say)."""
    gc.collect()
    folders = [Path("/proc/self/task"), Path("/proc/self/fd")]
    threads, files = (len(os.listdir(folder)) if folder.exists() else 0 for folder in folders)
    return threads, files


def assert_ended(workers: list[subprocess.Popen]) -> None:
    assert all(worker.poll() is not None for worker in workers)


def raise_timeout(*_):
    raise TimeoutError("a test of process ranks hangs")


@pytest.fixture(autouse=True)
def watchdog():
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(120)
    yield
    signal.alarm(0)


@pytest.fixture
def temporary_folder(tmp_path, monkeypatch):
    """Where the ranks of this test put their store; they must take it away again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def pair():
    ranks = ProcessRanks(Target, 2)
    yield ranks
    ranks.shutdown()
    ranks.shutdown()
    assert_ended(ranks.workers)


def test_processes_compute_what_threads_compute(pair):
    x = torch.randn(5, 3)
    expected = ThreadRanks(Target, 2).call("everything", x)
    total, gathered, word = pair.call("everything", x)
    assert torch.equal(total, expected[0])
    assert torch.equal(gathered, expected[1])
    assert word == "word"


def test_each_rank_is_a_process_in_inference_mode_with_its_share_of_the_cores(pair):
    own, other = pair.call("process")
    assert own[0] == os.getpid() != other[0]
    assert other[1] == max(1, torch.get_num_threads() // 2)
    assert own[2] and other[2]
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("calls", [50, pytest.param(1000, marks=slow)])
def test_quick_calls_to_a_slow_worker_arrive_in_order(pair, calls):
    for i in range(calls):
        assert pair.call("delayed", i, 0.01 * (i % 10 == 0)) == [i, i]


def test_a_call_may_be_of_any_size(pair):
    """Larger than any buffer of a pipe."""
    assert pair.call("delayed", b"x" * 2**24, 0.1) == [2**24] * 2


def test_ranks_of_different_sizes_live_side_by_side_and_end_when_dropped(pair, temporary_folder):
    before = resources()
    ranks = ProcessRanks(Target, 3)
    assert (ranks.call("total"), pair.call("total")) == (6, 3)
    workers = ranks.workers
    del ranks
    assert_ended(workers)
    assert resources() == before
    assert pair.call("total") == 3


@pytest.mark.parametrize(
    ("method", "args", "error", "message"),
    [
        pytest.param("fail", (1,), ValueError, r"wrong on rank 1", id="error"),
        pytest.param("send_signal", (1, signal.SIGKILL), RankLost, r"rank 1 .* -9", id="killed"),
        pytest.param("send_signal", (0, signal.SIGINT), KeyboardInterrupt, None, id="Ctrl-C"),
        pytest.param("fail", (1, True), ValueError, r"on rank 1", id="late", marks=slow),
        pytest.param("fail", (0,), ValueError, r"on rank 0", id="on rank 0", marks=slow),
    ],
)
def test_a_failure_ends_the_call_and_the_ranks(
    method, args, error, message, pair, temporary_folder
):
    before = resources()
    ranks = ProcessRanks(Target, 2)
    start = time.monotonic()
    with pytest.raises(error, match=message):
        ranks.call(method, *args)
    assert time.monotonic() - start < 10
    assert_ended(ranks.workers)
    ranks.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        ranks.call("total")
    del ranks
    assert resources() == before


def test_an_error_while_building_is_raised(pair, temporary_folder):
    before = resources()
    with pytest.raises(FileNotFoundError, match="no such model"):
        ProcessRanks(partial(Target, fails_on=1), 2)
    assert resources() == before


@slow
def test_a_worker_that_died_between_calls_is_named(pair, temporary_folder):
    ranks = ProcessRanks(Target, 2)
    ranks.workers[0].kill()
    ranks.workers[0].wait()
    with pytest.raises(RankLost, match=r"rank 1 .* -9"):
        ranks.call("total")


@slow
def test_twenty_rounds_leave_nothing(pair, temporary_folder):
    before = resources()
    for _ in range(20):
        signal.alarm(120)
        ranks = ProcessRanks(Target, 2)
        assert ranks.call("total") == 3
        ranks.shutdown()
        del ranks
        assert resources() == before


SCRIPT = """
from nanopool.ranks import ProcessRanks
from test_02_processes import Target
ranks = ProcessRanks(Target, 2)
print("total", ranks.call("total"), flush=True)
ranks.call("wait_for_ever")
"""


def test_a_script_from_stdin_without_main_guard_works_and_its_workers_die_with_it(tmp_path):
    script = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        text=True,
    )
    script.stdin.write(SCRIPT)
    script.stdin.close()
    assert script.stdout.readline() == "total 3.0\n"
    assert script.stdout.readline() == f"waiting {script.pid}\n"
    assert script.stderr.readline().startswith("waiting ")  # what a worker prints
    script.kill()
    script.wait()
    assert script.stderr.read() == ""  # the worker has closed its end too: it is gone
    assert list(tmp_path.iterdir()) == []
    script.stdout.close()
    script.stderr.close()


TORCHRUN_SCRIPT = """
import os
from nanopool.ranks import TorchrunRanks
from test_02_processes import Target
rank = int(os.environ["RANK"])
first, second = TorchrunRanks(Target, 2), TorchrunRanks(Target, 1)
lines = [f"rank {rank}: {first.call('total')} {second.call('total')}"]
for _ in range(2):
    try:
        first.call("fail", 1)
    except (ValueError, RuntimeError) as error:
        lines.append(str(error))
lines.append(str(second.call("total")))
print("; ".join(lines) + "\\n", end="", flush=True)
"""


def test_torchrun_ranks_make_the_same_calls(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True
    )
    told = "wrong on rank 1; this LLM is shut down: make a new one; 3.0"
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"rank {rank}: 3.0 3.0; {told}" for rank in (0, 1)
    ]
