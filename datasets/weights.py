"""`WeightSource`: the weights of a model tensor by tensor, trained from a folder or random.

A source hands out one of our tensors at a time (fused, ``[n, k]``, on the host), so that whoever
loads a layer can pack each linear and free it before it asks for the next. Random weights are a
function of (seed, layer, tensor) alone and use integer arithmetic only: each rank creates just its
own layers, and ranks with other instruction sets create the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from safetensors import safe_open

from foreplan.datasets.checkpoint import read_checkpoint
from foreplan.datasets.model import Model
from foreplan.datasets.tensor_names import (
    TensorSource,
    embedding_sources,
    find_prefix,
    head_sources,
    layer_sources,
)
from foreplan.errors import SpecError

#: A decoder layer by its index, or what lies before or behind all of them.
Part = int | Literal["embedding", "head"]

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)

#: ``initializer_range`` of every family in transformers.
INIT_STD = 0.02
#: Standard deviation of the sum of four independent bytes: sqrt(4 * (256^2 - 1) / 12).
_FOUR_BYTES_STD = 147.8005
#: Elements made at a time; bounds the scratch memory to a few MiB.
_CHUNK = 1 << 20


class WeightSource(Protocol):
    """Weights by (part, name); names and shapes are those of `tensor_names`."""

    model: Model

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        ...

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor: contiguous, on the host, in the dtype it is stored in.

        The caller may keep it but not write to it.
        """
        ...


def open_weights(model: Model, *, seed: int = 0) -> WeightSource:
    """The trained weights of a model that has some, else random ones of ``seed``.

    Raises:
        SpecError: the folder no longer holds what ``load_model`` found there.
    """
    return FolderWeights(model) if model.weights == "trained" else RandomWeights(model, seed=seed)


class FolderWeights:
    """Weights of a Hugging Face folder, read through memory maps.

    Args:
        model: with ``weights == "trained"``.

    Use it as a context manager, or `close` it, to let go of the files.

    Raises:
        SpecError: the folder holds no safetensors, or not those of this model.
    """

    def __init__(self, model: Model) -> None:
        checkpoint = read_checkpoint(Path(model.path)) if model.path is not None else None
        if checkpoint is None:
            raise SpecError(
                f"model {model.name}", got=model.path, expected="a folder with safetensors"
            )
        self.model = model
        self._checkpoint = checkpoint
        self._prefix = find_prefix(model, checkpoint)
        self._open: dict[Path, Any] = {}

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        return tuple(_sources(self.model, part, self._prefix))

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor in the dtype it is stored in, fused and transposed to ``[n, k]``."""
        source = _sources(self.model, part, self._prefix)[name]
        pieces = [self._stored(source, index) for index in range(len(source.names))]
        fused = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return fused.contiguous()

    def close(self) -> None:
        """Let go of the files; the next `tensor` opens them again."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stored(self, source: TensorSource, index: int) -> torch.Tensor:
        name = source.names[index]
        file = self._checkpoint.tensor(name).file
        handle = self._open.get(file)
        if handle is None:
            handle = self._open[file] = safe_open(file, framework="pt", device="cpu")
        tensor: torch.Tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != source.stored_shape(index):
            raise SpecError(
                f"{file}: {name}.shape",
                got=list(tensor.shape),
                expected=f"{list(source.stored_shape(index))}",
            )
        return tensor.t() if source.transposed else tensor


class RandomWeights:
    """Random weights, scaled like transformers' initialisation.

    Linears and embeddings are bell-shaped with standard deviation 0.02, norms scale by 1, biases
    are 0. A tied head is the embedding's own matrix.

    Args:
        model: what the weights are for.
        seed: any integer; the same seed means the same weights everywhere.
        dtype: dtype to hand tensors out in; the model's own if ``None``.
    """

    def __init__(self, model: Model, *, seed: int = 0, dtype: str | None = None) -> None:
        self.model = model
        self.seed = seed
        self._dtype = TORCH_DTYPES[dtype or model.dtype]

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        return tuple(_sources(self.model, part, None))

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor, made anew at each call."""
        source = _sources(self.model, part, None)[name]
        if name.endswith(".bias"):
            return torch.zeros(source.shape, dtype=self._dtype)
        if len(source.shape) == 1:
            return torch.ones(source.shape, dtype=self._dtype)
        if name == "head.weight" and self.model.tied:
            part, name = "embedding", "embed.weight"
        return bell_shaped(f"{self.seed}/{part}/{name}", source.shape, self._dtype)


def _sources(model: Model, part: Part, prefix: str | None) -> dict[str, TensorSource]:
    if part == "embedding":
        return embedding_sources(model, prefix)
    if part == "head":
        return head_sources(model, prefix)
    return layer_sources(model, part, prefix)


def bell_shaped(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of sums of four bytes (Irwin-Hall), centred, scaled in fp32, and rounded.

    torch's own normal generator goes through ``log`` and ``cos``, whose last bit depends on the
    instruction set; numpy guarantees a bit generator's raw stream, and sums of bytes are exact.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    stream = np.random.SFC64(int.from_bytes(digest, "little"))
    count = int(np.prod(shape))
    values = torch.empty(count, dtype=dtype)
    scale = np.float32(INIT_STD / _FOUR_BYTES_STD)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        raw = stream.random_raw(-(-4 * size // 8)).astype("<u8", copy=False)
        planes = raw.view(np.uint8)[: 4 * size].reshape(4, size)
        total = np.add(planes[0], planes[1], dtype=np.int16)
        total += planes[2]
        total += planes[3]
        total -= 510  # four times the mean byte, 127.5
        values[start : start + size] = torch.from_numpy(total * scale)
    return values.view(shape)
