"""Format ``helix``: times of one fp16 decoder layer (Thesys-lab/Helix-ASPLOS25, Apache-2.0).

Derived Parquet: ``model, device, phase, tokens, layer_ms``. Upstream CSV
(``simulator/model_manager/MODEL/DEVICE/{decode_bs2time,prompt_bs2time}.csv``): two columns without
a header, tokens (decode: batch size) and ms; the first row is ``0,0``. Model, device and phase are
then taken from the path. ``t4x2`` is two T4 with tensor parallelism: the device stays ``t4x2`` in
the table and its figures are those of ``t4``, with ``shards`` = 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.importers._columns import Columns
from foreplan.datasets.sweeps.operator_table import UNKNOWN, OperatorTable, operator_table, texts
from foreplan.errors import SpecError


class _Shape(NamedTuple):
    hidden: int
    intermediate: int
    heads: int


#: Layer shapes, from the models' published ``config.json``.
_SHAPES = {"llama1_30b": _Shape(6656, 17920, 52), "llama2_70b": _Shape(8192, 28672, 64)}

#: What a table calls it that computed the rows.
LIBRARY = "helix"

#: Cached positions behind a decode measurement; Helix does not say. Assumed; batches of more than
#: some 50 requests feel it (docs/results/serving_simulated.md).
_DECODE_CONTEXT = 512.0

#: What a layer computes: a token of each request, or prompts.
_PHASES = ("decode", "prompt")

#: Helix says ``a100`` and ``v100``; its paper says which.
_DEVICES = {"a100": "a100_sxm_40gb", "v100": "v100_sxm_16gb"}


def convert(columns: Columns) -> OperatorTable:
    """Turn Helix's columns into a table.

    Raises:
        SpecError: neither form, a path that does not say model, device and phase, another phase,
            or a row without a device.
    """
    if columns.has("c0", "c1"):
        model, device, phase = _from_path(columns)
        tokens, latency = columns.numbers("c0"), columns.numbers("c1") / 1e3
        keep = (tokens > 0) & (latency > 0)  # the leading 0,0
        if not keep.any():
            raise SpecError(columns.where, got="no positive time", expected="tokens,ms rows")
        names = [np.full(len(tokens), value, dtype=object) for value in (model, device, phase)]
    else:
        names = [
            columns.texts("model"), columns.devices("device"), columns.words("phase", _PHASES),
        ]  # fmt: skip
        tokens, latency = columns.sizes("tokens"), columns.milliseconds("layer_ms")
        keep = np.ones(len(tokens), dtype=bool)
    model_column, device_column, phase_column = (column[keep] for column in names)
    shapes = [_SHAPES.get(name, _Shape(0, 0, 0)) for name in model_column]
    decode = phase_column == "decode"
    return operator_table(
        op=phase_column,
        kind=texts("decoder_layer" if shape.hidden else UNKNOWN for shape in shapes),
        dtype=texts(["float16"] * len(shapes)),
        library=texts([LIBRARY] * len(shapes)),
        device=device_column,
        dims={
            "tokens": tokens[keep],
            "context": np.where(decode, _DECODE_CONTEXT, 0.0),
            "hidden": np.array([shape.hidden for shape in shapes], dtype=float),
            "intermediate": np.array([shape.intermediate for shape in shapes], dtype=float),
            "heads": np.array([shape.heads for shape in shapes], dtype=float),
            "shards": np.array([_split(name)[1] for name in device_column], dtype=float),
        },
        latency_s=latency[keep],
        source_row=np.flatnonzero(keep),
        devices=figures(device_column),
    )


def figures(names: Iterable[str]) -> dict[str, Device]:
    """What is known of Helix's devices, by its own names for them."""
    found = {}
    for device in set(names):
        name = _split(device)[0]
        name = _DEVICES.get(name, name)
        if device_zoo.is_known(name):
            found[device] = device_zoo.device(name)
    return found


def _split(device: str) -> tuple[str, int]:
    """``t4x2`` is (``t4``, 2)."""
    found = re.fullmatch(r"(.+)x([0-9]{1,3})", device)
    return (found[1], int(found[2])) if found else (device, 1)


def _from_path(columns: Columns) -> tuple[str, str, str]:
    parts = PurePath(columns.where).parts
    found = re.fullmatch(rf"({'|'.join(_PHASES)})_bs2time.*", parts[-1])
    if found is None or len(parts) < 3:
        raise SpecError(
            columns.where,
            got=parts[-1],
            expected="MODEL/DEVICE/decode_bs2time.csv or prompt_bs2time.csv",
        )
    return parts[-3], columns.device or parts[-2], found[1]
