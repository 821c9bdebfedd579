"""What a serving plan takes for quality, which limits follow, and the perplexity it then has."""

import dataclasses
import math

import pytest

from foreplan.cost_models.quality.perplexity_curve import PerplexityCurve
from foreplan.cost_models.quality.quality_table import QualityTable, weights_digest
from foreplan.cost_models.quality.sensitivity import weight_sensitivity
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.predict import Forecast
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.perplexity import held_out_perplexity
from foreplan.planner.serving.quality import plan_quality

PLANNER = ServingPlanner()
LAYERS = 4


@pytest.fixture(scope="module")
def trained(trained_decoder):
    return load_model(trained_decoder(LAYERS, 4, 128))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i} of a text without end\n" for i in range(400)))
    return str(file)


@pytest.fixture
def make(make_problem, trained):
    """A problem of the trained decoder; fields of the workload by name."""

    def problem(**workload):
        made = make_problem(
            64.0, 64.0, batch=4, prompt_tokens=16, new_tokens=4, bits=(16, 8, 4, 3), **workload
        )
        return dataclasses.replace(made, model=trained)

    return problem


@pytest.fixture
def table(trained, text, tmp_path):
    """A table in which layer 2 alone is dear, and a curve of its own."""
    costs = [[1e-4, 1e-3, 1e-2] if layer != 2 else [0.1, 0.2, 0.4] for layer in range(LAYERS)]
    made = QualityTable(
        model=trained.name, weights_digest=weights_digest(trained), indicator="measured_kl",
        bits=(8, 4, 3), omega=tuple(map(tuple, costs)), text=text, text_digest="0" * 16,
        windows=1, length=8, seed=0,
        curve=PerplexityCurve(
            perplexity=4.0, coefficient=1.0, exponent=1.0, largest_omega=0.5, plans=9, error=0.1
        ),
    )  # fmt: skip
    made.save(tmp_path / "quality.json")
    return str(tmp_path / "quality.json")


def test_without_text_the_weights_speak(make):
    problem = make()
    found = plan_quality(problem.model, problem.workload, 0)
    assert (found.omega == weight_sensitivity(problem.model, problem.workload.bits)).all()
    assert found.table is None
    assert "weights alone" in found.notes[0]
    assert not PLANNER.judges(problem)


def test_text_is_measured_once_for_a_plan(make, text):
    problem = make(text=text)
    found = plan_quality(problem.model, problem.workload, 0)
    assert found.table.indicator == "measured_kl"
    assert plan_quality(problem.model, problem.workload, 0).table is found.table
    assert (found.omega[:, 0] == 0).all()
    assert PLANNER.judges(problem)
    choice = PLANNER.decide(problem)
    assert any("measured_kl" in note and text in note for note in choice.assumptions)


def test_a_limit_on_perplexity_is_kept_by_sparing_the_dear_layer(make, table):
    free = PLANNER.decide(make(quality=table)).decision
    assert min(free.bits) < 16  # fewer bits are faster on these costs
    limit = 4.0 * math.expm1(0.02)
    problem = make(quality=table, max_perplexity_increase=limit)
    decision = PLANNER.decide(problem).decision
    assert decision.omega <= 0.02 * (1 + 1e-6) < free.omega
    assert decision.bits[2] == 16
    assert min(decision.bits) < 16
    metrics = Forecast(PLANNER, problem, decision).metrics
    assert metrics["perplexity_increase"] == pytest.approx(4.0 * math.expm1(decision.omega))
    assert metrics["perplexity_increase"] <= limit * (1 + 1e-6)


def test_the_tighter_of_two_limits_holds(make, table):
    both = make(quality=table, max_perplexity_increase=1.0, max_omega=0.01)
    assert plan_quality(both.model, both.workload, 0).max_omega == 0.01
    wide = make(quality=table, max_perplexity_increase=1e3)
    found = plan_quality(wide.model, wide.workload, 0)
    assert any("beyond the plans" in note for note in found.notes)


def test_what_cannot_be_limited_is_refused(make, make_problem, text, table):
    problem = make(max_perplexity_increase=0.1)
    with pytest.raises(SpecError, match="text or a quality table"):
        PLANNER.decide(problem)
    with pytest.raises(SpecError, match="random weights"):
        PLANNER.decide(make_problem(256.0, 256.0, text=text))
    with pytest.raises(SpecError, match="other weights"):
        PLANNER.decide(make_problem(256.0, 256.0, quality=table))
    with pytest.raises(SpecError, match="No such file"):
        PLANNER.decide(make(quality="nowhere.json"))
    small = make(quality=table, max_perplexity_increase=1e-9)
    lean = dataclasses.replace(small, workload=small.workload.model_copy(update={"bits": (8, 4)}))
    with pytest.raises(InfeasibleError, match="max_perplexity_increase"):
        PLANNER.decide(lean)


