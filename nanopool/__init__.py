"""nanopool: a vLLM-style inference engine for pooling models, to be read in an afternoon."""

from nanopool.config import PoolerConfig, SamplingParams
from nanopool.llm import LLM, IOProcessor
from nanopool.outputs import PoolingRequestOutput, RequestOutput, lexical_weights
from nanopool.parallel import LocalTP, SingleTP, TensorParallel, simulate
from nanopool.pooler.params import LateChunkingParams, LateInteractionParams, PoolingParams
