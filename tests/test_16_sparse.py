"""SPLADE and BGE-M3 equal transformers, sentence-transformers and the model cards. Chapter 16."""

import shutil

import checkpoints
import pytest
import references
import tiny_tokenizers
import torch
from answers import ask, ask_once, assert_close, start
from references import TEXTS, normalize
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB

from nanopool import PoolerConfig, PoolingParams
from nanopool.models.heads import MLMHead
from nanopool.outputs import PoolingOutput, PoolingRequestOutput, lexical_weights

PROMPTS = references.random_prompts(WORD_VOCAB, (1, 3, 9, 40))
PIECE_BYTES = 16 * 2**20


def mlm_logits(folder, prompts=PROMPTS) -> list[torch.Tensor]:
    model = references.load(folder, "AutoModelForMaskedLM")
    return [references.logits(model, ids) for ids in prompts]


# SPLADE


@pytest.mark.parametrize("weights", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize(
    "facts", [{"tied": True}, {"tied": False}, {"tied": False, "bias": "decoder"}], ids=str
)
def test_splade_is_the_largest_log1p_relu_of_the_vocabulary_logits(checkpoint, facts, weights):
    folder = checkpoint("bert_mlm", weights=weights, **facts)
    expected = [references.splade(logits) for logits in mlm_logits(folder)]
    assert_close(ask_once(folder, PROMPTS, "embed"), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", ["predictions", "decoder", "both"])
def test_the_decoders_bias_is_read_under_either_name(checkpoint, tied, bias):
    usual = checkpoint("bert_mlm", tied=tied)
    folder = checkpoint("bert_mlm", tied=tied, bias=bias)
    assert_close(ask_once(folder, PROMPTS, "embed"), ask_once(usual, PROMPTS, "embed"))


def test_what_pretraining_left_in_the_files_is_ignored(checkpoint):
    folder = checkpoint("bert_mlm", pretraining=True, prefix="", gamma=True)
    expected = [references.splade(logits) for logits in mlm_logits(checkpoint("bert_mlm"))]
    assert_close(ask_once(folder, PROMPTS, "embed"), expected)


def test_a_masked_lm_with_a_pooling_module_embeds_by_it(checkpoint, tmp_path):
    """Its own `embed` is SPLADE, but the folder asks for the mean of the rows."""
    folder = shutil.copytree(checkpoint("bert_mlm"), tmp_path / "model")
    embedder = checkpoint("sentence_transformer", layout="old", normalize=False)
    shutil.copy(embedder / "modules.json", folder)
    shutil.copytree(embedder / "1_Pooling", folder / "1_Pooling")
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_close(ask_once(folder, TEXTS, "embed"), [*expected])


def test_the_head_of_roberta_is_read_under_its_own_names(tmp_path):
    prompts = references.random_prompts(BPE_VOCAB, (1, 3, 40))
    for tied in (True, False):
        folder = tmp_path / f"tied-{tied}"
        checkpoints.encoder(folder, "Roberta", "ForMaskedLM", tie_word_embeddings=tied)
        expected = [references.splade(logits) for logits in mlm_logits(folder, prompts)]
        assert_close(ask_once(folder, prompts, "embed"), expected)


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_a_splade_folder_equals_sparse_encoder(checkpoint, strategy, layout):
    from sentence_transformers import SparseEncoder

    folder = checkpoint("sparse_encoder", strategy=strategy, layout=layout)
    expected = SparseEncoder(str(folder), device="cpu").encode(TEXTS).to_dense()
    assert_close(torch.stack(ask_once(folder, TEXTS, "embed")), expected)


def test_pieces_of_a_long_text_are_joined_to_their_mean_and_not_normalised(checkpoint):
    folder, (long,) = checkpoint("bert_mlm"), references.random_prompts(WORD_VOCAB, (12,))
    pieces = [references.splade(logits) for logits in mlm_logits(folder, [long[:8], long[8:]])]
    settings = {"max_model_len": 8, "max_num_batched_tokens": 8}
    settings["pooler_config"] = PoolerConfig(enable_chunked_processing=True)
    expected = (8 * pieces[0] + 4 * pieces[1]) / 12
    assert_close(ask_once(folder, [long], "embed", settings), [expected])


def test_sum_adds_the_weights_of_all_tokens(checkpoint):
    folder = checkpoint("sparse_encoder", strategy="sum")
    expected = [references.splade(logits, "sum") for logits in mlm_logits(folder)]
    assert_close(ask_once(folder, PROMPTS, "embed"), expected)


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_vocabulary_logits_never_exist_for_all_tokens(checkpoint, strategy):
    """256 rows of 40,000 logits are 39 MiB; the head makes at most 16 MiB of them at a time."""
    V = 40_000
    folder = checkpoint("sparse_encoder", strategy=strategy, vocab_size=V)
    prompts = references.random_prompts(V, (128, 100, 28))
    sizes = []
    with start(folder, max_num_batched_tokens=256) as llm:
        model = llm.llm_engine.runner.model
        (head,) = (module for module in model.modules() if isinstance(module, MLMHead))
        head.register_forward_hook(lambda _, args, logits: sizes.append(logits.nbytes))
        found = ask(llm, prompts, "embed")
    assert sum(sizes) == 256 * V * 4
    assert max(sizes) <= PIECE_BYTES
    expected = [references.splade(x, strategy) for x in mlm_logits(folder, prompts)]
    assert_close(found, expected)


def test_token_embed_of_a_masked_language_model_is_its_hidden_rows(checkpoint):
    folder = checkpoint("bert_mlm")
    model = references.load(folder)
    expected = [references.hidden_states(model, ids) for ids in PROMPTS]
    with start(folder) as llm:
        assert_close(ask(llm, PROMPTS, "token_embed", use_activation=False), expected)
        assert_close(ask(llm, PROMPTS, "token_embed"), [normalize(rows) for rows in expected])


def test_token_classify_of_a_masked_language_model_is_its_guess_for_every_token(checkpoint):
    folder = checkpoint("bert_mlm")
    expected = mlm_logits(folder)
    with start(folder) as llm:
        assert_close(ask(llm, PROMPTS, "token_classify", use_activation=False), expected)
        assert_close(ask(llm, PROMPTS, "token_classify"), [x.softmax(-1) for x in expected])


# BGE-M3


@pytest.fixture(scope="module")
def bge_m3(checkpoint):
    return checkpoint("bge_m3")


@pytest.fixture(scope="module")
def encoded(bge_m3):
    """For each text (its token ids, {task: result}), all tasks in one call."""
    tasks = ("embed", "token_embed", "token_classify", "embed&token_classify")
    params = [PoolingParams(task=task) for task in tasks for _ in TEXTS]
    with start(bge_m3) as llm:
        outputs = llm.encode(TEXTS * len(tasks), params, use_tqdm=False)
    n = len(TEXTS)
    return [
        (
            outputs[i].prompt_token_ids,
            {task: outputs[i + n * k].outputs.data for k, task in enumerate(tasks)},
        )
        for i in range(n)
    ]


def test_the_three_outputs_of_bge_m3_equal_its_model_card(bge_m3, encoded):
    for ids, results in encoded:
        dense, sparse, rows = references.bge_m3(bge_m3, ids)
        assert_close(results["embed"], dense)
        assert_close(results["token_classify"], sparse)
        assert_close(results["token_embed"], rows)


def test_the_joint_output_is_the_dense_vector_then_the_sparse_weights(encoded):
    for _, results in encoded:
        joined = torch.cat((results["embed"], results["token_classify"]))
        assert_close(results["embed&token_classify"], joined)


def test_bge_m3_drops_the_first_row_and_for_sparse_weights_the_last(encoded):
    for ids, results in encoded:
        assert results["token_embed"].shape == (len(ids) - 1, 32)
        assert results["token_classify"].shape == (len(ids) - 2,)


def test_the_dense_vector_of_bge_m3_equals_sentence_transformers(bge_m3, encoded):
    expected = SentenceTransformer(str(bge_m3), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_close(torch.stack([results["embed"] for _, results in encoded]), expected)


def test_sparse_weights_without_activation_may_be_negative(bge_m3):
    with start(bge_m3) as llm:
        raw = ask(llm, TEXTS, "token_classify", use_activation=False)
        assert_close(ask(llm, TEXTS, "token_classify"), [x.relu() for x in raw])
    assert min(x.min() for x in raw) < 0


@pytest.mark.parametrize("dense", [[], [0.5] * 32], ids=["sparse", "joint"])
def test_lexical_weights_are_the_largest_of_each_token_that_counts(dense):
    """0 is <s>, 2 </s>, 3 <unk>; token 7 has no weight, token 5 occurs twice."""
    result = torch.tensor([*dense, 0.2, 0.0, 0.6, 0.8])
    output = PoolingRequestOutput("0", PoolingOutput(result), [0, 5, 7, 5, 3, 2])
    assert lexical_weights(output, tiny_tokenizers.unigram()) == {5: pytest.approx(0.6)}


def test_bge_m3_without_its_extra_heads_is_a_plain_embedder(bge_m3, tmp_path):
    shutil.copytree(bge_m3, tmp_path / "plain")
    (tmp_path / "plain" / "sparse_linear.pt").unlink()
    with start(tmp_path / "plain") as llm:
        with pytest.raises(ValueError, match="token_classify"):
            ask(llm, TEXTS[:1], "token_classify")


def test_a_missing_head_of_bge_m3_is_an_error_that_names_it(bge_m3, tmp_path):
    shutil.copytree(bge_m3, tmp_path / "broken")
    (tmp_path / "broken" / "sparse_linear.pt").unlink()
    overrides = {"architectures": ["BgeM3EmbeddingModel"]}
    with pytest.raises(FileNotFoundError, match=r"sparse_linear\.pt is missing"):
        start(tmp_path / "broken", hf_overrides=overrides)


def test_a_decoder_that_a_file_lacks_is_an_error_that_names_it(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("bert_mlm", tied=False), tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.decoder.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing.*cls\.predictions\.decoder\.weight"):
        start(folder)