def test_an_unmeasured_cache_and_a_quality_limit_are_refused_together(make, make_problem, table):
    for problem in (
        make(quality=table, kv_bits=8, max_omega=0.1),
        make(quality=table, kv_bits=8, max_perplexity_increase=0.1),
        make(quality=table, kv_bits="auto", max_omega=0.1),
        make(kv_bits=8, max_omega=0.1),
        make_problem(256.0, kv_bits=8, max_omega=0.1),
    ):
        with pytest.raises(SpecError, match=r"kv_bits.*8-bit cache"):
            PLANNER.decide(problem)
    free = PLANNER.decide(make(quality=table, kv_bits=8))
    assert any("not measured" in note for note in free.assumptions)


def test_a_measured_cache_is_part_of_the_sum_and_of_its_limit(make, table):
    lost = 0.012
    QualityTable.load(table).model_copy(update={"cache_omega": lost}).save(table)
    limit = 0.02
    plain, eight = (
        PLANNER.decide(make(quality=table, kv_bits=bits, max_omega=limit)) for bits in (16, 8)
    )
    found = plan_quality(*(getattr(make(quality=table, kv_bits=8, max_omega=limit), name)
                           for name in ("model", "workload")), 0)  # fmt: skip
    assert found.max_omega == pytest.approx(limit - lost)
    assert eight.decision.omega <= limit * (1 + 1e-6)
    assert eight.decision.omega >= lost
    assert eight.decision.average_bits >= plain.decision.average_bits
    assert any("8 bits" in note and "0.012" in note for note in eight.assumptions)
    with pytest.raises(InfeasibleError, match="kv_bits=16"):
        PLANNER.decide(make(quality=table, kv_bits=8, max_omega=lost / 2))
    worth = [Forecast(PLANNER, make(quality=table, kv_bits=c.decision.kv_bits), c.decision).total_s
             for c in (plain, eight)]  # fmt: skip
    open_ = PLANNER.decide(make(quality=table, kv_bits="auto", max_omega=limit))
    assert open_.decision in (plain.decision, eight.decision)
    assert open_.decision.kv_bits == (16 if worth[0] <= worth[1] else 8)
    spare = PLANNER.decide(make(quality=table, kv_bits="auto", max_omega=lost / 2))
    assert spare.decision.kv_bits == 16


def test_held_out_perplexity_sees_a_quantised_cache(make, text):
    problem = make(text=text, kv_bits=8)
    decision = PLANNER.decide(problem).decision
    assert decision.omega >= plan_quality(problem.model, problem.workload, 0).cache_omega > 0
    stages = tuple(
        stage.model_copy(update={
            "bits": (16,) * len(stage.bits),
            "kernels": stage.kernels | dict.fromkeys(
                ("prefill/linear/16", "decode/linear/16"), KERNELS[16]),
        })
        for stage in decision.stages
    )  # fmt: skip
    sixteen = decision.model_copy(update={"stages": stages})
    found = held_out_perplexity(problem.model, problem.workload, sixteen, 0)
    assert found["perplexity_increase"] != 0
    assert abs(found["perplexity_increase"]) < 0.05 * found["perplexity"]


def test_held_out_perplexity_is_that_of_the_planned_kernels(make, text):
    problem = make(text=text)
    decision = PLANNER.decide(problem).decision

    def at(bits):
        stages = []
        for stage in decision.stages:
            kernels = dict(stage.kernels)
            for phase in ("prefill", "decode"):
                kernels[f"{phase}/linear/{bits}"] = KERNELS[bits]
            stages.append(
                stage.model_copy(update={"bits": (bits,) * len(stage.bits), "kernels": kernels})
            )
        chosen = decision.model_copy(update={"stages": tuple(stages)})
        return held_out_perplexity(problem.model, problem.workload, chosen, 0)

    found = {bits: at(bits) for bits in KERNELS}
    assert found[16]["perplexity_increase"] == pytest.approx(0, abs=1e-9)
    assert found[16]["perplexity"] > 1
    distances = [abs(found[b]["perplexity"] / found[16]["perplexity"] - 1) for b in (8, 4, 3)]
    assert distances[0] < 0.05
    assert max(distances) > distances[0]
    again = PLANNER.reference(problem, decision, mode="quality")
    assert again == held_out_perplexity(problem.model, problem.workload, decision, problem.seed)


KERNELS = {
    16: "bf16/bf16/torch.linear",
    8: "int8/bf16/torch.int8pack_mm",
    4: "int4/bf16/torch.int4pack_mm",
    3: "int3/fp32/torch.dequant_linear",
}
