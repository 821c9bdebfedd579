"""The indicator against gradients that the execution's kernels really perturb."""

import pytest

from foreplan.errors import SpecError
from foreplan.planner.precision.graph import TrainingGraph
from foreplan.planner.precision.indicator import module_variants, omega_table
from foreplan.planner.precision.spec import PrecisionWorkload
from foreplan.planner.precision.task import training_task
from foreplan.planner.precision.validation import (
    Perturbed,
    Setting,
    correlations,
    measure_perturbations,
    rank_correlation,
    trained_states,
)

INT8 = "fp32/int8/torch.int_mm+fp32"
BF16 = "fp32/bf16/torch.linear"


@pytest.fixture(scope="module")
def measured():
    options = {"context": 16, "width": 64, "layers": 2, "heads": 2}
    workload = PrecisionWorkload(
        batch=8, network="byte_lm", network_options=options, calibration_batches=4
    )
    task = training_task(None, workload, 0)
    graph = TrainingGraph.of(task)
    variants = {m: [t for t in texts if t in (BF16, INT8)]
                for m, texts in module_variants(graph).items()}  # fmt: skip
    batches = [task.batch(-100 - i, 0) for i in range(3)]
    return task, graph, workload, measure_perturbations(task, variants, batches)


def test_gradient_variance_orders_operators_as_measured(measured):
    task, graph, workload, rows = measured
    omega = omega_table(task, graph, workload, 0)
    found = rank_correlation(omega, rows)
    assert set(found) == {"bf16", "int8+fp32"}
    assert min(found.values()) > 0.8
    for row in rows:  # in size too, not in order alone
        assert 0.3 < omega[row.module][row.variant] / row.squared < 3.0


def test_perturbations_are_small_and_int8_is_larger(measured):
    by_module = {}
    for row in measured[3]:
        by_module.setdefault(row.module, {})[row.variant] = row
    for found in by_module.values():
        if INT8 in found:
            assert 0 < found[BF16].relative < found[INT8].relative < 0.05


def test_correlation_needs_modules_and_an_order():
    rows = [Perturbed(str(i), BF16, float(i), 0.1) for i in range(5)]
    rising = {str(i): {BF16: float(i) ** 2} for i in range(5)}
    assert rank_correlation(rising, rows) == {"bf16": pytest.approx(1.0)}
    assert rank_correlation({str(i): {BF16: 1.0} for i in range(5)}, rows) == {}
    assert rank_correlation(rising, rows[:3]) == {}


def test_no_batches(measured):
    with pytest.raises(SpecError, match="at least one"):
        measure_perturbations(measured[0], {}, [])


def test_states_of_a_training_are_copies_that_get_better():
    options = {"width": 32, "layers": 2}
    workload = PrecisionWorkload(batch=32, network="digits_mlp", network_options=options)
    task = training_task(None, workload, 0)
    modules, losses = [], []
    for trained, loss in trained_states(task, 10, 3, 10):
        modules.append(trained.module())
        losses.append(loss)
    assert losses[2] < losses[0]
    first, last = (dict(m.named_parameters())["1.weight"] for m in (modules[0], modules[2]))
    assert not first.equal(last)
    assert trained.module() is not trained.module()
    start = next(iter(trained_states(task, 0, 1, 1)))[0].module()
    assert dict(start.named_parameters())["1.weight"].equal(task.module()[1].weight)


def test_kinks_make_the_indicator_of_a_perceptron():
    """Where first order alone does not order operators; a smaller run of the printed table."""
    setting = Setting("digits_mlp", {"width": 64, "layers": 4}, 64, 0, 3)
    found, counts, _ = correlations(setting, 0)
    assert counts == {"bf16": 5, "int8+bf16": 4, "int8+fp32": 4}
    # Five modules: two neighbours that change places make 0.9.
    assert found["bf16"]["gradient_variance"] > 0.89 > 0.5 > found["bf16"]["first_order"]
    assert "uniform" not in found["bf16"]  # ranks all alike
