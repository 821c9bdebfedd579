"""What a worker finds out about its own device: identity and measured figures. Imports torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from foreplan.datasets import device_zoo
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.kernels.cold_operands import held_cache, last_level_cache
from foreplan.datasets.timing.worker_environment import thread_count

Timer = Callable[[Callable[[], object], int], float]

#: oneDNN's and the kernel's words for the extensions that `Device.isa` lists, least first.
_FLAGS = {
    "sse41": "sse4_1",
    "avx2": "avx2",
    "avx512": "avx512f",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_int8": "amx_int8",
    "neon": "asimd",
    "sve": "sve",
    "bf16": "bf16",
    "i8mm": "i8mm",
}
#: Extensions an instruction set leaves usable.
_WITHIN = {
    "sse41": ("sse41",),
    "avx2": ("sse41", "avx2"),
    "avx512": ("sse41", "avx2", "avx512"),
    "avx512_bf16": ("sse41", "avx2", "avx512", "avx512_vnni", "avx512_bf16"),
}

#: Each figure is the median of so many turns through all of them, and in each the best of so many
#: times. A virtual machine has speeds that last for seconds (a launch of 1.1 us and of 1.6-2.2,
#: products 62-96 GFLOP/s), and timed operators are medians over all of them: the best turn made
#: plans of a whole demo 10-26 % too low.
_TURNS, _TIMES = 3, 4
#: Bytes of a row of the matrix that is read to see how fast memory is.
_COLUMNS = 16384
#: Bytes that a processor reads again: from the least to twice the last-level cache, at most the
#: most. Fewer are read so often that a timing goes through `_REREAD`.
_LEAST_REREAD, _MOST_REREAD, _REREAD = 1 << 18, 1 << 30, 1 << 25


def identity(name: DeviceName, word: str) -> dict[str, Any]:
    """What the device is: chip, memory, units, caches, and the software that computes on it."""
    found = _cpu(name) if word == "cpu" else _cuda(name, word)
    found["last_level_cache_bytes"] = last_level_cache(word)
    found["software"] = {
        "torch": torch.__version__,
        "foreplan": _version("foreplan"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if word != "cpu":
        found["software"]["cuda"] = str(torch.version.cuda)
    return found


def figures(word: str, time_calls: Timer) -> dict[str, float]:
    """Measure the device: names as in `foreplan.datasets.device.Device`, SI units.

    - ``memory_bandwidth``: of a copy far larger than the caches, bytes read and written;
    - ``read_bandwidth``: of a sum or of a product by eight columns, whichever reads faster;
    - ``reread_bandwidth.<bytes>``, of a processor: of a sum over so many bytes, again and again;
    - ``host_to_device``, ``device_to_host``: of a copy from and to pinned memory;
    - ``peak_flops.<dtype>``: of a square product;
    - ``launch_overhead_s``: time of an operator on one element, back to back.
    """
    blocks = _blocks(word)
    turns = [_turn(word, time_calls, *blocks) for _ in range(_TURNS)]
    return {
        name: statistics.median(turn[name] for turn in turns if name in turn) for name in turns[0]
    }


def _blocks(word: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What all turns copy from and to: a system takes longer to give a gigabyte than to copy it.

    Far larger than the caches; of a processor, the first has room for all rereads too.
    """
    size = max(8 * held_cache(word), 1 << 26)
    most = max(size, _reread_sizes()[-1]) if word == "cpu" else size
    return (
        torch.ones(most, dtype=torch.uint8, device=word),
        torch.empty(size, dtype=torch.uint8, device=word),
    )


def _turn(
    word: str, time_calls: Timer, source: torch.Tensor, target: torch.Tensor
) -> dict[str, float]:
    """Each figure once; the launch, which is soon timed, between all others too."""
    tiny = _tiny(word)
    launches = [_best(tiny, time_calls, 200)]
    found = _bandwidths(word, time_calls, source[: target.nbytes], target)
    if word == "cpu":
        found |= _rereads(time_calls, source.view(torch.float32))
    launches.append(_best(tiny, time_calls, 200))
    side = 1024 if word == "cpu" else 8192
    for dtype, multiply in _products(word, side).items():
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no such kernel here
            found[f"peak_flops.{dtype}"] = 2.0 * side**3 / _best(multiply, time_calls, 1)
        launches.append(_best(tiny, time_calls, 200))
    return {"launch_overhead_s": statistics.median(launches)} | found


