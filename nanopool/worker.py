"""One process rank: ProcessRanks starts `python -m nanopool.worker RANK SIZE STORE`."""

import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import torch
import torch.distributed as dist

from nanopool.parallel import DistTP, report_error


def read_frames(pipe: BinaryIO, frames: SimpleQueue, folder: Path) -> None:
    """Ends the process when the parent closes the pipe or is gone, whatever this rank is doing."""
    try:
        while True:
            frames.put(pickle.load(pipe))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def serve(tp: DistTP, frames: SimpleQueue) -> None:
    """Builds the target from the first frame, then runs one call per frame."""
    target = tp.run(pickle.loads(frames.get()), tp)
    while True:
        method, args = pickle.loads(frames.get())
        tp.run(getattr(target, method), *args)


def main() -> None:
    """Serves until the pipe closes; an error is reported to rank 0, which raises it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    frames: SimpleQueue[bytes] = SimpleQueue()
    arguments = (sys.stdin.buffer, frames, path.parent)
    threading.Thread(target=read_frames, args=arguments, daemon=True).start()
    store = dist.FileStore(str(path), size)
    try:
        with torch.inference_mode():
            serve(DistTP(rank, size, store), frames)
    except BaseException as error:
        report_error(store, rank, error)
    os._exit(1)


if __name__ == "__main__":
    main()
