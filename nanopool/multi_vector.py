"""How a late-interaction (ColBERT) folder wants its queries and documents encoded. Chapter 17.

Three generations of folders say it in three places: `artifact.metadata` (Stanford), flat keys of
config_sentence_transformers.json (PyLate), settings of the modules (sentence-transformers 6).
"""

import string
from dataclasses import dataclass
from typing import Any

from nanopool.checks import check_value

ROLES = ("query", "document")
MAXSIM = (None, "maxsim", "MaxSim")  # what it is called; its mean is another score
PYLATE_KEYS = {"query_prefix", "document_prefix", "query_length", "document_length"}
PYLATE_KEYS |= {"do_query_expansion", "attend_to_expansion_tokens", "skiplist_words"}


@dataclass(frozen=True)
class MultiVectorConfig:
    """Settings by role ("query", "document"), read by resolve.py, used by inputs.py. Chapter 17.

    Lengths count every token, prefix and special ones too; None is the model's limit. `markers`
    are prefixes that older folders insert as one token where the vocabulary has them.
    `query_expansion` is sentence-transformers' {"strategy": "fixed" or "min", "length": 32,
    "attend": False, "token": None (the mask token)}, or None.
    """

    prefixes: dict[str, str]
    lengths: dict[str, int | None]
    markers: tuple[str, ...]
    query_expansion: dict[str, Any] | None
    skiplist_words: tuple[str, ...]
    skiplist_tasks: tuple[str, ...]


def read_multi_vector(
    settings: dict[str, Any], backbone: dict[str, Any], mask: dict[str, Any]
) -> MultiVectorConfig:
    """From config_sentence_transformers.json, sentence_bert_config.json and MultiVectorMask.

    Raises ValueError for a mask that keeps only some token ids (of images), and for meanmaxsim.
    """
    check_value("similarity_fn_name", settings.get("similarity_fn_name"), MAXSIM)
    check_value("MultiVectorMask: keep_only_token_ids", mask.get("keep_only_token_ids"), (None, []))
    stated = settings | backbone
    prompts = settings.get("prompts") or {}
    markers = {role: settings.get(f"{role}_prefix") or "" for role in ROLES}
    texts = {role: (prompts.get(role) or "").removeprefix(markers[role]) for role in ROLES}
    words = mask.get("skiplist_words", settings.get("skiplist_words"))
    if words is None:
        is_pylate = settings.get("model_type") == "ColBERT" or any(markers.values())
        words = string.punctuation if is_pylate else ""
    tasks = mask.get("skiplist_tasks")
    expansion = stated.get("query_expansion", pylate_expansion(settings))
    return MultiVectorConfig(
        prefixes={role: markers[role] + texts[role] for role in ROLES},
        lengths={role: stated.get(f"{role}_length") for role in ROLES},
        markers=tuple(marker for marker in markers.values() if marker),
        query_expansion=expansion and {"attend": False, "token": None} | expansion,
        skiplist_words=tuple(words),
        skiplist_tasks=("document",) if tasks is None else tuple(tasks),
    )


def pylate_expansion(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Query expansion as sentence-transformers 6 writes it, from PyLate's flat keys."""
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
