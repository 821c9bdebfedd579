"""`Placement`: what makes a process become one device of a cluster, before torch loads.

A device such as ``cpu:threads=1,isa=avx2`` is a process with an environment and with cores of its
own. Profiling and verification both use this mapping, so that what was measured is what runs.

Instruction sets are held down through three switches, because three libraries look for themselves
(``measured``, measured_facts of 2026-11-20): ``ONEDNN_MAX_CPU_ISA`` for oneDNN,
``ATEN_CPU_CAPABILITY`` for torch's own kernels, ``MKL_ENABLE_INSTRUCTIONS`` for MKL on Intel. They
and the thread counts are read once, when the libraries load: a process that has imported torch can
no longer become another device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from foreplan.datasets.device_name import DeviceName
from foreplan.errors import SpecError

_ISA_SWITCHES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "sse41": {
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        },
        "avx2": {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
        "avx512": {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
        "avx512_bf16": {
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
            "ATEN_CPU_CAPABILITY": "avx512",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    }
)

#: Flags of ``/proc/cpuinfo`` that an instruction set needs.
_ISA_FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "sse41": frozenset({"sse4_1"}),
        "avx2": frozenset({"avx2", "fma"}),
        "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
        "avx512_bf16": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}),
    }
)

_ISA_NAMES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True)
class Placement:
    """How a process becomes a device.

    Attributes:
        device: the device.
        environment: variables to set before torch loads.
        unset: variables to take out, which a user's shell may hold.
        cores: cores the process keeps to; () for whatever it has.
    """

    device: DeviceName
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    unset: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def apply_to(self, environment: Mapping[str, str]) -> dict[str, str]:
        """A copy of a process environment, changed for the device."""
        kept = {key: value for key, value in environment.items() if key not in self.unset}
        return kept | dict(self.environment)

    def pin(self) -> None:
        """Keep the calling process, and every thread it starts from now on, to the cores."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)


def placement(device: DeviceName, cores: Sequence[int] = ()) -> Placement:
    """How a process becomes ``device``; checks nothing about this machine.

    Args:
        device: a CPU worker or a GPU; a zoo name needs no process, so it gives an empty placement.
        cores: cores it may keep to, see `assign_cores`. They also give the thread count of a plain
            ``cpu``; without them that is left to the libraries.
    """
    if device.kind != "cpu":
        return Placement(device, cores=tuple(cores))
    changes = dict(_ISA_SWITCHES.get(device.isa or "native", {}))
    threads = device.threads or len(cores) or None
    if threads is not None:
        changes["OMP_NUM_THREADS"] = changes["MKL_NUM_THREADS"] = str(threads)
    # numpy's pool is not what is measured, and a thread of it would make forking unsafe.
    changes["OPENBLAS_NUM_THREADS"] = "1"
    unset = tuple(name for name in _ISA_NAMES if name not in changes)
    return Placement(device, MappingProxyType(changes), unset, tuple(cores))


def assign_cores(
    devices: Sequence[DeviceName], available: Iterable[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Cores of each device of one host, no core for two of them.

    CPU workers get as many cores as they have threads, in order; a plain ``cpu`` gets all that
    are left. GPUs share what no CPU worker has, or keep to none where nothing is left.

    Args:
        devices: the devices in use at the same time.
        available: core numbers; those this process may use if left out.

    Raises:
        SpecError: the workers have more threads than there are cores.
    """
    free = sorted(os.sched_getaffinity(0) if available is None else available)
    workers = [device for device in devices if device.kind == "cpu"]
    open_ended = [device for device in workers if device.threads is None]
    needed = sum(device.threads or 1 for device in workers)
    if needed > len(free) or len(open_ended) > 1:
        raise SpecError(
            "devices of one host", got=", ".join(str(device) for device in workers),
            expected=f"at most {len(free)} threads in all: this host has {len(free)} cores",
            fix="say threads=1 for each, or run fewer of them",
        )  # fmt: skip
    rest = len(free) - sum(device.threads or 0 for device in workers)
    taken: list[tuple[int, ...] | None] = []
    for device in devices:
        if device.kind != "cpu":
            taken.append(None)
            continue
        count = device.threads or rest
        taken.append(tuple(free[:count]))
        free = free[count:]
    return tuple(tuple(free) if cores is None else cores for cores in taken)


def check_present(device: DeviceName, where: str = "device") -> None:
    """Check that a process of this machine can become ``device``, as far as one can without torch.

    Args:
        device: the device.
        where: what names it, for the error.

    Raises:
        SpecError: a zoo name, an instruction set that the processor lacks, more threads than
            cores, no such GPU.
    """
    if device.kind == "zoo":
        raise SpecError(
            where, got=str(device), expected="a device of this machine",
            fix="a zoo device has published figures only; profile the real one "
            "('foreplan profile') and plan with its cluster.yaml",
        )  # fmt: skip
    if device.kind == "cuda":
        if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
            raise SpecError(where, got=str(device), expected="a machine with an NVIDIA driver")
        return
    cores = len(os.sched_getaffinity(0))
    if (device.threads or 1) > cores:
        raise SpecError(where, got=str(device), expected=f"at most threads={cores} on this host")
    lacking = _ISA_FLAGS.get(device.isa or "native", frozenset()) - _cpu_flags()
    if lacking:
        raise SpecError(
            where, got=str(device),
            expected=f"what this processor has: no {', '.join(sorted(lacking))} here",
        )  # fmt: skip


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
