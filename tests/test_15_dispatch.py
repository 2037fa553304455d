"""Tasks, dimensions and flags may be mixed: each request is answered as if alone. Chapter 15."""

import random
from dataclasses import replace

import pytest
import references
import torch
from answers import ask, assert_close, start
from torch import Tensor

from nanopool import PoolingParams
from nanopool.pooler.metadata import PoolingCursor, PoolingMetadata, PoolingState
from nanopool.pooler.poolers import DispatchPooler, Pooler

EMBEDDER = [
    PoolingParams(task="embed"),
    PoolingParams(task="token_embed"),
    PoolingParams(task="embed", dimensions=5),
    PoolingParams(task="token_embed", dimensions=9, use_activation=False),
    PoolingParams(task="embed", use_activation=False),
    PoolingParams(task="embed", dimensions=5, use_activation=False),
    PoolingParams(task="token_embed", use_activation=False),
]
CLASSIFIER = [
    PoolingParams(task="classify"),
    PoolingParams(task="token_classify"),
    PoolingParams(task="classify", use_activation=False),
    PoolingParams(task="token_classify", use_activation=False),
]
MATRYOSHKA = {"is_matryoshka": True}
MODELS = {
    "bert": (("sentence_transformer", {"dense": 24}), EMBEDDER),
    "qwen3": (("qwen3", {"suffix": "Model", "std": 0.2}), EMBEDDER),
    "bert-classifier": (("bert_classifier", {"labels": 3}), CLASSIFIER),
    "qwen3-classifier": (("qwen3_classifier", {"labels": 3, "std": 0.2}), CLASSIFIER),
    "bge-m3": (
        ("bge_m3", {}),
        [PoolingParams(task=task) for task in ("embed&token_classify", "embed", "token_embed")]
        + [CLASSIFIER[1], CLASSIFIER[3]],
    ),
    "bert-mlm": (("bert_mlm", {}), [EMBEDDER[0], EMBEDDER[1], CLASSIFIER[1], CLASSIFIER[3]]),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request, checkpoint):
    """(folder, prompts, params of each, their results when each is alone in its call)."""
    (kind, facts), kinds = MODELS[request.param]
    folder = checkpoint(kind, **facts)
    prompts = references.random_prompts(130, [1 + 3 * i % 17 for i in range(3 * len(kinds))])
    params = kinds * 3
    with start(folder, hf_overrides=MATRYOSHKA) as llm:
        alone = [ask(llm, [p], params=[q])[0] for p, q in zip(prompts, params, strict=True)]
    return folder, prompts, params, alone


@pytest.mark.parametrize("seed", [1, 2])
def test_a_mixed_step_equals_the_solo_runs(case, seed):
    folder, prompts, params, alone = case
    order = random.Random(seed).sample(range(len(prompts)), len(prompts))
    with start(folder, hf_overrides=MATRYOSHKA) as llm:
        found = ask(llm, [prompts[i] for i in order], params=[params[i] for i in order])
    assert_close(found, [alone[i] for i in order])


def test_prompts_of_one_length_keep_their_tasks_apart(case):
    """A, B, A: neighbours in the packed step, since they are equally long."""
    folder, prompts, params, _ = case
    longest = max(prompts, key=len)
    with start(folder, hf_overrides=MATRYOSHKA) as llm:
        alone = [ask(llm, [longest], params=[param])[0] for param in params]
        assert_close(ask(llm, [longest] * len(params), params=params), alone)


@pytest.mark.parametrize("budget", [1, 4, 13])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-classifier"])
def test_a_mixed_step_may_cut_its_prompts(checkpoint, name, budget):
    (kind, facts), params = MODELS[name]
    prompts = references.random_prompts(130, [2 + 5 * i % 11 for i in range(len(params))])
    folder = checkpoint(kind, **facts)
    with start(folder, hf_overrides=MATRYOSHKA) as llm:
        whole = ask(llm, prompts, params=params)
    with start(folder, hf_overrides=MATRYOSHKA, max_num_batched_tokens=budget) as llm:
        assert_close(ask(llm, prompts, params=params), whole)


# The dispatcher by itself


class RowSums(Pooler):
    """Notes the rows of each call and answers every request with the sum of its rows."""

    def __init__(self, task: str):
        self.tasks = (task,)
        self.calls: list[list[float]] = []

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        self.calls.append(hidden[:, 0].tolist())
        cursor = metadata.cursor
        edges = zip(cursor.first_rows.tolist(), cursor.last_rows.tolist(), strict=True)
        return [hidden[first : last + 1].sum() for first, last in edges]


def metadata_for(tasks: str) -> PoolingMetadata:
    """One request of two rows for each letter: E is `embed`, T is `token_embed`."""
    n = len(tasks)
    edges = torch.arange(0, 2 * n + 1, 2)
    cursor = PoolingCursor(edges[:-1], edges[1:] - 1, (2,) * n, (0,) * n, (2,) * n)
    names = {"E": "embed", "T": "token_embed"}
    params = tuple(PoolingParams(task=names[letter]) for letter in tasks)
    return PoolingMetadata(cursor, params, tuple(PoolingState() for _ in tasks), ((5, 6),) * n)


def test_adjacent_requests_of_one_task_share_a_call():
    embed, tokens = RowSums("embed"), RowSums("token_embed")
    pooler = DispatchPooler({"embed": embed, "token_embed": tokens})
    sums = pooler(torch.arange(10.0).unsqueeze(1), metadata_for("EETEE"))
    assert embed.calls == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert tokens.calls == [[4, 5]]
    assert [x.item() for x in sums] == [1, 5, 9, 13, 17]


def test_one_task_goes_to_its_pooler_in_one_call():
    embed = RowSums("embed")
    pooler = DispatchPooler({"embed": embed, "token_embed": RowSums("token_embed")})
    pooler(torch.arange(6.0).unsqueeze(1), metadata_for("EEE"))
    assert embed.calls == [[0, 1, 2, 3, 4, 5]]


def test_a_part_of_the_metadata_has_its_own_row_numbers():
    cursor = metadata_for("EETEE").cursor
    cursor = replace(cursor, prompt_lens=(2, 2, 9, 2, 2))
    assert cursor.is_partial and not cursor[3:].is_partial
    assert cursor[2:4].first_rows.tolist() == [0, 2]
    assert cursor[2:4].finished == (False, True)


def test_a_pooler_is_refused_for_a_task_that_it_does_not_offer():
    with pytest.raises(ValueError, match="RowSums offers \\['embed'\\], not 'classify'"):
        DispatchPooler({"classify": RowSums("embed")})


def test_a_task_that_the_model_lacks_is_refused_with_a_way_out(checkpoint):
    with start(checkpoint("qwen3", suffix="Model", std=0.2)) as llm:
        with pytest.raises(ValueError, match=r"'classify'.*convert='classify'"):
            ask(llm, [[5, 6]], "classify")
        assert_close(ask(llm, [[5, 6]], "embed")[0].norm().item(), 1.0)
