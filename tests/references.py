"""The oracles: what transformers and plain formulas say, small enough to be checked by eye.

Functions take the token ids of one prompt, without padding, and return float32 tensors on the CPU;
`greedy` alone runs prompts side by side (left-padded, as transformers does it).
"""

import random
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

TEXTS = [
    "the capital of france is paris",
    "What is the capital of England?",
    "a dog and a cat in the old house",
    "rome is a city by the sea",
    "no",
    "she was not searching for the big red book , he was",
    "italy : good food , good wine , good bread and good cheese !",
]
PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 40, 47, 64)


def random_prompts(vocab_size: int, lengths=PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """One prompt of random ids in [5, vocab_size) per length; ids below 5 are special in BERTs."""
    rng = random.Random(seed)
    return [[rng.randrange(5, vocab_size) for _ in range(length)] for length in lengths]


def load(folder: Path, auto: str = "AutoModel") -> transformers.PreTrainedModel:
    """The checkpoint as transformers reads it, float32, in eval mode."""
    return getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_states(model, ids: list[int], token_type_ids: list[int] | None = None) -> Tensor:
    """Last hidden states [T, D] of a bare model."""
    types = {} if token_type_ids is None else {"token_type_ids": torch.tensor([token_type_ids])}
    return model(input_ids=torch.tensor([ids]), **types).last_hidden_state[0]


@torch.inference_mode()
def logits(model, ids: list[int], token_type_ids: list[int] | None = None) -> Tensor:
    """Logits of a model with a head: [T, V] or [T, L] per token, [L] per sequence."""
    types = {} if token_type_ids is None else {"token_type_ids": torch.tensor([token_type_ids])}
    return model(input_ids=torch.tensor([ids]), **types).logits[0]


@torch.inference_mode()
def greedy(model, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    """(new tokens per prompt, smallest gap of the two best logits); no end token stops it."""
    longest = max(map(len, prompts))
    out = model.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=model.config.vocab_size,  # no such token
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits).topk(2).values
    return out.sequences[:, longest:].tolist(), best.diff(dim=-1).abs().min().item()


def normalize(x: Tensor) -> Tensor:
    """Rows of length 1."""
    return torch.nn.functional.normalize(x.float(), dim=-1)


def splade(vocab_logits: Tensor, strategy: str = "max") -> Tensor:
    """[T, V] logits -> [V] weights: log1p(relu), then the maximum or the sum over all tokens."""
    weights = vocab_logits.float().relu().log1p()
    return weights.amax(0) if strategy == "max" else weights.sum(0)


def maxsim(query: Tensor, document: Tensor) -> float:
    """Sum over query rows of the best dot product with a document row."""
    return (query.float() @ document.float().T).amax(1).sum().item()


def chunk_mean(rows: Tensor, chunk_size: int) -> Tensor:
    """[T, D] -> [chunks, D]: the mean of every `chunk_size` rows; the last chunk may be short."""
    return torch.stack([chunk.float().mean(0) for chunk in rows.split(chunk_size)])


@torch.inference_mode()
def reward_logits(folder: Path, ids: list[int]) -> Tensor:
    """[T, L] of Qwen2ForRewardModel and Qwen2ForProcessRewardModel: score.2(relu(score.0(h)))."""
    weights = load_file(Path(folder) / "model.safetensors")
    rows = hidden_states(load(folder), ids) @ weights["score.0.weight"].T + weights["score.0.bias"]
    return rows.relu() @ weights["score.2.weight"].T + weights["score.2.bias"]


RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
RERANK_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
RERANK_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank_prompt(query: str, document: str, instruction: str = RERANK_INSTRUCTION) -> str:
    """The text that Qwen3-Reranker was trained on."""
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return RERANK_PREFIX + body + RERANK_SUFFIX


def rerank_score(model, tokenizer, prompt: str) -> float:
    """P(yes) against no at the last token, as the model card of Qwen3-Reranker computes it."""
    yes_no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    return logits(model, tokenizer(prompt).input_ids)[-1, yes_no].softmax(0)[0].item()


@torch.inference_mode()
def bge_m3(folder: Path, ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """(dense [D], sparse weights [T-2], ColBERT rows [T-1, D]) by the model card's formulas."""
    rows = hidden_states(load(folder), ids)
    heads = {
        name: torch.load(Path(folder) / f"{name}_linear.pt", weights_only=True)
        for name in ("sparse", "colbert")
    }
    sparse, colbert = (rows @ head["weight"].T + head["bias"] for head in heads.values())
    return normalize(rows[0]), sparse.relu()[1:-1, 0], normalize(colbert[1:])
