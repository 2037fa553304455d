"""What ranks compute together, and what happens when a rank that is a thread fails.

Process ranks are run as threads here too, where only their collectives matter.
"""

import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from nanopool.parallel import (
    DistTP,
    LocalGroup,
    RankLost,
    SingleTP,
    report_error,
    run_ranks,
    simulate,
)
from nanopool.ranks import ThreadRanks

SIZES = [1, 2, 3, 4]


def rank_tensors(size: int) -> list[torch.Tensor]:
    """One [5, 7] tensor a rank, of magnitudes so different that the order of a sum shows."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, generator=generator) * 10.0**rank for rank in range(size)]


def simulate_processes(fn, size):
    """As `simulate`, with the ranks that processes have."""
    store = dist.HashStore()
    return run_ranks(lambda tp: fn(DistTP(tp.rank, size, store)), LocalGroup(size))


each_kind = pytest.mark.parametrize("simulate", [simulate, simulate_processes])


class Target:
    """A target whose methods fail where a test wants them to."""

    def __init__(self, tp):
        self.tp = tp
        self.resets = 0

    def reset(self):
        self.resets += 1

    def total(self):
        return self.tp.all_reduce(torch.tensor(self.tp.rank + 1.0)).item()

    def fail(self, rank, error):
        self.tp.barrier()
        if self.tp.rank == rank:
            raise error
        return self.total()

    def interrupt(self, rank):
        """Ctrl-C while one rank never comes to the barrier where the others wait."""
        if self.tp.rank == 0:
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]).start()
        if self.tp.rank != rank:
            self.tp.barrier()
        else:
            time.sleep(0.2 if rank else 0)


@pytest.fixture(autouse=True)
def no_thread_left():
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_adds_in_rank_order(size):
    values = rank_tensors(size)
    expected = values[0].clone()
    for value in values[1:]:
        expected += value
    for result in simulate(lambda tp: tp.all_reduce(values[tp.rank]), size):
        assert torch.equal(result, expected)


@each_kind
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_gives_new_tensors_with_the_same_bits(simulate, size):
    values = rank_tensors(size)
    kept = [value.clone() for value in values]
    results = simulate(lambda tp: tp.all_reduce(values[tp.rank]), size)
    assert len({result.data_ptr() for result in results}) == size
    for rank, result in enumerate(results):
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result, sum(values))
        assert torch.equal(values[rank], kept[rank])


@each_kind
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_concatenates_in_rank_order(simulate, size, dim):
    values = rank_tensors(size)
    for result in simulate(lambda tp: tp.all_gather(values[tp.rank], dim), size):
        assert torch.equal(result, torch.cat(values, dim))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_may_be_views_of_any_dtype(simulate, dtype):
    def views(tp):
        x = torch.arange(12, dtype=dtype).view(3, 4).t()[1:]
        return tp.all_reduce(x), tp.all_gather(x, dim=0)

    x = torch.arange(12, dtype=dtype).view(3, 4).t()[1:]
    for total, gathered in simulate(views, 2):
        assert torch.equal(total, 2 * x)
        assert torch.equal(gathered, torch.cat([x, x]))


@each_kind
@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_every_rank_the_value_of_rank_0(simulate, size):
    def values(tp):
        return [tp.broadcast(value) for value in (tp.rank, None, b"x" * 10**6, [ValueError])]

    assert simulate(values, size) == [[0, None, b"x" * 10**6, [ValueError]]] * size


@each_kind
def test_no_rank_leaves_a_barrier_before_the_last_has_come(simulate):
    come = []

    def meet(tp):
        time.sleep(0.05 * tp.rank)
        come.append(tp.rank)
        tp.barrier()
        return len(come)

    assert simulate(meet, 3) == [3, 3, 3]


@each_kind
def test_a_rank_may_overwrite_its_tensors_as_soon_as_an_operation_returns(simulate):
    def overwrite(tp):
        x = torch.zeros(1000)
        for step in range(30):
            x.fill_(step)
            total = tp.all_reduce(x)
            x.fill_(-1)
            assert (total == step * tp.size).all()
            total.fill_(-1)

    simulate(overwrite, 3)


def test_the_only_rank_computes_nothing():
    x = torch.ones(3)
    tp = SingleTP()
    assert (tp.rank, tp.size, tp.broadcast("x"), tp.barrier()) == (0, 1, "x", None)
    assert tp.all_reduce(x) is x
    assert tp.all_gather(x) is x


@pytest.mark.parametrize("size", SIZES)
def test_results_come_by_rank_and_each_rank_is_in_inference_mode(size):
    def look(tp):
        return tp.rank, torch.is_inference_mode_enabled()

    assert simulate(look, size) == [(rank, True) for rank in range(size)]
    assert not torch.is_inference_mode_enabled()


def test_every_rank_has_a_thread_of_its_own_unless_it_is_alone():
    ours = threading.current_thread()
    assert simulate(lambda tp: threading.current_thread(), 1) == [ours]
    assert len({ours, *simulate(lambda tp: threading.current_thread(), 3)}) == 4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", [ValueError("wrong"), MemoryError(), SystemExit(3)])
def test_a_call_raises_the_failing_ranks_own_error_and_the_next_call_works(size, error):
    ranks = ThreadRanks(Target, size)
    for failures, rank in enumerate(range(size), start=1):
        with pytest.raises(type(error)) as raised:
            ranks.call("fail", rank, error)
        assert raised.value is error
        assert [target.resets for target in ranks.targets] == [failures] * size
        assert ranks.call("total") == size * (size + 1) / 2


@pytest.mark.parametrize("rank", [0, 1], ids=["rank 0 is done", "rank 0 waits"])
def test_ctrl_c_frees_every_rank_and_the_next_call_works(rank):
    ranks = ThreadRanks(Target, 3)
    with pytest.raises(KeyboardInterrupt):
        ranks.call("interrupt", rank)
    assert ranks.call("total") == 6


def test_ctrl_c_while_the_ranks_start_leaves_none_of_them_behind(monkeypatch):
    start, ranks = threading.Thread.start, ThreadRanks(Target, 3)

    def start_one(thread):
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", start_one)
        ranks.call("total")
    assert [ranks.call("total") for _ in range(3)] == [6, 6, 6]


@pytest.mark.parametrize("size", SIZES)
def test_an_error_while_building_is_raised(size):
    def build(tp):
        if tp.rank == size - 1:
            raise ValueError("no such model")
        tp.barrier()

    with pytest.raises(ValueError, match="no such model"):
        ThreadRanks(build, size)


class TwoPartError(Exception):
    """Pickles, but cannot be read back."""

    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")


@pytest.mark.parametrize(
    ("error", "raised"), [(KeyError("k"), KeyError), (TwoPartError("one", "two"), RuntimeError)]
)
def test_a_waiting_process_rank_raises_the_first_reported_error(error, raised):
    store = dist.HashStore()

    def fail(tp):
        tp = DistTP(tp.rank, tp.size, store)
        if tp.rank == 1:
            report_error(store, 1, RankLost("not a cause"))
            report_error(store, 1, error)
            report_error(store, 1, ValueError("too late"))
            return None
        with pytest.raises(raised, match=r"k|one and two") as caught:
            tp.barrier()
        return caught.value.__notes__[0]

    assert simulate(fail, 2)[0].startswith("raised on rank 1:\n")


def test_a_process_rank_asks_for_lost_ranks_while_it_waits():
    with pytest.raises(RankLost, match="rank 1 is gone"):
        DistTP(0, 2, dist.HashStore(), lambda: RankLost("rank 1 is gone"))


def test_shutdown_is_idempotent_and_the_next_call_says_so():
    ranks = ThreadRanks(Target, 2)
    ranks.shutdown()
    ranks.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        ranks.call("total")
