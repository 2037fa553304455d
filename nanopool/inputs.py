"""From what the caller writes to token ids: prompts, pairs, limits, checks. Chapter 00."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from threading import Lock
from typing import Any

from nanopool.checks import check_value, refusing
from nanopool.config import ModelConfig
from nanopool.multi_vector import ROLES

Texts = list[str | tuple[int, ...]]
TEXTS_AT_ONCE = 1024  # a tokenizer's records of a text are far larger than its ids
PROMPT_KEYS = {"prompt": str, "prompt_token_ids": list | tuple}
IN_PIECES = "take it in pieces with PoolerConfig(enable_chunked_processing=True), "
TRUNCATION = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


@dataclass(frozen=True)
class Frame:
    """How the texts of a call become prompts: what stands around each, how long it may be.

    The folder puts a prompt before it (`prefix_len` rows that MEAN leaves out); for ColBERT also a
    `marker` behind [CLS], a `text_limit` to which texts are cut, a `filling` that makes queries as
    long as itself (attended or not), and the tokens whose rows are dropped. The call says what
    `limit` a prompt has, and whether a longer one is cut to it, or refused (naming the task's own
    `way_out`). Chapters 17 and 18.
    """

    prefix: str = ""
    prefix_len: int = 0
    marker: tuple[int, ...] = ()
    text_limit: int | None = None
    filling: tuple[int, ...] = ()
    is_filling_attended: bool = True
    skip_token_ids: tuple[int, ...] = ()
    limit: int = sys.maxsize
    is_cut: bool = False
    side: str = "right"
    add_special_tokens: bool = True
    way_out: str = ""


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, how it was written, and what its Request carries. Chapter 00."""

    token_ids: tuple[int, ...]
    frame: Frame
    text: str | None = None
    num_first_segment: int | None = None
    num_keys: int | None = None


