"""A made-up cluster of two unlike processors, for planners' tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from foreplan.cost_models.costs import Collective, Copy, CostBook, Estimate, Work
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Program
from foreplan.datasets.specs import validate
from foreplan.planner.base import Problem
from foreplan.planner.serving.spec import ServingWorkload

#: FLOP/s by compute dtype on a processor with and without low-precision instructions.
FULL = {"bf16": 150e9, "fp32": 60e9, "int8": 300e9, "tf32": 60e9, "fp8": 300e9}
AVX2 = {"bf16": 15e9, "fp32": 60e9, "int8": 80e9}


class Processors:
    """Overhead + compute + memory traffic, never zero."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if isinstance(work, Program):
            rate = (AVX2 if "avx2" in device else FULL)[work.variant.compute]
            seconds = 5e-6 + work.flops / rate + work.bytes / 10e9
        elif isinstance(work, Collective):
            seconds = 1e-4 + work.bytes / 2e9
        elif isinstance(work, Copy):
            seconds = 2 * work.bytes / 10e9
        else:
            return None
        return Estimate(seconds, 0.9 * seconds, 1.1 * seconds, "roofline")


class Wired:
    """Collectives over links that are fast enough for groups to pay."""

    def estimate(self, work: Work, device: str) -> Estimate | None:
        if not isinstance(work, Collective):
            return None
        seconds = 1e-6 + work.bytes / 50e9
        return Estimate(seconds, seconds, seconds, "theory")


@pytest.fixture
def make_cluster() -> Callable[..., Cluster]:
    def make(*memory_mib: float, slowdown: float = 1.0, isas: str = "avx2 native") -> Cluster:
        names = [f"cpu:threads=1,isa={isa}" for isa in isas.split()]
        devices = [
            {"name": names[i % len(names)], "memory_bytes": round(size * (1 << 20))}
            for i, size in enumerate(memory_mib)
        ]
        tier = {
            "group": "all", "scope": "host", "latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9,
            "source": "made up",
        }  # fmt: skip
        contention = [{"kind": "memory", "factors": {"2": slowdown, "3": slowdown, "4": slowdown}}]
        document = {"devices": devices, "tiers": [tier], "contention": contention}
        return validate(Cluster, document, "made-up cluster")

    return make


@pytest.fixture
def make_problem(
    make_cluster: Callable[..., Cluster],
) -> Callable[..., Problem[ServingWorkload]]:
    def make(
        *memory_mib: float,
        model: str = "tiny-llama-random",
        slowdown: float = 1.0,
        isas: str = "avx2 native",
        **workload: object,
    ) -> Problem[ServingWorkload]:
        fields = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8} | workload
        return Problem(
            model=load_model(model),
            cluster=make_cluster(*memory_mib, slowdown=slowdown, isas=isas),
            workload=validate(ServingWorkload, fields, "workload"),
            costs=CostBook([Processors()]),
        )

    return make


@pytest.fixture
def two_processors(tmp_path: Path) -> Path:
    """A cluster file of two equal processors with a profile of one, for real runs."""
    profile = Path(__file__).parents[1] / "benchmarks" / "profiles" / "cpu-threads-1.json"
    (tmp_path / profile.name).write_bytes(profile.read_bytes())
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "devices:\n"
        f"- {{name: 'cpu:threads=1', count: 2, memory_bytes: 268435456, profile: {profile.name}}}\n"
        "tiers:\n"
        "- {group: [localhost], scope: host, latency_s: 1e-4, bandwidth_bytes_per_s: 5e9,"
        " source: made up}\n"
    )
    return cluster
