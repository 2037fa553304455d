"""Embedding and LM head split over the vocabulary give what the whole table gives. Chapter 01."""

import pytest
import torch
import torch.nn.functional as F

from nanopool.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanopool.parallel import SingleTP, simulate

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
vocabularies = pytest.mark.parametrize("vocab_size", [3, 12, 13])


def table_of(vocab_size: int) -> torch.Tensor:
    """`[V, 4]` of random numbers, the same for the same V."""
    return torch.randn(vocab_size, 4, generator=torch.Generator().manual_seed(vocab_size))


def loaded(kind, table, tp):
    """A layer with this rank's rows; NaN where the loader wrote nothing."""
    layer = kind(*table.shape, tp)
    layer.weight.data.fill_(float("nan"))
    layer.weight_loader(layer.weight, table, None)
    return layer


@sizes
@vocabularies
@pytest.mark.parametrize("shape", [(6,), (2, 3), (0,)])
def test_embedding_equals_the_whole_table(size, vocab_size, shape):
    table = table_of(vocab_size)
    ids = (torch.arange(torch.Size(shape).numel()) * 5 % vocab_size).view(shape)
    outputs = simulate(lambda tp: loaded(VocabParallelEmbedding, table, tp)(ids), size)
    assert len(outputs) == size
    assert all(torch.equal(out, F.embedding(ids, table)) for out in outputs)


@sizes
@vocabularies
def test_lm_head_scores_every_word_and_no_padding(size, vocab_size):
    table, hidden = table_of(vocab_size), table_of(5)
    outputs = simulate(lambda tp: loaded(ParallelLMHead, table, tp)(hidden), size)
    for logits in outputs:
        torch.testing.assert_close(logits, hidden @ table.T)


@sizes
@vocabularies
def test_a_rank_holds_its_rows_then_zeros(size, vocab_size):
    table = table_of(vocab_size)
    weights = simulate(lambda tp: loaded(VocabParallelEmbedding, table, tp).weight.data, size)
    assert {len(weight) for weight in weights} == {-(-vocab_size // size)}
    padded = torch.cat(weights)
    assert torch.equal(padded[:vocab_size], table)
    assert torch.equal(padded[vocab_size:], torch.zeros(len(padded) - vocab_size, 4))


def test_a_table_of_another_height_is_refused():
    layer = VocabParallelEmbedding(12, 4, SingleTP())
    with pytest.raises(ValueError, match="13"):
        layer.weight_loader(layer.weight, table_of(13), None)
