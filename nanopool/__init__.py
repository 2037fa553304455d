"""nanopool: a vLLM-style inference engine for pooling models, small enough to read in an afternoon."""

from nanopool.config import SamplingParams
from nanopool.llm import LLM
from nanopool.outputs import PoolingRequestOutput, RequestOutput
from nanopool.parallel import LocalTP, SingleTP, TensorParallel, simulate
from nanopool.pooler.params import (
    LateChunkingParams,
    LateInteractionParams,
    PoolerConfig,
    PoolingParams,
)

__all__ = [
    "LLM",
    "LateChunkingParams",
    "LateInteractionParams",
    "LocalTP",
    "PoolerConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "SingleTP",
    "TensorParallel",
    "simulate",
]
