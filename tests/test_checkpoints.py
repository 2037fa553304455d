"""The tiny checkpoints load in the libraries that they imitate, and their outputs differ."""

import checkpoints
import pytest
import references
import torch
import transformers
from references import TEXTS, load, random_prompts
from safetensors.torch import load_file
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)

PAIRS = [("capital of france", "paris is a city"), ("who is he ?", "a man and a dog"), ("no", "no")]


def token_ids(folder, text: str = TEXTS[0]) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids


def spread(vectors) -> float:
    """How far rows lie apart, on average over columns; every entry is finite."""
    vectors = torch.as_tensor(vectors)
    assert vectors.isfinite().all()
    return vectors.std(0).mean().item()


# Hugging Face


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("qwen3", {}),
        ("qwen3", {"kv_heads": 1, "tied": True, "rope": "linear"}),
        ("qwen2", {"kv_heads": 4, "rope": "llama3"}),
        ("llama", {"rope": "yarn", "dtype": "float16"}),
    ],
)
def test_greedy_tokens_of_decoders_are_clear(checkpoint, kind, facts):
    model = load(checkpoint(kind, **facts), "AutoModelForCausalLM")
    tokens, margin = references.greedy(model, random_prompts(model.config.vocab_size), 32)
    assert margin > 1e-3
    assert len({tuple(row) for row in tokens}) == 16
    assert len({token for row in tokens for token in row}) > 60


def test_greedy_side_by_side_is_greedy_one_by_one(checkpoint):
    model = load(checkpoint("qwen3"), "AutoModelForCausalLM")
    prompts = random_prompts(model.config.vocab_size)[::4]
    alone = [references.greedy(model, [prompt], 8)[0][0] for prompt in prompts]
    assert references.greedy(model, prompts, 8)[0] == alone


@pytest.mark.parametrize(
    ("weights", "layout"), [("bin", "old"), ("sharded", "new"), ("sharded_bin", "old")]
)
def test_files_do_not_change_a_decoder(checkpoint, weights, layout):
    plain = load(checkpoint("qwen2", rope="yarn"), "AutoModelForCausalLM")
    other = checkpoint("qwen2", rope="yarn", weights=weights, config_layout=layout)
    ids = random_prompts(307, [9])[0]
    logits = references.logits(plain, ids)
    assert torch.equal(logits, references.logits(load(other, "AutoModelForCausalLM"), ids))


@pytest.mark.parametrize(
    ("kind", "prefix"), [("bert", "bert."), ("roberta", "roberta."), ("xlm_roberta", "roberta.")]
)
def test_files_do_not_change_an_encoder(checkpoint, kind, prefix):
    folder = checkpoint(kind)
    rows = references.hidden_states(load(folder), token_ids(folder))
    assert spread(rows) > 0.1
    old = checkpoint(kind, prefix=prefix, gamma=True, position_ids=True, weights="bin")
    assert torch.equal(rows, references.hidden_states(load(old), token_ids(old)))


def test_no_parameter_is_trivial(checkpoint):
    for kind in ("qwen2", "bert_mlm", "roberta_classifier"):
        for name, tensor in load_file(checkpoint(kind) / "model.safetensors").items():
            assert tensor.numel() == 1 or tensor.std() > 0.05, f"{kind}: {name}"


def test_a_seed_decides_every_byte(checkpoint, tmp_path):
    first, again, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (
            checkpoint("bert_ner"),
            checkpoints.build("bert_ner", tmp_path),
            checkpoint("bert_ner", seed=1),
        )
    )
    assert first == again != other


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm_roberta", "qwen3", "qwen2"])
def test_sequence_classifiers(checkpoint, family, labels):
    folder = checkpoint(f"{family}_classifier", labels=labels)
    model = load(folder, "AutoModelForSequenceClassification")
    scores = [references.logits(model, token_ids(folder, text)) for text in TEXTS]
    assert scores[0].shape == (labels,)
    assert spread(torch.stack(scores)) > 0.1


