"""Child process of a measurement: builds programs or times them, one JSON line a request.

Started as ``python -m foreplan.datasets.tir._worker`` with the environment of its device. Requests
come on stdin, replies go to the stdout it was started with; whatever a library prints goes to
stderr. It may die in any request: the parent records that and starts another.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: Repetitions kept, shortest repetition, and longest time spent on one program, by target.
_REPEATS = 9
_REPETITION_S = {"llvm": 3e-3, "cuda": 2e-3}
_BUDGET_S = {"llvm": 0.6, "cuda": 0.25}


def main() -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "build": build,
        "time": _Timer().time,
        "board": _describe_board,
    }
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = actions[request["do"]](request)
        except Exception as error:  # a reply is owed whatever the compiler raises
            reply = {"error": f"{type(error).__name__}: {_reason(error)}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Sample a task and build what was drawn into one library.

    Args:
        request: ``module``, ``device`` (fields of `TargetDevice`), ``count``, ``start``, ``known``
            (keys of programs not wanted again), ``recorded`` (samples to build; none to draw
            them), ``only`` (number of the one sample to build, or null for all), ``library`` (path
            to write), ``compiler`` (that links; null for the machine's own).

    Returns:
        ``programs``: for each sample its key, seed, module, trace and, if it did not build, an
        ``error``; ``arguments``: shape and dtype of each argument.
    """
    from foreplan.datasets.tir.sample import Sample, Sampler
    from foreplan.datasets.tir.target import TargetDevice
    from foreplan.datasets.tir.task import program_key
    from foreplan.datasets.tir.toolchain import load_tvm

    tvm = load_tvm()
    device = TargetDevice(**request["device"])
    target = tvm.target.Target(dict(device.options))
    known, programs, functions = set(request["known"]), [], {}
    drawn: Iterable[Sample] = [Sample(**sample) for sample in request.get("recorded", ())]
    if not drawn:
        sampler = Sampler(request["module"], device)
        drawn = sampler.samples(request["count"], start=request["start"], known=known)
    for number, sample in enumerate(drawn):
        if request["only"] not in (None, number):
            continue
        key = program_key(sample.module)
        programs.append(
            {"key": key, "seed": sample.seed, "module": sample.module, "trace": sample.trace}
        )
        function = tvm.ir.load_json(sample.module)["main"]
        functions[key] = function.with_attr("global_symbol", _symbol(key))
    arguments: list[list[Any]] = []
    if functions:
        info = tvm.s_tir.meta_schedule.arg_info.ArgInfo.from_prim_func(
            next(iter(functions.values()))
        )
        arguments = [[[int(n) for n in item.shape], str(item.dtype)] for item in info]
        errors = _build(tvm, functions, target, request["library"], request.get("compiler"))
        for program in programs:
            if program["key"] in errors:
                program["error"] = errors[program["key"]]
    return {"programs": programs, "arguments": arguments}


def _symbol(key: str) -> str:
    return f"program_{key}"


def _build(
    tvm: Any, functions: dict[str, Any], target: Any, path: str, compiler: str | None
) -> dict[str, str]:
    """Build into one library; what breaks the build is found by building one by one."""
    errors: dict[str, str] = {}
    linked: dict[str, Any] = {}
    if compiler is not None:
        from tvm.support import cc  # type: ignore[import-untyped,unused-ignore]

        linked["fcompile"] = cc.cross_compiler(compiler)

    def together(keys: list[str]) -> Any:
        named = {_symbol(key): functions[key] for key in keys}
        return tvm.tirx.build(tvm.IRModule(named), target=target)

    try:
        together(list(functions)).export_library(path, **linked)
        return errors
    except Exception:
        for key in functions:
            try:
                together([key])
            except Exception as error:
                errors[key] = _reason(error)
    good = [key for key in functions if key not in errors]
    if good:
        together(good).export_library(path, **linked)
    return errors


