"""Time operators of a processor by how long ago their weights were used.

``python -m foreplan.datasets.sweeps.reuse_sweep -o FILE.json.xz``, two minutes on one core (run it
under
``taskset -c CORE`` with ``OMP_NUM_THREADS=1``). Drawn linears, convolutions and attentions in fp32,
as the inference of a network calls them, each called behind 0 to 4 last-level caches of other data
(`DISTANCES`): a pass over the data takes the operator's weight, code and results out of the caches
as far as it is long, then its activations are written anew, as the operator before it would have,
and one call is timed. At each distance that is done several times in turn, as in passes that are
run again and again; then comes the next one. `cost_models.rates.reuse_fit` fits to the rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from foreplan.datasets.device import Device
from foreplan.datasets.operators import OPERATORS
from foreplan.datasets.program import Program, Variant, program
from foreplan.datasets.specs import StrictModel, rows_document, validate
from foreplan.datasets.storage import write_atomically
from foreplan.datasets.sweeps.processor_sweep import LARGE, SMALL, convolutions
from foreplan.errors import SpecError, told

SCHEMA: Literal["foreplan.reuse/1"] = "foreplan.reuse/1"
#: Bytes between two uses over the last-level cache; twice it is what profiles call cold.
DISTANCES = (0.0625, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
#: Of each kind so many are drawn, with so many FLOP at most.
_LINEARS, _CONVOLUTIONS, _ATTENTIONS = 64, 48, 16
_MOST_FLOPS = 4e8
#: An operator is timed at all distances in turn for so long, and at least and most so often.
_SECONDS, _FEWEST, _MOST = 1.2, 4, 12
#: Calls at one distance before the next one, of which the first do not count.
_CALLS, _SETTLING = 5, 2

Positive = Annotated[float, Field(gt=0)]


class ReuseRow(StrictModel):
    """One operator at all distances."""

    op: str
    dims: Mapping[str, Annotated[int, Field(ge=1)]]
    variant: str
    median_s: Annotated[tuple[Positive, ...], Field(strict=False)]
    """Median time of a call at each of the document's distances."""

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.op not in OPERATORS or set(self.dims) != set(OPERATORS[self.op].dims):
            raise ValueError("an operator with its dimensions")
        return self

    def program(self) -> Program:
        """What was timed."""
        return program(self.op, Variant.parse(self.variant), **self.dims)


