"""Heads: Dense, dimensions, normalisation; calibration, activation; all in fp32. Chapter 14."""

import pytest
import references
import torch
from answers import ask, ask_once, assert_close, start
from references import TEXTS, normalize
from safetensors.torch import load_file

from nanopool import PoolerConfig, PoolingParams
from nanopool.pooler.heads import ClassifierHead, EmbeddingHead, classify_activation

MATRYOSHKA = {"hf_overrides": {"is_matryoshka": True}}
DENSE = {"dense": 24, "pooling": "mean"}


def sentence_transformer(folder, texts=TEXTS, truncate_dim=None, **kwargs) -> torch.Tensor:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", truncate_dim=truncate_dim)
    return model.encode(texts, convert_to_tensor=True, **kwargs)


# Embeddings


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_dense_and_normalize_are_applied_as_the_folder_says(
    checkpoint, layout, normalize, activation
):
    facts = {"layout": layout, "normalize": normalize, "activation": activation}
    folder = checkpoint("sentence_transformer", **DENSE | facts)
    assert_close(torch.stack(ask_once(folder, TEXTS, "embed")), sentence_transformer(folder))


@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
@pytest.mark.parametrize("layout", ["old", "new"])
def test_the_pooling_file_decides_the_method(checkpoint, pooling, layout):
    folder = checkpoint("sentence_transformer", pooling=pooling, layout=layout)
    assert_close(torch.stack(ask_once(folder, TEXTS, "embed")), sentence_transformer(folder))


def test_token_rows_pass_the_dense_modules_too(checkpoint):
    folder = checkpoint("sentence_transformer", **DENSE)
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    with start(folder) as llm:
        outputs = llm.encode(TEXTS, pooling_task="token_embed", use_tqdm=False)
    model = references.load(folder)
    for output in outputs:
        rows = references.hidden_states(model, output.prompt_token_ids)
        projected = torch.tanh(rows @ weights["linear.weight"].T + weights["linear.bias"])
        assert_close(output.outputs.data, normalize(projected))


@pytest.mark.parametrize("dimensions", [1, 8, 24])
def test_dimensions_are_cut_before_normalising(checkpoint, dimensions):
    folder = checkpoint("sentence_transformer", **DENSE)
    found = torch.stack(ask_once(folder, TEXTS, "embed", MATRYOSHKA, dimensions=dimensions))
    assert_close(found, sentence_transformer(folder, TEXTS, dimensions, normalize_embeddings=True))
    assert_close(found.norm(dim=-1), torch.ones(len(TEXTS)))


def test_dimensions_without_normalising_are_the_first_numbers(checkpoint):
    folder = checkpoint("sentence_transformer", **DENSE)
    with start(folder, **MATRYOSHKA) as llm:
        whole = ask(llm, TEXTS, "embed", use_activation=False)
        cut = ask(llm, TEXTS, "embed", use_activation=False, dimensions=7)
    assert_close(cut, [vector[:7] for vector in whole])


@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("folder_normalizes", [True, False])
def test_a_requests_flag_goes_before_the_folders(checkpoint, task, folder_normalizes):
    folder = checkpoint("sentence_transformer", normalize=folder_normalizes)
    with start(folder) as llm:
        raw = ask(llm, TEXTS, task, use_activation=False)
        normalized = ask(llm, TEXTS, task, use_activation=True)
        default = ask(llm, TEXTS, task)
    assert_close(normalized, [normalize(rows) for rows in raw])
    assert_close(default, normalized if folder_normalizes else raw)
    assert (raw[0].norm(dim=-1) - 1).abs().max() > 0.1


def test_the_pooler_configs_flag_goes_before_the_folders(checkpoint):
    folder = checkpoint("sentence_transformer", normalize=True)
    settings = {"pooler_config": PoolerConfig(use_activation=False)}
    raw = ask_once(folder, TEXTS, "embed", use_activation=False)
    assert_close(ask_once(folder, TEXTS, "embed", settings), raw)


# Classifiers

IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
TANH = "torch.nn.modules.activation.Tanh"
ACTIVATIONS = {
    "one-label": (1, {}, torch.sigmoid),
    "three-labels": (3, {}, lambda x: x.softmax(-1)),
    "single-label-problem": (
        3,
        {"problem_type": "single_label_classification"},
        lambda x: x.softmax(-1),
    ),
    "multi-label-problem": (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    "regression-problem": (1, {"problem_type": "regression"}, lambda x: x),
    "file-says-identity": (1, {"sbert_ce_default_activation_function": IDENTITY}, lambda x: x),
    "file-says-tanh": (3, {"sentence_transformers": {"activation_fn": TANH}}, torch.tanh),
    "file-says-sigmoid": (3, {"sentence_transformers": {"activation_fn": SIGMOID}}, torch.sigmoid),
    "problem-before-file": (
        1,
        {"problem_type": "regression", "sentence_transformers": {"activation_fn": SIGMOID}},
        lambda x: x,
    ),
}


@pytest.mark.parametrize("task", ["classify", "token_classify"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_follows_problem_type_then_file_then_width(checkpoint, name, task):
    labels, facts, activation = ACTIVATIONS[name]
    with start(checkpoint("bert_classifier", labels=labels), hf_overrides=facts) as llm:
        raw = ask(llm, TEXTS, task, use_activation=False)
        activated = ask(llm, TEXTS, task)
    assert_close(activated, [activation(logits) for logits in raw])


@pytest.mark.parametrize("use_activation", [True, False])
def test_logits_are_calibrated_before_the_activation(checkpoint, use_activation):
    folder = checkpoint("bert_classifier")
    logits = ask_once(folder, TEXTS, "classify", use_activation=False)
    settings = {"pooler_config": PoolerConfig(logit_mean=0.3, logit_sigma=2.5)}
    found = ask_once(folder, TEXTS, "classify", settings, use_activation=use_activation)
    expected = [(x - 0.3) / 2.5 for x in logits]
    assert_close(found, [x.sigmoid() for x in expected] if use_activation else expected)


# Half precision


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_scores_near_one_keep_the_order_of_their_logits(head_dtype):
    """In bfloat16 the sigmoids of 8 and 9 would both be 1."""
    head = ClassifierHead(head_dtype, torch.nn.Identity(), classify_activation)
    params = PoolingParams(use_activation=True)
    scores = head(torch.tensor([[8.0], [9.0]], dtype=torch.bfloat16), params)
    assert_close(scores, torch.tensor([[8.0], [9.0]]).sigmoid())
    assert scores[0] < scores[1] < 1


def test_vectors_are_normalised_in_float32():
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = EmbeddingHead(torch.bfloat16)(rows, PoolingParams(use_activation=True))
    assert found.dtype == torch.float32
    assert_close(found, normalize(rows))


def test_a_bfloat16_model_sums_its_mean_in_float32(checkpoint):
    prompts = references.random_prompts(300, (400, 3))
    settings = {"dtype": "bfloat16", "pooler_config": PoolerConfig(pooling_type="MEAN")}
    with start(checkpoint("qwen3", suffix="Model", std=0.2), **settings) as llm:
        rows = ask(llm, prompts, "token_embed", use_activation=False)
        means = ask(llm, prompts, "embed", use_activation=False)
    assert all(torch.equal(x, x.bfloat16().float()) for x in rows), "rows are the model's own"
    assert_close(means, [x.mean(0) for x in rows])


def test_a_bfloat16_model_projects_and_classifies_in_float32(checkpoint):
    folder = checkpoint("bert_ner")
    with start(folder, dtype="bfloat16") as llm:
        head = llm.llm_engine.runner.model.classifier
        hidden = []
        head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        logits = ask(llm, [[7, 8, 9]], "token_classify", use_activation=False)
    weights = load_file(folder / "model.safetensors")
    assert hidden[0].dtype == torch.float32
    expected = hidden[0] @ weights["classifier.weight"].T + weights["classifier.bias"]
    assert_close(logits[0], expected)
