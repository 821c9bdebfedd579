"""The environment that makes a process a device: instruction set, threads, cores, memory.

Libraries read these settings when they load, so `worker_environment` must be in place before a
process imports torch, and `confine` comes first in a worker. The measuring worker and the
runtime's ranks both start from here: what was measured is what runs.

Free of torch.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Mapping, Sequence

from foreplan.datasets.device_name import DeviceName
from foreplan.errors import SpecError

#: What oneDNN, ATen and MKL are told for each instruction set. `avx512` is the plain set of
#: Skylake: no VNNI, no bf16.
_ISA_SETTINGS: Mapping[str, tuple[str, str, str]] = {
    "sse41": ("SSE41", "default", "SSE4_2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
}
_ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: Hardware queues of a GPU (the driver's own number is 8, at most 32): streams beyond it share one,
#: and what is queued behind a receive that still waits for its message would wait with it.
_CONNECTIONS = "32"
#: Of NCCL inside recorded graphs: none beside others of its communicator, which would give graphs
#: branches, and no registering of the memory that each graph happens to use.
_GRAPHS = {"NCCL_GRAPH_MIXING_SUPPORT": "0", "NCCL_GRAPH_REGISTER": "0"}
#: Old spelling of oneDNN's variable, which would win over ours.
_STALE = ("DNNL_MAX_CPU_ISA",)


def worker_environment(
    device: DeviceName, *, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a process that is to be ``device``.

    Args:
        device: a ``cpu`` or ``cuda`` device.
        base: environment to start from; the caller's own by default. Settings of an instruction
            set that it holds are removed where the device asks for none.

    Raises:
        SpecError: a zoo device, which no process can be.
    """
    _refuse_zoo(device)
    found = dict(os.environ if base is None else base)
    for name in (*_ISA_VARIABLES, *_STALE):
        found.pop(name, None)
    if device.isa is not None and device.isa in _ISA_SETTINGS:
        found.update(zip(_ISA_VARIABLES, _ISA_SETTINGS[device.isa], strict=True))
    if device.kind == "cpu":
        found.update(dict.fromkeys(_THREAD_VARIABLES, str(thread_count(device))))
    if device.kind == "cuda":
        found = {"CUDA_DEVICE_MAX_CONNECTIONS": _CONNECTIONS, **_GRAPHS, **found}
    return found


def thread_count(device: DeviceName) -> int:
    """Threads of a CPU device: as named, else as many as this process has cores."""
    return device.threads or len(os.sched_getaffinity(0))


def default_cores(device: DeviceName) -> tuple[int, ...]:
    """Cores a device takes where none were asked for: the first of this process's own.

    Raises:
        SpecError: more threads than this process has cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if device.kind != "cpu" or device.threads is None:
        return tuple(cores)
    if device.threads > len(cores):
        raise SpecError(
            "device", got=str(device), expected=f"at most the {len(cores)} threads of this process"
        )
    return tuple(cores[: device.threads])


def confine(cores: Sequence[int], memory_bytes: int | None = None) -> None:
    """Hold this process to cores and to an amount of memory. Call before torch is imported.

    The memory cap is on data (heap and anonymous maps): beyond it allocations fail, as they do on
    a device that is full. A cap on address space would count libraries and reservations too.

    Args:
        cores: cores to run on; empty leaves them as they are.
        memory_bytes: cap, or ``None`` for none.

    Raises:
        SpecError: a core that this process may not use.
    """
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            mine = sorted(os.sched_getaffinity(0))
            raise SpecError("cores", got=list(cores), expected=f"some of {mine}") from error
    if memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))


def end_with_parent(parent: int) -> None:
    """End this process within a second after its parent, also while a kernel runs.

    Args:
        parent: the parent's process id.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _refuse_zoo(device: DeviceName) -> None:
    if device.kind == "zoo":
        raise SpecError(
            "device", got=str(device), expected="a device of this machine, such as cpu or cuda:0"
        )
