"""LLM: the public methods. Chapter 00."""

import sys
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

from nanopool import long_text, scoring
from nanopool.checkpoint import load_tokenizer
from nanopool.checks import check_value, refusing, spread
from nanopool.config import EngineConfig, SamplingParams
from nanopool.engine.engine import start_ranks
from nanopool.engine.sequence import Request
from nanopool.inputs import PLAIN, Frame, InputProcessor, Prompt, as_list
from nanopool.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    warn_unless_finite,
)
from nanopool.pooler.params import PoolingParams, check_task

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
    is accepted and changes nothing: no remote code ever runs. Under torchrun every rank makes the
    same calls, and all but rank 0 get None for each output.
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
        self.model_config = self.llm_engine.model_config
        tokenizer = load_tokenizer(config.tokenizer or self.model_config.folder)
        self.inputs = InputProcessor(tokenizer, self.model_config)
        self.io_processor = io_processor
        self.seed = config.seed
        self.numbers = count()
        self.resolved: dict[tuple[PoolingParams, str, Frame], PoolingParams] = {}

    def generate(
        self, prompts: Any, sampling_params: Any = None, use_tqdm: bool = True, **tokenization: Any
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in input order; `sampling_params`: one for all, or a list."""
        if (runner := self.model_config.runner) != "generate":
            raise ValueError(f"runner={runner!r} cannot 'generate': use encode, or a generator")
        truncation = self.inputs.truncation(self.model_config.max_model_len - 1, tokenization)
        encoded = self.inputs.encode(as_list(prompts), truncation, PLAIN)
        params = spread("sampling_params", sampling_params, SamplingParams, len(encoded))
        requests = [self.generation_request(p, s) for p, s in zip(encoded, params, strict=True)]
        results = self.run([requests], "generate" if use_tqdm else None)
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
        prompts, config = as_list(prompts), self.model_config
        check_task(pooling_task)
        task = pooling_task or config.default_task
        if data := [p["data"] for p in prompts if isinstance(p, dict) and "data" in p]:
            return [self.run_plugin(item, task, use_tqdm) for item in data]
        params = spread("pooling_params", pooling_params, PoolingParams, len(prompts))
        limit = self.length_limit({p.task or task for p in params})
        frame = self.inputs.frame(prompt_name)
        truncation = self.inputs.truncation(limit, tokenization)
        encoded = self.inputs.encode(prompts, truncation, frame)
        pairs = [*zip(encoded, params, strict=True)]
        requests = [self.pooling_request(prompt, p, p.task or task, frame) for prompt, p in pairs]
        outputs = self.pool([requests], task if use_tqdm else None)
        char_spans = partial(long_text.char_spans, self.inputs, truncation, frame)
        return long_text.add_chunks(outputs, pairs, char_spans)

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

        `chat_template` (of messages by query and document) writes a cross-encoder's pairs;
        `max_tokens_per_...` shorten the texts first (0: not). scoring.py has the three routes.
        """
        queries = self.inputs.read_side("max_tokens_per_query", max_tokens_per_query, data_1)
        documents = self.inputs.read_side("max_tokens_per_doc", max_tokens_per_doc, data_2)
        task = scoring.score_task(self.model_config)
        truncation = self.inputs.truncation(self.length_limit({task}), tokenization)
        (params,) = spread("pooling_params", pooling_params, PoolingParams, 1)
        check_value("pooling_params.task", params.task, (None, task))
        progress = "score" if use_tqdm else None
        call = scoring.ScoreCall(self, task, params, truncation, chat_template, progress)
        return call.run(queries, documents)

    def rerank(
        self, query: Any, documents: Any, top_n: int | None = None, **kwargs: Any
    ) -> list[tuple[int, float]]:
        """(index, score) of the `top_n` best documents (None or 0: all), ties in input order."""
        check_value("top_n", 0 if top_n is None else top_n, 0)
        check_value("the number of queries", len(as_list(query)), (1,))
        documents = as_list(documents)
        outputs = self.score(query, documents, **kwargs) if documents else []
        scores = [(i, output.outputs.score) for i, output in enumerate(outputs) if output]
        return sorted(scores, key=lambda pair: -pair[1])[: top_n or None]

    def run_plugin(self, data: Any, task: str, use_tqdm: bool) -> PoolingRequestOutput | None:
        """The io_processor's answer to one piece of data."""
        io = self.io_processor
        if io is None or task != "plugin":
            raise ValueError(f"{data=}: give pooling_task='plugin' and LLM(io_processor=...)")
        prompts = io.pre_process(io.parse(data))
        outputs = self.encode(prompts, pooling_task=task, use_tqdm=use_tqdm)
        first, *_ = outputs
        return first and replace(first, outputs=io.post_process(outputs), prompt_token_ids=[])

    def length_limit(self, tasks: set[str]) -> int:
        """How many tokens a prompt may have; `embed` alone can take it in pieces."""
        pooler, limit = self.model_config.pooler, self.model_config.max_model_len
        if tasks != {"embed"}:
            return limit
        return pooler.max_embed_len or (sys.maxsize if pooler.enable_chunked_processing else limit)

    def pooling_request(
        self, prompt: Prompt, params: PoolingParams, task: str, frame: Frame = PLAIN
    ) -> Request:
        """The one place where pooling requests are made; equal params are resolved once."""
        key = params, task, frame
        if key not in self.resolved:
            resolved = params.resolve(task, self.model_config)
            facts = {"prompt_prefix_len": frame.prefix_len, "skip_token_ids": frame.skip_token_ids}
            facts |= self.llm_engine.pooling_updates(task)
            self.resolved[key] = replace(resolved, **facts)
        return Request(
            request_id=str(next(self.numbers)),
            token_ids=prompt.token_ids,
            pooling=self.resolved[key],
            num_first_segment=prompt.num_first_segment,
            num_keys=prompt.num_keys,
            reads_prefix_cache=not self.resolved[key].skip_reading_prefix_cache,
        )

    def generation_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The one place where generation requests are made."""
        number, stops = next(self.numbers), {*(params.stop_token_ids or ())}
        if not params.ignore_eos:
            stops |= {*self.model_config.eos_token_ids}
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

    def run(self, waves: list[list[Request]], progress: str | None) -> list[Any]:
        """Check every request, compute all of them on all ranks; results in their order.

        Long ones first, so that a step packs alike rows.
        """
        for wave in waves:
            for i, request in enumerate(wave):
                self.llm_engine.scheduler.check(request, f"prompt {i}")
        by_length = [sorted(wave, key=lambda r: -len(r.token_ids)) for wave in waves]
        with self.inputs.lock:
            result = self.ranks.call("run", by_length, progress)
        if result.error is not None:
            raise result.error
        is_first = self.llm_engine.tp.rank == 0
        return [result.outputs[r.request_id] if is_first else None for r in chain(*waves)]

    def pool(self, waves: list[list[Request]], progress: str | None) -> Outputs:
        """Outputs of all waves' requests in their order; a request that is too long is split."""
        length = self.model_config.max_model_len
        pieces = [[long_text.split(request, length) for request in wave] for wave in waves]
        results = iter(self.run([[*chain(*wave)] for wave in pieces], progress))
        outputs = []
        for request, parts in zip(chain(*waves), chain(*pieces), strict=True):
            data = long_text.join([next(results) for _ in parts], parts)
            facts = request.request_id, PoolingOutput(data), [*request.token_ids]
            outputs.append(None if data is None else PoolingRequestOutput(*facts))
        warn_unless_finite(outputs)
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
