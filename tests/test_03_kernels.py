"""Kernels against their PyTorch forms: Triton's, and the calls of flash attention. Chapter 03.

Triton runs on a GPU, or on the CPU in its interpreter; that must be chosen before the first import
of triton, so the interpreter has a process of its own.
"""

import inspect
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from answers import pack
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from nanopool.batch import Batch, Slice
from nanopool.layers.attention import sdpa_attention, select_backend, store_kvcache
from nanopool.layers.flash_attention import flash_attention, flash_attn_options, torch_options
from nanopool.pooler.late_interaction import maxsim


def on_gpu(test):
    """A test that needs a GPU: its `device` is always "cuda"."""
    return pytest.mark.gpu(pytest.mark.parametrize("device", ["cuda"], indirect=True)(test))


@pytest.fixture(scope="module")
def interpreter():
    """A process in which Triton interprets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            pool.submit(int).result()  # the process starts with this environment
        yield pool


@pytest.fixture
def run(device, request):
    """run(check, *args) -> check(device, *args): here on a GPU, in the interpreter on a CPU."""
    if device == "cuda":
        return lambda check, *args: check("cuda", *args)
    pool = request.getfixturevalue("interpreter")
    return lambda check, *args: pool.submit(check, "cpu", *args).result()


# store_kvcache


def qkv_parts(T: int, H: int, K: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v `[T, K, d]` as a decoder has them: parts of one qkv tensor."""
    torch.manual_seed(0)
    qkv = torch.randn(T, (H + 2 * K) * d).to(dtype)
    _, k, v = qkv.split([H * d, K * d, K * d], dim=-1)
    return k.unflatten(-1, (K, d)), v.unflatten(-1, (K, d))


