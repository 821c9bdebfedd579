"""The device zoo: published figures of GPUs and CPUs, from ``zoo/devices.yaml``.

In the file every figure is a pair ``[number in SI units, key of its source]``, so no number can
be added without saying where it is from. One device has many names (a driver's, a vendor's, a
data set's): letters' case, spaces, dashes and underscores do not matter, nor do vendor words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from foreplan.datasets.device import SCALAR_FIGURES, Device
from foreplan.datasets.specs import StrictModel, load_document, nearest_few, validate
from foreplan.errors import SpecError

_PATH = Path(__file__).with_name("zoo") / "devices.yaml"

_NOISE = re.compile(
    r"\((?:r|tm)\)|\bcpu\b(?:\s*@.*)?|\b\d+-core processor\b|\bprocessor\b"  # /proc/cpuinfo
    r"|\b(?:nvidia|tesla|geforce|quadro|amd|instinct|intel|arc|aws|nv)\b"
)

#: Letters from which on a name may also be looked for inside others (assumed).
_TELLING = 3
_Figure = Annotated[tuple[float, str], Field(strict=False)]


class _Entry(StrictModel):
    """One device as the file has it."""

    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()
    chip: str
    vendor: str
    kind: str
    architecture: str | None = None
    compute_capability: str | None = None
    isa: Annotated[tuple[str, ...], Field(strict=False)] = ()
    slice: str | None = None
    notes: str | None = None
    peak_flops: Mapping[str, _Figure] = Field(default_factory=dict)
    memory_bytes: _Figure | None = None
    memory_bandwidth: _Figure | None = None
    l2_bytes: _Figure | None = None
    l3_bytes: _Figure | None = None
    units: _Figure | None = None
    clock_hz: _Figure | None = None
    base_clock_hz: _Figure | None = None
    launch_overhead_s: _Figure | None = None
    shared_memory_bytes_per_unit: _Figure | None = None
    register_bytes_per_unit: _Figure | None = None
    max_threads_per_unit: _Figure | None = None
    tdp_w: _Figure | None = None
    host_link_bandwidth: _Figure | None = None
    peer_link_bandwidth: _Figure | None = None


class _Document(StrictModel):
    sources: Mapping[str, str]
    devices: Mapping[str, _Entry]


class _Zoo(NamedTuple):
    devices: Mapping[str, Device]
    by_key: Mapping[str, str]


def device(name: str, where: str = "device") -> Device:
    """Return a device of the zoo.

    Args:
        name: canonical or any other known name; see `canonical`.
        where: file and field the name stands in, for the error.

    Raises:
        SpecError: no such device; the error gives the nearest names.
    """
    return _zoo().devices[canonical(name, where)]


def names() -> tuple[str, ...]:
    """Return the canonical names, in the order of the file (vendor, then age)."""
    return tuple(_zoo().devices)


def canonical(name: str, where: str = "device", beside: Sequence[str] = ()) -> str:
    """Return the canonical name of a device: ``NVIDIA H100 80GB HBM3`` is ``h100_sxm``.

    Args:
        name: any known name; case, spaces, dashes, underscores and vendor words do not matter.
        where: file and field the name stands in, for the error.
        beside: words that may stand there too, for the error.

    Raises:
        SpecError: no such device, or a name that several have (``a100``); the error names the
            nearest.
    """
    zoo = _zoo()
    if name in zoo.devices:
        return name
    key = _key(name)
    if key in zoo.by_key:
        return zoo.by_key[key]
    within = sorted({zoo.by_key[k] for k in zoo.by_key if key and k.startswith(key)})
    if not within and len(key) >= _TELLING:  # Quadro, Tesla, 4090
        within = sorted({zoo.by_key[k] for k in zoo.by_key if key in k})
    known = {**zoo.by_key, **{word: word for word in beside}}
    head = _key(name.partition(":")[0])  # without a processor's options
    # Several names of one device may be the nearest.
    like = list(dict.fromkeys(known[k] for k in nearest_few(head, known, 6)))[:3]
    if len(within) == 1:  # perhaps another device, of which it is the beginning: H20, H200
        fix = f"did you mean {within[0]!r}?"
    elif within:
        fix = "say which: " + ", ".join(within[:6])
    elif like:
        fix = f"did you mean {' or '.join(map(repr, like))}?"
    else:
        fix = "`foreplan devices` lists them"
    raise SpecError(where, got=name, expected="a device of the zoo", fix=fix)


def is_known(name: str) -> bool:
    """Say whether `canonical` would find the name."""
    return _key(name) in _zoo().by_key


def own_figures(files: Iterable[Path]) -> dict[str, Device]:
    """Read figures of devices that the zoo lacks, by name (``--device-file``).

    Raises:
        SpecError: a file that cannot be read, or a name that the zoo or another of the files has:
            results would stand under a name that readers know by other figures.
    """
    found: dict[str, Device] = {}
    for path in files:
        device = Device.load(path)
        if is_known(device.name) or device.name in found:
            raise SpecError(
                f"{path}: name", got=device.name,
                expected="a name of its own: the zoo, or another --device-file, has this one",
            )  # fmt: skip
        found[device.name] = device
    return found


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9+.]", "", _NOISE.sub(" ", name.lower().replace("_", " ")))


@functools.cache
def _zoo() -> _Zoo:
    where = f"zoo/{_PATH.name}"
    document = validate(_Document, load_document(_PATH), where)
    devices: dict[str, Device] = {}
    by_key: dict[str, str] = {}
    for name, entry in document.devices.items():
        devices[name] = _device(name, entry, document.sources, f"{where}: devices.{name}")
        for alias in (name, *entry.aliases):
            if by_key.setdefault(_key(alias), name) != name:
                raise SpecError(
                    f"{where}: devices.{name}.aliases",
                    got=alias,
                    expected=f"names apart from those of {by_key[_key(alias)]}",
                )
    return _Zoo(devices, by_key)


def _device(name: str, entry: _Entry, sources: Mapping[str, str], where: str) -> Device:
    fields: dict[str, object] = entry.model_dump(
        exclude={"aliases", "peak_flops", *SCALAR_FIGURES}, exclude_none=True
    )
    figures: dict[str, tuple[float, str]] = {
        f"peak_flops.{peak}": figure for peak, figure in entry.peak_flops.items()
    }
    for figure_name in SCALAR_FIGURES:
        if (figure := getattr(entry, figure_name)) is not None:
            figures[figure_name] = figure
            value = figure[0]
            fields[figure_name] = int(value) if value.is_integer() else value
    fields["peak_flops"] = {peak: figure[0] for peak, figure in entry.peak_flops.items()}
    cited: dict[str, str] = {}
    for figure_name, (_, key) in figures.items():
        if key not in sources:
            raise SpecError(
                f"{where}.{figure_name}", got=key, expected="a key of the file's sources"
            )
        cited[figure_name] = sources[key]
    return validate(Device, {"name": name, **fields, "sources": cited}, where)
