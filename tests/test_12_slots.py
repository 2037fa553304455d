"""PoolingCursor and PoolingMetadata: whose row is whose, in whole steps and parts of them.

Chapter 12. A step is a list of (start, n, prompt length); a row of the toy model says whose it is
and at which position, so that a wrong index shows.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanopool.batch import Batch, Slice
from nanopool.pooler.metadata import PoolingCursor, PoolingMetadata, PoolingState
from nanopool.pooler.methods import SEQUENCE_METHODS, TOKEN_METHODS
from nanopool.pooler.params import PoolingParams

CPU = torch.device("cpu")


@st.composite
def pieces(draw):
    """(start, n, prompt length) of 1 to 6 requests."""
    prompt_lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    step = []
    for prompt_len in prompt_lens:
        start = draw(st.integers(0, prompt_len - 1))
        step.append((start, draw(st.integers(1, prompt_len - start)), prompt_len))
    return step


def hidden_of(step):
    """[T, 2]: (request, position) of every row."""
    return torch.tensor([(i, p) for i, (s, n, _) in enumerate(step) for p in range(s, s + n)])


def cursor_of(step, device=CPU, dead=0):
    """The cursor of a batch with these pieces, and `dead` rows of a CUDA graph behind them."""
    slices = [Slice(np.zeros(n, np.int32), start, start + n, []) for start, n, _ in step]
    slices += [Slice(np.zeros(1, np.int32), 0, 1, [])] * dead
    return PoolingCursor.build(Batch.build(slices, None, device), tuple(p for *_, p in step))


def metadata_of(step, cursor, **fields):
    params = PoolingParams(task="token_classify", **fields)
    states = tuple(PoolingState() for _ in step)
    prompts = tuple(tuple(range(prompt_len)) for *_, prompt_len in step)
    return PoolingMetadata(cursor, (params,) * len(step), states, prompts)


def check(cursor, step, hidden, owners):
    """First and last rows are those of the owners, `finished` and `is_partial` what they say."""
    rows = [(i, *piece) for i, piece in zip(owners, step, strict=True)]
    assert hidden[cursor.first_rows].tolist() == [[i, start] for i, start, _, _ in rows]
    assert hidden[cursor.last_rows].tolist() == [[i, start + n - 1] for i, start, n, _ in rows]
    assert cursor.finished == tuple(start + n == prompt_len for start, n, prompt_len in step)
    assert cursor.is_partial == any(n != prompt_len for _, n, prompt_len in step)


@given(pieces(), st.integers(0, 3))
def test_rows_belong_to_their_requests(step, dead):
    check(cursor_of(step, dead=dead), step, hidden_of(step), range(len(step)))


@given(pieces(), st.data())
def test_a_part_is_a_step_of_its_own(step, data):
    start = data.draw(st.integers(0, len(step) - 1))
    part = slice(start, data.draw(st.integers(start + 1, len(step))))
    first_row = sum(n for _, n, _ in step[:start])
    whole = metadata_of(step, cursor_of(step))
    assert whole[part].states == whole.states[part] and whole[part].prompts == whole.prompts[part]
    check(whole[part].cursor, step[part], hidden_of(step)[first_row:], range(start, part.stop))
    check(whole.cursor, step, hidden_of(step), range(len(step)))  # the whole is as it was


def test_a_row_that_nobody_attends_to_counts_as_one_of_the_prompt():
    """ColBERT's filled queries: 8 rows, 5 keys."""
    batch = Batch.build([Slice(np.zeros(8, np.int32), 0, 5, [])], None, CPU)
    cursor = PoolingCursor.build(batch, (8,))
    assert (cursor.starts, cursor.finished, cursor.is_partial) == ((0,), (True,), False)


def test_token_ids_are_for_those_who_asked():
    step = [(0, 2, 2), (0, 3, 3)]
    metadata = metadata_of(step, cursor_of(step), requires_token_ids=True)
    assert metadata.token_ids(1).tolist() == [0, 1, 2]
    assert metadata[1:].token_ids(0).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="requires_token_ids=True"):
        metadata_of(step, cursor_of(step)).token_ids(0)


@pytest.mark.parametrize("method", [*SEQUENCE_METHODS, *TOKEN_METHODS])
@pytest.mark.parametrize("step", [[(0, 2, 2), (0, 5, 5)], [(0, 2, 2), (0, 3, 5)]], ids=str)
def test_no_decision_reads_the_device(method, step):
    """On the meta device a tensor has no values: whoever reads one fails."""
    cursor = cursor_of(step, torch.device("meta"))
    metadata = metadata_of(step, cursor, requires_token_ids=True, step_tag_id=1)
    hidden = torch.empty(sum(cursor.query_lens), 8, device="meta")
    pooled = (SEQUENCE_METHODS | TOKEN_METHODS)[method](hidden, metadata)
    lengths = {"ALL": [(2, 8), (5, 8)], "STEP": [(1, 8), (1, 8)]}.get(method, [(8,), (8,)])
    for rows, shape, finished in zip(pooled, lengths, cursor.finished, strict=True):
        assert rows is None if method in TOKEN_METHODS and not finished else rows.shape == shape
