"""Three ways to score a text against another: cosine, cross-encoder, MaxSim. Chapter 17.

Functions over the LLM: each makes requests and turns their results into one output a pair.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import cosine_similarity

from nanopool.checks import check_value
from nanopool.config import ModelConfig
from nanopool.engine.sequence import Request
from nanopool.inputs import Frame, Prompt, Truncation
from nanopool.outputs import PoolingOutput, PoolingRequestOutput
from nanopool.pooler.params import LateInteractionParams, PoolingParams

if TYPE_CHECKING:
    from nanopool.llm import LLM

Texts = list[str | tuple[int, ...]]
Outputs = list[PoolingRequestOutput | None]

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
JOINED = "{{ messages[-2].content + messages[-1].content }}"


@dataclass(frozen=True)
class ScoreCall:
    """One call of `LLM.score`, but for its texts; made there, used by the routes. Chapter 17."""

    llm: "LLM"
    task: str
    params: PoolingParams
    truncation: Truncation
    chat_template: str | None
    progress: str | None

    def run(self, queries: Texts, documents: Texts) -> Outputs:
        """One output a pair. Raises ValueError unless there are 1 query and N texts, or N and N."""
        if not queries or not documents or len(queries) not in (1, len(documents)):
            raise ValueError(
                f"data_1 has {len(queries)} texts and data_2 {len(documents)}: "
                "Input lengths must be either 1:1, 1:N or N:N"
            )
        return ROUTES[self.task](self, queries, documents)

    def request(self, prompt: Prompt, frame: Frame, *late: str | int) -> Request:
        """A prompt's request; `late` is its part in late interaction: mode, key, uses."""
        params = self.params
        if late:
            params = replace(params, late_interaction_params=LateInteractionParams(*late))
        return self.llm.pooling_request(prompt, params, self.task, frame)

    def pool(self, prompts: list[Prompt], frame: Frame) -> Outputs:
        """The outputs of prompts that stand for themselves."""
        requests = [self.request(prompt, frame) for prompt in prompts]
        return self.llm.pool([requests], self.progress)


def score_task(config: ModelConfig) -> str:
    """The task that scores, by PoolerConfig.task or what the model offers.

    Raises ValueError where there is none, and for more labels than one.
    """
    offered = [task for task in ROUTES if task in config.spec.tasks]
    task = config.pooler.task or next(iter(offered), None)
    if task not in ROUTES or (task == "classify" and config.num_labels != 1):
        raise ValueError(
            f"task={task!r} with num_labels={config.num_labels} does not support the Scoring API: "
            f"it takes one of {[*ROUTES]}, and classify is only enabled for num_labels == 1; "
            "a decoder scores with LLM(..., convert='embed') or convert='classify'"
        )
    return task


def score_by_classifier(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Cross-encoder: one model reads both texts, in a template or as the tokenizer joins them."""
    inputs, truncation, frame = call.llm.inputs, call.truncation, call.llm.inputs.frame(None)
    for text in (*queries, *documents):
        check_value("a text for a cross-encoder", text, str)
    queries, own = repeat(queries, len(documents)), own_template(call.llm, queries)
    if template := call.chat_template or own:
        if template not in (call.chat_template, JOINED):  # it writes its special tokens itself
            truncation = replace(truncation, add_special_tokens=False)
        system = [("system", frame.prefix)] if frame.prefix else []
        pairs = zip(queries, documents, strict=True)
        chats = [[*system, ("query", query), ("document", text)] for query, text in pairs]
        prompts = inputs.encode_chats(chats, template, truncation)
    else:
        prompts = inputs.write(truncation, frame, queries, documents)
    outputs = call.pool(inputs.check(prompts, truncation.limit), frame)
    return [o and replace(o, outputs=PoolingOutput(o.outputs.data[0])) for o in outputs]


def own_template(llm: "LLM", queries: Texts) -> str | None:
    """How the folder writes a pair, if not by the tokenizer's pair rule.

    sentence-transformers folders say whether it is the tokenizer's chat template. Qwen3-Reranker's
    is known; it is left out where the caller wrote it already, as vLLM's older examples do.
    """
    config, hf_config = llm.model_config, vars(llm.model_config.hf_config)
    if config.chat_template_kwargs is not None:
        return llm.inputs.tokenizer.chat_template
    if hf_config.get("is_original_qwen3_reranker") and not queries[0].startswith("<|im_start|>"):
        return QWEN3_RERANKER
    return JOINED if hf_config.get("classifier_from_token") else None


def score_by_cosine(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Bi-encoder: the cosine of two embeddings, in float32 and normalised or not."""
    inputs, frame = call.llm.inputs, call.llm.inputs.frame(None)
    sides = [inputs.encode(texts, call.truncation, frame) for texts in (queries, documents)]
    outputs = call.pool([*chain(*sides)], frame)
    left, right = repeat(outputs[: len(queries)], len(documents)), outputs[len(queries) :]
    scores = []
    for query, document in zip(left, right, strict=True):
        cosine = query and cosine_similarity(query.outputs.data, document.outputs.data, dim=0)
        scores.append(query and joined(call, query.prompt_token_ids, document, cosine))
    return scores


def score_by_maxsim(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Late interaction: every query is encoded once; its rows wait in the engine for documents."""
    inputs = call.llm.inputs
    frames = inputs.frames.get("query") or inputs.frame(None), inputs.frame(None)
    queries = inputs.encode(queries, call.truncation, frames[0])
    documents = inputs.encode(documents, call.truncation, frames[1])
    pairs = [*zip(repeat(queries, len(documents)), documents, strict=True)]
    uses = Counter(query for query, _ in pairs)
    keys = {query: str(i) for i, query in enumerate(uses)}
    first = [call.request(q, frames[0], "cache_query", keys[q], n) for q, n in uses.items()]
    second = [call.request(text, frames[1], "score_doc", keys[query]) for query, text in pairs]
    outputs = call.llm.pool([first, second], call.progress)[len(first) :]
    return [
        output and joined(call, query.token_ids, output, output.outputs.data)
        for output, (query, _) in zip(outputs, pairs, strict=True)
    ]


def repeat(queries: list, n: int) -> list:
    """1 or n queries -> n."""
    return queries * (n // len(queries))


def joined(
    call: ScoreCall, query_ids: Sequence[int], document: PoolingRequestOutput, value: Tensor
) -> PoolingRequestOutput:
    """A pair's output: its score, and the ids of both prompts with a pad token between them."""
    pad = call.llm.inputs.tokenizer.pad_token_id
    ids = [*query_ids, *([] if pad is None else [pad]), *document.prompt_token_ids]
    return replace(document, outputs=PoolingOutput(value), prompt_token_ids=ids)


ROUTES = {"classify": score_by_classifier, "embed": score_by_cosine, "token_embed": score_by_maxsim}