def check_store(device: str, k: Tensor, v: Tensor, slots: list[int], pool_shape: tuple) -> None:
    """Every slot of the pool holds what plain indexing writes, or what it held before."""
    from nanopool.layers.store_kvcache import store_kvcache_triton

    slots = torch.tensor(slots)
    expected = torch.arange(torch.Size(pool_shape).numel()).view(pool_shape).to(k.dtype)
    actual = expected.to(device, copy=True)
    store_kvcache(k, v, expected, slots)
    store_kvcache_triton(k.to(device), v.to(device), actual, slots.to(device))
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, H, K, d", [(1, 1, 1, 2), (9, 4, 2, 12), (5, 6, 3, 80), (17, 2, 2, 33)])
def test_store_takes_parts_of_a_qkv_tensor(run, T, H, K, d, dtype):
    slots = np.random.default_rng(0).permutation(20)[:T]
    slots[T // 2] = -1
    run(check_store, *qkv_parts(T, H, K, d, dtype), slots.tolist(), (2, 5, 4, K, d))


def test_store_takes_any_strides(run):
    k, v = qkv_parts(6, 1, 4, 16, torch.float32)
    parts = (k[:, ::2, ::2], v.transpose(1, 2)[:, :2, :2].transpose(1, 2)[:, :, [0] * 8])
    run(check_store, *parts, [3, 0, -1, 7, 1, -1], (2, 2, 4, 2, 8))


def test_slot_minus_one_writes_nothing(run):
    run(check_store, *qkv_parts(4, 1, 2, 8, torch.float32), [-1] * 4, (2, 3, 2, 2, 8))


def check_far_slots(device: str) -> None:
    """Slots whose offset passes 2^31 come back; the pool is never written whole."""
    from nanopool.layers.store_kvcache import store_kvcache_triton

    blocks, width = 2**13 + 8, 1024
    pool = torch.empty(1, blocks, 256, 8, 128, dtype=torch.int8, device=device).expand(
        2, -1, -1, -1, -1
    )
    slots = torch.tensor([5, 2**31 // width, blocks * 256 - 1], device=device)
    rows = torch.arange(3 * width, device=device).remainder(100).to(torch.int8).view(3, 8, 128)
    store_kvcache_triton(rows, rows, pool, slots)
    assert torch.equal(pool[0].flatten(0, 1).index_select(0, slots), rows)


def test_store_reaches_slots_past_32_bits(run):
    run(check_far_slots)


# flash_maxsim


def ragged(lens: list[int], E: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, E, generator=generator) for n in lens]


def check_maxsim(device: str, queries: list[Tensor], documents: list[Tensor]) -> None:
    from nanopool.pooler.flash_maxsim import flash_maxsim

    on_device = ([x.to(device) for x in part] for part in (queries, documents))
    torch.testing.assert_close(
        flash_maxsim(*on_device).cpu(), maxsim(queries, documents), equal_nan=True
    )


@pytest.mark.parametrize("E", [3, 64, 130])
def test_maxsim_of_ragged_pairs(run, E):
    queries = ragged([1, 32, 33, 5], E, seed=1)
    documents = ragged([1, 64, 65, 3], E, seed=2)
    run(check_maxsim, queries, documents)


def test_a_document_without_rows_scores_below_all(run):
    run(check_maxsim, ragged([2, 3], 32, seed=1), ragged([0, 4], 32, seed=2))
    assert maxsim([torch.ones(2, 8)], [torch.ones(0, 8)]).item() == float("-inf")


def test_maxsim_of_one_query_and_many_documents(run):
    query = ragged([32], 128, seed=1)
    run(check_maxsim, query * 5, ragged([1, 2, 3, 4, 5], 128, seed=2))


def check_packing(device: str) -> None:
    from nanopool.pooler.flash_maxsim import pack

    first, second = (x.to(device) for x in ragged([3, 2], 4, seed=1))
    rows, spans = pack([first, second, first])
    assert torch.equal(rows, torch.cat([first, second]))
    assert spans.tolist() == [[0, 3], [3, 5], [0, 3]]


def test_maxsim_packs_a_query_once(run):
    run(check_packing)


def test_maxsim_where_every_dot_is_negative(run):
    queries = [x.abs() + 0.1 for x in ragged([7, 40], 20, seed=1)]
    documents = [-x.abs() - 0.1 for x in ragged([9, 70], 20, seed=2)]
    run(check_maxsim, queries, documents)


def check_nan(device: str) -> None:
    """Whose rows hold a NaN gets no number; its neighbours do."""
    from nanopool.pooler.flash_maxsim import flash_maxsim

    queries, documents = ragged([7, 8, 9], 20, seed=1), ragged([9, 70, 5], 20, seed=2)
    documents[0][3, 2] = queries[1][0, 0] = float("nan")
    on_device = ([x.to(device) for x in part] for part in (queries, documents))
    assert flash_maxsim(*on_device).isfinite().tolist() == [False, False, True]


def test_maxsim_shows_nan(run):
    run(check_nan)


@on_gpu
def test_maxsim_has_no_matrix(device):
    from nanopool.pooler.flash_maxsim import flash_maxsim

    query, document = torch.randn(1024, 64, device=device), torch.randn(100_000, 64, device=device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    flash_maxsim([query], [document])
    copies = query.nbytes + document.nbytes  # the packed rows
    assert torch.cuda.max_memory_allocated() - before < 1.1 * copies  # the matrix: 400 MB


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for(capability):
    """Down to machine code, with the compiler that comes with Triton; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from nanopool.layers.store_kvcache import store_row
    from nanopool.pooler.flash_maxsim import score_pair

    constants = {"k_column": 1, "v_column": 1, "BLOCK": 1024, "Q": 32, "N": 64}
    types = {"slots": "*i64", "k_row": "i32", "v_row": "i32", "width": "i32", "E": "i32"}
    types |= dict.fromkeys(("k", "v", "k_pool", "v_pool"), "*bf16")
    types |= dict.fromkeys(("queries", "documents", "scores"), "*fp32")
    types |= dict.fromkeys(("query_spans", "document_spans"), "*i32")
    for kernel in (store_row, score_pair):
        known = {name: constants[name] for name in kernel.arg_names if name in constants}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, known)
        assert "cubin" in compile(source, target=GPUTarget("cuda", capability, 32)).asm


# flash attention


def reference_kernel(q, k, v, cu_q, cu_k, causal, scale, tables) -> Tensor:
    """What the flash kernels promise, one sequence after the other."""
    outputs = []
    for i, (start, end) in enumerate(pairwise(cu_q)):
        first, last = cu_k[i], cu_k[i + 1]
        if tables is not None:
            keys, values = (x[tables[i].long()].flatten(0, 1)[: last - first] for x in (k, v))
        else:
            keys, values = k[first:last], v[first:last]
        n, m, groups = end - start, last - first, q.size(1) // k.size(-2)
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outputs)


def flash_attn_stand_in(
    q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, block_table
) -> Tensor:
    assert max_q == cu_q.diff().max() and max_k == cu_k.diff().max()
    return reference_kernel(q, k, v, cu_q, cu_k, causal, softmax_scale, block_table)


def torch_stand_in(*args, **options) -> Tensor:
    """Fails where torch's own signature would."""
    call = inspect.signature(varlen_attn).bind(*args, **options).arguments
    assert call["enable_gqa"] and call["window_size"][0] == -1
    q, k, v, cu_q, cu_k, _, _ = args
    if call["block_table"] is not None:
        assert (
            torch.equal(call["seqused_k"], cu_k.diff()) and call["seqused_k"].dtype == torch.int32
        )
    causal = call["window_size"][1] == 0
    return reference_kernel(q, k, v, cu_q, cu_k, causal, call["scale"], call["block_table"])


CALLS = {
    "flash_attn": partial(flash_attention, flash_attn_stand_in, flash_attn_options),
    "torch": partial(flash_attention, torch_stand_in, torch_options),
}


def heads(T: int, H: int, K: int, d: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = torch.randn(T, (H + 2 * K) * d).split([H * d, K * d, K * d], -1)
    return tuple(x.unflatten(-1, (-1, d)).to(device, dtype) for x in (q, k, v))


def paged_step(block_size: int, device: str) -> Batch:
    """A fresh prompt, three chunks, two decoding sequences."""
    spans, slices, used = [(0, 5), (3, 9), (20, 7), (500, 40), (16, 1), (30, 1)], [], 0
    for start, n in spans:
        blocks = -(-(start + n) // block_size)
        table = list(range(used + blocks - 1, used - 1, -1))
        slices.append(Slice(np.zeros(n, np.int32), start, start + n, table))
        used += blocks
    return Batch.build(slices, block_size, torch.device(device))


def attend_paged(attention, batch: Batch, block_size: int, d: int, device: str, dtype) -> Tensor:
    q, k, v = heads(len(batch.input_ids), 4, 2, d, device, dtype)
    blocks = int(batch.block_tables.max()) + 1
    pool = torch.randn(2, blocks, block_size, 2, d).to(device, dtype)
    store_kvcache(k, v, pool, batch.slot_mapping)
    return attention(q, k, v, batch, True, d**-0.5, pool).float()


def encoder_step(key_lens: list[int], device: str) -> Batch:
    rows = zip([3, 8, 5], key_lens, strict=True)
    slices = [Slice(np.zeros(n, np.int32), 0, keys, []) for n, keys in rows]
    return Batch.build(slices, None, torch.device(device))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flash_calls_read_pages(call):
    batch = paged_step(4, "cpu")
    actual, expected = (
        attend_paged(attention, batch, 4, 8, "cpu", torch.float32)
        for attention in (call, sdpa_attention)
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flash_calls_without_a_cache(call, causal):
    batch = pack([[1] * 4, [1] * 9, [1]], None)
    q, k, v = heads(14, 4, 4, 8, "cpu", torch.float32)
    args = (q, k, v, batch, causal, 0.3, None)
    torch.testing.assert_close(call(*args), sdpa_attention(*args))


@pytest.mark.parametrize("key_lens", [[3, 8, 5], [3, 2, 5], [1, 7, 4]])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flash_calls_with_keys_out_of_sight(call, key_lens):
    batch = encoder_step(key_lens, "cpu")
    args = (*heads(16, 4, 4, 8, "cpu", torch.float32), batch, False, 0.3, None)
    torch.testing.assert_close(call(*args), sdpa_attention(*args))


def test_the_cpu_has_plain_attention():
    for dtype in (torch.float32, torch.bfloat16):
        assert select_backend("cpu", dtype, 64, 256) is sdpa_attention


@pytest.fixture
def flash(device):
    """The flash attention of this GPU, for heads of 64 and pages of 256."""
    backend = select_backend(device, torch.bfloat16, 64, 256)
    if backend is sdpa_attention:
        pytest.skip("no flash attention here")
    return backend


@on_gpu
def test_flash_equals_sdpa_on_pages(flash, device):
    batch = paged_step(256, device)
    args = (batch, 256, 64, device, torch.bfloat16)
    actual, expected = (attend_paged(attention, *args) for attention in (flash, sdpa_attention))
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@on_gpu
@pytest.mark.parametrize("key_lens", [[3, 8, 5], [1, 7, 4]])
def test_flash_equals_sdpa_in_an_encoder(flash, device, key_lens):
    args = (*heads(16, 4, 4, 64, device, torch.bfloat16), encoder_step(key_lens, device))
    actual, expected = (
        attention(*args, False, 0.125, None) for attention in (flash, sdpa_attention)
    )
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
