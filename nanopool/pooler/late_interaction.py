"""MaxSim inside the engine: queries wait on rank 0 for their documents. Chapter 17."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from nanopool.pooler.metadata import PoolingMetadata
from nanopool.pooler.poolers import Pooler


@dataclass
class CachedQuery:
    """A query's rows `[q, E]` and how many documents are still to be scored. Chapter 17."""

    rows: Tensor
    uses: int


def maxsim(queries: list[Tensor], documents: list[Tensor]) -> Tensor:
    """For each query row its best dot product, summed (ColBERT, arXiv 2004.12832).

    Pairs of query rows `[q, E]` and document rows `[n, E]` -> `[pairs]`, float32; -inf where a
    document has no row.
    """
    pairs = zip(queries, documents, strict=True)
    return torch.stack(
        [(q @ d.T).amax(-1).sum() if len(d) else q.new_tensor(-inf) for q, d in pairs]
    )


def select_maxsim(device: torch.device, fused: bool) -> Callable[..., Tensor]:
    """The fused kernel on CUDA unless it is switched off, else the reference above."""
    if device.type != "cuda" or not fused:
        return maxsim
    from nanopool.pooler.flash_maxsim import flash_maxsim

    return flash_maxsim


@dataclass(frozen=True)
class LateInteractionPooler(Pooler):
    """Around a `token_embed` pooler: keeps a query's rows, scores a document's. Chapter 17.

    The rows live in the call's own dict, so that nothing is left of them when a call ends.
    """

    inner: Pooler
    fused: bool
    tasks = ("token_embed",)

    def get_pooling_updates(self, task: str) -> dict[str, bool]:
        return self.inner.get_pooling_updates(task)

    def __call__(self, hidden: Tensor, metadata: PoolingMetadata) -> list[Tensor | None]:
        outputs = self.inner(hidden, metadata)
        documents = []
        for i, rows in enumerate(outputs):
            late = metadata.params[i].late_interaction_params
            if rows is None or late is None:
                continue
            if late.mode == "score_doc":
                documents.append(i)
                continue
            metadata.states[i].queries[late.query_key] = CachedQuery(rows, late.query_uses or 1)
            outputs[i] = rows.new_zeros(())
        if documents:
            queries = [take_query(metadata, i) for i in documents]
            maxsim = select_maxsim(hidden.device, self.fused)
            scores = maxsim(queries, [outputs[i] for i in documents])
            for i, score in zip(documents, scores, strict=True):
                outputs[i] = score
        return outputs


def take_query(metadata: PoolingMetadata, i: int) -> Tensor:
    """The query rows for document i, freed with their last use; ValueError when not there."""
    queries, key = metadata.states[i].queries, metadata.params[i].late_interaction_params.query_key
    if key not in queries:
        raise ValueError(f"query_key = {key!r} is not cached: encode the query first")
    query = queries[key]
    query.uses -= 1
    if query.uses == 0:
        del queries[key]
    return query.rows
