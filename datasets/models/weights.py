"""`WeightSource`: the weights of a model tensor by tensor, trained from a folder or random.

A source hands out one of our tensors at a time (fused, ``[n, k]``), so that whoever loads a layer
can pack each linear and free it before it asks for the next. Random weights are a function of
(seed, layer, tensor) alone and use integer arithmetic only: each rank creates just its own layers,
a GPU its own on itself, and ranks of every kind create the same bits.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from foreplan.datasets.models.block_floats import matrix
from foreplan.datasets.models.checkpoint import read_checkpoint
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import (
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
#: Elements made at a time; scratch memory is 16 bytes of each.
_CHUNK, _GPU_CHUNK = 1 << 17, 1 << 21


class WeightSource(Protocol):
    """Weights by (part, name); names and shapes are those of `tensor_names`."""

    model: Model

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        ...

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor: contiguous, in the dtype it is stored in, or fp32 where it is changed.

        The caller may keep it but not write to it.
        """
        ...

    def shape(self, part: Part, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def slices(self, part: Part, name: str, rows: int) -> Iterator[torch.Tensor]:
        """The tensor in slices of up to ``rows`` along its first dimension, in order.

        What can be made slice by slice is, so that a device never holds it whole.
        """
        ...


def open_weights(
    model: Model, *, seed: int = 0, device: str | torch.device = "cpu"
) -> WeightSource:
    """The trained weights of a model that has some, else random ones of ``seed``.

    Args:
        model: says which.
        seed: of random weights.
        device: where random weights are made; trained ones come from files to the host.

    Raises:
        SpecError: the folder no longer holds what ``load_model`` found there.
    """
    if model.weights == "trained":
        return FolderWeights(model)
    return RandomWeights(model, seed=seed, device=device)


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
                f"model {model.name}", got=model.path, expected="a folder with safetensors",
                fix=f"a relative path starts from the current folder, {Path.cwd()}",
            )  # fmt: skip
        self.model = model
        self._checkpoint = checkpoint
        self._prefix = find_prefix(model, checkpoint)
        self._open: dict[Path, Any] = {}

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        return tuple(_sources(self.model, part, self._prefix))

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor, fused, transposed to ``[n, k]`` and changed as the runtime takes it."""
        source = _sources(self.model, part, self._prefix)[name]
        return source.change(self.stored(part, name)).contiguous()

    def stored(self, part: Part, name: str) -> torch.Tensor:
        """The same as transformers holds it, unchanged; in the dtype it is stored in."""
        source = _sources(self.model, part, self._prefix)[name]
        pieces = [self._stored(source, index) for index in range(len(source.names))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def shape(self, part: Part, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(_sources(self.model, part, self._prefix)[name].shape)

    def slices(self, part: Part, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Slices of the tensor, which is read at once and changed slice by slice."""
        change = _sources(self.model, part, self._prefix)[name].change
        apart = change.row_wise
        whole = self.stored(part, name) if apart else self.tensor(part, name)
        for start in range(0, len(whole), rows):
            piece = whole[start : start + rows]
            yield (change(piece) if apart else piece).contiguous()

    def close(self) -> None:
        """Let go of the files; the next `tensor` opens them again."""
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _stored(self, source: TensorSource, index: int) -> torch.Tensor:
        name, place = source.names[index], source.place
        blocks = source.blocks(index, self._checkpoint)
        if blocks is not None and place is not None:
            return matrix(*(self._read(*each, place[0]) for each in blocks.shapes.items()))
        at = None if place is None else place[0]
        tensor = self._read(name, source.stored_shape(index), at)
        return tensor.t() if source.transposed else tensor

    def _read(self, name: str, shape: tuple[int, ...], at: int | None) -> torch.Tensor:
        """A stored tensor, or one of those that it stacks."""
        file = self._checkpoint.tensor(name).file
        try:
            handle = self._open.get(file)
            if handle is None:
                handle = self._open[file] = safe_open(file, framework="pt", device="cpu")
            part = handle.get_slice(name)
            found = list(part.get_shape())
            if tuple(found) == shape:
                tensor: torch.Tensor = handle.get_tensor(name) if at is None else part[at]
                return tensor
        except (OSError, SafetensorError) as error:
            raise SpecError(
                f"{file}: {name}", got=str(error), expected="a tensor of a complete file",
                fix="download it again",
            ) from error  # fmt: skip
        raise SpecError(f"{file}: {name}.shape", got=found, expected=f"{list(shape)}")


