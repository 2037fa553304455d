"""Scheduler and block manager alone: what holds after every step of any trace, and bug cases whose
schedules are followed token by token. Chapters 08 and 09.
"""

import pytest
import traces
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Arrival, Run, Trace

BS = 4
ANY = st.sampled_from(traces.TOKENS)


@st.composite
def any_trace(draw) -> Trace:
    """Small pools and budgets; prompts are cut out of a few stems, so that they share prefixes."""
    stems = draw(st.lists(st.lists(ANY, min_size=1, max_size=16), min_size=1, max_size=3))
    arrivals = []
    for _ in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(ANY, max_size=4))
        new, reads = draw(st.sampled_from((0, 0, 1, 4, 9))), draw(st.booleans())
        arrivals.append(Arrival(draw(st.integers(0, 4)), tuple(prompt), new, reads or new > 0))
    return Trace(
        tuple(arrivals),
        num_blocks=draw(st.integers(1, 14)),
        block_size=draw(st.integers(1, 4)),
        budget=draw(st.sampled_from((1, 2, 3, 5, 8, 32))),
        max_num_seqs=draw(st.integers(1, 6)),
        chunked=draw(st.booleans()),
        caching=draw(st.booleans()),
        failing=draw(st.none() | st.integers(0, 6)),
    )


@settings(max_examples=300, deadline=None)
@given(any_trace())
def test_what_holds_after_every_step_of_any_trace(trace):
    traces.run(trace)


@pytest.mark.slow
def test_ten_thousand_random_traces():
    report = traces.search(10_000, seed=0)
    assert report is None, report


def test_a_fault_is_reported_with_its_seed_and_a_small_trace(monkeypatch):
    monkeypatch.setattr(traces.BlockManager, "release", lambda *_: None)
    report = traces.search(5, seed=8)
    assert "blocks are" in report and "python tests/traces.py --traces 1 --seed 8" in report
    assert report.count("Arrival(") == 1


# Cases of tests/README.md


def started(*arrivals: Arrival, **facts) -> Run:
    """A run that has its requests, before its first step; `sample` never ends a generation."""
    facts = {"block_size": BS, "budget": 64, "num_blocks": 16} | facts
    state = Run(Trace((), **facts))
    state.rng.choice = lambda _: 2
    for number, arrival in enumerate(arrivals):
        state.add(number, arrival)
    return state


def prompt(length: int, first: int = 2) -> tuple[int, ...]:
    """Distinct tokens; another `first` shares no block."""
    return tuple(range(first, first + length))


def finish(state: Run) -> None:
    """All steps, of which there are few."""
    for _ in range(200):
        if not state.scheduler.has_work:
            return
        state.step()
    raise AssertionError("no end")


@pytest.mark.parametrize("length", [BS, 2 * BS - 1, 2 * BS, 2 * BS + 1])
def test_a_cached_prompt_computes_at_least_its_last_token(length):
    state = started(Arrival(0, prompt(length)))
    finish(state)
    state.add(1, Arrival(0, prompt(length)))
    ((seq, n),) = state.step()
    cached = (length - 1) // BS * BS
    assert (seq.num_computed_tokens - n, n) == (cached, length - cached)


def test_a_preempted_sequence_that_hits_the_cache_stays_within_its_length():
    """Three sequences with one prefix of two blocks in a pool of five."""
    shared = prompt(2 * BS)
    arrivals = [Arrival(0, (*shared, 90 + i), 2 * BS) for i in range(3)]
    state = started(*arrivals, num_blocks=5)
    finish(state)
    assert state.num_preemptions > 0 and len(state.finished) == 3


@pytest.mark.parametrize("chunked", [True, False])
def test_a_refused_sequence_owns_nothing(chunked):
    """The second does not fit the budget (or gets a part of it), the third not the pool."""
    arrivals = [Arrival(0, prompt(6)), Arrival(0, prompt(6, 50)), Arrival(0, prompt(9, 90))]
    state = started(*arrivals, budget=10, num_blocks=4, chunked=chunked)
    state.step()
    assert [seq.block_table for seq in state.scheduler.waiting] == [[]] * (1 if chunked else 2)
    finish(state)
    assert len(state.finished) == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_equal_prompts_of_a_step_are_freed_in_either_order(order):
    """They do not read, so both compute; the first is published, and the loser takes nothing."""
    state = started(*[Arrival(0, prompt(2 * BS), 8, reads=False)] * 2)
    state.step()
    pair = list(state.scheduler.running)
    assert pair[0].block_table != pair[1].block_table
    entries = dict(state.blocks.cached)
    assert [block for block, _ in entries.values()] == pair[0].block_table[:2]
    for i in order:
        state.blocks.release(pair[i])
        assert state.blocks.cached == entries
    assert all(block.ref_count == 0 for block in state.blocks.blocks)
    state.scheduler.running.clear()
    state.live = []
    state.add(2, Arrival(0, (*prompt(2 * BS), 99)))
    ((third, n),) = state.step()
    assert n == 1 and third.num_computed_tokens == 2 * BS + 1


