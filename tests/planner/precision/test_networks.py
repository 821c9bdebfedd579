"""A workload names a network; it can make nothing be imported that was not installed for this."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from foreplan.datasets.models.model import Model
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.precision.execution.tasks import byte_lm
from foreplan.planner.precision.networks import network_names, register_network
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import TrainingTask, training_task
from foreplan.planner.verify.verify import verify

PACKAGE = '''"""A package with two networks, of which one is broken."""
from foreplan.planner.precision.execution.tasks import byte_lm as ours

number = 3


def small(model, workload, seed):
    return ours(model, workload, seed)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers networks, installed for this test."""
    info = tmp_path / "strange_networks-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-networks\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[foreplan.networks]\nsmall = strange_networks:small\nnumber = strange_networks:number\n"
        "absent = strange_networks:absent\n"
    )
    (tmp_path / "strange_networks.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("strange_networks", None)


def task_of(name: str) -> TrainingTask:
    options = {"width": 16, "layers": 1, "heads": 2, "context": 8}
    work = PrecisionWorkload(batch=2, network=name, network_options=options)
    return training_task(None, work, 0)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that anybody can import but that registers nothing."""
    (tmp_path / "trap_for_plans.py").write_text("def build(*given):\n    raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "trap_for_plans"
    sys.modules.pop("trap_for_plans", None)


@pytest.mark.parametrize("text", ["os:system", "{}:build", "{}.build", "{}"])
def test_an_import_path_is_no_network(text: str, trap: str) -> None:
    with pytest.raises(SpecError, match=r"workload\.network.*one of model, byte_lm"):
        task_of(text.format(trap))
    assert trap not in sys.modules


@pytest.mark.parametrize("text", ["os:system", "{}:build"])
def test_verifying_a_strangers_plan_imports_nothing(text: str, trap: str, make_plan: Plan) -> None:
    harmful = {**make_plan.workload, "network": text.format(trap)}
    plan = make_plan.model_copy(update={"workload": harmful})
    with pytest.raises(SpecError, match=r"workload\.network"):
        verify(plan, rounds=1)
    assert trap not in sys.modules


@pytest.fixture
def make_plan() -> Plan:
    """A good plan for one zoo device."""
    from foreplan.planner.api import plan

    workload = {
        "batch": 2, "network": "digits_mlp", "network_options": {"width": 16},
        "indicator": "uniform", "steps": 1,
    }  # fmt: skip
    return plan("precision", None, "1xt4", workload, costs="roofline")


@pytest.mark.usefixtures("installed")
def test_an_installed_package_registers_networks() -> None:
    assert {"small", "number", "absent"} <= set(network_names())
    assert task_of("small").module() is not None
    with pytest.raises(SpecError, match="a builder of training tasks"):
        task_of("number")
    with pytest.raises(SpecError, match="strange_networks:absent"):
        task_of("absent")
    with pytest.raises(SpecError, match="did you mean small"):
        task_of("smal")


def test_a_script_registers_a_network() -> None:
    seen: list[tuple[str, ...]] = []

    def build(model: Model | None, workload: PrecisionWorkload, seed: int) -> TrainingTask:
        return byte_lm(model, workload, seed)

    with register_network("mine", build):
        assert "mine" in network_names()
        assert task_of("mine").module() is not None
        other = Thread(target=lambda: seen.append(network_names()))
        other.start()
        other.join()
    assert "mine" not in network_names()
    assert seen == [network_names()], "a registration belongs to who made it"
    for name in ("byte_lm", "os:system", ""):
        with pytest.raises(SpecError, match="a word other than"):
            register_network(name, build)
