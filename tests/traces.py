"""Random traces of scheduler and block manager, without a model: `python tests/traces.py`.

A trace is a pool, a budget and requests that arrive between steps. After every step `check` looks
at all that must hold. A failure prints the seed and the smallest trace with the same fault.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from nanopool import PoolingParams, SamplingParams
from nanopool.engine.block_manager import ROOT, BlockManager
from nanopool.engine.scheduler import Scheduled, Scheduler
from nanopool.engine.sequence import Request, Sequence

END = 1  # a token that ends a generation
TOKENS = (END, 2)  # few, so that prefixes meet


@dataclass(frozen=True)
class Arrival:
    """A request and the step before which it comes; `max_new_tokens` 0 pools."""

    step: int
    prompt: tuple[int, ...]
    max_new_tokens: int = 0
    reads: bool = True


@dataclass(frozen=True)
class Trace:
    """What a run depends on. `failing` is a step that fails after it was scheduled."""

    arrivals: tuple[Arrival, ...]
    num_blocks: int = 8
    block_size: int = 2
    budget: int = 8
    max_num_seqs: int = 4
    chunked: bool = True
    caching: bool = True
    failing: int | None = None


def make_request(number: int, arrival: Arrival) -> Request:
    sampling, pooling = SamplingParams(max_tokens=max(1, arrival.max_new_tokens)), None
    if arrival.max_new_tokens == 0:
        sampling, pooling = None, PoolingParams()
    return Request(
        request_id=str(number),
        token_ids=arrival.prompt,
        sampling=sampling,
        pooling=pooling,
        max_new_tokens=arrival.max_new_tokens,
        stop_ids=frozenset({END}),
        reads_prefix_cache=arrival.reads,
    )


class Run:
    """One trace at work: the scheduler, and what the KV pool would hold.

    `pool[slot]` is the whole prefix whose last token's keys lie there, so that a slot tells the
    truth only if all before it is the same.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.blocks = BlockManager(trace.num_blocks, trace.block_size, trace.caching)
        self.scheduler = Scheduler(trace.budget, trace.max_num_seqs, trace.chunked, self.blocks)
        self.rng = random.Random(repr(trace))
        self.pool: dict[int, tuple[int, ...]] = {}
        self.prefixes: dict[int, tuple[int, ...]] = {ROOT: ()}
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.num_admitted = self.num_preemptions = 0

    def add(self, number: int, arrival: Arrival) -> None:
        """Admit a request, unless it can never fit."""
        request = make_request(number, arrival)
        try:
            self.scheduler.check(request)
        except ValueError:
            return
        self.num_admitted += 1
        self.live.append(Sequence(request))
        self.scheduler.add(self.live[-1])

    def step(self) -> Scheduled:
        """Schedule, check, store keys, attend, sample."""
        before = {id(seq): seq.num_computed_tokens for seq in self.live}
        scheduled = self.scheduler.schedule()
        self.num_preemptions += sum(
            seq.num_computed_tokens < before[id(seq)] for seq in self.scheduler.waiting
        )
        self.check(scheduled)
        slots = [slot for seq, n in scheduled for slot in self.write(seq, n)]
        assert len(slots) == len(set(slots)), "two rows of a step are stored in one slot"
        for seq, n in scheduled:
            self.attend(seq, seq.num_computed_tokens + n)
        finished = self.scheduler.update(scheduled, [self.sample(seq, n) for seq, n in scheduled])
        self.live = [seq for seq in self.live if seq not in finished]
        self.finished += finished
        self.check(())
        self.check_truth()
        return scheduled

    def slot(self, seq: Sequence, position: int) -> int:
        size = self.trace.block_size
        return seq.block_table[position // size] * size + position % size

    def write(self, seq: Sequence, n: int) -> Iterator[int]:
        """The slots of a sequence's n rows, each written once."""
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + n):
            slot = self.slot(seq, position)
            self.pool[slot] = tuple(seq.token_ids[: position + 1].tolist())
            yield slot

    def attend(self, seq: Sequence, end: int) -> None:
        """Every key that the last row reads belongs to this very prefix."""
        for position in range(end):
            expected = tuple(seq.token_ids[: position + 1].tolist())
            assert self.pool.get(self.slot(seq, position)) == expected, "a foreign or stale key"

    def sample(self, seq: Sequence, n: int) -> int | None:
        if seq.request.sampling is None or n < seq.num_new_tokens:
            return None
        return self.rng.choice(TOKENS)

    def check(self, scheduled: Scheduled) -> None:
        """What holds after every `schedule` and every `update`."""
        blocks, size = self.blocks, self.trace.block_size
        counts = [0] * len(blocks.blocks)
        for seq in self.live:
            for block in seq.block_table:
                counts[block] += 1
        assert counts == [block.ref_count for block in blocks.blocks], "blocks are lost or doubled"
        assert {*blocks.free} == {i for i, n in enumerate(counts) if n == 0}, "free and used differ"
        for seq in self.scheduler.waiting:
            owns = seq.block_table or seq.contents or seq.num_computed_tokens
            assert not owns, "a waiting sequence owns blocks"
        assert sum(n for _, n in scheduled) <= self.trace.budget, "above max_num_batched_tokens"
        assert len(self.scheduler.running) <= self.trace.max_num_seqs, "above max_num_seqs"
        for seq, n in scheduled:
            end = seq.num_computed_tokens + n
            assert 0 < n and end <= seq.num_tokens, "scheduled past its length"
            assert len(seq.block_table) == -(-end // size), "blocks and tokens differ"
        self.check_cache()

    def check_cache(self) -> None:
        """Blocks and entries know each other, under numbers of their own."""
        blocks = self.blocks
        keys = {i: block.key for i, block in enumerate(blocks.blocks) if block.key is not None}
        assert keys == {block: key for key, (block, _) in blocks.cached.items()}, "keys differ"
        contents = [content for _, content in blocks.cached.values()]
        assert len(contents) == len({*contents}), "a content number is used twice"
        assert ROOT not in contents and (not contents or max(contents) <= blocks.last_content)

    def check_truth(self) -> None:
        """Every entry's block holds its tokens after its parents', for ever under one number."""
        size = self.trace.block_size
        for (parent, tokens), (block, content) in self.blocks.cached.items():
            prefix = self.pool[block * size + size - 1]
            assert self.prefixes.setdefault(content, prefix) == prefix, (
                "a number means two prefixes"
            )
            own = np.frombuffer(tokens, dtype=np.int32).tolist()
            assert prefix == (*self.prefixes[parent], *own), "an entry lies"
        for seq in self.live:
            for end, content in enumerate(seq.contents, start=1):
                prefix = tuple(seq.token_ids[: end * size].tolist())
                assert self.prefixes.get(content, prefix) == prefix, "a sequence's number lies"

    def fail(self) -> None:
        """A step that was scheduled and not computed."""
        self.scheduler.schedule()
        self.scheduler.clear()
        self.live, self.pool = [], {}
        assert not self.blocks.cached, "a failed step left an entry"
        self.check(())


def run(trace: Trace) -> Run:
    """The trace to its end. Raises AssertionError where something does not hold."""
    state, coming = Run(trace), [*enumerate(trace.arrivals)]
    dropped = step = 0
    while coming or state.scheduler.has_work:
        for number, arrival in [item for item in coming if item[1].step <= step]:
            state.add(number, arrival)
            coming.remove((number, arrival))
        if state.scheduler.has_work and step == trace.failing:
            dropped = len(state.live)
            state.fail()
        elif state.scheduler.has_work:
            state.step()
        step += 1
        assert step < 2000, "no end"
    assert len(state.finished) + dropped == state.num_admitted, "a request is lost"
    assert len(state.blocks.free) == trace.num_blocks, "blocks are not given back"
    return state


def random_trace(seed: int) -> Trace:
    """Small pools, short blocks, prompts that share prefixes."""
    rng = random.Random(seed)
    stem = [rng.choice(TOKENS) for _ in range(24)]
    arrivals = []
    for _ in range(rng.randint(1, 7)):
        shared, own = rng.randint(0, 14), rng.randint(0, 6)
        prompt = stem[:shared] + [rng.choice(TOKENS) for _ in range(own)] or [END]
        new = rng.choice((0, 0, 1, 2, 5, 9))
        reads = new > 0 or rng.random() < 0.6
        arrivals.append(Arrival(rng.choice((0, 0, 1, 4)), tuple(prompt), new, reads))
    return Trace(
        tuple(arrivals),
        num_blocks=rng.randint(1, 14),
        block_size=rng.choice((1, 2, 3, 4)),
        budget=rng.choice((1, 2, 3, 5, 8, 32)),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        chunked=rng.random() < 0.8,
        caching=rng.random() < 0.8,
        failing=rng.choice((None, None, None, 0, 1, 2, 5)),
    )


def fault(trace: Trace) -> str | None:
    """What is wrong in the run of a trace."""
    try:
        run(trace)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def smaller(trace: Trace) -> Iterator[Trace]:
    """The trace without one arrival, then with one a token shorter."""
    for i, arrival in enumerate(trace.arrivals):
        before, after = trace.arrivals[:i], trace.arrivals[i + 1 :]
        yield replace(trace, arrivals=before + after)
        if len(arrival.prompt) > 1:
            shorter = replace(arrival, prompt=arrival.prompt[:-1])
            yield replace(trace, arrivals=(*before, shorter, *after))
        if arrival.max_new_tokens > 1:
            shorter = replace(arrival, max_new_tokens=arrival.max_new_tokens - 1)
            yield replace(trace, arrivals=(*before, shorter, *after))


def shrink(trace: Trace, message: str) -> Trace:
    """The smallest trace found with the same fault."""
    while found := next((other for other in smaller(trace) if fault(other) == message), None):
        trace = found
    return trace


def search(traces: int, seed: int) -> str | None:
    """A report of the first fault among `traces` traces from `seed` on."""
    for number in range(seed, seed + traces):
        trace = random_trace(number)
        if message := fault(trace):
            again = f"python tests/traces.py --traces 1 --seed {number}"
            return f"{message}\nagain: {again}\nsmallest: {shrink(trace, message)}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if report := search(arguments.traces, arguments.seed):
        raise SystemExit(report)
    print(f"{arguments.traces} traces from seed {arguments.seed}: every step is right")


if __name__ == "__main__":
    main()