class InputProcessor:
    """Tokenizes and checks what the caller gives. Owned by the LLM, the same on every rank."""

    def __init__(self, tokenizer, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.lock = Lock()  # calls from several threads take turns here and in the engine
        is_pooling = config.runner == "pooling"  # a text to continue keeps its end, as in vLLM
        self.truncation_side = tokenizer.truncation_side if is_pooling else "left"
        self.default_name = config.default_prompt_name if is_pooling else None
        self.frames = {name: self.prompt_frame(prefix) for name, prefix in config.prompts.items()}
        if config.multi_vector:
            self.default_name = "document"
            self.frames = {role: self.multi_vector_frame(role) for role in ROLES}

    def frame(
        self, name: str | None, tasks: set[str], /, tokenization_kwargs: Any = None, **given: Any
    ) -> Frame:
        """How a call's texts are written: with the folder's prompt of that name, or its default.

        (ColBERT takes "query" or "document".) `truncate_prompt_tokens` None: too long is an error;
        -1: cut to what the model takes; n: cut to n tokens. Tokenization arguments are given one by
        one or as `tokenization_kwargs`. Raises ValueError for other names, arguments and values.
        """
        name = name or self.default_name
        if name is not None:
            check_value("prompt_name", name, tuple(self.frames))
        check_value("tokenization_kwargs", tokenization_kwargs, dict | None)
        given |= tokenization_kwargs or {}
        for argument in given:
            check_value("keyword argument", argument, TRUNCATION)
        n, side, special = (given.get(argument) for argument in TRUNCATION)
        check_value("truncation_side", side, (None, "left", "right"))
        check_value("add_special_tokens", special, bool | None)
        longest = self.length_limit(tasks)
        longest = longest if n is None else min(longest, self.config.max_model_len)
        if n not in (None, -1):
            check_value("truncate_prompt_tokens", n, range(1, longest + 1))
            longest = n
        return replace(
            self.frames.get(name, Frame()),
            limit=longest,
            is_cut=n is not None,
            side=side or self.truncation_side,
            add_special_tokens=special is not False,
            way_out=IN_PIECES if tasks == {"embed"} else "",
        )

    def length_limit(self, tasks: set[str]) -> int:
        """How many tokens a prompt may have; `embed` alone can take it in pieces."""
        pooler, limit = self.config.pooler, self.config.max_model_len
        if tasks == {"generate"}:
            return limit - 1
        if tasks != {"embed"}:
            return limit
        return pooler.max_embed_len or (sys.maxsize if pooler.enable_chunked_processing else limit)

    def prompt_frame(self, prefix: str) -> Frame:
        """A prompt before each text, and how many rows it has where MEAN leaves them out."""
        if self.config.include_prompt or not prefix:
            return Frame(prefix)
        cut = {"truncation": True, "max_length": self.config.max_model_len}
        ids = self.tokenizer(prefix, **cut)["input_ids"]
        return Frame(prefix, len(ids) - (ids[-1] in self.tokenizer.all_special_ids))

    def multi_vector_frame(self, role: str) -> Frame:
        """Queries or documents as sentence_transformers.MultiVectorEncoder writes them."""
        facts, tokenizer = self.config.multi_vector, self.tokenizer
        prefix, limit, filling, attend = facts.prefixes[role], facts.lengths[role], (), True
        if role == "query" and (expansion := facts.query_expansion):
            tokens = expansion["token"], tokenizer.mask_token, tokenizer.eos_token
            filling = self.known_ids(*tokens)[:1] * expansion["length"]
            is_fixed, attend = expansion["strategy"] == "fixed", expansion["attend"]
            is_whole = attend or self.config.spec.encoder_only  # a decoder may cut its prompts
            check_value("attend in query_expansion of a decoder", is_whole, (True,))
            limit = len(filling) if is_fixed else limit and max(limit, len(filling))
        owned = next((marker for marker in facts.markers if prefix.startswith(marker)), "")
        marker = next((part for part in (owned, *owned.split()) if self.known_ids(part)), "")
        skipped = facts.skiplist_words if role in facts.skiplist_tasks else ()
        prefix, marker = prefix.removeprefix(marker), self.known_ids(marker)
        return Frame(prefix, 0, marker, limit, filling, attend, self.known_ids(*skipped))

    def known_ids(self, *tokens: str | None) -> tuple[int, ...]:
        """The ids of those tokens that the vocabulary has."""
        ids = self.tokenizer.convert_tokens_to_ids([token for token in tokens if token])
        return tuple(i for i in ids if i not in (None, self.tokenizer.unk_token_id))

    def encode(self, prompts: list, frame: Frame, name: str = "prompt") -> list[Prompt]:
        """Texts and token ids, in any of the accepted forms -> Prompts in the same order.

        ValueError says which prompt is empty, too long, or has an unknown id.
        """
        parsed = [parse_prompt(prompt, f"{name} {i}") for i, prompt in enumerate(prompts)]
        written = iter(self.write(frame, [text for text in parsed if isinstance(text, str)]))
        encoded = [next(written) if isinstance(p, str) else cut(p, frame) for p in parsed]
        return self.check(encoded, name)

    def write(self, frame: Frame, *texts: list[str]) -> list[Prompt]:
        """Texts, or pairs as two lists -> Prompts, special tokens and the frame included."""
        starts = [self.tokenizer.cls_token_id], [self.tokenizer.bos_token_id]
        prompts = []
        for i in range(0, len(texts[0]), TEXTS_AT_ONCE):
            part = [side[i : i + TEXTS_AT_ONCE] for side in texts]
            encoding = self.tokenize(frame, *part)
            has_types = getattr(self.config.hf_config, "type_vocab_size", 1) > 1
            types = (has_types and encoding.get("token_type_ids")) or [()] * len(part[0])
            for ids, text, segments in zip(encoding["input_ids"], part[0], types, strict=True):
                start = int(ids[:1] in starts)
                ids = (*ids[:start], *frame.marker, *ids[start:])
                filling = frame.filling[len(ids) :]
                num_keys = len(ids) if filling and not frame.is_filling_attended else None
                facts = frame, text, first_segment(segments), num_keys
                prompts.append(Prompt((*ids, *filling), *facts))
        return prompts

    def tokenize(self, frame: Frame, *texts: list[str]) -> Any:
        """Texts, or pairs as two lists -> the tokenizer's BatchEncoding, the marker left out.

        Cut as the frame says; the longer text of a pair is cut first.
        """
        texts = [frame.prefix + text for text in texts[0]], *texts[1:]
        is_cut = frame.is_cut or frame.text_limit is not None
        room = min(frame.limit, frame.text_limit or frame.limit) - len(frame.marker)
        with self.lock:
            self.tokenizer.truncation_side = frame.side
            return self.tokenizer(
                *texts,
                add_special_tokens=frame.add_special_tokens,
                truncation=is_cut,
                max_length=room if is_cut else None,
                verbose=False,
            )

    def read_side(self, side: str, data: Any, name: str, max_tokens: int) -> Texts:
        """The texts of a side of `score`, up to the end of their token `max_tokens` (0: whole)."""
        check_value(name, max_tokens, range(self.config.max_model_len))
        texts = [parse_prompt(text, f"{side}: prompt {i}") for i, text in enumerate(as_list(data))]
        if not max_tokens:
            return texts
        for text in texts:
            check_value(f"a text with {name}={max_tokens}", text, str)
        frame = Frame(limit=max_tokens, is_cut=True, add_special_tokens=False)
        records = self.tokenize(frame, texts).encodings
        ends = [record.offsets[-1][1] if record.offsets else 0 for record in records]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]

    def check(self, prompts: list[Prompt], name: str = "prompt") -> list[Prompt]:
        """The prompts, unless one is empty, too long, or has an id that the vocabulary lacks."""
        last = self.config.hf_config.vocab_size - 1
        for i, prompt in enumerate(prompts):
            ids, frame = prompt.token_ids, prompt.frame
            if not ids:
                raise ValueError(f"{name} {i} is empty: it has no token; give a text or token ids")
            if len(ids) > frame.limit:
                ways = f"shorten it, {frame.way_out}or cut it with truncate_prompt_tokens=-1"
                raise ValueError(
                    f"{name} {i} has {len(ids)} tokens, the limit is {frame.limit}: "
                    + ("its special tokens alone are more" if frame.is_cut else ways)
                )
            if bad := [token for token in (min(ids), max(ids)) if not 0 <= token <= last]:
                raise ValueError(f"{name} {i} has token id {bad[0]}, not one from 0 to {last}")
        return prompts