class ReuseTimes(StrictModel):
    """What the sweep wrote."""

    schema_: Literal["foreplan.reuse/1"] = Field(default=SCHEMA, alias="schema")
    device: Device
    """Figures taken before the rows."""
    distances: Annotated[tuple[Positive, ...], Field(strict=False)]
    """Bytes between two uses over the device's last-level cache."""
    software: Mapping[str, str]
    rows: Annotated[tuple[ReuseRow, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _all_distances(self) -> Self:
        if any(len(row.median_s) != len(self.distances) for row in self.rows):
            raise ValueError("a time at each distance")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a compressed document.

        Raises:
            SpecError: it cannot be read, or is no such document.
        """
        try:
            document = json.loads(lzma.decompress(Path(path).read_bytes()))
        except (OSError, lzma.LZMAError, ValueError) as error:
            raise SpecError(
                os.fspath(path), got=str(error), expected="a compressed document"
            ) from error
        return validate(cls, document, os.fspath(path))


class _Case(NamedTuple):
    """An operator ready to be timed."""

    item: Program
    call: Callable[[], object]
    write: Callable[[], object]
    """Writes its activations, as the operator before does."""


def drawn(seed: int = 0) -> list[Program]:
    """Linears, convolutions (half of them of small images) and attentions of random sizes."""
    rng = np.random.default_rng(seed)

    def size(least: int, most: int, step: int) -> int:
        return max(
            step, round(math.exp(rng.uniform(math.log(least), math.log(most))) / step) * step
        )

    found: list[Program] = []
    plain = Variant("fp32", "fp32", "torch.linear")
    while len(found) < _LINEARS:
        sizes = {"rows": size(4, 512, 1), "n": size(64, 2560, 16), "k": size(64, 2560, 16)}
        item = program("linear", plain, **sizes)
        found += [item] if item.flops <= _MOST_FLOPS else []
    for images in (SMALL, LARGE):
        every = convolutions(2 * _CONVOLUTIONS, seed=seed + 7, images=images)
        fit = [p for p in every if p.op == "conv2d_forward" and p.variant.compute == "fp32"]
        found += [p for p in fit if p.flops <= _MOST_FLOPS][: _CONVOLUTIONS // 2]
    for k in range(_ATTENTIONS):
        kernel = ("torch.sdpa", "torch.sdpa_causal")[k % 2]
        tokens = size(16, 256, 1)
        found.append(program(
            "attention_forward", Variant("fp32", "fp32", kernel), batch=size(1, 8, 1),
            queries=tokens, keys=tokens, heads=size(1, 16, 1), head_dim=size(16, 128, 16),
        ))  # fmt: skip
    return found


def _case(item: Program) -> _Case:
    """Tensors and call of a program. Imports torch."""
    import torch
    from torch.nn import functional as F

    d = item.dims
    if item.op == "linear":
        x, w = torch.randn(d["rows"], d["k"]), torch.randn(d["n"], d["k"])
        return _Case(item, lambda: F.linear(x, w), _writer(x))
    if item.op == "conv2d_forward":
        x = torch.randn(d["batch"], d["channels"], d["height"], d["width"])
        w = torch.randn(
            d["filters"], d["channels"] // d["groups"], d["kernel_height"], d["kernel_width"]
        )
        padding = tuple(
            -(-max((d[f"out_{way}"] - 1) * d["stride"] + d[f"kernel_{way}"] - d[way], 0) // 2)
            for way in ("height", "width")
        )
        stride, groups = d["stride"], d["groups"]
        return _Case(item, lambda: F.conv2d(x, w, None, stride, padding, 1, groups), _writer(x))
    shape = (d["batch"], d["keys"], d["heads"], d["head_dim"])
    q, k, v = (torch.randn(shape).transpose(1, 2) for _ in "qkv")
    causal = item.variant.kernel.endswith("_causal")
    return _Case(
        item, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), _writer(q, k, v)
    )


def _writer(*tensors: Any) -> Callable[[], object]:
    held = [tensor.clone() for tensor in tensors]

    def write() -> None:
        for tensor, values in zip(tensors, held, strict=True):
            tensor.copy_(values)

    return write


def timed(items: list[Program], cache_bytes: int, seconds: float = _SECONDS) -> Iterator[ReuseRow]:
    """Time programs at all of `DISTANCES`.

    Args:
        items: linears, ``conv2d_forward`` and ``attention_forward`` in fp32.
        cache_bytes: of the last-level cache.
        seconds: for each of them.
    """
    import torch

    # Only read, as the weights of a pass are.
    other = torch.ones(round(max(DISTANCES) * cache_bytes) // 4)
    parts = [other[: round(distance * cache_bytes) // 4] for distance in DISTANCES]
    with torch.inference_mode():
        for item in items:
            case = _case(item)
            case.call()
            times: list[list[float]] = [[] for _ in DISTANCES]
            begun = time.perf_counter()
            gc.disable()
            for turn in range(_MOST):
                if turn >= _FEWEST and time.perf_counter() - begun > seconds:
                    break
                # Downwards: a cache takes a while to keep what comes back after all was lost.
                for part, found in reversed(list(zip(parts, times, strict=True))):
                    for at in range(_CALLS):
                        part.sum()
                        case.write()
                        started = time.process_time()
                        case.call()
                        ended = time.process_time()
                        if at >= _SETTLING:
                            found.append(ended - started)
            gc.enable()
            yield ReuseRow(
                op=item.op, dims=item.dims, variant=str(item.variant),
                median_s=tuple(round(statistics.median(found), 9) for found in times),
            )  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.output.suffixes[-2:] != [".json", ".xz"]:
        raise SpecError("--output", got=asked.output, expected="a name that ends in .json.xz")
    import tempfile

    import torch

    from foreplan.datasets.device_name import DeviceName
    from foreplan.datasets.timing.profiling import measure_profile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_profile(DeviceName.parse("cpu:threads=1"), [], Path(folder) / "cpu.json")
    cache = figures.device.l3_bytes
    assert cache is not None, "a processor's profile says it"
    found = ReuseTimes(
        device=figures.device, distances=DISTANCES, software=figures.software,
        rows=tuple(timed(drawn(asked.seed), cache)),
    )  # fmt: skip
    write_atomically(asked.output, lzma.compress(rows_document(found, "rows").encode(), preset=9))
    print(f"{asked.output}: {len(found.rows)} operators")


if __name__ == "__main__":
    with told():
        main()
