"""The files of a model path (one, or a folder that diffusers saved); whether they were replaced; errors of reading."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckpointError, UnsupportedModelError

Identity = tuple[tuple[str, int, int, int, int], ...]

_LONGEST_SHOWN = 300
_DENOISERS = ("transformer", "unet")  # where a pipeline's folder has what the pool runs
_LARGEST_JSON = 16 << 20
_AGAIN = "Download the folder again."
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")


def find_files(path: str | Path) -> tuple[tuple[Path, ...], Path | None]:
    """The safetensors files, in a fixed order, and the config.json of a folder; None for a single file.
    CheckpointError: nothing there, a folder without config.json or weights, a missing shard. UnsupportedModelError: a
    pipeline without a transformer, or weights that are not safetensors."""
    path = expand(path)
    with reading(path):
        if path.is_file():
            return (path,), None
        if not path.is_dir():
            fix = "Check the model's path, and refresh the list of models."
            raise CheckpointError("{shortened} does not exist.", fix, shortened=shortened(path))
        folder = next((path / name for name in _DENOISERS if (path / name).is_dir()), path)
        if (config := folder / "config.json").is_file():
            return _find_weights(folder), config
        if (path / "model_index.json").is_file():
            name = read_json(path / "model_index.json").get("_class_name", "unknown")
            what = "{path} is a diffusers folder of {name}, which has no transformer."
            fix = "Choose the folder of a supported diffusion transformer."
            raise UnsupportedModelError(what, fix, path=path, name=name)
    raise CheckpointError("{folder} has no config.json.", "Choose a folder that diffusers saved.", folder=folder)


def identity(path: str | Path) -> Identity:
    """(file, device, inode, bytes, mtime in ns) of a path's files: equal while none is replaced. See `find_files`."""
    found = []
    weights, config = find_files(path)
    for file in weights if config is None else (config, *weights):
        with reading(file):
            status = file.stat()
        found.append((str(file.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _find_weights(folder: Path) -> tuple[Path, ...]:
    found = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob("*.safetensors.index*.json"))
    default = folder / "diffusion_pytorch_model.safetensors"
    if len(indices) > 1:
        indices = [index for index in indices if index.name == f"{default.name}.index.json"]
    if len(indices) == 1:
        return _read_index(indices[0])
    if default in found:
        return (default,)
    if not found:
        if pickles := sorted(folder.glob("*.bin")):
            pickled = "{folder} has its weights as a PyTorch pickle ({name}), which could run code."
            fix = "Download the safetensors version."
            raise UnsupportedModelError(pickled, fix, folder=folder, name=pickles[0].name)
        raise CheckpointError("{folder} has no safetensors file.", _AGAIN, folder=folder)
    shards = {(match.group(1), match.group(2)) for file in found if (match := _SHARD.fullmatch(file.name))}
    if len(found) > 1 and (len(shards) != 1 or len(found) != int(next(iter(shards))[1])):
        names = ", ".join(file.name for file in found[:4])
        files = f"{len(found)} safetensors files that are no complete set: {names}"
        what = "{folder} has {files}."
        raise CheckpointError(what, "Keep one version of the weights there.", folder=folder, files=files)
    return tuple(found)


def _read_index(index: Path) -> tuple[Path, ...]:
    names = read_json(index).get("weight_map")
    listed = list(names.values()) if isinstance(names, dict) else []
    if not listed or not all(isinstance(name, str) and "\0" not in name and Path(name).name == name for name in listed):
        raise CheckpointError("{index} does not list the files of the model.", _AGAIN, index=index)
    files = tuple(index.parent / name for name in sorted(set(listed)))
    if missing := [file.name for file in files if not file.is_file()]:
        what = "{folder} lacks {lacks}."
        lacks = f"{len(missing)} of {len(files)} files of the model, first {missing[0]}"
        raise CheckpointError(what, "Download the missing files.", folder=index.parent, lacks=lacks)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file that holds an object; CheckpointError where it cannot be read, or is something else."""
    with reading(path), path.open("rb") as file:
        text = file.read(_LARGEST_JSON + 1)
    try:
        if len(text) > _LARGEST_JSON:
            raise ValueError(f"it has more than {_LARGEST_JSON} bytes")
        content = msgspec.json.decode(text)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        what = "{path} is not valid JSON ({error})."
        raise CheckpointError(what, "Download it again.", path=path, error=str(error)[:200]) from error
    if not isinstance(content, dict):
        raise CheckpointError("{path} is not a JSON object.", "Download it again.", path=path)
    return content


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a file is read: where the system says that it cannot be, that is a CheckpointError."""
    try:
        yield
    except OSError as error:
        what = "{path} cannot be read: {strerror}."
        fix = "Check the path, the rights of the file, and the disk."
        raise CheckpointError(what, fix, path=shortened(path), strerror=error.strerror) from error


def expand(path: str | Path) -> Path:
    """The path with the home folder in place of a tilde. CheckpointError: no such home, or a name that is not UTF-8."""
    try:
        expanded = Path(path).expanduser()
        str(expanded).encode("utf-8")
    except RuntimeError as error:
        fix = "Write the path in full."
        raise CheckpointError("{shortened} does not exist.", fix, shortened=shortened(Path(path))) from error
    except UnicodeEncodeError as error:
        fix = "Rename the file or folder, and refresh the list of models."
        raise CheckpointError("The name {shortened} is not UTF-8.", fix, shortened=shortened(Path(path))) from error
    return expanded


def shortened(path: Path) -> str:
    """As it is shown."""
    text = str(path).encode("ascii" if not str(path).isprintable() else "utf-8", "backslashreplace").decode()
    return text if len(text) < _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
