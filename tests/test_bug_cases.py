"""Cases of tests/README.md that no chapter's own test covers, under their numbers there."""

import pickle
import shutil
from dataclasses import replace

import checkpoints
import pytest
import references
import torch
import transformers
from answers import ask, ask_once, assert_close, start
from safetensors.torch import load_file, save_file
from tiny_tokenizers import BPE_VOCAB
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from nanopool import LLM, PoolerConfig, PoolingParams, SamplingParams, simulate
from nanopool.engine.sequence import Request, Sequence
from nanopool.layers.activation import get_activation
from nanopool.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanopool.layers.rotary_embedding import RotaryEmbedding, apply_rotary
from nanopool.pooler.heads import ClassifierHead, EmbeddingHead, classify_activation
from nanopool.pooler.poolers import DispatchPooler

BS = 4
POOL = {"block_size": BS, "num_kv_blocks": 256}
SMALL = {"suffix": "Model", "std": 0.2}  # a decoder without a head, of even attention
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
METHODS = ("CLS", "LAST", "MEAN", "ALL")


def method(name: str) -> tuple[str, dict]:
    """(task, settings) that pool by a method on a decoder."""
    pooler = PoolerConfig(pooling_type=name)
    return "token_embed" if name == "ALL" else "embed", POOL | {"pooler_config": pooler}