class _Timer:
    """Times programs, here or on a board; keeps arguments and library of the task at hand."""

    def __init__(self) -> None:
        self._session: Any = None
        self._library: tuple[str, Any] | None = None
        self._arguments: tuple[str, list[Any]] | None = None

    def time(self, request: dict[str, Any]) -> dict[str, Any]:
        """Time one program on arguments that stay in place from call to call.

        Args:
            request: ``library``, ``key``, ``arguments``, ``kind``, ``slow_s``; ``board`` (host
                and port of a tracker, and key) if the device is not of this machine.

        Returns:
            ``times_s``: seconds of one call, by repetition; ``calls`` of a repetition; ``slow``
            where one call took longer than ``slow_s`` and was not repeated; ``clock_hz`` and
            ``load`` of the machine, or null.
        """
        from foreplan.datasets.tir.toolchain import load_runtime

        tvm = load_runtime()
        kind = request["kind"]
        if request.get("board") is not None and self._session is None:
            self._session = _board(request["board"])[1]
        home = tvm if self._session is None else self._session
        device = home.cuda(0) if kind == "cuda" else home.cpu(0)
        if self._library is None or self._library[0] != request["library"]:
            self._library = (request["library"], self._loaded(tvm, request["library"]))
        wanted = json.dumps(request["arguments"])
        if self._arguments is None or self._arguments[0] != wanted:
            self._arguments = None  # free before the next are made
            self._arguments = (wanted, [_array(tvm, device, *a) for a in request["arguments"]])
        library, arguments = self._library[1], self._arguments[1]
        symbol = _symbol(request["key"])

        def run(calls: int, repeats: int) -> list[float]:
            evaluator = library.time_evaluator(symbol, device, number=calls, repeat=repeats)
            return [float(value) for value in evaluator(*arguments).results]

        first = run(1, 1)[0]  # the evaluator itself makes an unmeasured call first
        if first > request["slow_s"]:
            return {"times_s": [first], "calls": 1, "slow": True, **self._state(kind)}
        calls = max(1, min(20_000, math.ceil(_REPETITION_S[kind] / max(first, 1e-7))))
        repeats = max(3, min(_REPEATS, int(_BUDGET_S[kind] / (calls * first))))
        times = run(calls, repeats)
        return {"times_s": times, "calls": calls, "slow": False, **self._state(kind)}

    def _loaded(self, tvm: Any, path: str) -> Any:
        if self._session is None:
            return tvm.runtime.load_module(path)
        if self._library is not None:
            self._session.remove(Path(self._library[0]).name)
        self._session.upload(path)
        return self._session.load_module(Path(path).name)

    def _state(self, kind: str) -> dict[str, float | None]:
        """Clock and load of this machine; a board does not tell."""
        if self._session is not None:
            return {"clock_hz": None, "load": None}
        return {"clock_hz": _clock(kind), "load": os.getloadavg()[0]}


def _board(board: list[Any]) -> tuple[Any, Any]:
    """A tracker, and a session with a board of it; the session ends with this process."""
    from foreplan.datasets.tir.toolchain import load_runtime

    load_runtime()
    from tvm import rpc  # type: ignore[import-untyped,unused-ignore]

    host, port, key = board
    tracker = rpc.connect_tracker(host, port)
    return tracker, tracker.request(key, session_timeout=0)


def _describe_board(request: dict[str, Any]) -> dict[str, Any]:
    """What the boards of a key are: how many, and processor or GPU as far as they tell."""
    host, port, key = request["board"]
    from tvm import rpc  # type: ignore[import-untyped,unused-ignore]

    summary = rpc.connect_tracker(host, port).summary()
    boards = sum(item["key"] == f"server:{key}" for item in summary["server_info"])
    if not boards:
        keys = sorted(item["key"].removeprefix("server:") for item in summary["server_info"])
        return {"error": f"the tracker knows {', '.join(keys) or 'no board'}"}
    _, session = _board(request["board"])
    found: dict[str, Any] = {"boards": boards, "gpu": None, "arch": None}
    gpu = session.cuda(0)
    if gpu.exist:
        found |= {
            "gpu": str(gpu.device_name),
            "arch": "sm_" + str(gpu.compute_version).replace(".", ""),
        }
    for name, function in (("mcpu", "system_cpu"), ("mtriple", "system_triple")):
        try:
            found[name] = str(session.get_function(f"target.llvm_get_{function}")())
        except Exception:  # a runtime without the compiler
            found[name] = None
    return found


def _array(tvm: Any, device: Any, shape: list[int], dtype: str) -> Any:
    """Random values for floats (zeros would save power, denormals cost time), zeros for the rest.

    Integers index tables, and zero is inside every table.
    """
    import numpy as np

    if dtype.startswith(("float", "bfloat")):
        block = np.random.default_rng(0).uniform(0.1, 1.0, 1 << 16).astype("float32")
        values = np.resize(block, shape)
        if dtype == "bfloat16":
            import ml_dtypes  # comes with TVM

            values = values.astype(ml_dtypes.bfloat16)
        elif dtype != "float32":
            values = values.astype(dtype)
    else:
        values = np.zeros(shape, dtype=dtype)
    return tvm.runtime.tensor(values, device=device)


def _clock(kind: str) -> float | None:
    """Clock in hertz right after the run, where the system tells."""
    if kind == "cuda":
        with contextlib.suppress(Exception):
            import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

            pynvml.nvmlInit()
            index = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            return 1e6 * float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        return None
    core = min(os.sched_getaffinity(0))
    now = Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq")
    with contextlib.suppress(OSError, ValueError):
        return 1e3 * float(now.read_text())
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        clocks = [line.split(":")[1] for line in lines if line.startswith("cpu MHz")]
        return 1e6 * float(clocks[core])
    return None


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


if __name__ == "__main__":
    main()
