"""What a model folder says: the Hugging Face config, and sentence-transformers files old and new.

Reads files and decides nothing: resolve.py weighs what is found here. Chapter 06.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanopool.checks import check_value, refusing
from nanopool.multi_vector import MultiVectorConfig, read_multi_vector, stanford_settings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# A class of sentence-transformers, and what its modules after the Transformer may be.
KINDS = {
    "SentenceTransformer": r"Pooling (Dense )*(Normalize )?",
    "CrossEncoder": r"LogitScore |Pooling (Dense )+",
    "SparseEncoder": r"SpladePooling ",
    "MultiVectorEncoder": r"(Dense )*(MultiVectorMask )?(Normalize )?",
}
BACKBONES = ("Transformer", "MLMTransformer")
MODULES = (*BACKBONES, *dict.fromkeys(re.findall(r"\w+", " ".join(KINDS.values()))))
POOLING_TYPES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
POOLING_TYPES |= {"cls_token": "CLS", "mean_tokens": "MEAN"}
BACKBONE_FILE = "sentence_bert_config.json"
SETTINGS_FILE = "config_sentence_transformers.json"
NOTHING = (None, "")  # for a fact that no file states: (value, file)
UNUSED_FILES = ["*.h5", "*.msgpack", "*.onnx", "onnx/*", "openvino/*"]


@dataclass(frozen=True)
class STModule:
    """One line of modules.json: class name, absolute folder and that folder's config.json."""

    name: str
    package: str  # "sentence_transformers" or "pylate"
    path: Path
    file: str  # the config's name in messages, such as `1_Pooling/config.json`
    config: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A model folder, read once by resolve.py; no code of it runs. Chapter 06.

    `root` holds modules.json, `folder` the backbone (the same, or `0_Transformer` in it).
    """

    root: Path
    folder: Path
    hf_config: "PretrainedConfig"
    is_overridden: bool  # hf_overrides names other architectures than config.json
    modules: tuple[STModule, ...] | None  # after the backbone; None: no modules.json
    settings: dict[str, Any]  # config_sentence_transformers.json
    backbone: dict[str, Any]  # `backbone_file`: sentence_bert_config.json or a sister of it
    backbone_file: str

    @classmethod
    def open(cls, model: str | Path, hf_overrides: dict | Callable | None = None) -> "Checkpoint":
        """Reads a local folder or a hub repository.

        Raises FileNotFoundError where there is neither, ValueError for files not understood.
        """
        root = find_folder(model)
        modules = read_modules(root)
        folder = modules[0].path if modules else root
        if not (raw := read_json(folder / "config.json")):
            raise FileNotFoundError(f"model={str(model)!r}: there is no config.json in {folder}")
        config = make_config(raw, hf_overrides)
        is_overridden = config.architectures != raw.get("architectures")
        settings, modules = read_json(root / SETTINGS_FILE), modules and modules[1:]
        file = folder / BACKBONE_FILE
        if not file.is_file():
            file = min(folder.glob("sentence_*_config.json"), default=file)
        backbone = read_json(file)
        return cls(root, folder, config, is_overridden, modules, settings, backbone, file.name)

    @property
    def kind(self) -> str | None:
        """A key of KINDS; None where the architecture alone says what the model is.

        Raises ValueError for a sequence of modules that is none of them.
        """
        stated = self.settings.get("model_type")
        if stated == "ColBERT" or any(module.package == "pylate" for module in self.modules or ()):
            stated = "MultiVectorEncoder"
        if self.modules is None or not (self.modules or stated == "MultiVectorEncoder"):
            return None
        names = "".join(f"{module.name} " for module in self.modules)
        may_be = [stated] if stated in KINDS else [*KINDS][:-1]  # a MultiVectorEncoder says so
        for kind in may_be:
            if re.fullmatch(KINDS[kind], names):
                return kind
        raise ValueError(
            f"{self.root}/modules.json: {names.split()} after the Transformer is none of the "
            f"sequences that are supported: {'; '.join(KINDS.values())}"
        )

    def include_prompt(self) -> tuple[bool | None, str]:
        """(whether pooling counts the rows of a prompt prefix, file)."""
        pooling = self.module("Pooling")
        return (pooling.config.get("include_prompt"), pooling.file) if pooling else NOTHING

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the tokenizer's chat template; None where texts do not go through it."""
        arguments = (self.backbone.get("processing_kwargs") or {}).get("chat_template") or {}
        return arguments if "message" in self.backbone.get("modality_config", ()) else None

    def module(self, name: str) -> STModule | None:
        """The first module of a class, None where there is none."""
        return next((module for module in self.modules or () if module.name == name), None)

    def dense_modules(self) -> tuple[STModule, ...]:
        """The Dense modules, in order."""
        return tuple(module for module in self.modules or () if module.name == "Dense")

    def pooling_type(self) -> tuple[str | None, str]:
        """(CLS, MEAN or LAST, file). Raises ValueError for a mode that nanopool does not have."""
        if (pooling := self.module("Pooling")) is None:
            return NOTHING
        flags = [name for name, value in pooling.config.items() if value]
        old = [n.removeprefix("pooling_mode_") for n in flags if n.startswith("pooling_mode_")]
        modes = pooling.config.get("pooling_mode", old or "mean")
        mode = modes if isinstance(modes, str) else " + ".join(modes)
        check_value(f"{pooling.file}: pooling_mode", mode, tuple(POOLING_TYPES))
        return POOLING_TYPES[mode], pooling.file

    def normalizes(self) -> tuple[bool | None, str]:
        """(whether the folder ends in Normalize, file); None where embeddings are not spoken of."""
        if self.kind not in ("SentenceTransformer", "MultiVectorEncoder"):
            return NOTHING
        if self.kind == "MultiVectorEncoder" and self.settings.get("model_type") != self.kind:
            return True, "modules.json"  # ColBERT and PyLate always do
        return self.module("Normalize") is not None, "modules.json"

    def splade(self) -> tuple[str | None, str]:
        """("max" or "sum", file) of SpladePooling. Raises ValueError for its other variants."""
        if (pooling := self.module("SpladePooling")) is None:
            return NOTHING
        strategy = pooling.config.get("pooling_strategy", "max")
        activation = pooling.config.get("activation_function", "relu")
        check_value(f"{pooling.file}: pooling_strategy", strategy, ("max", "sum"))
        check_value(f"{pooling.file}: activation_function", activation, ("relu",))
        return strategy, pooling.file

    def activation_fn(self) -> tuple[str | None, str]:
        """(class name, file) of a cross-encoder's activation, from the youngest of its places."""
        if (name := self.settings.get("activation_fn")) is not None:
            return name, SETTINGS_FILE
        old = getattr(self.hf_config, "sbert_ce_default_activation_function", None)
        nested = getattr(self.hf_config, "sentence_transformers", None) or {}
        return nested.get("activation_fn", old), "config.json"

    def length_limit(self) -> tuple[int | None, str]:
        """(tokens, file): `max_seq_length` of old folders, else the tokenizer's limit."""
        if (limit := self.backbone.get("max_seq_length")) is not None:
            return limit, self.backbone_file
        return self.fact("tokenizer_config.json", "model_max_length")

    def fact(self, file: str, key: str) -> tuple[Any, str]:
        """(what a JSON file beside config.json says of `key`, or None; file)."""
        return read_json(self.folder / file).get(key), file

    def multi_vector(self) -> MultiVectorConfig:
        """How queries and documents of a late-interaction model are encoded."""
        settings, mask = self.settings, self.module("MultiVectorMask")
        if self.modules is None:
            settings = stanford_settings(read_json(self.root / "artifact.metadata"))
        return read_multi_vector(settings, self.backbone, mask.config if mask else {})