def test_a_prefix_is_shared_as_far_as_it_is_scheduled_and_no_further():
    """A's prefix is cut in two by the budget: B, a step later, takes what both steps fill."""
    state = started(Arrival(0, prompt(3 * BS)), Arrival(0, (*prompt(3 * BS), 99)), budget=2 * BS)
    first, second = state.live
    assert [(seq is first, n) for seq, n in state.step()] == [(True, 2 * BS)]
    assert not second.block_table
    scheduled = {id(seq): n for seq, n in state.step()}
    assert scheduled == {id(first): BS, id(second): 1}


def test_within_one_step_a_neighbour_shares_what_the_step_fills():
    state = started(Arrival(0, prompt(3 * BS)), Arrival(0, (*prompt(3 * BS), 99)))
    assert [n for _, n in state.step()] == [1, 3 * BS]


def test_a_failed_step_leaves_no_entry():
    state = started(Arrival(0, prompt(3 * BS)))
    state.fail()
    state.add(1, Arrival(0, prompt(3 * BS)))
    assert [n for _, n in state.step()] == [3 * BS]


def test_a_block_is_known_when_it_is_full_and_not_before():
    """Two equal prompts of one block and 3 tokens, which then go on differently."""
    state = started(*[Arrival(0, prompt(BS + 3), 2 * BS)] * 2)
    draws = iter(range(100, 200))
    state.rng.choice = lambda _: next(draws)
    state.step()
    one, two = state.live
    assert one.block_table[0] == two.block_table[0]
    assert one.block_table[1] != two.block_table[1]
    assert all(state.blocks.blocks[seq.block_table[1]].key is None for seq in (one, two))
    state.step()
    keys = {state.blocks.blocks[seq.block_table[1]].key for seq in (one, two)}
    assert len(keys) == 2 and None not in keys


def test_equal_tokens_after_other_parents_are_not_equal_blocks():
    """Both prompts end in the same block; its keys differ by what came before."""
    same = prompt(BS + 1, 90)
    state = started(Arrival(0, (*prompt(BS), *same)))
    finish(state)
    state.add(1, Arrival(0, (*prompt(BS, 50), *same)))
    state.add(2, Arrival(0, same))
    assert [n for _, n in state.step()] == [BS + 1, 2 * BS + 1]
    assert len(state.blocks.cached) == 5


@pytest.mark.parametrize("length", [BS - 1, BS, BS + 1])
def test_a_decode_step_writes_the_slot_of_the_token_it_computes(length):
    """The block of a slot is there in time, and no slot is written twice."""
    arrivals = [Arrival(0, prompt(length), 2 * BS), Arrival(0, prompt(length, 50), 2 * BS)]
    state, written = started(*arrivals), []
    state.step()
    while state.scheduler.has_work:
        before = [(seq, seq.num_tokens) for seq in state.live]
        tables = {id(seq): seq.block_table for seq in state.live}
        scheduled = state.scheduler.schedule()
        state.check(scheduled)
        for seq, n in before:
            slot = tables[id(seq)][(n - 1) // BS] * BS + (n - 1) % BS
            assert [*state.write(seq, 1)] == [slot]
            written.append(slot)
        finished = state.scheduler.update(scheduled, [2] * len(scheduled))
        state.live = [seq for seq in state.live if seq not in finished]
    assert len(written) == len(set(written)) == 2 * (2 * BS - 1)


def test_a_request_that_outgrows_the_pool_is_refused_and_the_others_finish():
    """Two blocks: a prompt of both and max_tokens 5 could never end; max_tokens 1 can."""
    state = started(num_blocks=2)
    big = traces.make_request(0, Arrival(0, prompt(2 * BS), 5))
    with pytest.raises(ValueError, match=r"8 tokens and max_tokens = 5 .* num_kv_blocks = 2"):
        state.scheduler.check(big)
    state.add(1, Arrival(0, prompt(2 * BS), 1))
    state.add(2, Arrival(0, prompt(BS, 50), BS))
    finish(state)
    assert len(state.finished) == 2 and len(state.blocks.free) == 2


@pytest.mark.parametrize("lengths", [(3, 16), (16, 3), (15, 16, 3)])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_pooled_prompt_may_fill_the_budget(lengths, chunked):
    """No place is kept for a sampled token, whatever the order."""
    arrivals = [Arrival(0, prompt(n, 100 * i)) for i, n in enumerate(lengths)]
    state = started(*arrivals, budget=16, num_blocks=4 if chunked else 16, chunked=chunked)
    for _ in range(6):
        if state.scheduler.has_work:
            state.step()
    assert len(state.finished) == len(lengths)


@pytest.mark.parametrize("length", range(BS - 1, 2 * BS + 2))
def test_a_preempted_generation_neither_loses_nor_doubles_a_token(length):
    """By force, when the youngest has `length` tokens, one of them not computed."""
    arrivals = [Arrival(0, prompt(3), 3 * BS), Arrival(0, prompt(3, 50), 3 * BS)]
    state = started(*arrivals)
    draws = iter(range(100, 999))
    state.rng.choice = lambda _: next(draws)
    young = state.live[1]
    state.step()
    while young.num_tokens < length:
        state.step()
    generated = young.output_ids
    state.scheduler._preempt_youngest()
    assert (young.output_ids, young.block_table) == (generated, [])
    finish(state)
    assert young.output_ids[: len(generated)] == generated
    assert [len(seq.output_ids) for seq in state.finished] == [3 * BS] * 2