def generate(llm: LLM, prompts: list, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


# A, B


@pytest.mark.parametrize("length", [BS, 2 * BS - 1, 2 * BS, 2 * BS + 1])
def test_a1_a_prompt_that_is_wholly_cached(checkpoint, length):
    prompts = references.random_prompts(BPE_VOCAB, (length,))
    with start(checkpoint("qwen3"), **POOL) as llm:
        assert generate(llm, prompts) == generate(llm, prompts)
    with start(checkpoint("qwen3", **SMALL), **POOL) as llm:
        assert_close(ask(llm, prompts, "embed"), ask(llm, prompts, "embed"))


@pytest.mark.parametrize("budget", range(3, 3 * BS + 3))
def test_a7_a_prefix_that_the_budget_cuts_is_shared_right(checkpoint, budget):
    (prefix,) = references.random_prompts(BPE_VOCAB, (3 * BS,))
    prompts, folder = [[*prefix, 7], [*prefix, 8], prefix], checkpoint("qwen3", **SMALL)
    alone = [ask_once(folder, [ids], "embed", POOL)[0] for ids in prompts]
    assert_close(
        ask_once(folder, prompts, "embed", POOL | {"max_num_batched_tokens": budget}), alone
    )


def test_b4_keys_that_are_not_written_yet_are_not_read(checkpoint):
    """The pool holds NaN before every run."""
    prompts = references.random_prompts(BPE_VOCAB, (50,))
    folder = checkpoint("qwen3", **SMALL)
    expected = references.hidden_states(references.load(folder), prompts[0])
    with start(folder, **POOL) as llm:
        for budget in range(1, 51):
            with torch.inference_mode():
                for cache in llm.llm_engine.runner.kv_caches:
                    cache.fill_(torch.nan)
            llm.llm_engine.reset()
            llm.llm_engine.scheduler.max_num_batched_tokens = budget
            assert_close(ask(llm, prompts, "token_embed", use_activation=False), [expected])


@pytest.mark.parametrize("name", METHODS)
def test_b6_an_unfinished_request_has_one_place_in_the_outputs(checkpoint, name, monkeypatch):
    """The middle one takes three steps and shares two of them."""
    task, settings = method(name)
    folder, prompts = checkpoint("qwen3", **SMALL), references.random_prompts(BPE_VOCAB, (3, 20, 3))
    alone = [ask_once(folder, [ids], task, settings)[0] for ids in prompts]
    steps, pool = [], DispatchPooler.__call__

    def counted(pooler, hidden, metadata):
        outputs = pool(pooler, hidden, metadata)
        assert len(outputs) == len(metadata.params)
        steps.append([x is not None for x in outputs])
        return outputs

    monkeypatch.setattr(DispatchPooler, "__call__", counted)
    with start(folder, max_num_batched_tokens=9, **settings) as llm:
        params = PoolingParams().resolve(task, llm.model_config)
        named = zip("abc", prompts, strict=True)
        requests = [Request(name, tuple(ids), pooling=params) for name, ids in named]
        found = llm.ranks.call("run", [requests]).outputs
    assert_close([found[name] for name in "abc"], alone)
    assert [sorted(step) for step in steps] == [[False, True], [False], [True, True]]


# C


def test_c7_nothing_is_added_to_what_the_tokenizer_writes(checkpoint):
    folder = checkpoint("qwen3_embedding")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with start(folder) as llm:
        outputs = llm.embed(references.TEXTS, use_tqdm=False)
    for text, output in zip(references.TEXTS, outputs, strict=True):
        ids = output.prompt_token_ids
        assert ids == tokenizer(text)["input_ids"] and ids[-1] == end != ids[-2]


@pytest.mark.parametrize(("kind", "start_id"), [("qwen3", None), ("llama", 304)])
def test_c8_the_end_token_that_the_config_asks_for_is_there(checkpoint, kind, start_id, tmp_path):
    """transformers 5 reads tokenizer.json alone and drops `add_eos_token`."""
    folder = shutil.copytree(checkpoint(kind, **SMALL), tmp_path / "model")
    checkpoints.edit_json(folder / "tokenizer_config.json", add_eos_token=True)
    with start(folder) as llm:
        (output,) = llm.embed("no", use_tqdm=False)
        plain = llm.get_tokenizer()("no", add_special_tokens=False)["input_ids"]
        first = [] if start_id is None else [start_id]
        end = llm.get_tokenizer().eos_token_id
        assert output.prompt_token_ids == [*first, *plain, end]
        assert_close(output.outputs.data, ask(llm, [[*first, *plain, end]], "embed")[0])


@pytest.mark.parametrize(("lengths", "kept"), [((200, 500), (200, 309)), ((400, 500), None)])
def test_c11_the_longer_text_of_a_pair_loses_its_end(checkpoint, lengths, kept, tmp_path):
    folder = checkpoint("bert_classifier", max_position_embeddings=512)
    folder = shutil.copytree(folder, tmp_path / "model")
    checkpoints.edit_json(folder / "tokenizer_config.json", model_max_length=512)
    with start(folder) as llm:
        query, document = llm.get_tokenizer().convert_tokens_to_ids(["paris", "rome"])
        texts = ["paris " * lengths[0], "rome " * lengths[1]]
        (output,) = llm.score(*texts, truncate_prompt_tokens=-1, use_tqdm=False)
    ids = output.prompt_token_ids
    found = ids.count(query), ids.count(document)
    assert sum(found) == len(ids) - 3 == 509
    assert found == kept if kept else abs(found[0] - found[1]) <= 1


def test_c14_an_empty_prompt_is_refused_or_has_its_special_tokens(checkpoint):
    with start(checkpoint("qwen3"), **POOL) as llm:
        expected = generate(llm, [[7, 8]])
        for empty in ("", [""], [[]], {"prompt_token_ids": []}, [[7], []]):
            with pytest.raises(ValueError, match="is empty"):
                generate(llm, empty)
            assert generate(llm, [[7, 8]]) == expected
    folder = checkpoint("bert")
    (found,) = ask_once(folder, [""], "embed")
    rows = references.hidden_states(references.load(folder), [2, 3])
    assert_close(found, references.normalize(rows[0]))
    with start(checkpoint("qwen3_embedding")) as llm:
        (output,) = llm.embed("", use_tqdm=False)
        assert output.prompt_token_ids == [llm.get_tokenizer().eos_token_id]
        assert output.outputs.data.isfinite().all()


def test_c16_positions_go_on_by_one_and_rotate_as_in_transformers(checkpoint):
    seen, folder = [], checkpoint("qwen3")
    with start(folder, **POOL) as llm:
        llm.llm_engine.runner.model.register_forward_pre_hook(
            lambda _, args: seen.extend(args[0].positions.tolist())
        )
        generate(llm, [[5, 6, 7, 8, 9, 10]], replace(GREEDY, max_tokens=6))
    assert seen == [*range(11)]
    config, positions = transformers.AutoConfig.from_pretrained(folder), torch.arange(11)
    q, k = torch.randn(2, 1, 4, 11, 12).unbind()
    rope = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    expected = apply_rotary_pos_emb(q, k, *rope(q, positions[None]))
    ours = RotaryEmbedding(config, 12, 11)(positions, torch.float32)
    found = [apply_rotary(x[0].transpose(0, 1), *ours).transpose(0, 1)[None] for x in (q, k)]
    assert_close(found, list(expected))


# D


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", METHODS)
def test_d1_a_text_alone_first_in_the_middle_and_last(checkpoint, name, dtype):
    """Also D2: 1e-5 is what is promised in float32, not equal bits."""
    task, settings = method(name)
    prompts = references.random_prompts(BPE_VOCAB, (1, 7, 64, 500))
    with start(checkpoint("qwen3", **SMALL), dtype=dtype, **settings) as llm:
        alone = [ask(llm, [ids], task)[0] for ids in prompts]
        for i in range(4):
            found = ask(llm, prompts[i:] + prompts[:i], task)
            expected = alone[i:] + alone[:i]
            if dtype == "float32":
                assert_close(found, expected)
            for x, y in zip(found, expected, strict=True):
                assert torch.cosine_similarity(x, y, dim=-1).min() > 0.9995


@pytest.mark.parametrize("dimensions", [1, 32, 64])
def test_d8_dimensions_are_cut_and_then_normalised(dimensions):
    rows, params = torch.randn(3, 64), PoolingParams(dimensions=dimensions, use_activation=True)
    found = EmbeddingHead(torch.float32)(rows, params)
    assert_close(found, references.normalize(rows[:, :dimensions]))
    assert (found.norm(dim=-1) - 1).abs().max() < 1e-6


def test_d11_one_label_is_a_sigmoid_and_three_a_softmax():
    head = ClassifierHead(torch.float32, torch.nn.Identity(), classify_activation)
    on = PoolingParams(use_activation=True)
    assert head(torch.tensor([[-3.0]]), on).item() == pytest.approx(0.0474, abs=1e-4)
    assert head(torch.randn(2, 3), on).sum(-1).tolist() == pytest.approx([1, 1])


def test_d27_the_two_forms_of_gelu_are_told_apart():
    x = torch.tensor(-2.7)
    exact, tanh = get_activation("gelu")(x), get_activation("gelu_new")(x)
    assert (exact - tanh).abs() > 3e-4
    assert_close(tanh, get_activation("gelu_pytorch_tanh")(x))


# E, F


def test_e2_an_embedder_needs_no_lm_head_and_a_generator_does(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3", std=0.2), tmp_path / "model")
    whole = ask_once(folder, [[7, 8, 9]], "embed", {"runner": "pooling"})
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert_close(ask_once(folder, [[7, 8, 9]], "embed", {"runner": "pooling"}), whole)
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\]"):
        start(folder)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_f1_f2_a_bias_is_added_once_and_split_with_its_columns(ranks):
    x, up, down = torch.randn(3, 8), torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def pair(tp):
        first = ColumnParallelLinear(8, 12, True, tp, "width")
        layers = first, RowParallelLinear(12, 8, True, tp, "width")
        for ours, theirs in zip(layers, (up, down), strict=True):
            for name, param in ours.named_parameters():
                ours.weight_loader(param, getattr(theirs, name).data, None)
        assert layers[0].bias.shape == (12 // tp.size,) and layers[1].bias.shape == (8,)
        return layers[1](layers[0](x).relu())

    for found in simulate(pair, ranks):
        assert_close(found, down(up(x).relu()).detach())


def test_f4_requests_and_sequences_survive_a_pickle_in_every_state():
    """Ranks get Requests once a call; no step is pickled, and it would do no harm."""
    request = Request(
        "9",
        tuple(range(5, 15)),
        sampling=GREEDY,
        pooling=PoolingParams(task="embed", returned_token_ids=[3, 4]),
        max_new_tokens=5,
        seed=(0, 9),
        stop_ids=frozenset({3}),
        num_first_segment=6,
        reads_prefix_cache=True,
    )
    assert pickle.loads(pickle.dumps(request)) == request
    seq = Sequence(request)

    def new():
        assert seq.num_new_tokens == 10

    def mid_chunk():
        seq.num_computed_tokens, seq.block_table = 4, [3, 1]

    def decoding():
        seq.num_computed_tokens = 10
        seq.append(7)

    for state in (new, mid_chunk, decoding, seq.restart):
        state()
        again = pickle.loads(pickle.dumps(seq))
        ours, theirs = seq.slice(seq.num_new_tokens), again.slice(again.num_new_tokens)
        assert (ours.token_ids == theirs.token_ids).all() and ours[1:] == theirs[1:]
        assert again.request == request and again.output_ids == seq.output_ids
