"""`host_device`: this host's processor as a `Device`, by figures that are read off it in seconds.

Its identity is what the system says of it. Bandwidths, peaks and the time of a call are those that
``foreplan profile`` begins with, timed in a process that is the device. No operator is timed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foreplan.datasets.device import Device
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.measuring import Worker
from foreplan.datasets.timing.worker_environment import thread_count
from foreplan.errors import SpecError

#: Of a worker's identity, what a device keeps.
_KEPT = ("chip", "vendor", "kind", "architecture", "compute_capability", "isa", "slice",
         "memory_bytes", "units", "l2_bytes")  # fmt: skip
#: Extensions of matrices, by the dtype whose products they compute.
_MATRIX = {"bf16": "amx_bf16", "int8": "amx_int8"}


def is_host_processor(name: str) -> bool:
    """Whether a word names this host's processor: ``cpu``, ``cpu:threads=1``."""
    return re.match(r"\s*cpu\s*(:|$)", name, re.IGNORECASE) is not None


def host_device(name: str, where: str = "device") -> Device:
    """Read this host's processor; about 3 s, in a process of its own.

    Args:
        name: which `is_host_processor`.
        where: what to call it in an error.

    Raises:
        SpecError: no such name, more threads than this process may use, or an instruction set that
            the processor lacks.
        MissingDataError: the process cannot start.
    """
    asked = DeviceName.parse(name, where)
    most = thread_count(DeviceName("cpu"))
    if thread_count(asked) > most:
        raise SpecError(where, got=name, expected=f"at most the {most} threads of this process")
    with Worker(asked) as worker:
        known = worker.identity["isa"]
        if asked.isa not in (None, "native", *known):
            raise SpecError(
                where, got=name, expected=f"an instruction set of this host: {', '.join(known)}"
            )
        return measured_device(worker, worker.figures())


def measured_device(worker: Worker, figures: Mapping[str, float]) -> Device:
    """A worker's device.

    Args:
        worker: which runs on it.
        figures: that it measured, by its names, in SI units.
    """
    identity = worker.identity
    unit = {"cuda": "matrix", "rocm": "matrix"}.get(identity["kind"], "vector")
    peaks: dict[str, float] = {}
    reread = []
    for name, value in figures.items():
        head, _, dtype = name.partition(".")
        if head == "reread_bandwidth":
            reread.append([int(dtype), value])
        if head == "peak_flops":
            has_amx = _MATRIX.get(dtype) in identity["isa"]
            plain_fp32 = dtype == "fp32" and unit == "matrix"  # tensor cores do no plain fp32
            which = "vector" if plain_fp32 else "matrix" if has_amx else unit
            peaks[f"{dtype}/{which}"] = value
    described: dict[str, Any] = {f: identity[f] for f in _KEPT if identity.get(f) is not None}
    if identity["kind"] == "cpu":
        described["l3_bytes"] = identity["last_level_cache_bytes"]
    if reread:
        described["reread_bandwidth"] = sorted(reread)
    if worker.memory_bytes is not None:
        described["memory_bytes"] = min(worker.memory_bytes, described["memory_bytes"])
    measured = [f"peak_flops.{name}" for name in peaks]
    measured += ["memory_bandwidth", "launch_overhead_s"]
    measured += ["reread_bandwidth"] if reread else []
    device = {
        "name": str(worker.device),
        **described,
        "notes": identity["board"],
        "peak_flops": peaks,
        "memory_bandwidth": figures["memory_bandwidth"],
        "launch_overhead_s": figures["launch_overhead_s"],
        "sources": dict.fromkeys(measured, "measured"),
    }
    return validate(Device, device, "measured device")