@pytest.mark.parametrize("kind", ["bert_ner", "roberta_ner"])
def test_token_classifiers(checkpoint, kind):
    folder = checkpoint(kind)
    model = load(folder, "AutoModelForTokenClassification")
    best = references.logits(model, token_ids(folder, TEXTS[-1])).argmax(-1).tolist()
    assert len({model.config.id2label[label] for label in best}) > 1


@pytest.mark.parametrize("bias", ["predictions", "decoder", "both"])
@pytest.mark.parametrize("tied", [True, False])
def test_masked_lms(checkpoint, tied, bias):
    folder = checkpoint("bert_mlm", tied=tied, bias=bias, pretraining=True)
    names = set(load_file(folder / "model.safetensors"))
    assert ("cls.predictions.decoder.weight" in names) is not tied
    assert "cls.predictions.transform.dense.weight" in names
    twin = checkpoint("bert_mlm", tied=tied, bias="both", gamma=True)
    rows, expected = (
        references.logits(load(path, "AutoModelForMaskedLM"), token_ids(path))
        for path in (folder, twin)
    )
    untied_bias_is_lost = not tied and bias == "predictions"  # by transformers 5, not by its files
    assert torch.equal(rows, expected) is not untied_bias_is_lost
    assert spread(rows) > 0.1


@pytest.mark.parametrize(("kind", "labels"), [("qwen2_reward", 1), ("qwen2_process_reward", 2)])
def test_reward_models(checkpoint, kind, labels):
    folder = checkpoint(kind)
    rows = references.reward_logits(folder, token_ids(folder))
    assert rows.shape == (len(token_ids(folder)), labels)
    assert spread(rows) > 0.1


def test_reranker_has_an_opinion(checkpoint):
    folder = checkpoint("qwen3_reranker")
    model = load(folder, "AutoModelForCausalLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [references.rerank_prompt(query, document) for query, document in PAIRS]
    scores = [references.rerank_score(model, tokenizer, prompt) for prompt in prompts]
    assert spread(scores) > 0.01
    assert tokenizer.decode(tokenizer(prompts[0]).input_ids) == prompts[0]


# sentence-transformers


def encode(folder, **options) -> torch.Tensor:
    return torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(TEXTS, **options))


@pytest.mark.parametrize(
    "facts",
    [
        {"pooling": "mean"},
        {"pooling": "cls", "dense": 12},
        {"pooling": "lasttoken", "normalize": False, "backbone": "qwen3", "tied": True},
        {"pooling": ["cls", "mean"], "backbone": "xlm_roberta"},
        {"include_prompt": False, "default_prompt_name": "query", "backbone": "roberta"},
    ],
    ids=str,
)
def test_sentence_transformers_of_both_layouts_agree(checkpoint, facts):
    new = checkpoint("sentence_transformer", **facts)
    vectors = encode(new)
    assert spread(vectors) > 0.03
    assert torch.equal(vectors, encode(checkpoint("sentence_transformer", layout="old", **facts)))


def test_prompts_and_limits_count(checkpoint):
    folder = checkpoint("sentence_transformer", include_prompt=False)
    assert not torch.allclose(encode(folder), encode(folder, prompt_name="query"), atol=1e-3)
    assert SentenceTransformer(str(folder), device="cpu").max_seq_length == 64


def test_a_chat_template_changes_the_texts(checkpoint):
    facts = {"backbone": "qwen3", "pooling": "lasttoken", "tied": True}
    text, chat = (checkpoint("sentence_transformer", chat=chat, **facts) for chat in (False, True))
    assert not torch.allclose(encode(text), encode(chat), atol=1e-2)


def test_qwen3_embedding(checkpoint):
    old, new = (checkpoint("qwen3_embedding", layout=layout) for layout in ("old", "new"))
    assert torch.equal(encode(old), encode(new))
    rows = references.hidden_states(load(old), token_ids(old))
    torch.testing.assert_close(references.normalize(rows[-1]), encode(old)[0])
    assert transformers.AutoTokenizer.from_pretrained(old).decode(token_ids(old)[-1:]) == (
        "<|endoftext|>"
    )


