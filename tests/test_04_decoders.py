"""Qwen3, Qwen2 and Llama: hidden states and logits equal transformers'. Chapter 04."""

import pytest
import references
import torch
from answers import ask_once, assert_close, forward
from tiny_tokenizers import BPE_VOCAB

from nanopool import SingleTP, simulate

PROMPTS = references.random_prompts(BPE_VOCAB, (1, 2, 7, 16, 33, 150))
SHORT = PROMPTS[:4]

BACKBONES = {
    f"{kind}-{name}": (kind, facts | {"suffix": "Model", "std": 0.2})
    for kind, variants in {
        "qwen3": {
            "1-kv-head": {"kv_heads": 1},
            "4-kv-heads": {"kv_heads": 4},
            "biased": {"attention_bias": True},
            "old-config": {"config_layout": "old"},
        },
        "qwen2": {"2-kv-heads": {}, "1-kv-head": {"kv_heads": 1}},
        "llama": {
            "biased": {"attention_bias": True, "mlp_bias": True},
            "linear": {"rope": "linear"},
            "llama3": {"rope": "llama3"},
            "yarn": {"rope": "yarn"},
            "yarn-old-config": {"rope": "yarn", "config_layout": "old"},
        },
    }.items()
    for name, facts in variants.items()
}


def expected_hidden(folder) -> list[torch.Tensor]:
    model = references.load(folder)
    return [references.hidden_states(model, ids) for ids in PROMPTS]


@pytest.mark.parametrize("name", BACKBONES)
def test_hidden_states_equal_transformers(checkpoint, name):
    kind, facts = BACKBONES[name]
    folder = checkpoint(kind, **facts)
    rows = ask_once(folder, PROMPTS, "token_embed", use_activation=False)
    assert_close(rows, expected_hidden(folder))


@pytest.mark.parametrize("weights", ["sharded", "bin", "sharded_bin"])
def test_every_form_of_weight_files_is_read(checkpoint, weights):
    folder = checkpoint("qwen3", suffix="Model", std=0.2, weights=weights)
    rows = ask_once(folder, PROMPTS, "token_embed", use_activation=False)
    assert_close(rows, expected_hidden(folder))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_kv_heads_are_split_or_replicated_over_ranks(checkpoint, kv_heads, ranks):
    folder = checkpoint("qwen3", suffix="Model", std=0.2, kv_heads=kv_heads)
    settings = {"tensor_parallel_size": ranks}
    rows = ask_once(folder, PROMPTS, "token_embed", settings, use_activation=False)
    assert_close(rows, expected_hidden(folder))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen3", False), ("qwen3", True), ("qwen2", False), ("llama", False)]
)
def test_logits_equal_transformers_on_every_rank(checkpoint, kind, tied, ranks):
    folder = checkpoint(kind, tied=tied, std=0.3)

    def logits(tp):
        model, hidden = forward(folder, SHORT, tp, runner="generate")
        return [model.compute_logits(rows) for rows in hidden]

    reference = references.load(folder, "AutoModelForCausalLM")
    expected = [references.logits(reference, ids) for ids in SHORT]
    for found in simulate(logits, ranks):
        assert_close(found, expected)


def test_a_tied_head_is_the_embedding_itself(checkpoint):
    model, _ = forward(checkpoint("qwen3", tied=True, std=0.3), [[5]], SingleTP())
    assert model.lm_head.weight is model.model.embed_tokens.weight
