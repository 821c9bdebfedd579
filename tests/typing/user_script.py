"""A user's script: .ci/wheel checks it under ``mypy --strict`` against the installed wheel and runs
it there, outside the checkout. Every result is named with its type."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import foreplan
from foreplan.testing import check_cost_source


class Shop:
    """A cost source of the user's own."""

    def estimate(self, work: foreplan.Work, device: str) -> foreplan.Estimate | None:
        if isinstance(work, foreplan.Copy) and device == "here":
            return foreplan.Estimate.exact(work.bytes / 1e9, "theory")
        return None


def stages(plan: foreplan.Plan) -> Sequence[foreplan.StageDecision]:
    decision = foreplan.decision_of(plan, foreplan.ServingDecision)
    assert_type(decision, foreplan.ServingDecision)
    assert_type(decision.bits, tuple[int, ...])
    return decision.stages


def main(folder: Path) -> None:
    cluster, base = foreplan.load_cluster("1xl4,2xt4")
    assert_type(cluster, foreplan.Cluster)
    assert_type(base, Path)
    workload = foreplan.ServingWorkload(
        batch=8, prompt_tokens=64, new_tokens=8, min_average_bits=8.0,
        prefill_microbatch=4, decode_microbatch=4,
    )  # fmt: skip
    made = foreplan.plan("serving", "llama-3.2-1b", cluster, workload, costs="roofline")
    made.save(folder / "plan.json")
    plan: foreplan.Plan = foreplan.load_plan(folder / "plan.json")
    assert plan.digest == made.digest
    seconds: float = plan.predicted.total_s
    assert seconds > 0
    assert sum(stage.end - stage.start for stage in stages(plan)) == 16
    written: foreplan.Written = foreplan.export_plan(plan, "vllm", folder / "launch")
    assert "launch.sh" in written.files
    pages = foreplan.write_report(plan, f"{folder}/report.html")
    assert_type(pages, list[Path])
    replay: foreplan.Replay = foreplan.predict_latency("llama-3.2-1b", "l4", costs="roofline")
    assert replay.low_s <= replay.latency_s <= replay.high_s
    builder = foreplan.ScheduleBuilder(["here"])
    builder.add("copy", 0, foreplan.Copy(1 << 20))
    timeline = foreplan.simulate(builder.build(), foreplan.CostBook([Shop()]))
    assert_type(timeline, foreplan.Timeline)
    priced: int = check_cost_source(Shop(), [foreplan.Copy(1 << 20)], "here")
    assert priced == 1
    try:
        foreplan.plan("serving", "llama-3.2-1b", "1xt4", {"batch": 0}, costs="roofline")
    except foreplan.SpecError as error:
        code: int = error.exit_code
        assert code == 2


if __name__ == "__main__":
    main(Path(sys.argv[1]))
