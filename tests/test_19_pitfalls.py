"""What goes wrong in practice is refused by name, and the next call is right. Chapter 19."""

import pytest
from answers import ask, assert_close, start

from nanopool.pooler.poolers import TokenPooler

PROMPT = list(range(5, 15))


class Forgetful(TokenPooler):
    """Reads token ids and does not ask for them."""

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return {}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pooler_that_did_not_ask_is_named_and_the_next_call_is_right(checkpoint, ranks):
    folder = checkpoint("qwen3", suffix="Model", std=0.2)
    with start(folder, tensor_parallel_size=ranks) as llm:
        expected = ask(llm, [PROMPT], "token_embed")
        poolers = llm.llm_engine.runner.model.pooler.poolers
        right = poolers["token_embed"]
        poolers["token_embed"] = Forgetful(
            "ALL", right.inner.head, lambda ids, params: ids % 2 == 0
        )
        with pytest.raises(ValueError, match="'token_embed' reads token ids but did not ask"):
            ask(llm, [PROMPT], "token_embed")
        poolers["token_embed"] = right
        assert_close(ask(llm, [PROMPT], "token_embed"), expected)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_number_of_labels_that_the_weights_deny(checkpoint, count):
    with pytest.raises(
        ValueError, match=rf"classifier.weight .* is \[3, 32\], not \[{count}, 32\]"
    ):
        start(checkpoint("bert_classifier", labels=3), hf_overrides={"num_labels": count})


def test_pooling_and_generation_are_refused_before_a_step(checkpoint):
    with start(checkpoint("qwen3", suffix="Model", std=0.2)) as llm:
        with pytest.raises(ValueError, match="runner='pooling'"):
            llm.generate([PROMPT], use_tqdm=False)
        assert len(ask(llm, [PROMPT], "embed")) == 1
    with start(checkpoint("qwen3")) as llm:
        with pytest.raises(ValueError, match="needs a pooling model"):
            ask(llm, [PROMPT], "embed")
