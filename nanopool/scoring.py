"""Three ways to score a text against another: cosine, cross-encoder, MaxSim. Chapter 17.

Functions over the LLM: each makes requests and turns their results into one output a pair.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    """What one call of `LLM.score` asks for besides its texts; read by the routes. Chapter 17."""

    llm: "LLM"
    params: PoolingParams
    chat_template: str | None
    use_tqdm: bool
    tokenization: dict[str, Any]

    @property
    def truncation(self) -> Truncation:
        return self.llm.inputs.truncation(self.llm.model_config.max_model_len, self.tokenization)

    def pool(self, *waves: list[Request]) -> Outputs:
        """The outputs of the last wave."""
        outputs = self.llm.pool(list(waves), "score" if self.use_tqdm else None)
        return outputs[-len(waves[-1]) :]


def score(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """One output a pair, by the route that PoolerConfig.task or the model stands for.

    Raises ValueError unless there are 1 query and N documents, or N and N.
    """
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise ValueError(
            f"data_1 has {len(queries)} texts and data_2 {len(documents)}: "
            "Input lengths must be either 1:1, 1:N or N:N"
        )
    return ROUTES[score_task(call.llm.model_config)](call, queries, documents)


def score_task(config: ModelConfig) -> str:
    """The task that scores. Raises ValueError where there is none, or more than one label."""
    offered = [task for task in ROUTES if task in config.spec.tasks]
    task = config.pooler.task or next(iter(offered), None)
    if task not in ROUTES:
        raise ValueError(
            f"task={task!r} does not support the Scoring API: a pooling model with one of the "
            f"tasks {[*ROUTES]} does, by itself or with PoolerConfig(task=...)"
        )
    if task == "classify" and config.num_labels != 1:
        raise ValueError(
            f"num_labels={config.num_labels}: Scoring API is only enabled for num_labels == 1"
        )
    return task


def score_by_classifier(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Cross-encoder: one model reads both texts, in a template or as the tokenizer joins them."""
    llm, truncation, frame = call.llm, call.truncation, call.llm.inputs.frame(None)
    for text in (*queries, *documents):
        check_value("a text for a cross-encoder", text, str)
    pairs, own = pair_up(queries, documents), own_template(llm, queries)
    if template := call.chat_template or own:
        if template not in (call.chat_template, JOINED):  # it writes its special tokens itself
            truncation = replace(truncation, add_special_tokens=False)
        system = [("system", frame.prefix)] if frame.prefix else []
        chats = [[*system, ("query", query), ("document", text)] for query, text in pairs]
        prompts = llm.inputs.encode_chats(chats, template, truncation)
    else:
        pairs = [(frame.prefix + query, text) for query, text in pairs]
        prompts = llm.inputs.encode_pairs(pairs, truncation)
    params = llm.resolve(call.params, "classify", frame)
    outputs = call.pool([llm.pooling_request(prompt, params) for prompt in prompts])
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
    settings = {"pooling_task": "embed", "use_tqdm": call.use_tqdm} | call.tokenization
    outputs = call.llm.encode([*queries, *documents], call.params, **settings)
    scores = []
    for query, document in pair_up(outputs[: len(queries)], outputs[len(queries) :]):
        cosine = query and cosine_similarity(query.outputs.data, document.outputs.data, dim=0)
        scores.append(query and joined(call, query.prompt_token_ids, document, cosine))
    return scores


def score_by_maxsim(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Late interaction: every query is encoded once; its rows wait in the engine for documents."""
    llm, inputs = call.llm, call.llm.inputs
    frames = inputs.frames.get("query") or inputs.frame(None), inputs.frame(None)
    sides = zip((queries, documents), frames, strict=True)
    pairs = pair_up(*(inputs.encode(texts, call.truncation, frame) for texts, frame in sides))
    uses = Counter(query for query, _ in pairs)
    keys = {query: str(i) for i, query in enumerate(uses)}

    def request(prompt: Prompt, frame: Frame, *late: str | int) -> Request:
        params = replace(call.params, late_interaction_params=LateInteractionParams(*late))
        return llm.pooling_request(prompt, llm.resolve(params, "token_embed", frame))

    outputs = call.pool(
        [request(query, frames[0], "cache_query", keys[query], n) for query, n in uses.items()],
        [request(text, frames[1], "score_doc", keys[query]) for query, text in pairs],
    )
    return [
        output and joined(call, query.token_ids, output, output.outputs.data)
        for output, (query, _) in zip(outputs, pairs, strict=True)
    ]


def pair_up(queries: list, documents: list) -> list[tuple[Any, Any]]:
    """1 and N, or N and N -> N pairs."""
    return [*zip(queries * (len(documents) // len(queries)), documents, strict=True)]


def joined(
    call: ScoreCall, query_ids: Sequence[int], document: PoolingRequestOutput, value: Tensor
) -> PoolingRequestOutput:
    """A pair's output: its score, and the ids of both prompts with a pad token between them."""
    pad = call.llm.inputs.tokenizer.pad_token_id
    ids = [*query_ids, *([] if pad is None else [pad]), *document.prompt_token_ids]
    return replace(document, outputs=PoolingOutput(value), prompt_token_ids=ids)


ROUTES = {"classify": score_by_classifier, "embed": score_by_cosine, "token_embed": score_by_maxsim}
