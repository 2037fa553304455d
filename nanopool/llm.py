"""LLM: the public methods. Chapter 00."""

from dataclasses import replace
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

from nanopool import long_text, scoring
from nanopool.checkpoint import load_tokenizer
from nanopool.checks import check_value, refusing, spread
from nanopool.config import EngineConfig, SamplingParams
from nanopool.engine.engine import start_ranks
from nanopool.engine.sequence import Request
from nanopool.inputs import Frame, InputProcessor, Prompt, as_list
from nanopool.outputs import (
    CompletionOutput,
    Outputs,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    warn_unless_finite,
)
from nanopool.pooler.params import PoolingParams, check_task


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
    ValueError for a wrong value, TypeError for an unknown name, FileNotFoundError for a model that
    is not there. `trust_remote_code` is accepted and changes nothing: no remote code ever runs.
    Under torchrun every rank makes the same calls, and all but rank 0 get None for each output.
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
        with refusing(f"model={str(model)!r}: what a file or hf_overrides says"):
            self.ranks = start_ranks(config)
        self.llm_engine = self.ranks.target
        self.model_config = facts = self.llm_engine.model_config
        tokenizer = load_tokenizer(config.tokenizer or facts.folder, facts.do_lower_case)
        self.inputs = InputProcessor(tokenizer, self.model_config)
        self.io_processor = io_processor
        self.seed = config.seed
        self.numbers = count()
        self.resolve = cache(self.resolve_params)

    def generate(
        self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True, **tokenization: Any
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in input order; `sampling_params`: one for all, or a list."""
        if (runner := self.model_config.runner) != "generate":
            raise ValueError(f"runner={runner!r} cannot 'generate': use encode, or a generator")
        frame = self.inputs.frame(None, {"generate"}, **tokenization)
        encoded = self.inputs.encode(as_list(prompts), frame)
        params = spread("sampling_params", sampling_params, SamplingParams, len(encoded))
        requests = [self.generation_request(p, s) for p, s in zip(encoded, params, strict=True)]
        results = self.run(requests, "generate" if use_tqdm else None)
        rows = zip(requests, encoded, results, strict=True)
        return [ids and self.request_output(request, p.text, ids) for request, p, ids in rows]

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
        get the folder's prompt of `prompt_name`; a ColBERT reads them as documents, or as queries
        with prompt_name="query".
        """
        prompts, task = as_list(prompts), pooling_task or self.model_config.default_task
        check_task(pooling_task)
        if data := [p["data"] for p in prompts if isinstance(p, dict) and "data" in p]:
            check_value("prompts beside {'data': ...}", len(prompts) - len(data), (0,))
            return [self.run_plugin(item, task, use_tqdm) for item in data]
        params = spread("pooling_params", pooling_params, PoolingParams, len(prompts))
        frame = self.inputs.frame(prompt_name, {p.task or task for p in params}, **tokenization)
        encoded = self.inputs.encode(prompts, frame)
        return warn_unless_finite(self.pool(encoded, params, task, use_tqdm))

    def embed(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.embedding`: one vector a prompt."""
        return self.encode_as("embed", prompts, pooling_params, **kwargs)

    def classify(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.probs`: one number a label."""
        return self.encode_as("classify", prompts, pooling_params, **kwargs)

    def reward(self, prompts: Any, *, pooling_params: Any = None, **kwargs: Any) -> Outputs:
        """`.outputs.data`: one number a token, or a step."""
        return self.encode_as("token_classify", prompts, pooling_params, **kwargs)

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

        `chat_template` (of messages by query and document) writes a cross-encoder's pairs;
        `max_tokens_per_...` shorten the texts first (0: not). scoring.py has the three routes.
        """
        inputs, task = self.inputs, scoring.score_task(self.model_config)
        queries = inputs.read_side("data_1", data_1, "max_tokens_per_query", max_tokens_per_query)
        documents = inputs.read_side("data_2", data_2, "max_tokens_per_doc", max_tokens_per_doc)
        (params,) = spread("pooling_params", pooling_params, PoolingParams, 1)
        check_value("pooling_params.task", params.task, (None, task))
        check_value("chat_template", chat_template, str | None if task == "classify" else (None,))
        call = scoring.ScoreCall(self, task, params, chat_template, tokenization, use_tqdm)
        return warn_unless_finite(call.run(queries, documents))

    def rerank(
        self, query: Any, documents: Any, top_n: int | None = None, **kwargs: Any
    ) -> list[tuple[int, float]]:
        """(index, score) of the `top_n` best documents (None or 0: all), ties in input order."""
        check_value("top_n", 0 if top_n is None else top_n, 0)
        query = as_list(query)
        check_value("the number of queries", len(query), (1,))
        scoring.score_task(self.model_config)
        documents = as_list(documents)
        outputs = self.score(query, documents, **kwargs) if documents else []
        scores = [(i, output.outputs.score) for i, output in enumerate(outputs) if output]
        return sorted(scores, key=lambda pair: (pair[1] != pair[1], -pair[1]))[: top_n or None]

    def encode_as(self, task: str, prompts: Any, pooling_params: Any, **kwargs: Any) -> Outputs:
        """`encode` for one task. Raises ValueError where the params name another."""
        prompts = as_list(prompts)
        params = spread("pooling_params", pooling_params, PoolingParams, len(prompts))
        for other in {item.task for item in params}:
            check_value("pooling_params.task", other, (None, task))
        return self.encode(prompts, params, pooling_task=task, **kwargs)

    def run_plugin(self, data: Any, task: str, use_tqdm: bool) -> PoolingRequestOutput | None:
        """The io_processor's answer to one piece of data."""
        io = self.io_processor
        if io is None or task != "plugin":
            raise ValueError(f"{data=}: give pooling_task='plugin' and LLM(io_processor=...)")
        prompts = io.pre_process(io.parse(data))
        outputs = self.encode(prompts, pooling_task=task, use_tqdm=use_tqdm)
        first, *_ = outputs
        return first and replace(first, outputs=io.post_process(outputs), prompt_token_ids=[])

    def pooling_request(self, prompt: Prompt, params: PoolingParams, task: str) -> Request:
        """The one place where pooling requests are made; equal params are resolved once.

        A task of the params goes before `task`.
        """
        ids, pooling = prompt.token_ids, self.resolve(params, params.task or task, prompt.frame)
        if pooling.task == "classify":
            ids = without_end(ids, self.model_config.ignored_end)
        return Request(
            request_id=str(next(self.numbers)),
            token_ids=ids,
            pooling=pooling,
            num_first_segment=prompt.num_first_segment,
            num_keys=prompt.num_keys,
            reads_prefix_cache=not pooling.skip_reading_prefix_cache,
        )

    def resolve_params(self, params: PoolingParams, task: str, frame: Frame) -> PoolingParams:
        """What the engine is told: the params with all defaults, and what it must know besides."""
        resolved = params.resolve(task, self.model_config)
        facts = {"prompt_prefix_len": frame.prefix_len, "skip_token_ids": frame.skip_token_ids}
        updates = self.llm_engine.runner.model.pooler.get_pooling_updates(task)
        return replace(resolved, **facts, **updates)

    def generation_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The one place where generation requests are made."""
        number = next(self.numbers)
        ends = () if params.ignore_eos else self.model_config.eos_token_ids
        room = self.model_config.max_model_len - len(prompt.token_ids)
        return Request(
            request_id=str(number),
            token_ids=prompt.token_ids,
            sampling=params,
            max_new_tokens=min(params.max_tokens, room),
            seed=(self.seed, number) if params.seed is None else (params.seed,),
            stop_ids=frozenset((*ends, *(params.stop_token_ids or ()))),
            reads_prefix_cache=True,
        )

    def run(self, requests: list[Request], progress: str | None) -> list[Any]:
        """Check every request, compute all of them on all ranks; results in their order.

        One that is too long is split. Queries that documents wait for are a wave of their own; in a
        wave long ones go first, so that a step packs alike rows.
        """
        pieces = [long_text.split(r, self.model_config.max_model_len) for r in requests]
        for i, (longest, *_) in enumerate(pieces):
            self.llm_engine.scheduler.check(longest, f"prompt {i}")
        by_length = sorted(chain(*pieces), key=lambda part: -len(part.token_ids))
        waves = [
            [part for part in by_length if part.is_cached_query is first] for first in (True, False)
        ]
        with self.inputs.lock:
            result = self.ranks.call("run", waves, progress)
        if result.error is not None:
            raise result.error
        if self.llm_engine.tp.rank > 0:
            return [None] * len(requests)
        return [long_text.join(parts, result.outputs) for parts in pieces]

    def pool(self, prompts: list[Prompt], params: list, task: str, use_tqdm: bool) -> Outputs:
        """One output a prompt, in their order; `params` has one PoolingParams for each."""
        pairs = zip(prompts, params, strict=True)
        requests = [self.pooling_request(prompt, p, task) for prompt, p in pairs]
        results = self.run(requests, task if use_tqdm else None)
        outputs = []
        for prompt, request, data in zip(prompts, requests, results, strict=True):
            late = long_text.late_chunks(self.inputs, prompt, request.pooling.late_chunking_params)
            facts = request.request_id, PoolingOutput(data), [*prompt.token_ids]
            output = PoolingRequestOutput(*facts, late_chunking=late)
            outputs.append(None if data is None else output)
        return outputs

    def request_output(self, request: Request, text: str | None, ids: list[int]) -> RequestOutput:
        """The answer to one generate request: its new token ids, and their text."""
        reason = "stop" if ids[-1] in request.stop_ids else "length"
        generated = self.inputs.tokenizer.decode(ids, skip_special_tokens=True)
        completion = CompletionOutput(0, generated, ids, reason)
        return RequestOutput(request.request_id, text, list(request.token_ids), [completion])

    def get_tokenizer(self):
        """The folder's tokenizer, or the one that was given."""
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


def without_end(ids: tuple[int, ...], padding: int | None) -> tuple[int, ...]:
    """The ids up to the last that is no padding, whose row transformers classifies."""
    return ids[: 1 + max((i for i, token in enumerate(ids) if token != padding), default=0)]
