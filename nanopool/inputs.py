"""From what the caller writes to token ids: prompts, pairs, templates, limits. Chapters 00, 17."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from numbers import Integral
from threading import Lock
from typing import Any

from nanopool.checks import check_value, refusing
from nanopool.config import ModelConfig
from nanopool.multi_vector import ROLES

Chat = list[tuple[str, str]]  # messages: (role, text)
TEXTS_AT_ONCE = 1024  # a tokenizer's records of a text are far larger than its ids
TRUNCATION = ("truncate_prompt_tokens", "truncation_side", "add_special_tokens")


@dataclass(frozen=True)
class Truncation:
    """How long a prompt may be: a longer one is cut to `limit` tokens, or refused. Chapter 18."""

    limit: int
    cut: bool
    side: str
    add_special_tokens: bool


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, with the facts that its Request carries. Chapter 00."""

    token_ids: tuple[int, ...]
    text: str | None = None
    num_first_segment: int | None = None
    num_keys: int | None = None


@dataclass(frozen=True)
class Frame:
    """What the folder puts around each text of a call. Chapter 17.

    A prompt before it (of `prefix_len` rows that MEAN leaves out); for ColBERT also a `marker`
    behind [CLS], a `limit` to which texts are cut, a `filling` that makes queries as long as itself
    (attended or not), and the tokens whose rows are dropped.
    """

    prefix: str = ""
    prefix_len: int = 0
    marker: tuple[int, ...] = ()
    limit: int | None = None
    filling: tuple[int, ...] = ()
    is_filling_attended: bool = True
    skip_token_ids: tuple[int, ...] = ()


PLAIN = Frame()


