"""What torch and TVM can do here; runs in a process of its own, because a kernel may end it.

``python -m foreplan.planner._doctor_probe`` prints one JSON document: a line of its own after each
step, so that what was found before a crash is kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

#: Rows, output and input features of the products that are tried: multiples of every kernel's.
ROWS, N, K = 32, 64, 128
#: Cores that are looked at, at most: a third of a second each.
_CORES = 16


def main() -> None:
    """Print what is found, step by step."""
    for name, step in (
        ("realtime", _realtime),
        ("speeds", _speeds),
        ("torch", _torch),
        ("cpu", lambda: _kernels("cpu", "cpu")),
        ("gpus", _gpus),
        ("tvm", _tvm),
    ):
        print(json.dumps({name: _found(step)}), flush=True)


def _found(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except Exception as error:
        return {"error": _line(error)}


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")


def _realtime() -> dict[str, Any]:
    """Whether this user may run processes ahead of all others."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        return {"allowed": False, "reason": error.strerror}
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return {"allowed": True}


def _speeds() -> dict[str, float]:
    """How much longer than at its best a core takes."""
    from foreplan.datasets.timing.core_speed import core_speeds

    cores = sorted(os.sched_getaffinity(0))
    found = core_speeds(cores[:: -(-len(cores) // _CORES)])
    return {"alone": found.alone, "together": found.together}


def _torch() -> dict[str, Any]:
    import torch
    from torch import distributed

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "nccl": distributed.is_available() and distributed.is_nccl_available(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": p.name, "sms": p.multi_processor_count, "memory_bytes": total,
                "free_bytes": free, "capability": f"{p.major}.{p.minor}",
                "slices": hasattr(torch.cuda, "green_contexts"),
                "kernels": _kernels("cuda", f"cuda:{index}"),
            }
        )  # fmt: skip
    return found


def _kernels(kind: str, device: str) -> dict[str, str]:
    """Kernels of the linear operator: "" where one runs, else why it does not."""
    import torch

    from foreplan.datasets.kernels.registry import kernels_for, linear_kernel

    found: dict[str, str] = {}
    with torch.inference_mode():
        weight = torch.ones(N, K, device=device) / K
        x = torch.ones(ROWS, K, device=device, dtype=torch.bfloat16)
        for variant in kernels_for("linear", kind, n=N, k=K):
            try:
                kernel = linear_kernel(variant, kind)
                out = kernel.run(x, kernel.pack(weight), None).float()
                off = float((out - 1.0).abs().max())
                # Ones times equal weights: 1, up to the rounding of 3 bits.
                found[str(variant)] = "" if off < 0.2 else f"computes {1 + off:.3g} instead of 1"
            except Exception as error:
                found[str(variant)] = _line(error)
    return found


def _tvm() -> dict[str, Any]:
    from foreplan.datasets.tir.toolchain import load_tvm, require_tvm

    versions = require_tvm()
    tvm = load_tvm()
    enabled = [name for name in ("llvm", "cuda") if tvm.runtime.enabled(name)]
    return {"tvm": versions.tvm, "ffi": versions.ffi, "targets": enabled}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # libraries that crash while they end have nothing to say any more
