"""BERT, RoBERTa and XLM-R: hidden states equal transformers', under every name. Chapter 05."""

import pytest
import references
import torch
from answers import ask, ask_once, assert_close, forward, start
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB

from nanopool import SingleTP
from nanopool.batch import decode_segments, encode_segments

LENGTHS = (1, 2, 7, 16, 33, 128)
VARIANTS = {
    f"{kind}-{name}": (kind, facts)
    for kind, variants in {
        "bert": {
            "plain": {},
            "prefixed": {"prefix": "bert."},
            "gamma": {"prefix": "bert.", "gamma": True},
            "position-ids": {"position_ids": True},
            "sharded": {"weights": "sharded"},
            "bin": {"weights": "bin", "prefix": "bert.", "gamma": True},
            "gelu-new": {"hidden_act": "gelu_new"},
            "relu": {"hidden_act": "relu"},
            "wide-eps": {"layer_norm_eps": 0.1},
        },
        "roberta": {"plain": {}, "prefixed": {"prefix": "roberta."}},
        "xlm_roberta": {"plain": {}, "prefixed": {"prefix": "roberta.", "position_ids": True}},
    }.items()
    for name, facts in variants.items()
}


def prompts_for(kind: str) -> list[list[int]]:
    return references.random_prompts(BPE_VOCAB if kind == "roberta" else WORD_VOCAB, LENGTHS)


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_equal_transformers(checkpoint, name):
    kind, facts = VARIANTS[name]
    folder, prompts = checkpoint(kind, **facts), prompts_for(kind)
    rows = ask_once(folder, prompts, "token_embed", use_activation=False)
    model = references.load(folder)
    assert_close(rows, [references.hidden_states(model, ids) for ids in prompts])


def test_positions_of_packed_roberta_begin_after_the_padding_index(checkpoint):
    seen = []
    with start(checkpoint("xlm_roberta")) as llm:
        table = llm.llm_engine.runner.model.model.embeddings.position_embeddings
        table.register_forward_pre_hook(lambda _, args: seen.append(args[0].tolist()))
        ask(llm, [[7, 8, 9], [10, 11]], "token_embed")
    assert sorted(seen[0]) == [2, 2, 3, 3, 4]


def test_a_pad_token_inside_a_roberta_text_is_counted_as_transformers_does(checkpoint):
    folder = checkpoint("xlm_roberta")
    prompts = [[0, 5, 6, 2], [0, 5, 1, 1, 6, 7, 2], [0, 9, 2]]
    rows = ask_once(folder, prompts, "token_embed", use_activation=False)
    model = references.load(folder)
    assert_close(rows, [references.hidden_states(model, ids) for ids in prompts])


def test_roberta_takes_two_tokens_less_than_it_has_positions(checkpoint):
    with start(checkpoint("roberta")) as llm:
        assert llm.model_config.max_model_len == 128
        with pytest.raises(ValueError, match=r"129 tokens.*128"):
            llm.embed([[5] * 129], use_tqdm=False)


def test_segment_ids_of_packed_pairs_equal_transformers(checkpoint):
    folder, prompts = checkpoint("bert"), prompts_for("bert")
    firsts = [1, 1, 3, 16, 20, 64]  # tokens of each pair's first text
    _, hidden = forward(folder, prompts, SingleTP(), firsts)
    model = references.load(folder)
    types = [[0] * n + [1] * (len(ids) - n) for ids, n in zip(prompts, firsts, strict=True)]
    pairs = zip(prompts, types, strict=True)
    assert_close(hidden, [references.hidden_states(model, *pair) for pair in pairs])


def test_segment_ids_are_not_ignored(checkpoint):
    folder, ids = checkpoint("bert"), [7, 8, 9, 10]
    first, second = (forward(folder, [ids], SingleTP(), [n])[1][0] for n in (2, 4))
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("num_first", range(6))
def test_segments_survive_a_cut_at_any_position(num_first):
    ids = torch.arange(100, 105, dtype=torch.int32)
    expected = [int(position >= num_first) for position in range(5)]
    for cut in range(1, 5):
        pieces = [(ids[:cut], 0), (ids[cut:], cut)]
        encoded = [encode_segments(rows.numpy(), start, num_first) for rows, start in pieces]
        clean, segments = decode_segments(torch.cat([torch.from_numpy(rows) for rows in encoded]))
        assert clean.tolist() == ids.tolist()
        assert segments.tolist() == expected
