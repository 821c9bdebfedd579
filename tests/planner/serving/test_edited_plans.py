"""A plan that a hand or a launcher changed is refused in one line, before anything reads it."""

import copy

import pytest

import foreplan
from foreplan.datasets.specs import validate
from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.serving.check import check_decision
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload


@pytest.fixture(scope="module")
def plan():
    workload = {"batch": 4, "prompt_tokens": 16, "new_tokens": 4, "min_average_bits": 8}
    return foreplan.plan("serving", "tiny-llama-random", "2xt4", workload, costs="roofline")


def _check(plan, decision):
    check_decision(
        plan.model, plan.cluster, validate(ServingWorkload, plan.workload, "workload"),
        validate(ServingDecision, decision, "decision"),
    )  # fmt: skip


def test_the_plan_itself_passes(plan):
    _check(plan, plan.decision)


def _device(stage):
    stage["device"] = "localhost/h100_sxm"


def _no_such_kernel(stage):
    stage["kernels"]["decode/attention"] = "bf16/bf16/torch.magic"


def _kernel_of_other_bits(stage):
    (name,) = [k for k in stage["kernels"] if k.startswith("decode/linear/")][:1]
    bits = "int4" if not name.endswith("/4") else "int8"
    stage["kernels"][name] = f"{bits}/bf16/foreplan.fragment_linear"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (_device, r"stages\[0\]\.device: got 'localhost/h100_sxm', expected localhost/t4"),
        (_no_such_kernel, r"kernels: decode/attention: got 'bf16/bf16/torch\.magic', expected one"),
        (_kernel_of_other_bits, r"kernels: decode/linear/\d+: got 'int"),
    ],
)
def test_a_changed_stage_is_refused(plan, change, where):
    decision = copy.deepcopy(plan.decision)
    change(decision["stages"][0])
    with pytest.raises(SpecError, match=where):
        _check(plan, decision)


def test_a_launcher_that_only_reads_is_told_too(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text()
    stage = plan.decision["stages"][0]["device"]
    path.write_text(text.replace(f'"device": "{stage}"', '"device": "localhost/h100_sxm"'))
    assert path.read_text() != text
    with pytest.raises(SpecError, match=f"expected {stage}, its rank's device"):
        foreplan.load_plan(path)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("predicted", "total_s"), -1.0), (("verify", "tolerance"), 0.0), (("verify", "ranks"), 0)],
)
def test_figures_that_no_run_has_are_refused(plan, path, value):
    document = plan.model_dump(mode="json", by_alias=True)
    document[path[0]][path[1]] = value
    with pytest.raises(SpecError, match=f"{path[0]}.{path[1]}"):
        validate(Plan, document, "plan.json")
