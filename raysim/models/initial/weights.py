"""Weights from which a net starts: of a run, of torchvision, of Hugging Face, or of any file."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from raysim.data import import_torchvision
from raysim.errors import ConfigError, in_a_line
from raysim.spelling import did_you_mean
from raysim.system.json_files import parsed
from raysim.system.signals import failing_as

PARAMETERS_FILE = "parameters.safetensors"
"""File of the final parameters, in the folder of a run that has finished."""

HUGGING_FACE_FILE = "model.safetensors"
"""File of the weights, in a folder of Hugging Face."""

HUGGING_FACE_INDEX = "model.safetensors.index.json"
"""Index of weights that are divided over several files."""

TORCHVISION, HUGGING_FACE = "torchvision:", "hf:"
"""Beginnings of the names of downloaded weights."""

KEY = "model.init_from"
"""The key of the configuration, for messages."""


class _WeightIndex(TypedDict):
    """Content of the index of weights that are divided over several files."""

    weight_map: dict[str, str]


def is_run_id(source: str) -> bool:
    """Return whether a text is the MLflow id of a run, and not a path.

    Args:
        source: a run, or the value of `model.init_from`.
    """
    return re.fullmatch("[0-9a-f]{32}", source) is not None and not Path(source).exists()


def weight_files(source: str) -> list[Path]:
    """Return the files that hold the weights; they are downloaded if need be.

    Args:
        source: the folder of a run; a file; `torchvision:NET` or `torchvision:NET.WEIGHTS`;
            `hf:NAME` or `hf:NAME@REVISION`; or a folder of Hugging Face.

    Returns:
        One file, or several that hold different tensors. A file need not exist.

    Raises:
        ConfigError: there are no such weights, or they cannot be downloaded.
    """
    if source.startswith(TORCHVISION):
        return [_of_torchvision(source)]
    if source.startswith(HUGGING_FACE):
        return _of_hugging_face(source)
    path = Path(source).expanduser()
    return _in_folder(path, source) if path.is_dir() else [path]


def read_weights(source: str) -> dict[str, Tensor]:
    """Read the weights that `weight_files` finds.

    Args:
        source: as for `weight_files`.

    Returns:
        The tensors by name.

    Raises:
        ConfigError: there are no such weights, or a file cannot be read.
    """
    tensors = {}
    for file in weight_files(source):
        tensors |= read_state_dict(str(file), KEY)
    return tensors


def _in_folder(folder: Path, source: str) -> list[Path]:
    """Return the files of the weights in a folder of a run or of Hugging Face."""
    for name in (PARAMETERS_FILE, HUGGING_FACE_FILE):
        if (folder / name).is_file():
            return [folder / name]
    index = folder / HUGGING_FACE_INDEX
    if index.is_file():
        try:
            names = set(parsed(index.read_bytes(), _WeightIndex)["weight_map"].values())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KEY}: {index} cannot be read: {in_a_line(error)}") from None
        return [folder / name for name in sorted(names)]
    if (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{KEY}: the run in {source} has no {PARAMETERS_FILE} yet; raysim resume {source} "
            "finishes it"
        )
    raise ConfigError(
        f"{KEY}: {source} is a folder without weights; give a file, the folder of a finished run "
        f"({PARAMETERS_FILE}), or a folder of Hugging Face ({HUGGING_FACE_FILE})"
    )


def _of_torchvision(source: str) -> Path:
    """Return the file of weights of torchvision, in the cache of torch.hub."""
    name, _, version = source.removeprefix(TORCHVISION).partition(".")
    models: Any = import_torchvision().models
    if name not in models.list_models():
        hint = did_you_mean(name, models.list_models())
        raise ConfigError(f"{KEY}: torchvision has no net '{name}'{hint}")
    known = models.get_model_weights(name)
    if version and version not in known.__members__:
        raise ConfigError(
            f"{KEY}: torchvision has no weights '{version}' of {name}; it has "
            f"{', '.join(known.__members__)}"
        )
    url = (known[version] if version else known.DEFAULT).url
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if file.is_file():
        return file
    digest = re.search(r"-([a-f0-9]{8,})\.", file.name)
    cannot = f"{KEY}: {source} cannot be downloaded from {url}"
    fix = f"without network put the file at {file}"
    with failing_as(lambda why: ConfigError(f"{cannot}: {why}; {fix}")):
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(file), digest and digest[1], progress=False)
    return file


def _of_hugging_face(source: str) -> list[Path]:
    """Return the files of weights of the Hugging Face hub, in its cache."""
    name, _, revision = source.removeprefix(HUGGING_FACE).partition("@")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise ConfigError(
            f"{KEY}: {source} needs the package huggingface_hub, which is not installed; run "
            "pip install 'raysim[hf]'"
        ) from None
    wanted = [HUGGING_FACE_FILE, HUGGING_FACE_INDEX, "model-*-of-*.safetensors"]
    cannot = f"{KEY}: {source} cannot be read from the Hugging Face hub"
    fix = f"check the name, or give a folder that holds {HUGGING_FACE_FILE}"
    with failing_as(lambda why: ConfigError(f"{cannot}: {why}; {fix}")):
        folder = hub.snapshot_download(name, revision=revision or None, allow_patterns=wanted)
    return _in_folder(Path(folder), source)


def read_state_dict(file: str, key: str) -> dict[str, Tensor]:
    """Read a state_dict without executing code from its file.

    Args:
        file: a .safetensors file, or one that torch.save wrote.
        key: the key of the configuration that names the file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    path = Path(file).expanduser()
    if path.is_dir():
        raise ConfigError(f"{key}: {file} is a folder; give a file")
    reason = ""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: {file} cannot be read: {reason}") from None
    except MemoryError:
        raise ConfigError(
            f"{key}: {file} is damaged, or does not fit in memory; give another file"
        ) from None
    except Exception as error:
        # A file that is not a pickle can fail with any error.
        loaded, reason = None, f" ({type(error).__name__})"
    is_dict = isinstance(loaded, dict)
    if not is_dict or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ConfigError(
            f"{key}: {file} is not a state_dict{reason}; write it with "
            "torch.save(net.state_dict(), file)"
        )
    return loaded


def in_part(loaded: Mapping[str, Tensor], net_names: Iterable[str]) -> dict[str, Tensor]:
    """Return weights under the names that they have in a net of which theirs is a part.

    Args:
        loaded: the tensors by their names in their net.
        net_names: the names of the tensors of the net that contains it, for example as its part
            `body`.

    Returns:
        The tensors as `body.NAME` where the net has that name, for the part that has the most of
        the names. They are unchanged if the net itself has as many, or several parts have.
    """
    names = set(net_names)
    count = Counter(
        name.removesuffix(inner) for name in names for inner in loaded if name.endswith(f".{inner}")
    )
    count[""] = len(loaded.keys() & names)
    most = max(count.values())
    parts = [part for part in count if count[part] == most]
    part = parts[0] if len(parts) == 1 else ""
    return {part + n if part + n in names else n: tensor for n, tensor in loaded.items()}