class InputProcessor:
    """Tokenizes and checks what the caller gives. Owned by the LLM, the same on every rank."""

    def __init__(self, tokenizer, config: ModelConfig):
        self.tokenizer = tokenizer
        self.config = config
        self.lock = Lock()  # calls from several threads take turns here and in the engine
        is_pooling = config.runner == "pooling"  # a text to continue keeps its end, as in vLLM
        self.truncation_side = tokenizer.truncation_side if is_pooling else "left"
        self.frames = {role: self.multi_vector_frame(role) for role in ROLES if config.multi_vector}

    def truncation(self, limit: int, given: dict[str, Any]) -> Truncation:
        """From a call's tokenization arguments, given one by one or as `tokenization_kwargs`.

        `truncate_prompt_tokens` None: too long is an error; -1: cut to what the model takes; n: cut
        to n tokens. Raises ValueError for other arguments and values.
        """
        given = dict(given)
        check_value("tokenization_kwargs", given.get("tokenization_kwargs"), dict | None)
        given |= given.pop("tokenization_kwargs", None) or {}
        for name in given:
            check_value("tokenization argument", name, TRUNCATION)
        n, side, special = (given.get(name) for name in TRUNCATION)
        check_value("truncation_side", side, (None, "left", "right"))
        check_value("add_special_tokens", special, (None, True, False))
        longest = limit if n is None else min(limit, self.config.max_model_len)
        if n not in (None, -1):
            check_value("truncate_prompt_tokens", n, range(1, longest + 1))
            longest = n
        side = side or self.truncation_side
        return Truncation(longest, n is not None, side, special is not False)

    def frame(self, prompt_name: str | None) -> Frame:
        """The prompt of that name, else the folder's default; for ColBERT "query" or "document".

        Raises ValueError for a name that the folder lacks.
        """
        name = prompt_name or ("document" if self.frames else self.config.default_prompt_name)
        if name is None:
            return PLAIN
        check_value("prompt_name", name, tuple(self.frames or self.config.prompts))
        if self.frames:
            return self.frames[name]
        prefix = self.config.prompts[name]
        if self.config.include_prompt or not prefix:
            return Frame(prefix)
        ids = self.tokenizer(prefix)["input_ids"]
        return Frame(prefix, len(ids) - (ids[-1] in self.tokenizer.all_special_ids))

    def multi_vector_frame(self, role: str) -> Frame:
        """Queries or documents as sentence_transformers.MultiVectorEncoder writes them."""
        facts, tokenizer = self.config.multi_vector, self.tokenizer
        prefix, limit, filling, attend = facts.prefixes[role], facts.lengths[role], (), True
        if role == "query" and (expansion := facts.query_expansion):
            tokens = expansion["token"], tokenizer.mask_token, tokenizer.eos_token
            filling = self.known_ids(*tokens)[:1] * expansion["length"]
            is_fixed, attend = expansion["strategy"] == "fixed", expansion["attend"]
            is_whole = attend or self.config.is_encoder_only  # a decoder may cut its prompts
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

    def encode(self, prompts: list, truncation: Truncation, frame: Frame) -> list[Prompt]:
        """Texts and token ids, in any of the accepted forms -> Prompts in the same order.

        ValueError names the index of a prompt that is empty, too long, or has an unknown id.
        """
        parsed = [parse_prompt(prompt, i) for i, prompt in enumerate(prompts)]
        texts = [prompt for prompt in parsed if isinstance(prompt, str)]
        written = iter(self.write(truncation, frame, texts) if texts else ())
        encoded = [
            next(written) if isinstance(p, str) else Prompt(cut(p, truncation)) for p in parsed
        ]
        return self.check(encoded, truncation.limit)

    def write(self, truncation: Truncation, frame: Frame, *texts: list[str]) -> list[Prompt]:
        """Texts, or pairs as two lists -> Prompts, special tokens and the frame included."""
        starts = [self.tokenizer.cls_token_id], [self.tokenizer.bos_token_id]
        prompts = []
        for i in range(0, len(texts[0]), TEXTS_AT_ONCE):
            part = [side[i : i + TEXTS_AT_ONCE] for side in texts]
            encoding = self.tokenize(truncation, frame, *part)
            types = encoding.get("token_type_ids") or [()] * len(part[0])
            for ids, text, segments in zip(encoding["input_ids"], part[0], types, strict=True):
                start = int(ids[:1] in starts)
                ids = (*ids[:start], *frame.marker, *ids[start:])
                filling = frame.filling[len(ids) :]
                num_keys = len(ids) if filling and not frame.is_filling_attended else None
                prompts.append(Prompt((*ids, *filling), text, first_segment(segments), num_keys))
        return prompts

    def tokenize(self, truncation: Truncation, frame: Frame, *texts: list[str]) -> Any:
        """Texts, or pairs as two lists -> the tokenizer's BatchEncoding, its marker left out.

        Cut as truncation and frame say; the longer text of a pair is cut first.
        """
        room = min(truncation.limit, frame.limit or truncation.limit) - len(frame.marker)
        is_cut = truncation.cut or frame.limit is not None
        framed = [frame.prefix + text for text in texts[0]], *texts[1:]
        return self.call_tokenizer(replace(truncation, limit=room, cut=is_cut), *framed)

    def encode_chats(
        self, chats: list[Chat], template: str, truncation: Truncation
    ) -> list[Prompt]:
        """Messages in a chat template -> Prompts; the last message of a long one loses its end.

        What the template puts after that message stays: a reranker reads its answer there.
        """
        encoded = self.render(chats, template, truncation)
        for i, ids in enumerate(encoded):
            if truncation.cut and len(ids) > truncation.limit:
                *before, (role, _) = chats[i]
                (shortest,) = self.render([[*before, (role, "x")]], template, truncation)
                tail = count_shared(reversed(ids), reversed(shortest))
                encoded[i] = ids[: max(0, truncation.limit - tail)] + ids[len(ids) - tail :]
        return [Prompt(tuple(ids)) for ids in encoded]

    def render(self, chats: list[Chat], template: str, truncation: Truncation) -> list[list[int]]:
        """Messages in a chat template -> token ids, not cut."""
        chats = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
        facts = {"tokenize": False} | (self.config.chat_template_kwargs or {})
        with refusing(f"chat_template={template!r}"):
            texts = self.tokenizer.apply_chat_template(chats, chat_template=template, **facts)
        return self.call_tokenizer(replace(truncation, cut=False), texts)["input_ids"]

    def call_tokenizer(self, truncation: Truncation, *texts: list[str]) -> Any:
        """Texts, or pairs as two lists -> the tokenizer's BatchEncoding."""
        if self.config.do_lower_case:
            texts = tuple([text.lower() for text in side] for side in texts)
        with self.lock:
            self.tokenizer.truncation_side = truncation.side
            return self.tokenizer(
                *texts,
                add_special_tokens=truncation.add_special_tokens,
                truncation=truncation.cut,
                max_length=truncation.limit if truncation.cut else None,
                verbose=False,
            )

    def read_side(self, name: str, max_tokens: int, data: Any) -> list[str | tuple[int, ...]]:
        """The texts of a side of `score`, up to the end of their token `max_tokens` (0: whole)."""
        check_value(name, max_tokens, range(self.config.max_model_len))
        texts = [parse_prompt(text, i) for i, text in enumerate(as_list(data))]
        if not max_tokens:
            return texts
        for text in texts:
            check_value(f"a text with {name}={max_tokens}", text, str)
        encoding = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        ends = [spans[:max_tokens][-1][1] if spans else 0 for spans in encoding["offset_mapping"]]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]

    def check(self, prompts: list[Prompt], limit: int) -> list[Prompt]:
        """The prompts, unless one is empty, too long, or has an id that the vocabulary lacks."""
        last = self.config.hf_config.vocab_size - 1
        for i, prompt in enumerate(prompts):
            ids = prompt.token_ids
            if not ids:
                raise ValueError(f"prompt {i} is empty: it has no token; give a text or token ids")
            if len(ids) > limit:
                raise ValueError(
                    f"prompt {i} has {len(ids)} tokens, the limit is {limit}: shorten it, cut it "
                    "with truncate_prompt_tokens=-1, or, for embed, take it in pieces with "
                    "PoolerConfig(enable_chunked_processing=True)"
                )
            if bad := [token for token in (min(ids), max(ids)) if not 0 <= token <= last]:
                raise ValueError(f"prompt {i} has token id {bad[0]}, not one from 0 to {last}")
        return prompts