def find_folder(model: str | Path) -> Path:
    """The folder of a model; a hub repository is downloaded. Raises FileNotFoundError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(str(model), ignore_patterns=UNUSED_FILES)
        return Path(found).resolve()
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model={str(model)!r} is neither a folder nor a hub repository within reach: {error}"
        ) from error


def load_tokenizer(place: str | Path, in_lower_case: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder or hub repository, with the end token that its config asks for.

    transformers 5 leaves it out where tokenizer.json does (e5-mistral). Raises ValueError.
    """
    import transformers
    from tokenizers.normalizers import Lowercase, Sequence

    with refusing(f"tokenizer={str(place)!r}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(place))
        ids, end = tokenizer("a")["input_ids"], tokenizer.eos_token_id
        has_end = ids[-1:] != tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        if in_lower_case:  # special tokens are found before
            backend = tokenizer.backend_tokenizer
            own = [backend.normalizer] if backend.normalizer else []
            backend.normalizer = Sequence([Lowercase(), *own])
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made up where there is no file
        raise ValueError(f"tokenizer={str(place)!r} has no vocabulary: its files are missing")
    if read_json(Path(place, "tokenizer_config.json")).get("add_eos_token") and end and not has_end:
        tokenizer.add_bos_token, tokenizer.add_eos_token = tokenizer.bos_token_id in ids, True
        tokenizer.update_post_processor()
    return tokenizer


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON file that holds a `kind`, an empty one where there is no such file; ValueError."""
    if not path.is_file():
        return kind()
    with refusing(str(path)):
        content = json.loads(path.read_text(encoding="utf-8"))
    check_value(f"{path}: content", content, kind)
    return content


def read_modules(root: Path) -> tuple[STModule, ...] | None:
    """The modules of modules.json, the Transformer first; None where there is no such file.

    Raises ValueError for a class that is not known and where no Transformer comes first.
    """
    if not (root / "modules.json").is_file():
        return None
    modules = tuple(read_module(root, entry) for entry in read_json(root / "modules.json", list))
    if not modules or modules[0].name not in BACKBONES:
        raise ValueError(f"{root}/modules.json: the first module must be one of {BACKBONES}")
    return modules


def read_module(root: Path, entry: dict[str, str]) -> STModule:
    """Old and new layouts share the package and the class name at the end of the type.

    Raises ValueError for a class that is not known and for a path that leaves the folder.
    """
    kind, folder = entry.get("type", ""), (root / entry.get("path", "")).resolve()
    package, name = kind.partition(".")[0], kind.rpartition(".")[2]
    if package not in ("sentence_transformers", "pylate") or name not in MODULES:
        raise ValueError(
            f"{root}/modules.json: module type {kind!r} is not supported; known classes of "
            f"sentence_transformers and pylate: {', '.join(MODULES)}"
        )
    if not folder.is_relative_to(root):
        raise ValueError(f"{root}/modules.json: path {entry['path']!r} leaves the folder")
    config = {} if name in BACKBONES else read_json(folder / "config.json")
    return STModule(name, package, folder, f"{folder.name}/config.json", config)


def make_config(raw: dict[str, Any], overrides: dict | Callable | None) -> "PretrainedConfig":
    """The content of config.json under `hf_overrides`. Raises ValueError for its model_type."""
    import transformers

    merged = raw | (overrides if isinstance(overrides, dict) else {})
    model_type = merged.pop("model_type", None)
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not known to transformers "
            f"{transformers.__version__}; hf_overrides={{'model_type': ...}} names another"
        )
    config = transformers.AutoConfig.for_model(model_type, **merged)
    return overrides(config) if callable(overrides) else config
