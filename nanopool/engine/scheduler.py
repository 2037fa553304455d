"""Which sequences run in a step, and how many tokens of each. Chapter 09."""

from collections import deque
from dataclasses import dataclass, field

from nanopool.engine.block_manager import BlockManager
from nanopool.engine.sequence import Request, Sequence

Scheduled = list[tuple[Sequence, int]]


@dataclass
class Scheduler:
    """The waiting and the running sequences; called by the Engine, the same on every rank.

    Chapter 09.

    There is no prefill phase and no decode phase: a step gives each sequence some tokens until its
    computed tokens catch up with its known ones. Decisions read lengths only, so that every rank
    reaches the same schedule.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    enable_chunked_prefill: bool
    block_manager: BlockManager  # an encoder's has no blocks
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # the oldest first

    def check(self, request: Request, name: str = "a prompt") -> None:
        """ValueError, under that name, when it could never be scheduled, whatever else runs."""
        prompt = len(request.token_ids)
        if not self.enable_chunked_prefill and prompt > self.max_num_batched_tokens:
            raise ValueError(
                f"{name} of {prompt} tokens exceeds max_num_batched_tokens = "
                f"{self.max_num_batched_tokens} and is not cut; raise max_num_batched_tokens, "
                "or set enable_chunked_prefill=True on a causal model"
            )
        needed = self.block_manager.num_blocks_for(prompt + max(0, request.max_new_tokens - 1))
        if needed > len(self.block_manager.blocks):
            raise ValueError(
                f"{name} of {prompt} tokens and max_tokens = {request.max_new_tokens} need "
                f"{needed} blocks of {self.block_manager.block_size} tokens, but num_kv_blocks = "
                f"{len(self.block_manager.blocks)}; raise num_kv_blocks, or shorten the request"
            )

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> Scheduled:
        """The sequences of the next step with their number of tokens, alike ones side by side.

        A step that preempted admits nobody: what it freed would be given away again.
        """
        scheduled, preempted = self._schedule_running()
        if not preempted:
            self._admit_waiting(scheduled)
        assert scheduled, "a step makes progress: what can never fit was refused at admission"
        return sorted(scheduled, key=lambda item: (item[1], item[0].num_computed_tokens))

    def _schedule_running(self) -> tuple[Scheduled, bool]:
        """Running sequences in order of age; when blocks run out the youngest is preempted."""
        scheduled: Scheduled = []
        budget, preempted = self.max_num_batched_tokens, False
        while len(scheduled) < len(self.running) and budget > 0:
            seq = self.running[len(scheduled)]
            n = min(seq.num_new_tokens, budget)
            if self.block_manager.allocate(seq, seq.num_computed_tokens + n):
                scheduled.append((seq, n))
                budget -= n
            else:
                self._preempt_youngest()
                preempted = True
        return scheduled, preempted

    def _preempt_youngest(self) -> None:
        seq = self.running.pop()
        self.block_manager.release(seq)
        seq.restart()
        self.waiting.appendleft(seq)

    def _admit_waiting(self, scheduled: Scheduled) -> None:
        """First pieces of waiting sequences, until budget or blocks do not allow the next one's."""
        budget = self.max_num_batched_tokens - sum(n for _, n in scheduled)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            hits = self.block_manager.find_prefix(seq)
            cached = len(hits) * self.block_manager.block_size
            n = min(seq.num_tokens - cached, budget)
            is_cut = cached + n < seq.num_tokens
            if is_cut and not self._may_cut(seq):
                return
            if not self.block_manager.allocate(seq, cached + n, hits):
                return
            self.running.append(self.waiting.popleft())
            scheduled.append((seq, n))
            budget -= n

    def _may_cut(self, seq: Sequence) -> bool:
        """Whether a prompt may be computed in pieces.

        A preempted one that outgrew the budget must be.
        """
        return self.enable_chunked_prefill or seq.num_tokens > self.max_num_batched_tokens

    def update(self, scheduled: Scheduled, tokens: list[int | None]) -> list[Sequence]:
        """Move the scheduled sequences on by their sampled tokens; return those that ended."""
        for (seq, n), token in zip(scheduled, tokens, strict=True):
            seq.num_computed_tokens += n
            if token is not None:
                seq.append(token)
        finished = [seq for seq, _ in scheduled if seq.is_finished]
        if finished:
            self.running = [seq for seq in self.running if not seq.is_finished]
        for seq in finished:
            self.block_manager.release(seq)
        return finished

    def clear(self) -> None:
        """Drop every sequence and forget the prefix cache: after a failure in a step."""
        for seq in self.running:
            self.block_manager.release(seq)
        self.block_manager.forget()
        self.waiting.clear()
        self.running.clear()