def as_list(prompts: Any) -> list:
    """One prompt or a list of prompts -> a list of prompts."""
    if isinstance(prompts, str | dict | bytes):
        return [prompts]
    check_value("prompts", prompts, Iterable)
    prompts = list(prompts)
    is_one = prompts and all(isinstance(token, Integral) for token in prompts)
    return [prompts] if is_one else prompts


def parse_prompt(prompt: Any, i: int) -> str | tuple[int, ...]:
    """The text or the token ids of one prompt in any accepted form."""
    if isinstance(prompt, dict):
        forms = {"prompt"}, {"prompt_token_ids"}, {"prompt", "prompt_token_ids"}
        check_value(f"keys of prompt {i}", {*prompt}, forms)
        for key, value in prompt.items():
            check_value(f"{key} of prompt {i}", value, str if key == "prompt" else list | tuple)
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        check_value(f"prompt {i}", prompt, (prompt.encode(errors="ignore").decode(),))
        return prompt
    ids = tuple(prompt) if isinstance(prompt, list | tuple) else (None,)
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise ValueError(f"prompt {i} = {prompt!r}: give a text, or a list of int token ids")
    return tuple(map(int, ids))


def cut(ids: tuple[int, ...], truncation: Truncation) -> tuple[int, ...]:
    """Token ids that the caller gave, cut at one side."""
    if not truncation.cut or len(ids) <= truncation.limit:
        return ids
    return ids[-truncation.limit :] if truncation.side == "left" else ids[: truncation.limit]


def count_shared(first: Iterable[int], second: Iterable[int]) -> int:
    """How many tokens two lists have in common before they differ."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])


def first_segment(types: list[int]) -> int | None:
    """How many tokens belong to a pair's first text: `0..0 1..1` -> the number of zeros."""
    first = types.index(1) if 1 in types else None
    if first is not None and 0 in types[first:]:
        raise ValueError(f"token_type_ids = {types} are not zeros followed by ones")
    return first
