"""Several plans in one table and on one page: regrets by source of costs, widths, bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from foreplan.errors import SpecError
from foreplan.planner.plan import Plan
from foreplan.planner.report.overview import (
    Result,
    load_results,
    overview_table,
    render_overview,
)
from foreplan.planner.verify.verification import Verification


def decided(plan: Plan, **sources: str) -> Plan:
    """The plan as one from predicted costs, with what other sources decided."""
    by = {"predicted": "chosen"} | sources
    provenance = plan.provenance.model_copy(update={"costs": "predicted", "decided": by})
    return plan.model_copy(update={"provenance": provenance})


@pytest.fixture
def result(make_plan, verification) -> Result:
    """A plan from predicted costs; the roofline's decision took 1.5 times as long."""
    made: Plan = make_plan()
    other = made.alternatives[1].model_copy(update={"name": "decided from roofline costs"})
    made = decided(made.model_copy(update={"alternatives": (other,)}), roofline=other.name)
    chosen = verification.chosen
    rival = chosen.model_copy(
        update={"name": other.name, "role": "alternative", "measured_s": 1.5 * chosen.measured_s}
    )
    run: Verification = verification.model_copy(
        update={"plan_digest": made.digest, "candidates": (chosen, rival), "regret": 0.0}
    )
    return Result.of(made, run)


def test_the_regret_of_each_source_is_against_the_best_that_ran(result: Result) -> None:
    assert result.regrets == {"predicted": 0.0, "roofline": pytest.approx(0.5)}
    assert json.loads(json.dumps(result.document()))["regret_by_costs"][
        "roofline"
    ] == pytest.approx(0.5)


def test_a_decision_of_two_sources_is_a_row_that_names_both(result: Result) -> None:
    name = "decided from measured and roofline costs"
    other = result.plan.alternatives[0].model_copy(update={"name": name})
    plan = result.plan.model_copy(update={"alternatives": (other,)})
    plan = decided(plan, measured=name, roofline=name)
    rival = result.run.candidates[1].model_copy(update={"name": name})
    run = result.run.model_copy(
        update={"plan_digest": plan.digest, "candidates": (result.run.chosen, rival)}
    )
    slower = pytest.approx(0.5)
    found = Result.of(plan, run).regrets
    assert found == {"predicted": 0.0, "measured": slower, "roofline": slower}


def test_the_same_decision_has_the_same_regret(result: Result) -> None:
    plan = decided(result.plan.model_copy(update={"alternatives": ()}), roofline="chosen")
    run = result.run.model_copy(update={"plan_digest": plan.digest, "regret": 0.03})
    assert Result.of(plan, run).regrets == {"predicted": 0.03, "roofline": 0.03}


def test_a_plan_that_took_over_another_sources_decision_gives_it_the_credit(
    result: Result,
) -> None:
    """The roofline's decision became the plan; the solver's own took 1.5 times as long."""
    solver = result.plan.alternatives[0].model_copy(update={"name": "solver"})
    plan = result.plan.model_copy(update={"alternatives": (solver,)})
    plan = decided(plan, predicted="solver", roofline="chosen")
    rival = result.run.candidates[1].model_copy(update={"name": "solver"})
    run = result.run.model_copy(
        update={"plan_digest": plan.digest, "candidates": (result.run.chosen, rival)}
    )
    assert Result.of(plan, run).regrets == {"predicted": pytest.approx(0.5), "roofline": 0.0}


def test_a_decision_that_misses_a_limit_has_no_regret(result: Result) -> None:
    rival = result.run.candidates[1].model_copy(update={"limits_met": False})
    run = result.run.model_copy(update={"candidates": (result.run.chosen, rival)})
    assert Result.of(result.plan, run).regrets["roofline"] is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(result: Result, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(overview_table([result, result, result]))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.count("serving ") == 3
    for word in ("predicted", "measured", "error", "roofline", "50 %"):
        assert word in text


def test_the_page_is_whole_and_safe(result: Result) -> None:
    alternative = result.plan.alternatives[0].model_copy(
        update={"name": "<script>alert(1)</script>"}
    )
    plan = result.plan.model_copy(update={"alternatives": (alternative,)})
    run = result.run.model_copy(update={"plan_digest": plan.digest})
    page = render_overview([Result.of(plan, run), result])
    assert page.count("<section") == page.count("</section>") == 3
    assert "<script>alert" not in page
    assert "Regret, roofline" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page == render_overview([Result.of(plan, run), result])


def test_plans_of_one_kind_are_told_apart_by_their_files(result: Result, tmp_path: Path) -> None:
    files: dict[str, list[Path]] = {"plan": [], "run": []}
    for folder in ("small", "large"):
        (tmp_path / folder).mkdir()
        for name, document in (("plan", result.plan.to_json()), ("run", result.run.to_json())):
            files[name].append(tmp_path / folder / f"{name}.json")
            files[name][-1].write_text(document)
    found = load_results(files["plan"], files["run"])
    assert [one.name for one in found] == ["serving small/plan", "serving large/plan"]
    page = render_overview(found)
    assert "<h1>Serving</h1>" in page
    assert page.count("(large/plan)") == 1
    (alone,) = load_results(files["plan"][:1], files["run"][:1])
    assert (alone.name, alone.document()["name"]) == ("serving", "serving")
    other = result.run.model_copy(update={"plan_digest": "0" * 64})
    files["run"][1].write_text(other.to_json())
    with pytest.raises(SpecError, match=r"large/run\.json: got .* expected a run of this plan"):
        load_results(files["plan"], files["run"])


def test_runs_belong_to_their_plans(result: Result, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="one for each plan"):
        load_results([tmp_path / "a.json", tmp_path / "b.json"], [])
    other = result.run.model_copy(update={"plan_digest": "0" * 64})
    with pytest.raises(SpecError, match="verify the plan again"):
        Result.of(result.plan, other)
