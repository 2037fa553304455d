"""Runs a step on this rank's device: packs the batch, calls the model, samples or pools. Chapter 10."""

from dataclasses import dataclass

from torch import Tensor

from nanopool.batch import Batch
from nanopool.config import EngineConfig, ModelConfig
from nanopool.engine.kv_cache import allocate_kv_caches, count_kv_blocks
from nanopool.engine.scheduler import Scheduled
from nanopool.layers.sampler import sample
from nanopool.models.loader import load_model
from nanopool.parallel import TensorParallel
from nanopool.pooler.metadata import PoolingCursor, PoolingMetadata


@dataclass(frozen=True)
class StepOutput:
    """What a step gave, aligned with its sequences. `error` is rank 0's own; `must_stop` holds on every rank."""

    tokens: list[int | None]
    pooled: list[Tensor | None]
    error: Exception | None = None
    must_stop: bool = False


class ModelRunner:
    """The model, its KV caches and what a device needs around them. Owned by the Engine; chapter 10."""

    def __init__(self, config: ModelConfig, engine_config: EngineConfig, tp: TensorParallel):
        self.config = config
        self.tp = tp
        self.model = load_model(config, tp)
        self.num_kv_blocks = count_kv_blocks(config, engine_config, tp, peak=0)
        self.kv_caches = allocate_kv_caches(config, tp, self.num_kv_blocks)
        self.block_size = config.block_size if self.kv_caches else None

    def execute(self, scheduled: Scheduled) -> StepOutput:
        """Compute the scheduled tokens; sample where a sequence caught up, or pool."""
        slices = [seq.slice(n) for seq, n in scheduled]
        batch = Batch.build(slices, self.block_size, self.config.device)
        hidden = self.model(batch, self.kv_caches)  # [T, D]
        if self.config.runner == "generate":
            return self._sample(hidden, batch, scheduled)
        return self._pool(hidden, batch, scheduled)

    def _sample(self, hidden: Tensor, batch: Batch, scheduled: Scheduled) -> StepOutput:
        """Every rank computes the logits; rank 0 draws and tells the others, or tells them to stop."""
        tokens: list[int | None] = [None] * len(scheduled)
        ready = [i for i, (seq, n) in enumerate(scheduled) if n == seq.num_new_tokens]
        error = None
        if ready:
            last_rows = batch.cu_seqlens_q[1:][ready] - 1
            logits = self.model.compute_logits(hidden[last_rows])  # [B, V]
            drawn, error = self.tp.broadcast(self._draw(logits, [scheduled[i][0] for i in ready]))
            for i, token in zip(ready, drawn, strict=True):
                tokens[i] = token
        return StepOutput(tokens, [None] * len(scheduled), error, must_stop=error is not None)

    def _draw(self, logits: Tensor, sequences: list) -> tuple[list[int | None], Exception | None]:
        if self.tp.rank > 0:
            return [], None
        try:
            params = [seq.request.sampling for seq in sequences]
            seeds = [(*seq.request.seed, seq.num_tokens) for seq in sequences]
            return sample(logits, params, seeds), None
        except Exception as error:
            return [None] * len(sequences), error

    def _pool(self, hidden: Tensor, batch: Batch, scheduled: Scheduled) -> StepOutput:
        """Rank 0 pools; its error is kept, since the other ranks go on."""
        nothing: list[None] = [None] * len(scheduled)
        if self.tp.rank > 0:
            return StepOutput(nothing, nothing)
        sequences = [seq for seq, _ in scheduled]
        cursor = PoolingCursor.build(batch, tuple(seq.num_prompt_tokens for seq in sequences))
        metadata = PoolingMetadata(
            cursor,
            params=tuple(seq.request.pooling for seq in sequences),
            states=tuple(seq.pooling_state for seq in sequences),
            prompts=tuple(seq.request.token_ids for seq in sequences),
        )
        try:
            return StepOutput(nothing, self.model.pooler(hidden, metadata))
        except Exception as error:
            return StepOutput(nothing, nothing, error)
