"""Cases of tests/README.md that no chapter's own test covers, by their numbers there."""

import pickle
import random
import shutil

import checkpoints
import pytest
import references
import tiny_tokenizers
import torch
import transformers
from answers import ask, ask_once, assert_close, forward, start
from safetensors.torch import load_file
from tiny_tokenizers import BPE_VOCAB, WORD_VOCAB
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb
from types_of_requests import REQUESTS

from nanopool import LLM, PoolerConfig, SamplingParams, simulate
from nanopool.batch import Batch
from nanopool.engine.sequence import Sequence
from nanopool.inputs import InputProcessor, Truncation
from nanopool.layers.activation import get_activation
from nanopool.layers.rotary_embedding import RotaryEmbedding
