"""Exercises of chapter 09. Replace a `raise NotImplementedError`, then run its test."""

from nanopool.config import SamplingParams
from nanopool.engine.block_manager import BlockManager
from nanopool.engine.scheduler import Scheduler
from nanopool.engine.sequence import Request, Sequence

NO_BLOCKS = BlockManager(0, 4, enable_prefix_caching=False)  # as an encoder's: nobody waits for one


def waste(group: list[tuple[int, int]]) -> int:
    """Rows without use when (prompt length, tokens to generate) pairs run as one padded batch.

    All prompts are padded to the longest, and all generate until the slowest is done.
    """
    raise NotImplementedError


def share(new_tokens: list[int], budget: int) -> list[int]:
    """Tokens that running sequences get in one step, in order of age; 0 for who gets none."""
    raise NotImplementedError


class ShortestFirst(Scheduler):
    """A scheduler whose waiting sequences are ordered by prompt length, equal ones by arrival."""

    def add(self, seq: Sequence) -> None:
        raise NotImplementedError


def check_1(waste) -> None:
    assert waste([(4, 6)]) == 0
    assert waste([(3, 6), (5, 2)]) == 6
    assert waste([(4, 1), (6, 4), (6, 4)]) == 5


def check_2(share) -> None:
    assert share([1, 1, 1], 8) == [1, 1, 1]
    assert share([1, 30, 5], 8) == [1, 7, 0]
    assert share([8, 1], 8) == [8, 0]


def first_tokens(scheduler: Scheduler, lengths: list[int]) -> list[int]:
    """The step in which each prompt is computed to its end."""
    for i, length in enumerate(lengths):
        request = Request(str(i), tuple(range(length)), SamplingParams(), max_new_tokens=1)
        scheduler.add(Sequence(request))
    ends, step = {}, 0
    while scheduler.has_work:
        scheduled = scheduler.schedule()
        done = [seq.num_new_tokens == n for seq, n in scheduled]
        for seq in scheduler.update(scheduled, [7 if d else None for d in done]):
            ends[seq.request.request_id] = step
        step += 1
    return [ends[str(i)] for i in range(len(lengths))]


def check_3(ShortestFirst) -> None:
    lengths = [20, 3, 2, 9, 2]
    ends = first_tokens(ShortestFirst(8, 256, True, NO_BLOCKS), lengths)
    assert ends == [4, 0, 0, 1, 0], f"each prompt's last step: {ends}"


EXERCISES = [(waste, check_1), (share, check_2), (ShortestFirst, check_3)]
