"""Memory that this process may still take: the host's, or its container's or job's share of it.

A process that takes more than its control group has is ended by the system without a word. Python
and torch only see the host's memory, so the group's limits are read from the kernel's files
(Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreplan.errors import InfeasibleError

_CGROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: Left to everybody else (assumed): a host that is full to the last page ends processes.
_LEFT_BYTES = 256 << 20
#: How torch, oneDNN and C++ say that an allocation failed, where it is no `MemoryError`.
_REFUSED = re.compile(r"allocate memory|bad_alloc|not enough memory|out of memory", re.IGNORECASE)


def total_bytes() -> int:
    """Memory of this host, or the least limit of this process's control groups."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _groups())])


def free_bytes() -> int:
    """Memory that this process may take more without the system ending anybody."""
    import psutil

    left = (limit - held for limit, held in _groups())
    return max(min([int(psutil.virtual_memory().available), *left]), 0)


@contextmanager
def within_free_memory(what: str, fix: str) -> Iterator[None]:
    """Make a block that needs more memory than is free fail, where the system would end us.

    Args:
        what: what the block does, as in "the indicator".
        fix: what would need less.

    Raises:
        InfeasibleError: the block ran out of memory.
    """
    free = free_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    cap = data_bytes() + max(free - _LEFT_BYTES, 0)
    narrower = soft == resource.RLIM_INFINITY or cap < soft
    if narrower:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, hard))
    failed = False
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _REFUSED.search(str(error)):
            raise
        failed = True
    finally:
        if narrower:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    if failed:  # behind the handler, whose traceback would keep the block's tensors
        raise InfeasibleError(
            f"{what} needs more memory than the {free / 2**30:.3g} GiB that this host has free",
            fix=fix,
        )


def data_bytes() -> int:
    """Private writable memory of this process, as ``RLIMIT_DATA`` counts it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").split("\n"):
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _groups() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group of this process that has a limit, in bytes."""
    try:
        lines = _CGROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, names = _MOUNT, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = _MOUNT / "memory", (
                "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
            )  # fmt: skip
        else:
            continue
        # A container may see its own group as the root, under the path that the host knows.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place != root and root not in place.parents:
                break
            limit, used = _number(place / names[0]), _number(place / names[1])
            if limit is not None and used is not None:
                yield limit, max(used - _entry(place / "memory.stat", names[2]), 0)


def _number(file: Path) -> int | None:
    """The number in a file; ``None`` for ``max``, an absurd one or no file."""
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _entry(file: Path, name: str) -> int:
    """One line of ``memory.stat``: files kept in memory are given back when memory is short."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    told = dict(line.split(" ", 1) for line in lines if " " in line).get(name, "0")
    return int(told) if told.isdigit() else 0
