"""Ranks that are threads: what they compute together, and what happens when one of them fails."""

import signal
import threading
import time

import pytest
import torch

from nanopool.parallel import SingleTP, simulate
from nanopool.ranks import ThreadRanks

SIZES = [1, 2, 3, 4]


def rank_tensors(size: int) -> list[torch.Tensor]:
    """One [5, 7] tensor a rank, of magnitudes so different that the order of a sum shows."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, generator=generator) * 10.0**rank for rank in range(size)]


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
def test_all_reduce_adds_in_rank_order_with_the_same_bits_on_every_rank(size):
    values = rank_tensors(size)
    expected = values[0].clone()
    for value in values[1:]:
        expected += value
    kept = [value.clone() for value in values]
    results = simulate(lambda tp: tp.all_reduce(values[tp.rank]), size)
    assert len({result.data_ptr() for result in results}) == size
    for rank, result in enumerate(results):
        assert torch.equal(result, expected)
        assert torch.equal(values[rank], kept[rank])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_concatenates_in_rank_order(size, dim):
    values = rank_tensors(size)
    for result in simulate(lambda tp: tp.all_gather(values[tp.rank], dim), size):
        assert torch.equal(result, torch.cat(values, dim))


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_every_rank_the_value_of_rank_0(size):
    assert simulate(lambda tp: tp.broadcast(("from", tp.rank)), size) == [("from", 0)] * size


def test_a_rank_may_overwrite_its_tensors_as_soon_as_an_operation_returns():
    def overwrite(tp):
        x = torch.zeros(1000)
        for step in range(100):
            x.fill_(step)
            total = tp.all_reduce(x)
            x.fill_(-1)
            assert (total == step * tp.size).all()
            total.fill_(-1)

    simulate(overwrite, 4)


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


def test_rank_0_is_the_callers_own_thread():
    threads = simulate(lambda tp: threading.current_thread(), 2)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


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


@pytest.mark.parametrize("size", SIZES)
def test_an_error_while_building_is_raised(size):
    def build(tp):
        if tp.rank == size - 1:
            raise ValueError("no such model")
        tp.barrier()

    with pytest.raises(ValueError, match="no such model"):
        ThreadRanks(build, size)


def test_shutdown_is_idempotent_and_the_next_call_says_so():
    ranks = ThreadRanks(Target, 2)
    ranks.shutdown()
    ranks.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        ranks.call("total")
