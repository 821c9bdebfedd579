"""`Seat`: the device a rank's process has become, with its cores, its memory cap and its GPU slice.

The environment of the process was set before torch was loaded (`foreplan.datasets.placement`); a
seat is what is left to do inside it. Nothing here is undone: a process stays what it has become.

- CPU: torch's thread count, cores of its own, and ``RLIMIT_DATA`` at what the process holds before
  it loads anything, plus the cap. ``RLIMIT_DATA`` counts private writable memory, which is what
  tensors are made of; ``RLIMIT_AS`` counts address space and does not map to use (measured_facts).
- GPU: ``set_per_process_memory_fraction``, and for ``cuda:0/sms=32`` a green context. A backward
  pass leaves a slice because autograd runs it on a thread of its own, so that thread is switched
  off; a GPU carries one slice at a time.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.placement import placement
from foreplan.errors import SpecError

if TYPE_CHECKING:
    import torch

#: What a run takes beside the ledger's items (Python's records of the run, connection buffers,
#: the allocator's rounding); granted on top of a CPU cap. Fitted by eye on a two-rank run: 6 MiB.
ALLOWANCE_BYTES = 32 << 20


@dataclass(frozen=True)
class Seat:
    """A process that has become a device.

    Attributes:
        name: the device.
        device: torch's device for its tensors.
        stream: compute stream of a slice, ``None`` where the default stream serves.
    """

    name: DeviceName
    device: torch.device
    stream: Any = None

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


def take_seat(name: DeviceName, cores: Sequence[int], where: str = "device") -> Seat:
    """Become a device; called once in a process that has run nothing on torch yet.

    Args:
        name: the device, one of this machine.
        cores: cores to keep to; () for all.
        where: what names the device, for errors.

    Raises:
        SpecError: no such GPU, or more SMs than it has, or a torch without green contexts.
    """
    import torch

    place = placement(name, cores)
    place.pin()
    if name.kind == "cpu":
        threads = name.threads or len(cores)
        if threads:
            torch.set_num_threads(threads)
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
    return Seat(name, device, _slice(name, index, where))


def _slice(name: DeviceName, index: int, where: str) -> Any:
    """Confine this process to some SMs of a GPU; the compute stream to use."""
    import torch

    whole = torch.cuda.get_device_properties(index).multi_processor_count
    if (name.sms or 0) > whole:
        raise SpecError(where, got=str(name), expected=f"at most {whole} SMs on this GPU")
    contexts: Any = getattr(torch.cuda, "green_contexts", None)
    if contexts is None:
        raise SpecError(
            where, got=str(name), expected="a whole GPU with this torch",
            fix="slices need a torch with green contexts (2.11 or newer)",
        )  # fmt: skip
    context = contexts.GreenContext.create(num_sms=name.sms, device_id=index)
    context.set_context()
    torch.autograd.set_multithreading_enabled(False)
    # A plain torch.cuda.Stream() may belong to another slice (measured_facts).
    return context.Stream()


def cap_memory(seat: Seat, capacity_bytes: int | None) -> None:
    """Let the process take ``capacity_bytes`` more than it holds now (a GPU: in all), and no more.

    Args:
        seat: from `take_seat`.
        capacity_bytes: the cap, ``None`` for none.
    """
    import torch

    if capacity_bytes is None:
        return
    if seat.device.type == "cpu":
        limit = data_bytes() + capacity_bytes + ALLOWANCE_BYTES
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        return
    total = torch.cuda.get_device_properties(seat.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(capacity_bytes / total, 1.0), seat.device)


def data_bytes() -> int:
    """Private writable memory of this process, as ``RLIMIT_DATA`` counts it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n"):
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