class RandomWeights:
    """Random weights, scaled like transformers' initialisation.

    Linears and embeddings are bell-shaped with standard deviation 0.02, norms scale by 1, biases
    are 0. A tied head is the embedding's own matrix. They are what a checkpoint's weights become
    when they are loaded: a family's factors are not applied to them.

    Args:
        model: what the weights are for.
        seed: any integer; the same seed means the same weights everywhere.
        dtype: dtype to hand tensors out in; the model's own if ``None``.
        device: torch device to make them on.
    """

    def __init__(
        self,
        model: Model,
        *,
        seed: int = 0,
        dtype: str | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.model = model
        self.seed = seed
        self._device = device
        self._dtype = TORCH_DTYPES[dtype or model.dtype]

    def names(self, part: Part) -> tuple[str, ...]:
        """Our names of the tensors of ``part``."""
        return tuple(_sources(self.model, part, None))

    def shape(self, part: Part, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(_sources(self.model, part, None)[name].shape)

    def tensor(self, part: Part, name: str) -> torch.Tensor:
        """One tensor, made anew at each call."""
        return next(self.slices(part, name, self.shape(part, name)[0]))

    def slices(self, part: Part, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Slices of the tensor, each made when it is asked for."""
        shape = self.shape(part, name)
        if name == "head.weight" and self.model.tied:
            part, name = "embedding", "embed.weight"
        each = math.prod(shape[1:])
        for start in range(0, shape[0], rows):
            size = (min(rows, shape[0] - start), *shape[1:])
            if name.endswith(".bias"):
                yield torch.zeros(size, dtype=self._dtype, device=self._device)
            elif len(shape) == 1:
                yield torch.ones(size, dtype=self._dtype, device=self._device)
            else:
                key = f"{self.seed}/{part}/{name}"
                yield bell_shaped(key, size, self._dtype, self._device, first=start * each)


@functools.lru_cache(maxsize=4)  # a layer of experts has hundreds of tensors, asked one by one
def _sources(model: Model, part: Part, prefix: str | None) -> dict[str, TensorSource]:
    if part == "embedding":
        return embedding_sources(model, prefix)
    if part == "head":
        return head_sources(model, prefix)
    return layer_sources(model, part, prefix)


def bell_shaped(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    first: int = 0,
) -> torch.Tensor:
    """A tensor of sums of four bytes (Irwin-Hall), centred, scaled in fp32, and rounded.

    The bytes are a hash of key and index. Integer arithmetic is exact, so that every device and
    instruction set makes the same bits, which torch's own normal generators do not; and a GPU makes
    its weights without the host.

    Args:
        key: names the tensor; another key gives other values.
        shape: of the tensor.
        dtype: of the tensor.
        device: torch device to make it on.
        first: index of its first element, where it is a slice of what ``key`` names.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    words = [int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:])]
    count = math.prod(shape)
    values = torch.empty(count, dtype=dtype, device=device)
    chunk = _CHUNK if values.device.type == "cpu" else _GPU_CHUNK
    for start in range(0, count, chunk):
        stop = min(start + chunk, count)
        index = torch.arange(stop - start, dtype=torch.int32, device=device)
        hashed = _hashed(index.add_(_wrapped(first + start)), *words)
        pairs = ((hashed >> 8) & 0x00FF00FF).add_(hashed.bitwise_and_(0x00FF00FF))
        total = (pairs >> 16).add_(pairs.bitwise_and_(0xFFFF)).sub_(510)  # four mean bytes
        values[start:stop] = total.to(torch.float32).mul_(INIT_STD / _FOUR_BYTES_STD)
    return values.view(shape)


def _wrapped(index: int) -> int:
    """The low 32 bits as a signed integer."""
    return (index + (1 << 31)) % (1 << 32) - (1 << 31)


def _hashed(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """32 mixed bits of each int32 and two keys, in place.

    Multipliers and shifts are those of ``lowbias32`` (Wellons, Prospecting for hash functions,
    2018); products wrap around.
    """
    x.bitwise_xor_(first)
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).bitwise_xor_(second)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
