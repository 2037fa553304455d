"""The largest steps that a runner will meet, to measure what they need. Chapter 10."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from nanopool.config import ModelConfig, SamplingParams
from nanopool.engine.scheduler import Scheduled
from nanopool.engine.sequence import Request, Sequence
from nanopool.pooler.params import PoolingParams


def warm_up_steps(model: nn.Module, config: ModelConfig, max_num_seqs: int) -> Iterator[Scheduled]:
    """A step for each supported task: as many sequences as fill the token budget together."""
    for task in config.spec.tasks:
        asked = {"sampling": SamplingParams(top_p=0.9), "max_new_tokens": 1}
        if task != "generate":
            params = PoolingParams(task=task).resolve(task, config)
            asked = {"pooling": replace(params, **model.pooler.get_pooling_updates(task))}
        lens = largest_step(config.max_num_batched_tokens, max_num_seqs, config.max_model_len)
        yield [(Sequence(Request(str(i), (0,) * n, **asked)), n) for i, n in enumerate(lens)]


def largest_step(budget: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Sequence lengths: (8192, 256, 512) -> 256 times 32, (100, 3, 512) -> [34, 33, 33]."""
    count = min(max_num_seqs, budget)
    n, longer = divmod(min(budget, count * max_model_len), count)
    return [n + 1] * longer + [n] * (count - longer)
