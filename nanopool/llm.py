"""LLM: the public methods. Chapter 00."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import transformers

from nanopool.config import EngineConfig, SamplingParams
from nanopool.engine.engine import start_ranks
from nanopool.engine.sequence import Request
from nanopool.inputs import InputProcessor, Prompt, Truncation, as_list, with_pooling_prefix
from nanopool.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    warn_unless_finite,
)
from nanopool.pooler.params import PoolingParams


class LLM:
    """A model, ready to generate or to pool. Holds the tokenizer, the ranks and the request numbers. Chapter 00.

    Arguments are those of EngineConfig (config.py). ValueError for a wrong one, FileNotFoundError for a model that is
    not there. `trust_remote_code` is accepted and changes nothing: no remote code ever runs.
    """

    def __init__(self, model: str | Path, *, trust_remote_code: bool = False, **kwargs: Any):
        config = EngineConfig(model, **kwargs)
        self.ranks = start_ranks(config)
        self.llm_engine = self.ranks.target
        self.model_config = self.llm_engine.model_config
        self.seed = config.seed
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(config.tokenizer or self.model_config.folder)
        )
        self.inputs = InputProcessor(tokenizer, self.model_config)
        self.numbers = count()

    def generate(
        self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True, **tokenization: Any
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in input order; `sampling_params` is one for all, or a list."""
        if self.model_config.runner != "generate":
            raise ValueError(
                "generate is only supported for generative models; this one was loaded with "
                f"runner={self.model_config.runner!r}"
            )
        limit = self.model_config.max_model_len - 1
        encoded = self.inputs.encode(as_list(prompts), self.truncation(limit, tokenization))
        params = spread(sampling_params or SamplingParams(), len(encoded), SamplingParams)
        requests = [self.generation_request(p, s) for p, s in zip(encoded, params, strict=True)]
        outputs = self.run([requests], "generate" if use_tqdm else None)
        pairs = zip(requests, encoded, strict=True)
        return [self.request_output(r, p.text, outputs[r.request_id]) for r, p in pairs]

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        prompt_name: str | None = None,
        **tokenization: Any,
    ) -> list[PoolingRequestOutput]:
        """One PoolingRequestOutput a prompt, in input order. Each request's own `task` goes before `pooling_task`."""
        prefix = self.prompt_prefix(prompt_name)
        truncation = self.truncation(self.model_config.max_model_len, tokenization)
        encoded = self.inputs.encode(as_list(prompts), truncation, prefix)
        params = spread(pooling_params or PoolingParams(), len(encoded), PoolingParams)
        task = pooling_task or self.model_config.default_task
        pairs = zip(encoded, params, strict=True)
        requests = [
            self.pooling_request(prompt, param, param.task or task) for prompt, param in pairs
        ]
        return self.pool([requests], task if use_tqdm else None)

    def embed(
        self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any
    ) -> list[PoolingRequestOutput]:
        """`.outputs.embedding`: one vector a prompt."""
        return self.encode(prompts, pooling_params, pooling_task="embed", **kwargs)

    def classify(
        self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any
    ) -> list[PoolingRequestOutput]:
        """`.outputs.probs`: one number a label."""
        return self.encode(prompts, pooling_params, pooling_task="classify", **kwargs)

    def reward(
        self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any
    ) -> list[PoolingRequestOutput]:
        """`.outputs.data`: one number a token, or a step; a sequence-level reward model gives one a prompt."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **kwargs)

    def pooling_request(self, prompt: Prompt, params: PoolingParams, task: str) -> Request:
        """The one place where pooling requests are made: params resolved, the pooler's needs added."""
        params = params.resolve(task, self.model_config)
        params = replace(params, **self.llm_engine.pooling_updates(task))
        return Request(
            request_id=str(next(self.numbers)),
            token_ids=prompt.token_ids,
            pooling=with_pooling_prefix(params, prompt),
            num_first_segment=prompt.num_first_segment,
            num_keys=prompt.num_keys,
            reads_prefix_cache=not params.skip_reading_prefix_cache,
        )

    def generation_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        number = next(self.numbers)
        stops = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops |= set(self.model_config.eos_token_ids)
        room = self.model_config.max_model_len - len(prompt.token_ids)
        return Request(
            request_id=str(number),
            token_ids=prompt.token_ids,
            sampling=params,
            max_new_tokens=min(params.max_tokens, room),
            seed=(self.seed, number) if params.seed is None else (params.seed,),
            stop_ids=frozenset(stops),
            reads_prefix_cache=True,
        )

    def run(self, waves: list[list[Request]], progress: str | None) -> dict[str, Any]:
        """Check every request, then compute them on all ranks; long ones first, so that a step packs alike rows."""
        for wave in waves:
            for i, request in enumerate(wave):
                self.llm_engine.check(request, i)
        waves = [sorted(wave, key=lambda r: len(r.token_ids), reverse=True) for wave in waves]
        result = self.ranks.call("run", waves, progress)
        if result.error is not None:
            raise result.error
        return result.outputs

    def pool(self, waves: list[list[Request]], progress: str | None) -> list[PoolingRequestOutput]:
        """Outputs of all waves' requests in their order; on ranks other than 0 each is None."""
        data = self.run(waves, progress)
        requests = [request for wave in waves for request in wave]
        if self.llm_engine.tp.rank > 0:
            return [None] * len(requests)
        outputs = [
            PoolingRequestOutput(r.request_id, PoolingOutput(data[r.request_id]), list(r.token_ids))
            for r in requests
        ]
        warn_unless_finite(outputs)
        return outputs

    def request_output(self, request: Request, text: str | None, ids: list[int]) -> RequestOutput:
        reason = "stop" if ids and ids[-1] in request.stop_ids else "length"
        generated = self.inputs.tokenizer.decode(ids, skip_special_tokens=True)
        completion = CompletionOutput(0, generated, ids, reason)
        return RequestOutput(request.request_id, text, list(request.token_ids), [completion])

    def truncation(self, limit: int, kwargs: dict[str, Any]) -> Truncation:
        """The tokenization arguments of a call, given one by one or as `tokenization_kwargs`."""
        merged = kwargs | (kwargs.get("tokenization_kwargs") or {})
        merged.pop("tokenization_kwargs", None)
        return self.inputs.truncation(limit, **merged)

    def prompt_prefix(self, prompt_name: str | None) -> str:
        """The folder's prompt of that name, or its default prompt; ValueError for a name that it lacks."""
        prompts = self.model_config.prompts
        name = prompt_name or self.model_config.default_prompt_name
        if name is None:
            return ""
        if name not in prompts:
            raise ValueError(f"prompt_name = {name!r}; the model's prompts are {sorted(prompts)}")
        return prompts[name]

    def get_tokenizer(self):
        return self.inputs.tokenizer

    def shutdown(self) -> None:
        """Stop the ranks; may be called twice."""
        self.ranks.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"LLM({self.model_config})"


def spread(value: Any, n: int, kind: type) -> list:
    """One params object for all n prompts, or a list with one each."""
    values = [value] * n if isinstance(value, kind) else list(value)
    if len(values) != n or not all(isinstance(v, kind) for v in values):
        raise ValueError(
            f"{kind.__name__}: {len(values)} given for {n} prompts; give one, or a list with one each"
        )
    return values
