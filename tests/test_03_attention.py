"""Attention over packed rows equals a loop over sequences that anyone can check. Chapter 03."""

import random

import numpy as np
import pytest
import references
import torch
from answers import assert_close, start
from tiny_tokenizers import BPE_VOCAB
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanopool import SamplingParams
from nanopool.batch import Batch, Slice
from nanopool.layers.attention import store_kvcache, varlen_attention

H, d, BLOCK = 4, 8, 4


def naive(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """One sequence: q `[n, H, d]`, k and v `[m, K, d]`, visible `[n, m]` -> `[n, H, d]`."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) / q.size(-1) ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v)


def lower_right(n: int, m: int) -> Tensor:
    """Row i of the last n positions sees the keys up to its own."""
    return torch.arange(m) <= torch.arange(m - n, m).unsqueeze(1)


def random_rows(n: int, heads: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, heads, d, generator=generator)


def paged(lens: list[tuple[int, int]], K: int) -> tuple[Batch, Tensor, list[tuple], Tensor]:
    """A step of (new rows, keys in all) sequences over shuffled pages; other pages hold NaN.

    Returns the batch, q, each sequence's keys and values, and the pool, which lacks the new rows.
    """
    generator = torch.Generator().manual_seed(0)
    needed = [-(-m // BLOCK) for _, m in lens]
    blocks = random.Random(0).sample(range(sum(needed) + 5), sum(needed))
    pool = torch.full((2, sum(needed) + 5, BLOCK, K, d), float("nan"))
    slices, keys = [], []
    for (n, m), count in zip(lens, needed, strict=True):
        table, blocks = blocks[:count], blocks[count:]
        kv = random_rows(2 * m, K, generator).view(2, m, K, d)
        slots = torch.tensor(table).repeat_interleave(BLOCK) * BLOCK
        slots = (slots + torch.arange(len(slots)) % BLOCK)[: m - n]
        pool.flatten(1, 2)[:, slots] = kv[:, : m - n]
        slices.append(Slice(np.zeros(n, np.int32), m - n, m, table))
        keys.append(tuple(kv))
    q = random_rows(sum(n for n, _ in lens), H, generator)
    return Batch.build(slices, BLOCK, torch.device("cpu")), q, keys, pool


STEPS = {
    "prompts": [(5, 5), (5, 5), (1, 1), (9, 9)],
    "decoding": [(1, m) for m in (1, 2, 3, 8, 9, 17, 40, 41, 64, 200)],
    "chunks": [(3, 7), (3, 7), (3, 8), (7, 20), (4, 4), (2, 9)],
    "everything": [(1, 6), (1, 33), (2, 2), (2, 9), (4, 17), (8, 8), (1, 1)],
}


@pytest.mark.parametrize("K", [1, 2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_causal_rows_read_their_own_pages_and_nothing_else(name, K):
    lens = STEPS[name]
    batch, q, keys, pool = paged(lens, K)
    pairs = list(zip(lens, keys, strict=True))
    k, v = (torch.cat([kv[i][m - n :] for (n, m), kv in pairs]) for i in (0, 1))
    store_kvcache(k, v, pool, batch.slot_mapping)
    found = varlen_attention(q, k, v, batch, True, d**-0.5, pool)
    parts = zip(q.split([n for n, _ in lens]), pairs, strict=True)
    expected = [naive(rows, *kv, lower_right(n, m)) for rows, ((n, m), kv) in parts]
    assert_close(found, torch.cat(expected))


def test_a_run_of_decoding_sequences_is_narrow_in_whatever_order_they_come():
    """Its longest has at most a quarter and 16 keys more than its shortest."""
    key_lens = [40, 20, 60, 55, 1, 17, 18, 300, 400, 280]
    slices = [Slice(np.zeros(1, np.int32), m - 1, m, [0] * 100) for m in key_lens]
    runs = Batch.build(slices, BLOCK, torch.device("cpu")).runs
    spans = [key_lens[run.rows] for run in runs]
    assert spans == [[40, 20], [60, 55], [1, 17], [18], [300], [400], [280]]


@pytest.mark.parametrize("lens", [[3], [4, 4, 4], [1, 7, 7, 2, 30]], ids=str)
def test_encoder_rows_see_their_whole_sequence(lens):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (random_rows(sum(lens), H, generator) for _ in range(3))
    slices = [Slice(np.zeros(n, np.int32), 0, n, []) for n in lens]
    batch = Batch.build(slices, None, torch.device("cpu"))
    found = varlen_attention(q, k, v, batch, False, d**-0.5)
    parts = zip(*(x.split(lens) for x in (q, k, v)), strict=True)
    expected = [naive(*qkv, torch.ones(n, n) > 0) for n, qkv in zip(lens, parts, strict=True)]
    assert_close(found, torch.cat(expected))


def test_an_encoder_row_may_be_a_query_without_being_a_key():
    """ColBERT's [MASK] rows: 8 queries, of which the first 3 are keys, beside a plain neighbour."""
    generator, lens, keys = torch.Generator().manual_seed(0), [8, 8, 8], [3, 8, 3]
    q, k, v = (random_rows(sum(lens), H, generator) for _ in range(3))
    pairs = zip(lens, keys, strict=True)
    slices = [Slice(np.zeros(n, np.int32), 0, m, []) for n, m in pairs]
    batch = Batch.build(slices, None, torch.device("cpu"))
    found = varlen_attention(q, k, v, batch, False, d**-0.5)
    parts = zip(keys, *(x.split(lens) for x in (q, k, v)), strict=True)
    expected = [naive(q, k[:m], v[:m], torch.ones(8, m) > 0) for m, q, k, v in parts]
    assert_close(found, torch.cat(expected))


def test_slot_minus_1_stores_nothing():
    generator = torch.Generator().manual_seed(0)
    k, v = (random_rows(3, 2, generator) for _ in range(2))
    pool = torch.zeros(2, 2, BLOCK, 2, d)
    store_kvcache(k, v, pool, torch.tensor([6, -1, 1]))
    rows = pool.flatten(1, 2)
    assert torch.equal(rows[:, 6], torch.stack((k[0], v[0])))
    assert torch.equal(rows[:, 1], torch.stack((k[2], v[2])))
    rows[:, [1, 6]] = 0
    assert not pool.any()


class CountSDPA(TorchFunctionMode):
    """Counts the calls of scaled_dot_product_attention."""

    calls = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += function is torch.nn.functional.scaled_dot_product_attention
        return function(*args, **kwargs or {})


def test_32_decoding_sequences_of_mixed_lengths_take_at_most_16_calls_a_layer(checkpoint):
    prompts = references.random_prompts(BPE_VOCAB, [1 + 15 * i for i in range(32)])
    per_step = []
    with start(checkpoint("qwen3"), max_num_batched_tokens=8192) as llm, CountSDPA() as counter:
        model = llm.llm_engine.runner.model

        def before(_, args):
            counter.calls = 0

        def after(_, args, hidden):
            per_step.append((args[0].query_lens, counter.calls))

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), False)
    decoding = [calls for query_lens, calls in per_step if query_lens == (1,) * 32]
    assert len(decoding) == 2
    num_layers = len(model.model.layers)
    assert 0 < max(decoding) <= 16 * num_layers