def _bandwidths(
    word: str, time_calls: Timer, source: torch.Tensor, target: torch.Tensor
) -> dict[str, float]:
    size = source.nbytes
    found = {"memory_bandwidth": 2 * size / _best(lambda: target.copy_(source), time_calls, 1)}
    if word != "cpu":
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["host_to_device"] = size / _best(lambda: target.copy_(host), time_calls, 1)
        found["device_to_host"] = size / _best(lambda: host.copy_(source), time_calls, 1)
        rows = source[: size // _COLUMNS * _COLUMNS].view(torch.bfloat16).view(-1, _COLUMNS // 2)
        few = torch.ones(_COLUMNS // 2, 8, dtype=torch.bfloat16, device=word)
        reads = (lambda: rows @ few, lambda: source.view(torch.float32).sum())
        found["read_bandwidth"] = rows.nbytes / min(_best(call, time_calls, 1) for call in reads)
    return found


def _reread_sizes() -> list[int]:
    """Whole and one and a half powers of two."""
    most = min(_MOST_REREAD, max(2 * last_level_cache("cpu"), 1 << 26))
    powers = [1 << k for k in range(_LEAST_REREAD.bit_length() - 1, most.bit_length())]
    return sorted({n for size in powers for n in (size, size * 3 // 2) if n <= most})


def _rereads(time_calls: Timer, block: torch.Tensor) -> dict[str, float]:
    """Bytes a second by bytes that are read again."""
    found = {}
    for size in _reread_sizes():
        part = block[: size // 4]
        found[f"reread_bandwidth.{size}"] = size / _best(
            part.sum, time_calls, max(1, _REREAD // size)
        )
    return found


def _tiny(word: str) -> Callable[[], object]:
    one = torch.ones(1, dtype=torch.bfloat16, device=word)
    return lambda: torch.add(one, one)


def _products(word: str, side: int) -> dict[str, Callable[[], object]]:
    def square(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(side, side, device=word).to(dtype)

    wide, half = square(torch.float32), square(torch.bfloat16)
    small = torch.randint(-63, 64, (side, side), dtype=torch.int8, device=word)
    found: dict[str, Callable[[], object]] = {
        "fp32": lambda: wide @ wide,
        "bf16": lambda: half @ half.t(),
        "int8": lambda: torch._int_mm(small, small.t()),
    }
    if word != "cpu":
        brain = half.to(torch.float8_e4m3fn)
        one = torch.ones((), device=word)
        found["fp8"] = lambda: torch._scaled_mm(
            brain, brain.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
        found["tf32"] = lambda: _tf32(wide)
    return found


def _tf32(wide: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return wide @ wide
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _best(call: Callable[[], object], time_calls: Timer, count: int) -> float:
    """Least of a few times: a figure of the device, not of what else the machine does."""
    call()
    return min(time_calls(call, count) for _ in range(_TIMES))


def _cuda(name: DeviceName, word: str) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(word)
    board = str(properties.name)
    known = device_zoo.device(board) if device_zoo.is_known(board) else None
    units = int(properties.multi_processor_count)
    found: dict[str, Any] = {
        "board": board,
        "chip": known.chip if known else board.lower(),
        "vendor": known.vendor if known else ("AMD" if torch.version.hip else "NVIDIA"),
        "kind": "rocm" if torch.version.hip else "cuda",
        "architecture": known.architecture if known else None,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": int(properties.total_memory),
        "units": name.sms or units,
        "l2_bytes": int(properties.L2_cache_size),
        "isa": [],
    }
    if name.sms is not None:
        found["slice"] = f"{name.sms} of {units} SMs"
    return found


def _cpu(name: DeviceName) -> dict[str, Any]:
    info = _cpuinfo()
    model = info.get("model name") or platform.processor() or platform.machine()
    known = device_zoo.device(model) if device_zoo.is_known(model) else None
    where = "".join(f" {key} {info[key]}" for key in ("cpu family", "model") if key in info)
    flags = set(info.get("flags", info.get("Features", "")).split())
    usable = _WITHIN.get(name.isa or "", tuple(_FLAGS))
    cores = os.cpu_count() or 1
    threads = thread_count(name)
    found: dict[str, Any] = {
        "board": model,
        # A virtual machine hides the model's number; family and model still name the silicon.
        "chip": known.chip if known else re.sub(r"\s+", " ", f"{model}{where}").lower(),
        "vendor": known.vendor if known else model.split()[0],
        "kind": "cpu",
        "architecture": known.architecture if known else None,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "units": threads,
        "isa": [word for word, flag in _FLAGS.items() if flag in flags and word in usable],
    }
    parts = [f"{threads} of {cores} cores"] if threads < cores else []
    parts += [f"instructions up to {name.isa}"] if name.isa not in (None, "native") else []
    if parts:
        found["slice"] = ", ".join(parts)
    return found


def _cpuinfo() -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
