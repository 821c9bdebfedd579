"""`Seat`: the device a rank's process has become, with its cores, its memory cap and its GPU slice.

The environment of the process was set before torch was loaded (`worker_environment`, shared with
profiling); a seat is what is left to do inside it. Nothing here is undone: a process stays what it
has become.

- CPU: cores of its own, torch's thread count, and ``RLIMIT_DATA`` at what the process holds before
  it loads anything, plus the cap. ``RLIMIT_DATA`` counts private writable memory, which is what
  tensors are made of; ``RLIMIT_AS`` counts address space and does not map to use (measured_facts).
- GPU: ``set_per_process_memory_fraction``, and for ``cuda:0/sms=32`` a green context. A backward
  pass leaves a slice because autograd runs it on a thread of its own, so that thread is switched
  off; a GPU carries one slice at a time.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.timing.host_memory import data_bytes, free_bytes
from foreplan.datasets.timing.worker_environment import confine, thread_count
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: What a run takes beside the ledger's items (records of the run, the allocator's rounding);
#: granted on top of a CPU cap.
ALLOWANCE_BYTES = 32 << 20
#: The same on a GPU, where the cap is on whole segments of torch's allocator: its pages are 20 MiB,
#: started anew for each stream and for the recorded passes (torch, ``kLargeBuffer``).
GPU_ALLOWANCE_BYTES = 256 << 20

#: Flags of ``/proc/cpuinfo`` that an instruction set needs.
_ISA_FLAGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "sse41": frozenset({"sse4_1"}),
        "avx2": frozenset({"avx2", "fma"}),
        "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
        "avx512_bf16": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"}),
    }
)


@dataclass(frozen=True)
class Seat:
    """A process that has become a device.

    Attributes:
        name: the device.
        device: torch's device for its tensors.
        stream: compute stream of a slice, ``None`` where the default stream serves.
        context: the slice's green context, which ends when nobody keeps it.
    """

    name: DeviceName
    device: torch.device
    stream: Any = None
    context: Any = None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Make the device and the slice's stream current."""
        import torch

        if self.device.type == "cpu":
            yield
            return
        with torch.cuda.device(self.device):
            if self.stream is None:
                yield
                return
            with torch.cuda.stream(self.stream):
                yield


# ------------------------------------------------------------------------- before torch is loaded


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
            expected=f"at most {len(free)} threads in all: this process has {len(free)} cores",
            fix="allow it more (taskset, --cpus), or run fewer of them"
            if needed == len(workers) and not open_ended
            else "say threads=1 for each, or run fewer of them",
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
            cores, no GPU driver.
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


def gpu_free_bytes() -> int | None:
    """Free memory of the fullest NVIDIA GPU that this process sees; ``None`` if nothing says so.

    Asked of the driver's tool because torch would start a CUDA context, after which nothing can be
    forked. The tool does not know ``CUDA_VISIBLE_DEVICES``, which takes the same names of GPUs.
    """
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={seen}")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
        return min(int(line) << 20 for line in said.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


# ------------------------------------------------------------------------------ inside the process


def take_seat(name: DeviceName, cores: Sequence[int], where: str = "device") -> Seat:
    """Become a device; called once in a process that has run nothing on torch yet.

    Args:
        name: the device, one of this machine.
        cores: cores to keep to; () for all.
        where: what names the device, for errors.

    Raises:
        SpecError: no such GPU, or more SMs than it has, or a torch without green contexts.
    """
    confine(cores)
    import torch

    if name.kind == "cpu":
        torch.set_num_threads(thread_count(name))
        # The pool's threads start now, so that their stacks are not charged to the memory cap.
        size = 256
        torch.ones(size, size) @ torch.ones(size, size)
        torch.ones(1 << 20).exp_()
        return Seat(name, torch.device("cpu"))
    index = name.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise SpecError(where, got=str(name), expected=f"one of the {found} GPUs torch sees here")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if name.sms is None:
        return Seat(name, device)
    context = _slice(name, device, where)
    # A plain torch.cuda.Stream() may belong to another slice (measured_facts).
    return Seat(name, device, context.Stream(), context)


def _slice(name: DeviceName, device: torch.device, where: str) -> Any:
    """Confine this process to some SMs of a GPU; the green context."""
    import torch

    whole = torch.cuda.get_device_properties(device).multi_processor_count
    if (name.sms or 0) > whole:
        raise SpecError(where, got=str(name), expected=f"at most {whole} SMs on this GPU")
    contexts: Any = getattr(torch.cuda, "green_contexts", None)
    if contexts is None:
        raise SpecError(
            where, got=str(name), expected="a whole GPU with this torch",
            fix="slices need a torch with green contexts (2.11 or newer)",
        )  # fmt: skip
    torch.zeros(1, device=device)  # the primary context has to exist first
    context = contexts.GreenContext.create(num_sms=name.sms, device_id=device.index)
    context.set_context()
    torch.autograd.set_multithreading_enabled(False)
    return context


def cap_memory(seat: Seat, capacity_bytes: int | None) -> None:
    """Let the process take ``capacity_bytes`` more than it holds now (a GPU: in all), and no more.

    Args:
        seat: from `take_seat`.
        capacity_bytes: the cap, ``None`` for none but what the machine has free: a plan may state
            any sizes, and the system would end other processes for them.
    """
    import torch

    if seat.device.type == "cpu":
        free = free_bytes()
        cap = free if capacity_bytes is None else min(capacity_bytes, free)
        confine((), data_bytes() + cap + ALLOWANCE_BYTES)
        return
    if capacity_bytes is None:
        return
    total = torch.cuda.get_device_properties(seat.device).total_memory
    share = (capacity_bytes + GPU_ALLOWANCE_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(min(share, 1.0), seat.device)


def lift_cap() -> None:
    """Take a CPU cap away again, so that a process that ran into it can say so."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
