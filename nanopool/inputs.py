"""From what the caller writes to token ids: prompts, pairs, truncation, limits. Chapters 00 and 17."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nanopool.config import ModelConfig

TOKENIZATION_KWARGS = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


@dataclass(frozen=True)
class Truncation:
    """How long a prompt may be: `limit` tokens, and whether a longer one is cut or refused. Chapter 18."""

    limit: int
    cut: bool = False
    side: str = "right"
    add_special_tokens: bool = True


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, with the facts that a Request carries. Chapter 00."""

    token_ids: tuple[int, ...]
    text: str | None = None
    num_first_segment: int | None = None
    num_keys: int | None = None
    prefix_len: int = 0


class InputProcessor:
    """Tokenizes and checks what the caller gives. Owned by the LLM, the same on every rank. Chapter 00."""

    def __init__(self, tokenizer, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config

    def truncation(
        self,
        limit: int,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        add_special_tokens: bool = True,
    ) -> Truncation:
        """None: a prompt over the limit is an error; -1: cut to the limit; n: cut to n."""
        side = truncation_side or self.tokenizer.truncation_side
        if side not in ("left", "right"):
            raise ValueError(f"truncation_side = {side!r}; use 'left' or 'right'")
        n = truncate_prompt_tokens
        if n is None:
            return Truncation(limit, False, side, add_special_tokens)
        if isinstance(n, bool) or not isinstance(n, int) or n < -1 or n == 0 or n > limit:
            raise ValueError(
                f"truncate_prompt_tokens = {n!r}; use None (too long is an error), -1 (cut to "
                f"{limit}) or a number from 1 to {limit}"
            )
        return Truncation(limit if n == -1 else n, True, side, add_special_tokens)

    def encode(self, prompts: list, truncation: Truncation, prefix: str = "") -> list[Prompt]:
        """Texts and token ids, in any of the accepted forms -> Prompts in the same order.

        ValueError names the index of a prompt that is empty, too long, or has an id outside the vocabulary.
        """
        parsed = [parse_prompt(prompt, i) for i, prompt in enumerate(prompts)]
        texts = [prefix + text for text, ids in parsed if ids is None]
        tokenized = iter(self.tokenize(texts, truncation))
        skipped = self.num_prefix_tokens(prefix)
        encoded = []
        for i, (text, ids) in enumerate(parsed):
            if ids is None:
                prompt = Prompt(tuple(next(tokenized)), text, prefix_len=skipped)
            else:
                prompt = Prompt(cut(ids, truncation))
            encoded.append(self.check(prompt, truncation, i))
        return encoded

    def tokenize(self, texts: list[str], truncation: Truncation) -> list[list[int]]:
        """Token ids of the texts, special tokens included; cut as the truncation says."""
        if not texts:
            return []
        return self.call_tokenizer(truncation, [self.clean(text) for text in texts])["input_ids"]

    def encode_pairs(self, pairs: list[tuple[str, str]], truncation: Truncation) -> list[Prompt]:
        """(first, second) texts -> one prompt each; the longer text is cut first."""
        first, second = ([self.clean(text) for text in side] for side in zip(*pairs, strict=True))
        encoding = self.call_tokenizer(truncation, first, second)
        prompts = []
        for i, ids in enumerate(encoding["input_ids"]):
            types = encoding["token_type_ids"][i] if "token_type_ids" in encoding else None
            prompt = Prompt(tuple(ids), num_first_segment=first_segment(types))
            prompts.append(self.check(prompt, truncation, i))
        return prompts

    def call_tokenizer(self, truncation: Truncation, *texts: list[str]) -> dict[str, Any]:
        self.tokenizer.truncation_side = truncation.side
        return self.tokenizer(
            *texts,
            add_special_tokens=truncation.add_special_tokens,
            truncation=truncation.cut,
            max_length=truncation.limit if truncation.cut else None,
            verbose=False,
        )

    def clean(self, text: str) -> str:
        """The text as the folder's own tokenization would see it."""
        return text.lower() if self.config.do_lower_case else text

    def num_prefix_tokens(self, prefix: str) -> int:
        """Leading rows that belong to the prompt prefix, where the folder leaves them out of the mean."""
        if self.config.include_prompt or not prefix:
            return 0
        ids = self.tokenizer(self.clean(prefix))["input_ids"]
        ends_special = bool(ids) and ids[-1] in self.tokenizer.all_special_ids
        return len(ids) - ends_special

    def check(self, prompt: Prompt, truncation: Truncation, i: int) -> Prompt:
        """The prompt, unless it is empty, too long, or has an id that the vocabulary lacks."""
        ids, V = prompt.token_ids, self.config.hf_config.vocab_size
        if not ids:
            raise ValueError(f"prompt {i} is empty: it has no token; give a text or token ids")
        if len(ids) > truncation.limit:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, more than the limit of {truncation.limit}; shorten it, "
                "or cut it with truncate_prompt_tokens=-1"
            )
        if not (0 <= min(ids) and max(ids) < V):
            bad = next(t for t in ids if not 0 <= t < V)
            raise ValueError(f"prompt {i} has token id {bad}; the vocabulary has ids 0 to {V - 1}")
        return prompt


def as_list(prompts: Any) -> list:
    """One prompt or a list of prompts -> a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts = {prompts!r}; give a text, token ids, a dict, or a list of these"
        )
    prompts = list(prompts)
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return prompts


def parse_prompt(prompt: Any, i: int) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids) of one prompt in any accepted form."""
    if isinstance(prompt, dict):
        known = {"prompt", "prompt_token_ids"}
        if not prompt.keys() & known or not prompt.keys() <= known:
            raise ValueError(
                f"prompt {i} is a dict with the keys {sorted(map(str, prompt))}; give 'prompt' or 'prompt_token_ids'"
            )
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt, None
    ids = tuple(prompt) if isinstance(prompt, Iterable) else (None,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"prompt {i} = {prompt!r}; give a text, or a list of int token ids")
    return None, ids


def cut(ids: tuple[int, ...], truncation: Truncation) -> tuple[int, ...]:
    """Token ids that the caller gave, cut at one side."""
    if not truncation.cut or len(ids) <= truncation.limit:
        return ids
    return ids[-truncation.limit :] if truncation.side == "left" else ids[: truncation.limit]


def first_segment(types: list[int] | None) -> int | None:
    """How many tokens belong to a pair's first text: `0..0 1..1` -> the number of zeros."""
    if types is None or 1 not in types:
        return None
    index = types.index(1)
    if types != [0] * index + [1] * (len(types) - index):
        raise ValueError(f"token_type_ids = {types} are not zeros followed by ones")
    return index


def with_pooling_prefix(params, prompt: Prompt):
    """The params of one prompt: how many leading rows MEAN leaves out."""
    return replace(params, prompt_prefix_len=prompt.prefix_len) if prompt.prefix_len else params
