"""Nodes of a real local Ray profile themselves; a second run finds what the first one wrote."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from foreplan.datasets.cluster import Cluster
from foreplan.datasets.profile import Profile
from foreplan.datasets.specs import load_document, validate

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: make test installs it"
)
NAME = "cpu:threads=1,isa=avx2"


@needs_ray
def test_a_node_is_profiled_where_it_is(tmp_path: Path) -> None:
    from foreplan.planner.profile_on_ray import profile_on_ray

    said = Console(file=io.StringIO())
    found = profile_on_ray("local", [NAME], tmp_path, quick=True, tasks=2, console=said)
    assert found["failed"] == {}
    ((node, devices),) = found["nodes"].items()
    assert devices[NAME] == {"rows": 2, "failed": 0}
    cluster = validate(Cluster, load_document(Path(found["cluster"])), "cluster")
    assert list(cluster.hosts()) == [node]
    profile = Profile.load(tmp_path / node / "cpu-threads-1-isa-avx2.json")
    assert profile.device.chip
    assert (tmp_path / node / "cpu-threads-1-isa-avx2.fit.json").exists()
    digest = hashlib.sha256(f"{tmp_path.resolve()}/{node}".encode()).hexdigest()[:12]
    assert not (Path(tempfile.gettempdir()) / f"foreplan-profile-{digest}").exists()
