"""TargetDevice: a device of this machine as TVM's compiler target, with the chip it is a part of.

TVM has no run-time dispatch on CPUs, so an instruction set is what code is generated for
(``mcpu``), not what a library is told to use.
"""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from foreplan.errors import MissingDataError, SpecError

#: LLVM's processor for each instruction set of `foreplan.datasets.device_name.ISAS`.
_MCPU = {
    "sse41": "x86-64-v2",
    "avx2": "x86-64-v3",
    "avx512": "x86-64-v4",
    "avx512_bf16": "cooperlake",
}
_CPU = re.compile(r"cpu(?::(?P<options>.*))?")
_CUDA = re.compile(r"cuda(?::(?P<index>\d+))?")

#: Names that chips of several kinds go by.
_HIDDEN = re.compile(r"AMD EPYC|Intel\(R\) Xeon\(R\) (Processor|CPU)( @ .*)?|.*unknown.*|")
#: The chip that ``datasets/measured/xeon_programs`` and its like call by such a name alone.
_RECORDED_AS_HIDDEN = "Intel(R) Xeon(R) Processor family 6 model 207"

#: Per-block limits of every CUDA target: what sampled kernels may use without opting in to more.
_CUDA_LIMITS = {
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """One device that programs are built for and timed on.

    Attributes:
        name: device name, as ``cpu:threads=1,isa=avx2`` or ``cuda:0``.
        kind: ``llvm`` or ``cuda``.
        index: number of the GPU; 0 for a CPU.
        chip: the silicon, as the system names it; folds of held-out chips go by it.
        options: TVM's target as a dictionary.
    """

    name: str
    kind: str
    index: int
    chip: str
    options: dict[str, str | int]

    @property
    def target(self) -> str:
        """The target as JSON text with sorted keys: equal text, equal code."""
        return json.dumps(self.options, sort_keys=True)


def target_device(name: str, *, chip: str | None = None, arch: str | None = None) -> TargetDevice:
    """Describe a device of this machine.

    Args:
        name: ``cpu:threads=1[,isa=...]`` or ``cuda:N``.
        chip: name of the silicon where it cannot or should not be asked of the machine.
        arch: CUDA architecture (``sm_90``); by default the GPU is asked.

    Raises:
        SpecError: another form, more than one thread, or an unknown instruction set.
        MissingDataError: no such GPU here.
    """
    word = name.strip().lower()
    if match := _CUDA.fullmatch(word):
        index = int(match["index"] or 0)
        if arch is None or chip is None:
            found_chip, found_arch = _ask_gpu(index)
            chip, arch = chip or found_chip, arch or found_arch
        options: dict[str, str | int] = {"kind": "cuda", "arch": arch, **_CUDA_LIMITS}
        return TargetDevice(f"cuda:{index}", "cuda", index, chip, options)
    match = _CPU.fullmatch(word)
    if match is None:
        raise SpecError("device", got=name, expected="cpu:threads=1,isa=avx2 or cuda:0")
    options_of = dict(part.split("=", 1) for part in (match["options"] or "").split(",") if part)
    isa = options_of.pop("isa", "native")
    if options_of.pop("threads", "1") != "1" or options_of:
        raise SpecError(
            "device", got=name, expected="one thread: scheduled programs are timed pinned to a core"
        )
    if isa != "native" and isa not in _MCPU:
        raise SpecError("device", got=name, expected="isa as one of " + ", ".join(_MCPU))
    mcpu = _native_mcpu() if isa == "native" else _MCPU[isa]
    return TargetDevice(
        f"cpu:threads=1,isa={isa}", "llvm", 0, chip or _cpu_name(),
        {"kind": "llvm", "mcpu": mcpu, "num-cores": 1},
    )  # fmt: skip


def _native_mcpu() -> str:
    from foreplan.datasets.tir.toolchain import load_runtime

    return str(load_runtime().get_global_func("target.llvm_get_system_cpu")())


def _cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """The chip's name, with family and model where a virtual machine hides what it is."""
    try:
        text = information.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    name = str(fields.get("model name", platform.machine()))
    told = f"{name} family {fields.get('cpu family')} model {fields.get('model')}"
    return told if _HIDDEN.fullmatch(name) and told != _RECORDED_AS_HIDDEN else name


def _ask_gpu(index: int) -> tuple[str, str]:
    from foreplan.datasets.tir.toolchain import load_runtime

    gpu = load_runtime().cuda(index)
    if not gpu.exist:
        raise MissingDataError(
            f"no GPU cuda:{index} that TVM can use on this machine",
            fix="run this on a machine with one, or name chip= and arch= to build only",
        )
    return str(gpu.device_name), "sm_" + str(gpu.compute_version).replace(".", "")
