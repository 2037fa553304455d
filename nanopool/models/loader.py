"""From the tensors of a checkpoint to the parameters of a model, each written exactly once.

Chapter 06.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from nanopool.config import ModelConfig
from nanopool.models import load_class
from nanopool.parallel import TensorParallel

BACKBONE_PREFIXES = ("model.", "bert.", "roberta.")


def load_model(config: ModelConfig, tp: TensorParallel) -> nn.Module:
    """The model of this rank with its weights, on the config's device and in its dtypes.

    Built on the meta device first, so that no weight exists twice. ValueError lists what is
    missing, unknown or written twice under the checkpoint's names.
    """
    backbone, adapter = load_class(config.spec)
    weights = WeightFiles(config.folder)
    shapes = weights.shapes()
    with torch.device("meta"):
        model = adapter(backbone(config, tp), config, tp, shapes)
    for name, child in model.named_children():
        child.to(config.dtype if name in ("model", "lm_head") else config.head_dtype)
    model.to_empty(device=config.device)
    model.tie_weights()
    load_weights(model, weights.tensors(model.extra_files(config)))
    return model.eval()


class WeightFiles:
    """The weight files of a model folder:
    safetensors or pytorch_model.bin, whole or in shards. Chapter 06.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files = self._find()

    def _find(self) -> list[Path]:
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                shards = json.loads(index.read_text())["weight_map"].values()
                return [inside(self.folder, shard) for shard in dict.fromkeys(shards)]
            if (self.folder / name).is_file():
                return [self.folder / name]
        raise FileNotFoundError(
            f"{self.folder} has neither model.safetensors nor pytorch_model.bin (nor an index of "
            "shards); give a folder that holds the weights"
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name, without the backbone's prefix."""
        pairs = (pair for file in self.files for pair in tensor_shapes(file))
        return {strip_prefix(name): shape for name, shape in pairs}

    def tensors(self, extra: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all files, then of `extra`:
        prefix -> file, or folder that holds one.
        """
        for file in self.files:
            yield from read_tensors(file)
        for prefix, path in extra.items():
            if not path.exists():
                raise FileNotFoundError(f"{path} is missing: the model folder is incomplete")
            files = WeightFiles(path).files if path.is_dir() else [path]
            for name, tensor in (pair for file in files for pair in read_tensors(file)):
                yield f"{prefix}.{name}", tensor


def inside(folder: Path, name: str) -> Path:
    """folder / name.

    ValueError when that leaves the folder, FileNotFoundError when nothing is there.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name!r} points outside the model folder {folder}")
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the model folder is incomplete")
    return path


def tensor_shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    if file.suffix != ".safetensors":
        yield from ((name, tuple(tensor.shape)) for name, tensor in read_tensors(file))
        return
    with open_safetensors(file) as tensors:
        for name in tensors.keys():
            yield name, tuple(tensors.get_slice(name).get_shape())


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file.

    Checkpoints are untrusted: no pickled object but tensors is loaded.
    """
    if file.suffix == ".safetensors":
        with open_safetensors(file) as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
        return
    try:
        yield from torch.load(file, map_location="cpu", weights_only=True, mmap=True).items()
    except Exception as error:
        raise ValueError(f"{file} is not a file of plain tensors: {error}") from error


def open_safetensors(file: Path):
    try:
        return safetensors.safe_open(file, framework="pt")
    except Exception as error:
        raise ValueError(f"{file} is damaged: {error}; fetch it again") from error


def strip_prefix(name: str) -> str:
    """`bert.encoder.x` and `encoder.x` are the same tensor."""
    for prefix in BACKBONE_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def has_parts(name: str, parts: str) -> re.Match | None:
    """Where the dotted `parts` occur in a dotted name, as whole parts."""
    return re.search(rf"(?:^|(?<=\.)){re.escape(parts)}(?=\.|$)", name)


def rename(name: str, name_map: dict[str, tuple[str, str | None]]) -> tuple[str, str | None]:
    """(parameter name, shard id) of a checkpoint's name."""
    shard = None
    for old, (new, shard_id) in name_map.items():
        if match := has_parts(name, old):
            name = name[: match.start()] + new + name[match.end() :]
            shard = shard or shard_id
    return name, shard


def load_weights(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write every tensor to its parameter.

    ValueError unless each parameter was written once, each tensor used.
    """
    params = dict(model.named_parameters())
    missing = {(name, shard) for name in params for shard in shard_ids(model, name)}
    unknown = []
    for full_name, tensor in tensors:
        name = strip_prefix(full_name)
        found = [(resolve_target(target, params), shard) for target, shard in model.targets(name)]
        targets = [(target, shard) for target, shard in found if target is not None]
        for target, shard in targets:
            if (target, shard) not in missing:
                raise ValueError(f"{full_name} is in the checkpoint twice, or under two names")
            write(model, target, shard, tensor, full_name)
            missing.discard((target, shard))
        if not targets and not any(has_parts(name, ignored) for ignored in model.ignored):
            unknown.append(full_name)
    if missing or unknown:
        raise ValueError(describe(model, missing, unknown))


def resolve_target(name: str, params: dict[str, nn.Parameter]) -> str | None:
    """The parameter of that name: a head's, or the backbone's."""
    return next((n for n in (name, f"model.{name}") if n in params), None)


def shard_ids(model: nn.Module, name: str) -> tuple[str | None, ...]:
    module = model.get_submodule(name.rpartition(".")[0])
    return getattr(module, "shard_ids", (None,))


def write(model: nn.Module, target: str, shard: str | None, tensor: Tensor, name: str) -> None:
    module, _, attribute = target.rpartition(".")
    owner = model.get_submodule(module)
    param = getattr(owner, attribute)
    try:
        loader = getattr(owner, "weight_loader", copy_whole)
        loader(param, tensor, shard)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{name} {list(tensor.shape)} does not fit the model: {error}") from error


def copy_whole(param: nn.Parameter, loaded: Tensor, shard_id: str | None) -> None:
    """The loader of a parameter that every rank holds whole."""
    if param.shape != loaded.shape:
        raise ValueError(f"the config says {list(param.shape)}")
    param.data.copy_(loaded)


def describe(model: nn.Module, missing: set, unknown: list[str]) -> str:
    """The error text, under the checkpoint's names."""
    lines = ["the checkpoint does not match the model"]
    if missing:
        names = sorted(model.checkpoint_name(target, shard) for target, shard in missing)
        lines.append(f"missing: {', '.join(names[:20])}")
    if unknown:
        lines.append(f"not understood: {', '.join(sorted(unknown)[:20])}")
    return "; ".join(lines) + "; check the architecture in config.json"
