"""What ``foreplan doctor`` finds: what this machine can do, what is missing, how to get it.

Nothing is written, and nothing measured but how steadily the cores run. What may crash (kernels of
the installed torch, TVM) is tried in a process of its own. A check is ``ok``, a ``note`` (works,
with this restriction) or ``missing``: then some of `TASKS` cannot be done here, and it says which.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.quantity import format_bytes
from foreplan.datasets.timing.host_memory import free_bytes, total_bytes
from foreplan.errors import ForeplanError
from foreplan.planner.verify.placement import check_present
from foreplan.planner.verify.verify import BUSY, cpu_model

State = Literal["ok", "note", "missing"]
#: What one does with a machine, in the order of the work.
TASKS = ("plan", "profile", "verify", "dataset build")
PROBE = "foreplan.planner._doctor_probe"
_ISAS = ("sse41", "avx2", "avx512", "avx512_bf16")
#: What a core may take over its best where steps can be predicted to some per cent (chosen: two
#: cores of a virtual machine beside other work had 1.02 to 1.11, a host that guests share 1.9).
_STEADY = 1.15
#: Processes of a verification each keep modules, a gloo context and a queue of their own.
_RANK_BYTES, _SHARED_BYTES = 1 << 30, 64 << 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: in a word or two.
        state: see the module.
        found: what there is.
        fix: the command, or what else would mend it; "" where nothing is to be mended.
        stops: tasks that are not possible as it is.
    """

    what: str
    state: State
    found: str
    fix: str = ""
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examined:
    """A device of this machine.

    Attributes:
        name: for ``foreplan profile``.
        memory_bytes: its memory; of a processor, what is free for all its devices together.
        kernels: kernels of the linear operator that run, as ``storage/compute/kernel``.
        failing: the others, with the reason.
        slices: names of parts of it that are devices too; kernels were not tried on them.
        detail: what else there is to know.
    """

    name: str
    memory_bytes: int
    kernels: tuple[str, ...]
    failing: Mapping[str, str]
    slices: tuple[str, ...] = ()
    detail: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """``storage/compute`` of the kernels that run."""
        return tuple(dict.fromkeys(text.rsplit("/", 1)[0] for text in self.kernels))


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        machine: processor, cores, memory, load and system.
        devices: what can be profiled here.
        checks: in the order of the work.
    """

    machine: Mapping[str, Any]
    devices: tuple[Examined, ...]
    checks: tuple[Check, ...]

    @property
    def ready(self) -> dict[str, bool]:
        """Whether each of `TASKS` can be done here."""
        stopped = {task for check in self.checks for task in check.stops}
        return {task: task not in stopped for task in TASKS}

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "machine": dict(self.machine),
            "devices": [{**asdict(device), "dtypes": device.dtypes} for device in self.devices],
            "checks": [asdict(check) for check in self.checks],
            "ready": self.ready,
        }


def examine(*, timeout_s: float = 180.0) -> Diagnosis:
    """Look at this machine.

    Args:
        timeout_s: how long trying kernels and compilers may take.
    """
    probed = _probe(timeout_s)
    free = free_bytes()
    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_online": os.cpu_count() or 1,
        "memory_bytes": total_bytes(),
        "free_bytes": free,
        "load": round(os.getloadavg()[0], 2),
        "governor": _governor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    devices = (_processor(probed, free), *_gpus(probed))
    checks = (*_software(probed), *_hardware(machine, probed), *_limits(machine, probed))
    return Diagnosis(machine, devices, checks)


def _probe(timeout_s: float) -> dict[str, Any]:
    """What the process of its own found; what it did not get to is an error of its own."""
    command = [sys.executable, "-P", "-m", PROBE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        text, ended = done.stdout, f"it ended with code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        ended = f"it took more than {timeout_s:g} s"
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    for name in ("realtime", "speeds", "torch", "cpu", "gpus", "tvm"):
        found.setdefault(name, {"error": f"was not found out: {ended}"})
    return found


# ------------------------------------------------------------------------------------------ devices


def _processor(probed: Mapping[str, Any], free_bytes: int) -> Examined:
    runs, fails = _split(probed["cpu"])
    slices = []
    for isa in _ISAS:
        name = DeviceName.parse(f"cpu:threads=1,isa={isa}")
        try:
            check_present(name)
        except ForeplanError:
            continue
        slices.append(str(name))
    return Examined("cpu", free_bytes, runs, fails, tuple(slices), "all cores of this process")


def _gpus(probed: Mapping[str, Any]) -> list[Examined]:
    if not isinstance(probed["gpus"], list):
        return []
    found = []
    for index, gpu in enumerate(probed["gpus"]):
        runs, fails = _split(gpu["kernels"])
        detail = f"{gpu['name']}, {gpu['sms']} SMs, compute capability {gpu['capability']}"
        slices = (f"cuda:{index}/sms={max(8, gpu['sms'] // 4 // 8 * 8)}",) if gpu["slices"] else ()
        found.append(Examined(f"cuda:{index}", gpu["memory_bytes"], runs, fails, slices, detail))
    return found


def _split(kernels: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    if "error" in kernels:
        return (), {"all": kernels["error"]}
    runs = tuple(name for name, reason in kernels.items() if not reason)
    return runs, {name: reason for name, reason in kernels.items() if reason}


# ------------------------------------------------------------------------------------------- checks


def _software(probed: Mapping[str, Any]) -> list[Check]:
    lacking = _lacking()
    fix = "" if not lacking else "pip install " + " ".join(f'"{name}"' for name in lacking)
    checks = [
        Check(
            "packages", "missing" if lacking else "ok",
            "lacks " + ", ".join(lacking) if lacking else "all that foreplan requires",
            fix, TASKS if lacking else (),
        )
    ]  # fmt: skip
    torch = probed["torch"]
    if "error" in torch:
        checks.append(
            Check("torch", "missing", torch["error"], "pip install --force-reinstall torch",
                  ("profile", "verify", "dataset build"))
        )  # fmt: skip
    else:
        built = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU only"
        checks.append(Check("torch", "ok", f"{torch['version']}, {built}"))
        gloo = "gloo" if torch["gloo"] else "no gloo"
        nccl = "NCCL" if torch["nccl"] else "no NCCL"
        checks.append(
            Check(
                "communication", "ok" if torch["gloo"] else "missing", f"{gloo}, {nccl}",
                "" if torch["gloo"] else "pip install --force-reinstall torch",
                () if torch["gloo"] else ("verify",),
            )
        )  # fmt: skip
    tvm = probed["tvm"]
    if "error" in tvm or "llvm" not in tvm["targets"]:
        said = tvm.get("error", "TVM was built without LLVM")
        command = re.search(r"pip install .*", said)
        fix = command[0] if command else 'pip install --force-reinstall "apache-tvm<0.28"'
        checks.append(Check("TVM", "missing", said.partition("; pip")[0], fix, ("dataset build",)))
    else:
        targets = ", ".join(tvm["targets"])
        checks.append(
            Check("TVM", "ok", f"{tvm['tvm']} (ffi {tvm['ffi']}), compiles for {targets}")
        )
    if _version("ortools") is None:
        said = "not here; it only certifies how bubbles are filled"
        checks.append(Check("OR-Tools", "note", said, 'pip install "foreplan[cp]"'))
    return checks


def _hardware(machine: Mapping[str, Any], probed: Mapping[str, Any]) -> list[Check]:
    checks = []
    driver = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    gpus = probed["gpus"]
    if isinstance(gpus, list) and gpus:
        checks.append(Check("GPUs", "ok", f"{len(gpus)} seen by torch"))
    elif driver:
        said = gpus.get("error", "") if isinstance(gpus, dict) else ""
        checks.append(
            Check(
                "GPUs", "note", f"a driver, but torch sees none{': ' + said if said else ''}",
                "pip install --force-reinstall torch --index-url "
                "https://download.pytorch.org/whl/cu130",
            )
        )  # fmt: skip
    else:
        checks.append(
            Check(
                "GPUs", "note", "none: processors can be profiled and run; GPUs of the zoo planned"
            )
        )
    cores = machine["cores"]
    if cores < 2:
        checks.append(
            Check("cores", "note", "one: a plan of several ranks shares it, times are too long",
                  "allow this process more cores (taskset, --cpus)")
        )  # fmt: skip
    else:
        of = "" if cores == machine["cores_online"] else f" of {machine['cores_online']}"
        checks.append(Check("cores", "ok", f"{cores}{of} for this process"))
    free = machine["free_bytes"]
    little = free < 2 * _RANK_BYTES
    checks.append(
        Check(
            "memory", "note" if little else "ok",
            f"{format_bytes(free)} free of {format_bytes(machine['memory_bytes'])}",
            f"free {format_bytes(2 * _RANK_BYTES)}: each rank of a verification takes about "
            f"{format_bytes(_RANK_BYTES)} beside its model" if little else "",
        )
    )  # fmt: skip
    return checks


def _limits(machine: Mapping[str, Any], probed: Mapping[str, Any]) -> list[Check]:
    """What disturbs or restricts measurements."""
    load = machine["load"]
    busy = load > BUSY
    checks = [
        Check(
            "load", "note" if busy else "ok", f"{load:g}",
            "wait until other work is done: it makes measured times too long" if busy else "",
        )
    ]  # fmt: skip
    checks.append(_steadiness(probed["speeds"]))
    governor = machine["governor"]
    slow = governor not in (None, "performance")
    checks.append(
        Check(
            "clock", "note" if slow else "ok",
            f"{governor} governor" if governor else "governor not visible (virtual machine)",
            "sudo cpupower frequency-set -g performance" if slow else "",
        )
    )  # fmt: skip
    allowed = bool(probed["realtime"].get("allowed"))
    checks.append(
        Check(
            "real-time priority", "ok" if allowed else "note",
            "allowed" if allowed else "not allowed",
            "" if allowed else "sudo prlimit --pid $$ --rtprio=50; then chrt -f 50 foreplan profile"
            " ... keeps other work out of measured times",
        )
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    capped = hard != resource.RLIM_INFINITY
    checks.append(
        Check(
            "memory limit", "note" if capped else "ok",
            f"processes may have {format_bytes(hard)} of data" if capped else "none on processes",
            "ulimit -Hd unlimited" if capped else "",
        )
    )  # fmt: skip
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    small = shared < _SHARED_BYTES
    checks.append(
        Check(
            "shared memory", "note" if small else "ok", f"{format_bytes(shared)} free in /dev/shm",
            "start the container with --shm-size=1g" if small else "",
        )
    )  # fmt: skip
    return checks


def _steadiness(speeds: Mapping[str, Any]) -> Check:
    if "error" in speeds:
        return Check("steadiness", "note", speeds["error"])
    alone, together = speeds["alone"], speeds["together"]
    steady = max(alone, together) <= _STEADY
    return Check(
        "steadiness", "ok" if steady else "note",
        f"a core takes up to {alone:.2f} times its best, with all at work {together:.2f}",
        "" if steady else "steps of processors are off by as much: leave a core's other thread "
        "idle (taskset, lscpu -e), or take a host that nobody shares",
    )  # fmt: skip


def _governor() -> str | None:
    """Frequency governors of the cores, ``None`` where the system shows none."""
    seen = set()
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"):
        try:
            seen.add(path.read_text(encoding="utf-8").strip())
        except OSError:
            continue
    return ", ".join(sorted(seen)) or None


def _lacking() -> list[str]:
    """Requirements of foreplan that are not installed."""
    try:
        required = importlib.metadata.requires("foreplan") or []
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return []
    wanted = [line for line in required if "extra ==" not in line]
    return [line for line in wanted if _version(re.split(r"[\s<>=!~;\[(]", line)[0]) is None]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
