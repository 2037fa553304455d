"""From the tensors of a checkpoint to the parameters of a model, each written exactly once.

Each parameter says which tensors it is made of; what is missing and what nobody asked for is an
error. Chapter 06.
"""

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from nanopool.config import ModelConfig
from nanopool.layers.linear import ShardedModule
from nanopool.models import load_class
from nanopool.parallel import TensorParallel

WHOLE = ShardedModule()  # how a module of plain PyTorch is filled
BACKBONE = ("model.", "pooler_dense.")  # our names of what has a prefix in files with heads


def load_model(config: ModelConfig, tp: TensorParallel) -> nn.Module:
    """The model of this rank with its weights, on the config's device and in its dtypes.

    Built on the meta device first, so that no weight exists twice. Raises as `load_weights` does.
    """
    backbone, adapter = load_class(config.spec)
    weights = Weights(config.folder)
    with torch.device("meta"):
        model = adapter(backbone(config, tp), config, weights)
    for name, child in model.named_children():
        child.to(config.dtype if name in ("model", "lm_head") else config.head_dtype)
    model.to_empty(device=config.device)
    model.tie_weights()
    load_weights(model, weights)
    return model.eval()


def load_weights(model: nn.Module, weights: "Weights") -> None:
    """Write every parameter, shard by shard, from the tensors that its adapter names.

    ValueError, under the checkpoint's names, when one is missing, does not fit, or is not used.
    """
    missing = []
    for name, param in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        loader = module if isinstance(module, ShardedModule) else WHOLE
        prefix = weights.prefix if name.startswith(BACKBONE) else ""
        for shard_id in loader.shard_ids:
            source = model.source(name, shard_id)
            if source not in weights:
                missing.append(prefix + source)
                continue
            loaded = weights[source]
            try:
                loader.weight_loader(param, loaded, shard_id)
            except ValueError as error:
                raise ValueError(f"{prefix}{source} does not fit config.json: {error}") from error
    unknown = weights.unused(model.ignored)
    if missing or unknown:
        raise ValueError(
            f"the checkpoint does not fit the architecture in config.json: missing {missing[:20]}, "
            f"not understood {unknown[:20]}"
        )


class Weights:
    """The tensors of a checkpoint by name, read when asked for; knows which were. Chapter 06.

    Names are those of the files without the backbone's prefix (`bert.`, `model.`), and with
    `weight` and `bias` for the old `gamma` and `beta`. Files are untrusted: only tensors are read.
    """

    def __init__(self, folder: Path):
        self.places: dict[str, tuple[Tensors, str]] = {}
        self.used: set[str] = set()
        self.prefix = ""  # of a backbone's names in the files
        self.add(folder)

    def add(self, place: Path, prefix: str = "") -> None:
        """Enter the tensors of a file, or of a folder's weight files, under `prefix`."""
        for file in weight_files(place) if place.is_dir() else [place]:
            tensors = open_tensors(file)
            for name in tensors.keys():
                backbone, short = normalise(name)
                key = prefix + short
                self.prefix = self.prefix or backbone
                if key in self.places:
                    raise ValueError(f"{name} is in the checkpoint {place} twice, or has two names")
                self.places[key] = tensors, name

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        tensors, real_name = self.places[name]
        tensor = tensors.get_tensor(real_name)
        if not tensor.is_floating_point():
            raise ValueError(f"{real_name} is {tensor.dtype}: quantised models are not supported")
        return tensor

    def are_equal(self, head: str, embedding: str) -> bool:
        """Whether two modules have one weight; a missing head is the embedding."""
        names = f"{head}.weight", f"{embedding}.weight"
        return names[0] not in self or torch.equal(*(self[name] for name in names))

    def unused(self, ignored: Iterable[str]) -> list[str]:
        """The files' names of tensors that nobody read, but for those with an ignored part."""
        ignored = set(ignored)
        names = self.places.keys() - self.used - ignored
        return sorted(self.places[name][1] for name in names if ignored.isdisjoint(name.split(".")))


def normalise(name: str) -> tuple[str, str]:
    """`bert.encoder.x.LayerNorm.gamma` -> (`bert.`, `encoder.x.LayerNorm.weight`)."""
    prefix = re.match(r"((model|bert|roberta)\.)?", name)[0]
    stem, dot, last = name.removeprefix(prefix).rpartition(".")
    return prefix, stem + dot + {"gamma": "weight", "beta": "bias"}.get(last, last)


def weight_files(folder: Path) -> list[Path]:
    """safetensors or pytorch_model.bin, whole or in shards.

    ValueError when an index points outside the folder, FileNotFoundError when a file is missing.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
            if outside := [shard for shard in shards if Path(shard).name != shard]:
                raise ValueError(f"{index} points outside its folder: {outside[0]!r}")
            return [folder / shard for shard in shards]
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


class Tensors(dict):
    """A loaded pytorch_model.bin with the two methods of an open safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name]


def open_tensors(file: Path):
    """An open file of tensors; ValueError when it is damaged or holds anything else."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the model folder is incomplete")
    try:
        if file.suffix == ".safetensors":
            return safetensors.safe_open(file, framework="pt")
        is_new = zipfile.is_zipfile(file)  # since torch 1.6
        return Tensors(torch.load(file, map_location="cpu", weights_only=True, mmap=is_new))
    except Exception as error:
        raise ValueError(f"{file} is damaged or not a plain file of tensors: {error}") from error
