"""nanopool: a vLLM-style inference engine for pooling models, to be read in an afternoon."""

from nanopool.config import PoolerConfig, SamplingParams
from nanopool.llm import LLM
from nanopool.outputs import PoolingRequestOutput, RequestOutput
from nanopool.parallel import LocalTP, SingleTP, TensorParallel, simulate
from nanopool.pooler.params import LateChunkingParams, LateInteractionParams, PoolingParams

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
