"""Folders as they are found in the wild give what their libraries make of them. Chapter 06."""

import json
import re
import shutil

import checkpoints
import pytest
import references
import st_checkpoints
import tiny_tokenizers
import torch
from answers import ask, ask_once, assert_close, start
from checkpoints import edit_json, rename_weights
from references import TEXTS
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from nanopool import SamplingParams

FEW = (1, 4, 17)
BACKBONE = "sentence_bert_config.json"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def embedded(folder, texts=TEXTS, **kwargs) -> list[torch.Tensor]:
    with start(folder) as llm:
        outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False, **kwargs)
    return [output.outputs.data for output in outputs]


def assert_embeds_as_sentence_transformers(folder, texts=TEXTS, prompt_name=None) -> None:
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(texts, prompt_name=prompt_name, convert_to_tensor=True)
    assert_close(embedded(folder, texts, prompt_name=prompt_name), list(expected.cpu()))


def another_head(folder, name: str) -> None:
    """A weight under that name which is not the embedding, though the config ties the two."""
    generator = torch.Generator().manual_seed(1)
    named = load_file(folder / WEIGHTS)
    shape = next(t.shape for n, t in named.items() if re.search(r"embed_tokens|word_embed", n))
    rename_weights(folder, str, {name: torch.randn(shape, generator=generator)})


# Heads and ties


def test_a_head_in_the_file_goes_before_the_tie(folder):
    checkpoints.build("qwen3", folder, tied=True)
    another_head(folder, "lm_head.weight")
    prompts = references.random_prompts(BPE_VOCAB, FEW)
    expected, _ = references.greedy(references.load(folder, "AutoModelForCausalLM"), prompts, 8)
    with start(folder) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_an_equal_head_in_the_file_is_the_embedding_itself(folder):
    checkpoints.build("qwen3", folder, tied=True)
    named = load_file(folder / WEIGHTS)
    rename_weights(folder, str, {"lm_head.weight": named["model.embed_tokens.weight"].clone()})
    with start(folder) as llm:
        model = llm.llm_engine.runner.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_masked_language_models_decoder_goes_before_the_tie(folder):
    checkpoints.build("bert_mlm", folder)
    another_head(folder, "cls.predictions.decoder.weight")
    prompts = references.random_prompts(WORD_VOCAB, FEW)
    model = references.load(folder, "AutoModelForMaskedLM")
    expected = [references.splade(references.logits(model, ids)) for ids in prompts]
    assert_close(ask_once(folder, prompts, "embed"), expected)


def test_the_rows_of_a_reranker_come_from_the_head_in_the_file(folder):
    checkpoints.build("logit_score", folder)
    another_head(folder, "lm_head.weight")
    expected = CrossEncoder(str(folder), device="cpu").predict([(TEXTS[0], text) for text in TEXTS])
    with start(folder) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    assert_close([output.outputs.score for output in outputs], expected.tolist())


def test_robertas_masked_language_model_head_is_gelu_whatever_the_config_says(folder):
    checkpoints.encoder(folder, "Roberta", "ForMaskedLM", hidden_act="relu")
    prompts = references.random_prompts(BPE_VOCAB, FEW)
    model = references.load(folder, "AutoModelForMaskedLM")
    expected = [references.splade(references.logits(model, ids)) for ids in prompts]
    assert_close(ask_once(folder, prompts, "embed"), expected)


def test_qwen2_has_no_bias_after_attention_whatever_the_config_says(folder):
    checkpoints.build("qwen2", folder, suffix="Model", std=0.2)
    edit_json(folder / "config.json", attention_bias=True)
    prompts = references.random_prompts(BPE_VOCAB, FEW)
    model = references.load(folder)
    expected = [references.hidden_states(model, ids) for ids in prompts]
    assert_close(ask_once(folder, prompts, "token_embed", use_activation=False), expected)


def test_a_decoder_classifies_by_the_last_row_before_the_padding(folder):
    tokenizer = tiny_tokenizers.qwen_bpe(end_token=True)  # ends every text with the pad token
    checkpoints.build("qwen3_classifier", folder, labels=3, tokenizer=tokenizer)
    model = references.load(folder, "AutoModelForSequenceClassification")
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert all(row[-1] == model.config.pad_token_id for row in ids)
    with start(folder) as llm:
        found = ask(llm, TEXTS, "classify", use_activation=False)
        assert_close(found, [references.logits(model, row) for row in ids])
        rows = ask(llm, TEXTS, "token_classify")
        assert [len(row) for row in rows] == [len(row) for row in ids]
        assert [o.prompt_token_ids for o in llm.classify(TEXTS, use_tqdm=False)] == ids


# What the tokenizer does


