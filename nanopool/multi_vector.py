"""How a late-interaction (ColBERT) folder wants its queries and documents encoded. Chapter 17.

Three generations of folders say it in three places: `artifact.metadata` (Stanford), flat keys of
config_sentence_transformers.json (PyLate), settings of the modules (sentence-transformers 6).
"""

import string
from dataclasses import dataclass
from typing import Any

ROLES = ("query", "document")
PYLATE_KEYS = {"query_prefix", "document_prefix", "query_length", "document_length"}
PYLATE_KEYS |= {"do_query_expansion", "attend_to_expansion_tokens", "skiplist_words"}


@dataclass(frozen=True)
class MultiVectorConfig:
    """The settings, read once by resolve.py and used by inputs.py and scoring.py. Chapter 17.

    Lengths count every token, prefix and special ones too; None is the model's limit. `markers`
    are the prefixes that older folders insert as one token where the vocabulary has them.
    """

    query_prefix: str = ""
    document_prefix: str = ""
    markers: tuple[str, ...] = ()
    query_length: int | None = None
    document_length: int | None = None
    expansion_length: int | None = None  # None: queries are not expanded
    expansion_truncates: bool = True  # False: a longer query stays as it is
    expansion_token: str | None = None  # None: the tokenizer's mask token
    attend_to_expansion_tokens: bool = False
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[str, ...] = ("document",)
    keep_only_token_ids: tuple[int, ...] = ()  # empty: all


def read_multi_vector(
    settings: dict[str, Any], backbone: dict[str, Any], mask: dict[str, Any]
) -> MultiVectorConfig:
    """From config_sentence_transformers.json, sentence_bert_config.json and MultiVectorMask."""
    knobs = {name: settings.get(name) for name in ("query_length", "document_length")}
    knobs |= {"query_expansion": pylate_expansion(settings)}
    knobs |= {name: value for name, value in backbone.items() if name in knobs}
    expansion = knobs.pop("query_expansion") or {}
    markers = {role: settings.get(f"{role}_prefix") or "" for role in ROLES}
    prompts = settings.get("prompts") or {}
    words = mask.get("skiplist_words", settings.get("skiplist_words"))
    if words is None:
        is_pylate = settings.get("model_type") == "ColBERT" or any(markers.values())
        words = string.punctuation if is_pylate else ""
    return MultiVectorConfig(
        **knobs,
        **{
            f"{role}_prefix": marker + (prompts.get(role) or "").removeprefix(marker)
            for role, marker in markers.items()
        },
        markers=tuple(marker for marker in markers.values() if marker),
        expansion_length=expansion.get("length"),
        expansion_truncates=expansion.get("strategy") != "min",
        expansion_token=expansion.get("token"),
        attend_to_expansion_tokens=bool(expansion.get("attend")),
        skiplist_words=tuple(words),
        skiplist_tasks=tuple(mask.get("skiplist_tasks") or ("document",)),
        keep_only_token_ids=tuple(mask.get("keep_only_token_ids") or ()),
    )


def pylate_expansion(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Query expansion as sentence-transformers 6 writes it, from PyLate's flat keys."""
    if "query_expansion" in settings:
        return settings["query_expansion"]
    if not PYLATE_KEYS & settings.keys() or settings.get("do_query_expansion") is False:
        return None
    attend = settings.get("attend_to_expansion_tokens", False)
    return {"strategy": "fixed", "attend": attend, "length": settings.get("query_length") or 32}


def stanford_settings(metadata: dict[str, Any]) -> dict[str, Any]:
    """`artifact.metadata` in PyLate's words; a missing file means ColBERT's defaults."""
    return {
        "query_prefix": (metadata.get("query_token_id") or "[unused0]") + " ",
        "document_prefix": (metadata.get("doc_token_id") or "[unused1]") + " ",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_expansion_tokens": metadata.get("attend_to_mask_tokens", False),
        "skiplist_words": string.punctuation if metadata.get("mask_punctuation", True) else "",
    }
