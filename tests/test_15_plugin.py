"""Plugin requests: data that is not text, an IOProcessor and an identity pooler. Chapter 15."""

import pytest
import references
import torch
from answers import ask, assert_close, start

from nanopool import LLM

ROWS = [[0.0, 0.5, 0.99], [0.25, 0.75]]  # readings of an instrument, between 0 and 1


class Readings:
    """Numbers become token ids; the hidden rows of all of them become one number a reading."""

    def parse(self, data):
        if not all(0 <= value < 1 for row in data for value in row):
            raise ValueError("readings lie between 0 and 1")
        return data

    def pre_process(self, data) -> list[list[int]]:
        return [[10 + int(100 * value) for value in row] for row in data]

    def post_process(self, outputs) -> list[list[float]]:
        return [output.outputs.data.norm(dim=-1).tolist() for output in outputs]


@pytest.fixture(scope="module", params=["bert", "bert_classifier", "qwen3_classifier"])
def llm(request, checkpoint):
    with start(checkpoint(request.param), io_processor=Readings()) as llm:
        yield llm


def hidden(llm, prompts) -> list[torch.Tensor]:
    model = references.load(llm.model_config.folder)
    return [references.hidden_states(model, ids) for ids in prompts]


def test_data_go_through_the_processor(llm: LLM):
    (output,) = llm.encode({"data": ROWS}, pooling_task="plugin", use_tqdm=False)
    rows = hidden(llm, [[10, 60, 109], [35, 85]])
    assert_close(output.outputs, [row.norm(dim=-1).tolist() for row in rows])
    assert output.finished


def test_each_piece_of_data_has_its_own_answer(llm: LLM):
    data = [{"data": ROWS[:1]}, {"data": ROWS[1:]}]
    outputs = llm.encode(data, pooling_task="plugin", use_tqdm=False)
    (both,) = llm.encode({"data": ROWS}, pooling_task="plugin", use_tqdm=False)
    assert_close([output.outputs[0] for output in outputs], both.outputs)


def test_other_prompts_give_their_hidden_rows(llm: LLM):
    prompts = [[10, 60, 109], [35]]
    assert_close(ask(llm, prompts, "plugin"), hidden(llm, prompts))


def test_the_processors_error_reaches_the_caller_and_the_next_call_is_right(llm: LLM):
    with pytest.raises(ValueError, match="between 0 and 1"):
        llm.encode({"data": [[2.0]]}, pooling_task="plugin", use_tqdm=False)
    assert len(ask(llm, [[10]], "plugin")) == 1


def test_data_need_the_task_and_a_processor(checkpoint, llm: LLM):
    with pytest.raises(ValueError, match=r"pooling_task='plugin' and LLM\(io_processor"):
        llm.encode({"data": ROWS}, use_tqdm=False)
    with start(checkpoint("bert")) as other:
        with pytest.raises(ValueError, match=r"LLM\(io_processor"):
            other.encode({"data": ROWS}, pooling_task="plugin", use_tqdm=False)


def test_data_and_prompts_do_not_mix(llm: LLM):
    with pytest.raises(ValueError, match=r"beside {'data': \.\.\.}=1"):
        llm.encode([{"data": ROWS}, [10]], pooling_task="plugin", use_tqdm=False)


@pytest.mark.parametrize("budget", [1, 3])
def test_a_causal_model_may_cut_plugin_requests(checkpoint, budget):
    prompts = references.random_prompts(300, (2, 9, 20))
    settings = {"convert": "embed", "max_num_batched_tokens": budget, "block_size": 4}
    with start(checkpoint("qwen3", suffix="Model", std=0.2), **settings) as llm:
        assert_close(ask(llm, prompts, "plugin"), hidden(llm, prompts))
