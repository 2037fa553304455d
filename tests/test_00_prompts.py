"""What the caller may write, how it becomes token ids, and what is refused. Chapter 00."""

import numpy as np
import pytest
from answers import assert_close, start
from references import TEXTS
from sentence_transformers import SentenceTransformer

from nanopool import LLM, PoolingParams, inputs

LIMIT = 64
LONG = "paris " * 100


@pytest.fixture(scope="module")
def llm(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        yield llm


def ids_of(llm: LLM, prompts, **kwargs) -> list[list[int]]:
    outputs = llm.embed(prompts, use_tqdm=False, **kwargs)
    return [output.prompt_token_ids for output in outputs]


# Forms


def test_all_forms_of_a_prompt(llm):
    ids = llm.get_tokenizer()("no")["input_ids"]
    one = ["no", ids, tuple(ids), {"prompt": "no"}, {"prompt_token_ids": ids}, ["no"], [ids]]
    one.append({"prompt": "no", "prompt_token_ids": ids})
    for prompt in one:
        assert ids_of(llm, prompt) == [ids]
    assert ids_of(llm, ["no", ids, {"prompt": "no"}, {"prompt_token_ids": ids}]) == [ids] * 4
    assert ids_of(llm, (text for text in ["no", "yes"])) == ids_of(llm, ["no", "yes"])


def test_no_prompts_give_no_outputs(llm):
    assert llm.embed([], use_tqdm=False) == []


def test_results_come_in_input_order_with_ids_of_their_own(llm):
    outputs = llm.embed([LONG[:60], "no", LONG[:90]], use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [12, 3, 17]
    assert len({output.request_id for output in outputs}) == 3
    assert all(output.finished for output in outputs)


def test_long_lists_are_tokenized_in_parts(llm, monkeypatch):
    texts = ["no", LONG[:60], "paris no", "yes", LONG[:90]]
    whole = ids_of(llm, texts)
    monkeypatch.setattr(inputs, "TEXTS_AT_ONCE", 2)
    assert ids_of(llm, texts) == whole


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, "prompts=5"),
        ([["no"]], "prompt 0"),
        (["no", 5], "prompt 1"),
        ([[2, "no"]], "prompt 0"),
        ([[2, True]], "prompt 0"),
        ([{"text": "no"}], "prompt 0"),
        ([{}], "prompt 0"),
        ([[2, 3], []], "prompt 1 is empty"),
        ([[2, 131]], "prompt 0 has token id 131.*130"),
        ([[-1, 2]], "prompt 0 has token id -1"),
        (["no", LONG], "prompt 1 has 102 tokens, the limit is 64"),
        ([[2] * 65], "prompt 0 has 65 tokens, the limit is 64"),
    ],
)
def test_bad_prompts_are_named_and_the_next_call_is_right(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        ids_of(llm, prompts)
    assert len(ids_of(llm, TEXTS)) == len(TEXTS)


def test_params_are_one_or_one_each(llm):
    params = [PoolingParams(use_activation=flag) for flag in (True, False)]
    first, second = llm.embed(["no", "no"], pooling_params=params, use_tqdm=False)
    assert_close(first.outputs.data, second.outputs.data / second.outputs.data.norm())
    for wrong in (params[:1], params * 2, [5, 5]):
        with pytest.raises(ValueError, match=r"pooling_params: . given|pooling_params=5"):
            llm.embed(["no", "no"], pooling_params=wrong, use_tqdm=False)


# Truncation


@pytest.mark.parametrize("n", [-1, 1, 2, 3, 17, 64])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_texts_are_cut_as_the_tokenizer_cuts_them(llm, n, side):
    tokenizer = llm.get_tokenizer()
    tokenizer.truncation_side = side or "right"
    length = LIMIT if n == -1 else n
    expected = tokenizer("a b c " * 50, truncation=True, max_length=length)["input_ids"]
    kwargs = {"truncate_prompt_tokens": n, "truncation_side": side}
    if len(expected) > length:  # [CLS] and [SEP] alone are more
        with pytest.raises(ValueError, match="the limit is 1"):
            ids_of(llm, "a b c " * 50, **kwargs)
        return
    assert ids_of(llm, "a b c " * 50, **kwargs) == [expected]
    assert ids_of(llm, "a b c " * 50, tokenization_kwargs=kwargs) == [expected]


def test_token_ids_are_cut_at_the_side(llm):
    ids = list(range(5, 105))
    assert ids_of(llm, [ids], truncate_prompt_tokens=-1) == [ids[:LIMIT]]
    assert ids_of(llm, [ids], truncate_prompt_tokens=7, truncation_side="left") == [ids[-7:]]


def test_special_tokens_may_be_left_out(llm):
    expected = llm.get_tokenizer()("no", add_special_tokens=False)["input_ids"]
    assert ids_of(llm, "no", add_special_tokens=False) == [expected]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 65),
        ("truncate_prompt_tokens", True),
        ("truncate_prompt_tokens", "7"),
        ("truncation_side", "middle"),
        ("max_length", 5),
    ],
)
def test_bad_tokenization_arguments_are_named(llm, name, value):
    for kwargs in ({name: value}, {"tokenization_kwargs": {name: value}}):
        with pytest.raises(ValueError, match=name):
            ids_of(llm, "no", **kwargs)


def test_a_folder_may_ask_for_lower_case(checkpoint, tmp_path):
    import shutil

    import checkpoints
    import tiny_tokenizers

    folder = shutil.copytree(checkpoint("sentence_transformer", layout="old"), tmp_path / "lower")
    tiny_tokenizers.wordpiece(lower=False).save_pretrained(folder)
    checkpoints.edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    with start(folder) as llm:
        assert ids_of(llm, "PARIS") == ids_of(llm, "paris")


# Prompts of the folder


PROMPTS = {"query": "query : ", "passage": "a document : ", "document": ""}


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("default", [None, "query"])
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_prompts_equal_sentence_transformers(checkpoint, include_prompt, default, pooling):
    facts = {"include_prompt": include_prompt, "default_prompt_name": default, "prompts": PROMPTS}
    folder = checkpoint("sentence_transformer", pooling=pooling, **facts)
    model = SentenceTransformer(str(folder), device="cpu")
    with start(folder) as llm:
        for name in (None, *PROMPTS):
            expected = model.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
            outputs = llm.embed(TEXTS, prompt_name=name, use_tqdm=False)
            assert_close([output.outputs.data for output in outputs], list(expected))


def test_a_text_that_is_nothing_but_its_prompt_has_a_vector(checkpoint):
    folder = checkpoint("sentence_transformer", include_prompt=False)
    model = SentenceTransformer(str(folder), device="cpu")
    with start(folder) as llm:
        (output,) = llm.embed("", prompt_name="query", use_tqdm=False)
    expected = model.encode("", prompt_name="query", convert_to_tensor=True)
    assert_close(output.outputs.data, expected)


def test_prompts_are_for_texts_alone(llm):
    ids = llm.get_tokenizer()("no")["input_ids"]
    assert ids_of(llm, [ids], prompt_name="query") == [ids]


def test_an_unknown_prompt_name_lists_those_there_are(llm):
    with pytest.raises(ValueError, match=r"prompt_name='title'.*'query'"):
        ids_of(llm, "no", prompt_name="title")


def test_numpy_numbers_are_not_token_ids(llm):
    with pytest.raises(ValueError, match="prompt 0"):
        ids_of(llm, [np.array([2.5, 3.0])])
