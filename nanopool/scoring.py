"""Three ways to score a text against another: cosine, cross-encoder, MaxSim. Chapter 17.

Functions over the LLM: each makes requests and turns their results into one output a pair.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from nanopool.checks import check_value, refusing
from nanopool.config import ModelConfig
from nanopool.inputs import Frame, InputProcessor, Prompt, Texts
from nanopool.outputs import Outputs, PoolingOutput, PoolingRequestOutput
from nanopool.pooler.params import LateInteractionParams, PoolingParams

if TYPE_CHECKING:
    from nanopool.llm import LLM

Pairs = list[tuple[str, str]]  # (query, document)

JOINED = "{{ messages[-2].content + messages[-1].content }}"
QWEN3_RERANKER = (  # vLLM's older examples write it themselves
    "{% if messages[-2].content.startswith('<|im_start|>') %}" + JOINED + "{% else %}"
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


@dataclass(frozen=True)
class ScoreCall:
    """One call of `LLM.score`, but for its texts; made there, used by the routes. Chapter 17."""

    llm: "LLM"
    task: str
    params: PoolingParams
    chat_template: str | None
    tokenization: dict[str, Any]
    use_tqdm: bool

    def run(self, queries: Texts, documents: Texts) -> Outputs:
        """One output a pair. Raises ValueError unless there are 1 query and N texts, or N and N."""
        if not queries or not documents or len(queries) not in (1, len(documents)):
            raise ValueError(
                f"data_1 has {len(queries)} texts and data_2 {len(documents)}: "
                "Input lengths must be either 1:1, 1:N or N:N"
            )
        return ROUTES[self.task](self, queries, documents)

    def frame(self, prompt_name: str | None = None) -> Frame:
        """How the texts are written."""
        return self.llm.inputs.frame(prompt_name, {self.task}, **self.tokenization)

    def encode(self, queries: Texts, documents: Texts) -> tuple[list[Prompt], list[Prompt]]:
        """Each side as prompts of its own."""
        role = "query" if self.llm.model_config.multi_vector else None
        left = self.llm.inputs.encode(queries, self.frame(role), "data_1: prompt")
        return left, self.llm.inputs.encode(documents, self.frame(), "data_2: prompt")

    def pool(self, prompts: list[Prompt], late: Sequence[LateInteractionParams] = ()) -> Outputs:
        """The outputs of prompts that stand for themselves, or have `late` parts in MaxSim."""
        params = [replace(self.params, late_interaction_params=part) for part in late]
        params = params or [self.params] * len(prompts)
        return self.llm.pool(prompts, params, self.task, self.use_tqdm)


def score_task(config: ModelConfig) -> str:
    """The task that scores, by PoolerConfig.task or what the model offers.

    Raises ValueError where there is none, and for more labels than one.
    """
    offered = config.spec.tasks
    task = config.pooler.task or next((task for task in ROUTES if task in offered), None)
    if task not in ROUTES:
        raise ValueError(
            f"task={task!r} of {list(offered)} does not support the Scoring API: it takes one of "
            f"{[*ROUTES]}; a decoder embeds with LLM(..., convert='embed')"
        )
    if task == "classify" and config.num_labels != 1:
        raise ValueError(
            f"num_labels={config.num_labels} does not support the Scoring API: classify is only "
            "enabled for num_labels == 1"
        )
    return task


def score_by_classifier(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Cross-encoder: one model reads both texts, in a template or as the tokenizer joins them."""
    inputs, frame = call.llm.inputs, call.frame()
    for text in (*queries, *documents):
        check_value("a text for a cross-encoder", text, str)
    queries, own = repeat(queries, len(documents)), own_template(call.llm)
    if template := call.chat_template or own:
        if template not in (call.chat_template, JOINED):  # it writes its special tokens itself
            frame = replace(frame, add_special_tokens=False)
        prompts = write_chats(inputs, frame, template, [*zip(queries, documents, strict=True)])
    else:
        prompts = inputs.write(frame, queries, documents)
    outputs = call.pool(inputs.check(prompts))
    return [o and replace(o, outputs=PoolingOutput(o.outputs.data[0])) for o in outputs]


def own_template(llm: "LLM") -> str | None:
    """How the folder writes a pair, if not by the tokenizer's pair rule.

    sentence-transformers folders say whether it is the tokenizer's chat template. Qwen3-Reranker's
    is known, and leaves a query alone that the caller has written as a chat.
    """
    config, hf_config = llm.model_config, vars(llm.model_config.hf_config)
    if config.chat_template_kwargs is not None:
        return config.chat_template_kwargs.get("chat_template", llm.inputs.tokenizer.chat_template)
    if hf_config.get("is_original_qwen3_reranker"):
        return QWEN3_RERANKER
    return JOINED if hf_config.get("classifier_from_token") else None


def write_chats(inputs: InputProcessor, frame: Frame, template: str, pairs: Pairs) -> list[Prompt]:
    """Pairs in a chat template -> Prompts; a long one loses the end of its document.

    What the template puts after the document stays: a reranker reads its answer there.
    """
    encoded = render(inputs, frame, template, pairs)
    for i, ids in enumerate(encoded):
        if frame.is_cut and len(ids) > frame.limit:
            (shortest,) = render(inputs, frame, template, [(pairs[i][0], "x")])
            tail = count_shared(reversed(ids), reversed(shortest))
            encoded[i] = ids[: max(0, frame.limit - tail)] + ids[len(ids) - tail :]
    return [Prompt(tuple(ids), frame) for ids in encoded]


def render(inputs: InputProcessor, frame: Frame, template: str, pairs: Pairs) -> list[list[int]]:
    """Pairs in a chat template, the prefix as its system message -> token ids, not cut."""
    system = [{"role": "system", "content": frame.prefix}] if frame.prefix else []
    chats = [
        [*system, {"role": "query", "content": query}, {"role": "document", "content": text}]
        for query, text in pairs
    ]
    facts = {"tokenize": False, **(inputs.config.chat_template_kwargs or {})}
    with refusing(f"chat_template={template!r}"):
        texts = inputs.tokenizer.apply_chat_template(chats, **facts | {"chat_template": template})
        frame = Frame(add_special_tokens=frame.add_special_tokens)
        return inputs.tokenize(frame, texts)["input_ids"]


def count_shared(first: Iterable[int], second: Iterable[int]) -> int:
    """How many tokens two lists have in common before they differ."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])


def score_by_cosine(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Bi-encoder: the cosine of two embeddings, in float32 and normalised or not."""
    queries, documents = call.encode(queries, documents)
    outputs = call.pool(queries + documents)
    left, right = repeat(outputs[: len(queries)], len(documents)), outputs[len(queries) :]
    scores = []
    for query, document in zip(left, right, strict=True):
        cosine = query and cosine_similarity(query.outputs.data, document.outputs.data, dim=0)
        scores.append(query and joined(call, query.prompt_token_ids, document, cosine))
    return scores


def score_by_maxsim(call: ScoreCall, queries: Texts, documents: Texts) -> Outputs:
    """Late interaction: every query is encoded once; its rows wait in the engine for documents."""
    queries, documents = call.encode(queries, documents)
    pairs = [*zip(repeat(queries, len(documents)), documents, strict=True)]
    uses = Counter(query for query, _ in pairs)
    keys = {query: str(i) for i, query in enumerate(uses)}
    late = [LateInteractionParams("cache_query", keys[query], n) for query, n in uses.items()]
    late += [LateInteractionParams("score_doc", keys[query]) for query, _ in pairs]
    outputs = call.pool([*uses, *documents], late)[len(uses) :]
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
