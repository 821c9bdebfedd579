"""Devices of measured programs: what a record's ``device`` and ``chip`` stand for, in figures.

A GPU is looked up in the device zoo by its driver's name. A record of a CPU is of *one thread* held
to an instruction set, of a chip that a virtual machine may hide; such a core is described by theory
(vector width times two fused multiply-adds a cycle) and by assumptions that its ``sources`` name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.errors import SpecError

#: Single-precision lanes of a vector register.
_LANES = {"sse41": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 16, "native": 16}
_CLOCK_HZ = 3.0e9
#: A system often tells the nominal clock alone; no core is known to turn faster than this, so a
#: bound that is made with it holds.
_TURBO_HZ = 5.0e9
#: Most that one core draws from memory, and what it sees of caches; assumed where not known.
_BANDWIDTH, _L2_BYTES, _L3_BYTES = 40e9, 1 << 20, 32 << 20

_OTHERS = "`foreplan devices` lists them; --device-file gives figures of others"


def record_device(name: str, chip: str, clock_hz: float = math.nan) -> Device:
    """The device of a record.

    Args:
        name: ``cuda:0`` or ``cpu:threads=1,isa=avx2``.
        chip: the silicon as the system names it.
        clock_hz: of a CPU core while it measured; NaN where not known.

    Raises:
        SpecError: a GPU that the zoo lacks.
    """
    if not name.startswith("cpu"):
        if not device_zoo.is_known(chip or name):
            raise SpecError(
                "device of the programs", got=chip or name, expected="a device of the zoo",
                fix=f"{_OTHERS}, under this name",
            )  # fmt: skip
        return device_zoo.device(chip or name)
    known = device_zoo.device(chip) if device_zoo.is_known(chip) else None
    return _core(DeviceName.parse(name), chip, clock_hz, known)


def named_device(name: str, known: Mapping[str, Device]) -> Device:
    """The device that a user named.

    Args:
        name: a zoo name, or one of ``known``, or ``cpu:threads=1,isa=avx2`` of an unknown chip.
        known: devices of files and of the model's card, by any name they go by.

    Raises:
        SpecError: no such device.
    """
    if name in known:
        return known[name]
    parsed = DeviceName.parse(name, "--device")
    if parsed.kind == "zoo":
        return device_zoo.device(name)
    if parsed.kind == "cpu":
        return _core(parsed, "unknown CPU", math.nan, None)
    raise SpecError(
        "--device", got=name, expected="the GPU's name in the zoo, as 'h200'",
        fix=_OTHERS,
    )  # fmt: skip


def _core(name: DeviceName, chip: str, clock_hz: float, zoo: Device | None) -> Device:
    """One thread of a CPU."""
    isa = name.isa or "native"
    clock = clock_hz if clock_hz > 0 else float((zoo and zoo.clock_hz) or _CLOCK_HZ)
    peak = 4.0 * _LANES[isa] * max(clock, _TURBO_HZ)
    measured = "measured: clock of the core while programs ran"
    return Device(
        name=f"{chip}/{name}", chip=zoo.chip if zoo else chip,
        vendor=zoo.vendor if zoo else "unknown",
        kind="cpu", isa=() if isa == "native" else (isa,),
        architecture=zoo.architecture if zoo else None,
        slice=f"one thread, {isa} instructions", peak_flops={"fp32/vector": peak},
        memory_bandwidth=int(_BANDWIDTH), l2_bytes=_L2_BYTES, l3_bytes=_L3_BYTES, units=1,
        clock_hz=clock,
        sources={
            "peak_flops.fp32/vector": "theory: two fused multiply-adds of the width a cycle, 5 GHz",
            "clock_hz": measured if clock_hz > 0 else "assumed, or the zoo's",
            "memory_bandwidth": "assumed: most that one core draws",
            "l2_bytes": "assumed", "l3_bytes": "assumed: what one core may fill",
        },
    )  # fmt: skip