def as_list(prompts: Any) -> list:
    """One prompt or a list of prompts -> a list of prompts."""
    if isinstance(prompts, str | Mapping | bytes | bytearray | memoryview):
        return [prompts]
    with refusing(f"prompts={prompts!r}"):
        prompts = list(prompts)
    is_one = prompts and all(isinstance(token, Integral) for token in prompts)
    return [prompts] if is_one else prompts


def parse_prompt(prompt: Any, name: str) -> str | tuple[int, ...]:
    """The text or the token ids of one prompt in any accepted form."""
    if isinstance(prompt, dict):
        for key, value in prompt.items():
            check_value(f"keys of {name}", key, tuple(PROMPT_KEYS))
            check_value(f"{key} of {name}", value, PROMPT_KEYS[key])
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        with refusing(name):
            prompt.encode()
        return prompt
    ids = tuple(prompt) if isinstance(prompt, list | tuple) else (None,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"{name} = {prompt!r}: give a text, or a list of int token ids")
    return tuple(map(int, ids))


def cut(ids: tuple[int, ...], frame: Frame) -> Prompt:
    """Token ids that the caller gave, cut at one side."""
    if frame.is_cut:
        ids = ids[-frame.limit :] if frame.side == "left" else ids[: frame.limit]
    return Prompt(ids, replace(frame, prefix_len=0))


def first_segment(types: list[int]) -> int | None:
    """How many tokens belong to a pair's first text: `0..0 1..1` -> the number of zeros."""
    first = types.index(1) if 1 in types else None
    if first is not None and 0 in types[first:]:
        raise ValueError(f"token_type_ids = {types} are not zeros followed by ones")
    return first