@pytest.mark.parametrize(
    "facts", [{}, {"labels": 3}, {"activation_fn": "Identity", "backbone": "roberta_classifier"}]
)
def test_cross_encoders_of_all_layouts_agree(checkpoint, facts):
    scores = [
        CrossEncoder(
            str(checkpoint("cross_encoder", layout=layout, **facts)), device="cpu"
        ).predict(PAIRS)
        for layout in ("new", "old", "4")
    ]
    assert spread(scores[0]) > 0.01
    assert (scores[0] == scores[1]).all() and (scores[0] == scores[2]).all()


def test_cross_encoders_of_modules(checkpoint):
    for kind, facts in [("cross_encoder_dense", {}), ("logit_score", {"two_tokens": False})]:
        model = CrossEncoder(str(checkpoint(kind, **facts)), device="cpu")
        assert spread(model.predict(PAIRS)) > 0.01


def test_logit_score_is_the_difference_of_two_logits(checkpoint):
    folder = checkpoint("logit_score")
    score = CrossEncoder(str(folder), device="cpu").predict(PAIRS[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    query, document = PAIRS[0]
    roles = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    prompt = tokenizer.apply_chat_template(roles, tokenize=False)
    model = load(folder, "AutoModelForCausalLM")
    assert score == pytest.approx(references.rerank_score(model, tokenizer, prompt), abs=1e-6)


@pytest.mark.parametrize("facts", [{}, {"strategy": "sum", "tied": False}, {"layout": "old"}])
def test_sparse_encoder_is_the_splade_formula(checkpoint, facts):
    folder = checkpoint("sparse_encoder", **facts)
    weights = SparseEncoder(str(folder), device="cpu").encode(TEXTS).to_dense()
    assert spread(weights) > 0.05
    rows = references.logits(load(folder, "AutoModelForMaskedLM"), token_ids(folder))
    expected = references.splade(rows, facts.get("strategy", "max"))
    torch.testing.assert_close(weights[0], expected, atol=1e-5, rtol=0)


def test_bge_m3(checkpoint):
    folder = checkpoint("bge_m3")
    dense, sparse, colbert = references.bge_m3(folder, token_ids(folder))
    torch.testing.assert_close(encode(folder)[0], dense)
    assert sparse.count_nonzero() > 1
    assert colbert.shape == (len(token_ids(folder)) - 1, 32)


def colbert(folder) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(query rows, document rows, scores) of TEXTS against themselves."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    return queries, documents, model.similarity(queries, documents)


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("hf_colbert", {"attend": True}),
        ("multi_vector_encoder", {"expansion": "min"}),
        ("multi_vector_encoder", {"expansion": None}),
        ("pylate", {}),
        ("pylate", {"model_type": None, "expansion": False}),
    ],
)
def test_multi_vector_encoders(checkpoint, kind, facts):
    queries, documents, scores = colbert(checkpoint(kind, **facts))
    expands = facts.get("expansion", True)
    assert (queries[0].shape == (32, 20)) is bool(expands)
    assert spread(scores) > 0.5
    expected = references.maxsim(queries[1], documents[2])
    assert scores[1, 2].item() == pytest.approx(expected, abs=1e-4)


def test_stanford_and_version_6_say_the_same(checkpoint):
    stanford = colbert(checkpoint("hf_colbert"))
    ours = colbert(checkpoint("multi_vector_encoder"))
    torch.testing.assert_close(stanford[0][0], ours[0][0])
    assert len(stanford[1][1]) < len(token_ids(checkpoint("hf_colbert"), TEXTS[1])) + 1  # no "?"


def test_pylate_markers_are_single_tokens(checkpoint):
    model = MultiVectorEncoder(str(checkpoint("pylate")), device="cpu")
    ids = model.preprocess(["paris"], prompt=model.prompts["query"], task="query")["input_ids"]
    assert ids[0, 1] == 131