@pytest.mark.parametrize("backbone", ["bert", "roberta"])
def test_lower_case_leaves_special_tokens_alone(folder, backbone):
    checkpoints.build("sentence_transformer", folder, backbone=backbone, layout="old")
    if backbone == "bert":
        tiny_tokenizers.wordpiece(lower=False).save_pretrained(folder)
    edit_json(folder / BACKBONE, do_lower_case=True)
    mask = AutoTokenizer.from_pretrained(folder).mask_token
    assert_embeds_as_sentence_transformers(folder, ["PARIS", f"Paris {mask} is", "a \u03a3"])


def test_a_prompt_longer_than_the_limit_leaves_the_end_token(folder):
    facts = {"include_prompt": False, "prompts": {"query": "paris " * 80}}
    checkpoints.build("sentence_transformer", folder, **facts)
    assert_embeds_as_sentence_transformers(folder, TEXTS[:2], "query")


def test_token_ids_lose_no_rows_to_a_prompt_that_was_not_written(folder):
    facts = {"include_prompt": False, "default_prompt_name": "query", "normalize": False}
    checkpoints.build("sentence_transformer", folder, prompts={"query": "query : "}, **facts)
    model, ids = references.load(folder), [2, 10, 3]
    assert_close(embedded(folder, [ids]), [references.hidden_states(model, ids).mean(0)])


def test_add_eos_token_leaves_a_template_alone_that_ends_in_another_token(folder):
    tokenizer = tiny_tokenizers.qwen_bpe(end_token=True)
    tokenizer.eos_token = "<|im_end|>"
    facts = {"pooling": "lasttoken", "suffix": "Model", "std": 0.2}
    kind = {"backbone": "qwen3", "tokenizer": tokenizer}
    checkpoints.build("sentence_transformer", folder, **kind, **facts)
    edit_json(folder / "tokenizer_config.json", add_eos_token=True)
    assert_embeds_as_sentence_transformers(folder)


def test_segments_mean_nothing_to_a_decoder(folder):
    tokenizer = tiny_tokenizers.llama_bpe()
    tokenizer.chat_template = None
    pairs = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    tokenizer.backend_tokenizer.post_processor = pairs
    facts = {"tokenizer": tokenizer, "std": 0.2} | checkpoints.label_config(1)
    checkpoints.decoder(folder, "Llama", "ForSequenceClassification", **facts)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    edit_json(folder / "tokenizer_config.json", model_input_names=names)
    assert AutoTokenizer.from_pretrained(folder)("a", "b")["token_type_ids"][-1] == 1
    model = CrossEncoder(str(folder), device="cpu")
    expected = [model.predict(("no", text)).item() for text in TEXTS]
    with start(folder) as llm:
        outputs = llm.score("no", TEXTS, use_tqdm=False)
    assert_close([output.outputs.score for output in outputs], expected)


# Late interaction


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta"])
def test_colbert_on_roberta_counts_its_positions(folder, family):
    checkpoints.encoder(folder, family, prefix="roberta.")
    linear = st_checkpoints.projection(0).linear.weight.detach().clone()
    rename_weights(folder, str, {"linear.weight": linear})
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    edit_json(folder / "artifact.metadata", doc_maxlen=48)
    model = references.load(folder)
    with start(folder) as llm:
        outputs = llm.encode(TEXTS[:3], pooling_task="token_embed", use_tqdm=False)
    for output in outputs:
        rows = references.hidden_states(model, output.prompt_token_ids) @ linear.T
        assert_close(output.outputs.data[:2], references.normalize(rows)[:2])


def test_an_empty_list_of_tasks_skips_nothing(folder):
    checkpoints.build("multi_vector_encoder", folder)
    (mask,) = folder.glob("*_MultiVectorMask/config.json")
    edit_json(mask, skiplist_tasks=[])
    model = MultiVectorEncoder(str(folder), device="cpu")
    assert_close(ask_once(folder, TEXTS, "token_embed"), model.encode_document(TEXTS))


# Forms of files


def test_pooling_flags_may_be_numbers(folder):
    checkpoints.build("sentence_transformer", folder, pooling="cls", layout="old")
    config = json.loads((folder / "1_Pooling/config.json").read_text())
    flags = {name: int(value) for name, value in config.items() if isinstance(value, bool)}
    edit_json(folder / "1_Pooling/config.json", **flags)
    assert_embeds_as_sentence_transformers(folder)


def test_weights_may_be_in_the_format_of_before_torch_1_6(checkpoint, folder):
    shutil.copytree(source := checkpoint("bert"), folder)
    (folder / WEIGHTS).unlink()
    weights = load_file(source / WEIGHTS)
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_close(ask_once(folder, TEXTS, "embed"), ask_once(source, TEXTS, "embed"))


def test_a_whole_file_goes_before_an_index_beside_it(checkpoint, folder):
    shutil.copytree(source := checkpoint("bert"), folder)
    index = {"weight_map": {"a": "gone.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert_close(ask_once(folder, TEXTS, "embed"), ask_once(source, TEXTS, "embed"))
