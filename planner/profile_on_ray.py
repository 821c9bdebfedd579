"""``foreplan profile --ray``: measure the nodes of a Ray cluster as ``profile`` measures a host.

Each node gets a folder ``OUTPUT/NODE`` with what `profile_host` writes there, and the clusters of
all nodes are merged into ``OUTPUT/cluster.yaml``. Links between nodes are not measured: ``profile
--serve`` and ``--link`` on two of them do that, and ``cluster merge`` adds their file.

A node measures one after the other, so that none is busy with another's links, and keeps what it
has in a folder of its own until that has arrived: a run that was killed goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreplan.datasets.ranks.ray_cluster import connected, nodes, place
from foreplan.datasets.storage import exclusive, folder_for, write_atomically
from foreplan.errors import ForeplanError, MissingDataError
from foreplan.planner.merge_command import merge_files
from foreplan.planner.profile_command import profile_host

if TYPE_CHECKING:
    from rich.console import Console


class _NodeProfiler:
    """The actor: one host that measures itself."""

    def profile(
        self, folder: str, files: dict[str, bytes], names: list[str], host: str, quick: bool,
        tasks: int | None, replace: bool,
    ) -> tuple[dict[str, Any] | None, str, dict[str, bytes]]:  # fmt: skip
        """What `profile_host` says (or why it failed), and the files there are."""
        from rich.console import Console

        output = Path(tempfile.gettempdir()) / folder
        output.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            if not (output / name).exists():
                (output / name).write_bytes(data)
        result, reason = None, ""
        try:
            result = profile_host(
                names, output, quick=quick, tasks=tasks, host=host, replace=replace,
                console=Console(stderr=True),
            )  # fmt: skip
        except ForeplanError as error:
            reason = str(error)
        return result, reason, _files(output)

    def forget(self, folder: str) -> None:
        """Remove what was measured, once it lies on the driver."""
        shutil.rmtree(Path(tempfile.gettempdir()) / folder, ignore_errors=True)


def profile_on_ray(
    address: str,
    names: Sequence[str],
    output: Path,
    *,
    quick: bool = False,
    tasks: int | None = None,
    replace: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Measure the devices of every node.

    Args:
        address: ``local``, ``auto`` or ``HOST:PORT``.
        names: devices of each node, as `profile_host`; what it has by default.
        output: folder to write to, made if missing.
        quick: as `profile_host`.
        tasks: as `profile_host`.
        replace: as `profile_host`.
        console: says what is measured.

    Returns:
        ``cluster`` (the file), ``nodes`` (rows by device, by node) and ``failed`` (nodes with the
        reason).

    Raises:
        MissingDataError: no Ray, no cluster, or no node that could be measured.
        SpecError: a folder that cannot be written.
    """
    measured: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with folder_for(output), exclusive(output / "cluster.yaml"), connected(address) as ray:
        for node in nodes(ray):
            here = output / node.host
            digest = hashlib.sha256(f"{output.resolve()}/{node.host}".encode()).hexdigest()[:12]
            scratch = f"foreplan-profile-{digest}"
            here.mkdir(exist_ok=True)
            console.print(f"measuring {node.host}")
            try:
                # All of the node: whatever else ran on it would be measured too.
                actor = place(ray, _NodeProfiler, node, cpus=node.cpus, gpus=node.gpus)
                result, reason, files = ray.get(
                    actor.profile.remote(
                        scratch,
                        _files(here),
                        list(names),
                        node.host,
                        quick,
                        tasks,
                        replace,
                    )
                )
                for name, data in sorted(files.items()):
                    write_atomically(here / name, data)
                with contextlib.suppress(ray.exceptions.RayError):  # what it measured is here
                    ray.get(actor.forget.remote(scratch))
                ray.kill(actor)
            except (MissingDataError, ray.exceptions.RayError) as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                result, reason = None, said[-1]
            if result is None:
                console.print(f"{node.host}: {reason}")
                failed[node.host] = reason
                continue
            measured[node.host] = {
                device: {key: one[key] for key in ("rows", "failed")}
                for device, one in result["devices"].items()
            }
    if not measured:
        reasons = "; ".join(f"{host}: {reason}" for host, reason in failed.items())
        raise MissingDataError(f"no node could be measured: {reasons}")
    clusters = [output / host / "cluster.yaml" for host in measured]
    cluster = clusters[0] if len(clusters) == 1 else output / "cluster.yaml"
    if len(clusters) > 1:
        merge_files(clusters, cluster)
    console.print(f"wrote {cluster}: {len(measured)} nodes")
    return {"cluster": str(cluster), "nodes": measured, "failed": failed}


def _files(folder: Path) -> dict[str, bytes]:
    """What a profile's folder holds, without locks."""
    if not folder.is_dir():
        return {}
    found = (p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith("."))
    return {path.name: path.read_bytes() for path in found}
