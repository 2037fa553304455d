"""Fixtures of every test: tiny checkpoints, built once per session, and the devices."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import checkpoints
import pytest
import torch

torch.set_num_threads(1)
# Ctrl-C is tested, and a shell switches it off for what it runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, **overrides) -> folder, one per distinct call; copy it before writing."""
    folders = {}

    def get(kind: str, **overrides):
        key = (kind, repr(sorted(overrides.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(kind)
            folders[key] = checkpoints.build(kind, folder, **overrides)
        return folders[key]

    return get


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """The devices to run on: "cpu", and "cuda" where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
