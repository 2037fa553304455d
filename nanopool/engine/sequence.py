"""A request as it came in, and its progress through the engine. Chapters 00 and 09."""

from dataclasses import dataclass, field

import numpy as np

from nanopool.batch import Slice, encode_segments
from nanopool.config import SamplingParams
from nanopool.pooler.metadata import PoolingState
from nanopool.pooler.params import PoolingParams


@dataclass(frozen=True)
class Request:
    """What the caller asked for; the only thing that travels to other ranks. Chapter 00.

    Token ids are clean (no segment bit). `num_first_segment` is the length of a pair's first text
    (None: no pair), `num_keys` the leading tokens that encoder rows attend to (None: all). Exactly
    one of `sampling`, `pooling` is set.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams | None = None
    pooling: PoolingParams | None = None
    max_new_tokens: int = 0
    seed: tuple[int, ...] = (0,)
    stop_ids: frozenset[int] = frozenset()
    num_first_segment: int | None = None
    num_keys: int | None = None
    reads_prefix_cache: bool = False

    @property
    def is_cached_query(self) -> bool:
        """Whether its rows wait in the engine: a query of late interaction, for its documents."""
        late = self.pooling and self.pooling.late_interaction_params
        return late is not None and late.mode == "cache_query"


@dataclass
class Sequence:
    """A Request on its way: its tokens, how many are computed, its KV blocks. Chapter 09.

    Each rank makes its own. `contents` are the prefix-cache numbers of its leading full blocks
    (block_manager.py).
    """

    request: Request
    queries: dict[str, list] = field(default_factory=dict)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)

    def __post_init__(self):
        prompt = np.array(self.request.token_ids, dtype=np.int32)
        self.token_ids = np.concatenate((prompt, np.zeros(self.request.max_new_tokens, np.int32)))
        self.num_tokens = len(prompt)
        self.pooling_state = PoolingState(self.queries)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are known and not computed: a whole prompt, or the one token sampled last."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens : self.num_tokens].tolist()

    @property
    def is_finished(self) -> bool:
        """A pooling request ends with its prompt; a generation with its length or a stop token."""
        if self.request.sampling is None:
            return self.num_new_tokens == 0
        generated = self.num_tokens - self.num_prompt_tokens
        if generated == 0:
            return False
        stopped = int(self.token_ids[self.num_tokens - 1]) in self.request.stop_ids
        return stopped or generated == self.request.max_new_tokens

    def append(self, token: int) -> None:
        self.token_ids[self.num_tokens] = token
        self.num_tokens += 1

    def restart(self) -> None:
        """Forget what was computed (a preemption); generated tokens stay."""
        self.num_computed_tokens = 0
        self.pooling_state = PoolingState(self.queries)

    def slice(self, n: int) -> Slice:
        """The next n tokens as rows of a batch."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + n
        ids = self.token_ids[start:end]
        if self.request.num_first_segment is not None:
            ids = encode_segments(ids, start, self.request.num_first_segment)
        return Slice(ids, start, self.request.num_keys or end, self.block_table)
