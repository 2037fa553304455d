"""LLM: the public methods. Chapter 00."""

import sys
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import transformers

from nanopool import long_text, scoring
from nanopool.checks import check_value
from nanopool.config import EngineConfig, SamplingParams
from nanopool.engine.engine import start_ranks
from nanopool.engine.sequence import Request
from nanopool.inputs import Frame, InputProcessor, Prompt, as_list, parse_prompt
from nanopool.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    warn_unless_finite,
)
from nanopool.pooler.params import PoolingParams

Outputs = list[PoolingRequestOutput]


class IOProcessor(Protocol):
    """Feeds other data than text to `encode(..., pooling_task="plugin")`. Chapter 15."""

    def parse(self, data: Any) -> Any:
        """What a prompt {"data": ...} holds, checked. Raises ValueError."""

    def pre_process(self, data: Any) -> list:
        """Parsed data -> prompts: texts or token ids."""

    def post_process(self, outputs: Outputs) -> Any:
        """The prompts' outputs, hidden rows `[n, D]` each -> the answer to the data."""


class LLM:
    """A model, ready to generate or to pool. Holds the tokenizer and the ranks. Chapter 00.

    Arguments are those of EngineConfig (config.py), and an `io_processor` for plugin requests.
    ValueError for a wrong one, FileNotFoundError for a model that is not there. `trust_remote_code`
    is accepted and changes nothing: no remote code ever runs.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        io_processor: IOProcessor | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ):
        config = EngineConfig(model, **kwargs)
        self.ranks = start_ranks(config)
        self.llm_engine = self.ranks.target
        self.model_config = self.llm_engine.model_config
        folder = config.tokenizer or self.model_config.folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
        self.inputs = InputProcessor(tokenizer, self.model_config)
        self.io_processor = io_processor
        self.seed = config.seed
        self.numbers = count()

    def generate(
        self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True, **tokenization: Any
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in input order; `sampling_params`: one for all, or a list."""
        check_value("runner", self.model_config.runner, ("generate",))
        truncation = self.inputs.truncation(self.model_config.max_model_len - 1, tokenization)
        encoded = self.inputs.encode(as_list(prompts), truncation, Frame())
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
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        **tokenization: Any,
    ) -> Outputs:
        """One PoolingRequestOutput a prompt, in input order.

        A request's own `task` goes before `pooling_task`, that before the model's default. Texts
        are written with the folder's prompt of `prompt_name`; those of a ColBERT as documents, or
        as queries with prompt_name="query".
        """
        prompts, config = as_list(prompts), self.model_config
        task = pooling_task or config.default_task
        if data := [p["data"] for p in prompts if isinstance(p, dict) and "data" in p]:
            return [self.run_plugin(item, task, use_tqdm) for item in data]
        params = spread(pooling_params or PoolingParams(), len(prompts), PoolingParams)
        frame = self.inputs.frame(prompt_name)
        resolved = {p: self.resolve(p, p.task or task, frame) for p in {*params}}
        limit = self.length_limit({p.task for p in resolved.values()})
        encoded = self.inputs.encode(prompts, self.inputs.truncation(limit, tokenization), frame)
        groups = [
            [
                self.pooling_request(piece, resolved[p])
                for piece in long_text.split(prompt, config.max_model_len)
            ]
            for prompt, p in zip(encoded, params, strict=True)
        ]
        outputs = iter(self.pool([[*chain(*groups)]], task if use_tqdm else None))
        return [
            long_text.finish([next(outputs) for _ in group], prompt, group[0].pooling, frame)
            for group, prompt in zip(groups, encoded, strict=True)
        ]

    def embed(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.embedding`: one vector a prompt."""
        return self.encode(prompts, pooling_params, pooling_task="embed", **kwargs)

    def classify(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.probs`: one number a label."""
        return self.encode(prompts, pooling_params, pooling_task="classify", **kwargs)

    def reward(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.data`: one number a token, or a step."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **kwargs)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        max_tokens_per_query: int = 0,
        max_tokens_per_doc: int = 0,
        use_tqdm: bool = True,
        **tokenization: Any,
    ) -> Outputs:
        """`.outputs.score` of each pair: one with one, one with each of N, or N with N in order.

        `chat_template` (with the roles query and document) writes a cross-encoder's pairs;
        `max_tokens_per_...` shorten the texts first (0: not). See scoring.py for the three routes.
        """
        params = pooling_params or PoolingParams()
        call = scoring.ScoreCall(self, params, chat_template, use_tqdm, tokenization)
        queries = self.texts(data_1, "max_tokens_per_query", max_tokens_per_query)
        documents = self.texts(data_2, "max_tokens_per_doc", max_tokens_per_doc)
        return scoring.score(call, queries, documents)

    def rerank(
        self, query: Any, documents: Any, top_n: int | None = None, **kwargs: Any
    ) -> list[tuple[int, float]]:
        """(index, score) of the `top_n` best documents (None or 0: all), ties in input order."""
        check_value("top_n", top_n or 0, 0)
        documents = as_list(documents)
        outputs = self.score(query, documents, **kwargs) if documents else []
        scores = [(i, output.outputs.score) for i, output in enumerate(outputs) if output]
        return sorted(scores, key=lambda pair: pair[1], reverse=True)[: top_n or None]

    def texts(self, data: Any, name: str, max_tokens: int) -> list:
        """The texts of one side of `score`, shortened where the caller says so."""
        check_value(name, max_tokens, 0)
        if max_tokens >= self.model_config.max_model_len:
            raise ValueError(f"{name}={max_tokens}: use less than max_model_len")
        texts = [parse_prompt(text, i) for i, text in enumerate(as_list(data))]
        return [self.inputs.shorten(text, max_tokens) for text in texts] if max_tokens else texts

    def run_plugin(self, data: Any, task: str, use_tqdm: bool) -> PoolingRequestOutput | None:
        """The io_processor's answer to one piece of data."""
        io = self.io_processor
        if io is None or task != "plugin":
            raise ValueError(
                "a prompt with 'data' needs pooling_task='plugin' and LLM(io_processor=...)"
            )
        prompts = io.pre_process(io.parse(data))
        outputs = self.encode(prompts, pooling_task=task, use_tqdm=use_tqdm)
        if None in outputs:
            return None
        return PoolingRequestOutput(outputs[0].request_id, io.post_process(outputs), [])

    def length_limit(self, tasks: set[str | None]) -> int:
        """How many tokens a prompt may have; `embed` alone can take it in pieces."""
        pooler, limit = self.model_config.pooler, self.model_config.max_model_len
        if tasks != {"embed"}:
            return limit
        return pooler.max_embed_len or (sys.maxsize if pooler.enable_chunked_processing else limit)

    def resolve(self, params: PoolingParams, task: str, frame: Frame) -> PoolingParams:
        """The params of a request: verified, filled, with what the pooler and the frame add."""
        params = params.resolve(task, self.model_config)
        facts = {"prompt_prefix_len": frame.prefix_len, "skip_token_ids": frame.skip_token_ids}
        return replace(params, **facts, **self.llm_engine.pooling_updates(task))

    def pooling_request(self, prompt: Prompt, params: PoolingParams) -> Request:
        """The one place where pooling requests are made."""
        return Request(
            request_id=str(next(self.numbers)),
            token_ids=prompt.token_ids,
            pooling=params,
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
        """Check every request, then compute them on all ranks.

        Long ones first, so that a step packs alike rows.
        """
        for wave in waves:
            for i, request in enumerate(wave):
                self.llm_engine.check(request, i)
        waves = [sorted(wave, key=lambda r: len(r.token_ids), reverse=True) for wave in waves]
        result = self.ranks.call("run", waves, progress)
        if result.error is not None:
            raise result.error
        return result.outputs

    def pool(self, waves: list[list[Request]], progress: str | None) -> Outputs:
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
            f"{kind.__name__}: {len(values)} given for {n} prompts: give one, or one for each"
        )
    return values
