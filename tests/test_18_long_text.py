"""Long text: pieces that become one vector, late chunking, limits. Chapter 18."""

import pytest
import references
import torch
from answers import ask, assert_close, start
from references import TEXTS, normalize
from sentence_transformers import SentenceTransformer
from tiny_tokenizers import WORD_VOCAB

from nanopool import LateChunkingParams, PoolerConfig, PoolingParams

LIMIT = 64  # of the tiny sentence_transformer
LENGTHS = (1, 63, 64, 65, 128, 200)
PROMPTS = references.random_prompts(WORD_VOCAB, LENGTHS)
IN_PIECES = {"pooler_config": PoolerConfig(enable_chunked_processing=True)}


def embed(llm, prompts, **kwargs) -> list[torch.Tensor]:
    return [output.outputs.data for output in llm.embed(prompts, use_tqdm=False, **kwargs)]


# Chunked processing


@pytest.mark.parametrize("is_normalised", [True, False])
def test_pieces_are_weighted_by_their_tokens(checkpoint, is_normalised):
    """sum(n_i e_i) / sum(n_i), normalised where the request is: vLLM leaves that out."""
    folder = checkpoint("sentence_transformer", normalize=is_normalised)
    model = references.load(folder)
    expected = []
    for ids in PROMPTS:
        pieces = [ids[i : i + LIMIT] for i in range(0, len(ids), LIMIT)]
        vectors = [references.hidden_states(model, piece).mean(0) for piece in pieces]
        vectors = [normalize(vector) if is_normalised else vector for vector in vectors]
        total = sum(len(piece) * v for piece, v in zip(pieces, vectors, strict=True)) / len(ids)
        expected.append(normalize(total) if is_normalised else total)
    with start(folder, **IN_PIECES) as llm:
        assert_close(embed(llm, PROMPTS), expected)
        outputs = llm.embed(PROMPTS, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS


def test_a_request_decides_whether_the_joined_vector_is_normalised(checkpoint):
    with start(checkpoint("sentence_transformer"), **IN_PIECES) as llm:
        raw = embed(llm, PROMPTS, pooling_params=PoolingParams(use_activation=False))
        joined = embed(llm, PROMPTS)
    assert all(vector.norm() > 1.1 for vector in raw)
    assert_close([vector.norm() for vector in joined], [torch.tensor(1.0)] * len(PROMPTS))


def test_a_prompt_that_does_not_count_is_left_out_of_the_first_piece_alone(checkpoint):
    folder = checkpoint("sentence_transformer", include_prompt=False, normalize=False)
    model = references.load(folder)
    with start(folder, **IN_PIECES) as llm:
        (output,) = llm.embed("paris " * 70, prompt_name="query", use_tqdm=False)
    ids = output.prompt_token_ids
    first, second = (references.hidden_states(model, part) for part in (ids[:64], ids[64:]))
    counted = torch.cat((first[3:], second))  # [CLS], "query" and ":" do not count
    assert_close(output.outputs.data, counted.mean(0))


def test_special_tokens_stay_where_they_fell(checkpoint):
    folder = checkpoint("sentence_transformer")
    with start(folder, **IN_PIECES) as llm:
        ids = llm.get_tokenizer()("paris " * 100)["input_ids"]
        assert_close(embed(llm, ["paris " * 100]), embed(llm, [ids]))
    assert (len(ids), ids[0], ids[-1]) == (102, 2, 3)


def test_short_texts_are_as_without_it(checkpoint):
    folder = checkpoint("sentence_transformer")
    with start(folder, **IN_PIECES) as llm:
        found = embed(llm, TEXTS)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    assert_close(torch.stack(found), expected)


@pytest.mark.parametrize("budget", [5, 8192])
def test_a_causal_model_in_pieces_at_every_budget(checkpoint, budget):
    settings = IN_PIECES | {"max_model_len": 16, "max_num_batched_tokens": budget}
    folder = checkpoint("qwen3_embedding")
    model = references.load(folder)
    ids = references.random_prompts(300, (40,))[0]
    rows = [references.hidden_states(model, ids[i : i + 16])[-1] for i in (0, 16, 32)]
    expected = normalize(sum(n * normalize(row) for n, row in zip((16, 16, 8), rows, strict=True)))
    with start(folder, block_size=4, **settings) as llm:
        assert_close(embed(llm, [ids]), [expected])


def test_other_tasks_keep_their_limit(checkpoint):
    with start(checkpoint("sentence_transformer"), **IN_PIECES) as llm:
        with pytest.raises(ValueError, match="prompt 5 has 200 tokens, the limit is 64"):
            ask(llm, PROMPTS[:1] * 5 + PROMPTS[-1:], "token_embed")


def test_cutting_still_means_what_the_model_takes(checkpoint):
    with start(checkpoint("sentence_transformer"), **IN_PIECES) as llm:
        (output,) = llm.embed(PROMPTS[-1:], truncate_prompt_tokens=-1, use_tqdm=False)
    assert output.prompt_token_ids == PROMPTS[-1][:LIMIT]


# Limits


def test_a_long_text_names_the_limit_and_the_ways_out(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        with pytest.raises(ValueError) as error:
            embed(llm, [*TEXTS, "paris " * 100])
        assert len(embed(llm, TEXTS)) == len(TEXTS)
    for part in ("prompt 7", "102 tokens", "limit is 64", "truncate_prompt_tokens=-1"):
        assert part in str(error.value)
    assert "enable_chunked_processing=True" in str(error.value)


def test_pieces_are_advised_for_embeddings_alone(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        with pytest.raises(ValueError, match="truncate_prompt_tokens=-1") as error:
            ask(llm, PROMPTS[-1:], "token_embed")
    assert "enable_chunked_processing" not in str(error.value)


@pytest.mark.parametrize(("in_pieces", "limit"), [(False, 20), (True, 100)])
def test_max_embed_len_is_the_longest_text(checkpoint, in_pieces, limit):
    config = PoolerConfig(max_embed_len=limit, enable_chunked_processing=in_pieces)
    with start(checkpoint("sentence_transformer"), pooler_config=config) as llm:
        fits, too_long = references.random_prompts(WORD_VOCAB, (limit, limit + 1))
        assert len(embed(llm, [fits])) == 1
        with pytest.raises(ValueError, match=f"prompt 1 has {limit + 1} tokens.*is {limit}"):
            embed(llm, [fits, too_long])
        rows = ask(llm, [PROMPTS[2]], "token_embed")
    assert rows[0].shape == (LIMIT, 32)


def test_max_embed_len_above_the_model_needs_pieces(checkpoint):
    with pytest.raises(ValueError, match="enable_chunked_processing=True"):
        start(checkpoint("sentence_transformer"), pooler_config=PoolerConfig(max_embed_len=65))


# Late chunking


def late(llm, texts, chunk_size: int, **kwargs) -> list:
    params = PoolingParams(late_chunking_params=LateChunkingParams(chunk_size))
    kwargs = {"pooling_task": "token_embed", "use_tqdm": False} | kwargs
    return llm.encode(texts, pooling_params=params, **kwargs)


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
@pytest.mark.parametrize("budget", [5, 8192])
def test_chunks_are_means_of_rows_before_normalising(checkpoint, chunk_size, budget):
    folder = checkpoint("qwen3_embedding")
    model = references.load(folder)
    with start(folder, block_size=4, max_num_batched_tokens=budget) as llm:
        outputs = late(llm, TEXTS, chunk_size)
    for output in outputs:
        rows = references.hidden_states(model, output.prompt_token_ids)
        assert_close(output.outputs.data, normalize(references.chunk_mean(rows, chunk_size)))
        assert output.late_chunking.input_tokens == len(rows)


def test_chunks_pass_the_dense_modules(checkpoint):
    folder = checkpoint("sentence_transformer", dense=12)
    reference = SentenceTransformer(str(folder), device="cpu")
    model = references.load(folder)
    with start(folder) as llm:
        outputs = late(llm, TEXTS, 3)
    for output in outputs:
        rows = references.hidden_states(model, output.prompt_token_ids)
        means = references.chunk_mean(rows, 3)
        dense = reference[2]({"sentence_embedding": means})["sentence_embedding"]
        assert_close(output.outputs.data, normalize(dense.detach()))


def test_ranges_of_tokens_and_characters(checkpoint):
    """[CLS] the capital of | paris , rome [SEP]: special tokens count, and have no characters."""
    text = "the capital of Paris, rome"
    with start(checkpoint("sentence_transformer")) as llm:
        (output,) = late(llm, text, 4)
        (single,) = late(llm, text, 1)
    assert output.late_chunking.chunks == (((0, 4), (0, 14)), ((4, 8), (15, 26)))
    assert [chunk.token_range for chunk in single.late_chunking.chunks][-1] == (7, 8)
    ranges = [chunk.char_range for chunk in single.late_chunking.chunks]
    assert ranges[0] is None and ranges[-1] is None
    parts = [text[start:end] for start, end in ranges[1:-1]]
    assert parts == ["the", "capital", "of", "Paris", ",", "rome"]


def test_characters_count_from_the_text_that_was_given(checkpoint):
    """The tokens of a prompt before the text have none; a ColBERT's marker neither."""
    with start(checkpoint("sentence_transformer")) as llm:
        (output,) = late(llm, "rome paris", 1, prompt_name="query")  # "query : " before it
    ranges = [chunk.char_range for chunk in output.late_chunking.chunks]
    assert ranges == [None, None, None, (0, 4), (5, 10), None]
    with start(checkpoint("hf_colbert")) as llm:
        (output,) = late(llm, "rome paris", 1)
    ranges = [chunk.char_range for chunk in output.late_chunking.chunks]
    assert ranges == [None, None, (0, 4), (5, 10), None]


def test_token_ids_have_no_characters(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        (output,) = late(llm, [[2, 15, 16, 3]], 3)
    assert output.late_chunking.chunks == (((0, 3), None), ((3, 4), None))


def test_other_requests_have_no_chunks(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        (output,) = llm.encode("rome", pooling_task="token_embed", use_tqdm=False)
    assert output.late_chunking is None


def test_late_chunking_is_for_token_embed(checkpoint):
    with start(checkpoint("sentence_transformer")) as llm:
        with pytest.raises(ValueError, match="late_chunking_params"):
            late(llm, TEXTS, 4, pooling_task="embed")
