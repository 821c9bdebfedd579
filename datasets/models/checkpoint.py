"""`Checkpoint`: which tensors a folder of safetensors files holds, read from their headers alone.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, a
JSON object ``{name: {"dtype", "shape", "data_offsets"}}`` (huggingface.co/docs/safetensors).
Reading it takes a few kilobytes whatever the size of the model, and neither torch nor safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreplan.datasets.specs import load_document
from foreplan.errors import SpecError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Longest header that is read: some 100,000 tensors. The safetensors library itself takes 100 MB,
#: which can be 3 GB once parsed.
_MAX_HEADER_BYTES = 16 << 20
#: Dtypes of weights that are not quantised, with our names.
_DTYPES: Mapping[str, str] = MappingProxyType({"F32": "fp32", "F16": "fp16", "BF16": "bf16"})


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
        file: the safetensors file it lies in.
        dtype: our name (``fp32``, ``fp16``, ``bf16``) or, for anything else, that of safetensors.
        shape: as stored.
        bytes: its payload.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a folder by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def tensor(self, name: str) -> StoredTensor:
        """The tensor ``name``.

        Raises:
            SpecError: the folder holds no such tensor.
        """
        found = self.tensors.get(name)
        if found is None:
            raise SpecError(
                f"{self.folder}: safetensors",
                got=f"{len(self.tensors)} tensors without {name}",
                expected=f"the tensor {name}",
                fix="is the checkpoint complete, and of the architecture its config.json names?",
            )
        return found


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the headers of the safetensors files in ``folder``; no weight is loaded.

    Returns:
        The tensors, or ``None`` when the folder holds no safetensors at all.

    Raises:
        SpecError: shards that the index names are missing, or a file is cut off or no safetensors.
    """
    index = folder / _INDEX
    if index.is_file():
        files = _indexed_files(index)
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        stray = sorted(path.name for path in folder.glob("*.safetensors"))
        if not stray:
            return None
        raise SpecError(
            f"{folder}", got=stray, expected=f"{_SINGLE}, or shards with their {_INDEX}"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors.update(_read_header(file))
    if index.is_file():
        _check_index(index, tensors)
    return Checkpoint(folder, MappingProxyType(tensors))


def _weight_map(index: Path) -> dict[str, str]:
    document = load_document(index).get("weight_map")
    if not isinstance(document, dict) or not all(isinstance(v, str) for v in document.values()):
        raise SpecError(
            f"{index}: weight_map", got=document, expected="a mapping of tensor to file"
        )
    return document


def _indexed_files(index: Path) -> list[Path]:
    names = sorted(set(_weight_map(index).values()))
    stray = [name for name in names if Path(name).name != name or len(name) > 200 or "\0" in name]
    if stray:
        raise SpecError(
            f"{index}: weight_map", got=stray[0], expected="names of files beside the index"
        )
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise SpecError(
            f"{index}",
            got=f"{len(missing)} of {len(files)} shards missing: {', '.join(missing[:3])}",
            expected="every shard that the index names",
            fix="finish the download",
        )
    return files


def _check_index(index: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in _weight_map(index).items():
        if name not in tensors or tensors[name].file.name != file:
            raise SpecError(
                f"{index}: weight_map.{name}",
                got=file,
                expected="the file that holds this tensor",
                fix="index and shards are of different checkpoints",
            )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise _not_safetensors(file, size, "its header does not fit into it")
        try:
            header: Any = json.loads(stream.read(length))
        except (ValueError, RecursionError) as error:
            raise _not_safetensors(file, size, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _not_safetensors(file, size, "its header is no mapping")
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            whole = all(type(number) is int for number in (begin, end, *shape))
            if not whole or not isinstance(dtype, str) or not 0 <= begin <= end:
                raise ValueError
        except (KeyError, TypeError, ValueError) as error:
            raise _not_safetensors(file, size, f"no dtype, shape, offsets of {name}") from error
        if 8 + length + end > size:
            raise _not_safetensors(file, size, f"{name} ends behind its end: cut off")
        tensors[name] = StoredTensor(file, _DTYPES.get(dtype, dtype), shape, end - begin)
    return tensors


def _not_safetensors(file: Path, size: int, why: str) -> SpecError:
    return SpecError(
        f"{file}",
        got=f"{size} bytes, {why}",
        expected="a complete safetensors file",
        fix="download it again (a Git LFS pointer is not the file)",
    )
