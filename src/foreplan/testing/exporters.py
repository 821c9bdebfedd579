"""`check_exporter`: what `export_plan` takes for granted about an exporter."""

from __future__ import annotations

from pathlib import PurePath

from foreplan.planner.export.exporter import Exporter
from foreplan.planner.plan import Plan
from foreplan.testing.contract import require


def check_exporter(exporter: Exporter, plan: Plan, other: Plan) -> None:
    """Write two plans that differ, read them back and compare.

    The files are texts with plain names, the same for the same plan; reading them gives what
    ``expected`` says of *their* plan and of no other, so that a round trip that loses something is
    noticed; the plan is not changed.

    Args:
        exporter: what is checked.
        plan: a plan that it can express.
        other: another one, which the target would have to carry out in another way.

    Raises:
        ContractError: a promise does not hold.
        SpecError: the exporter refuses one of the plans; choose others.
    """
    who = type(exporter).__name__
    target = getattr(exporter, "target", None)
    plain = isinstance(target, str) and target and not any(c.isspace() for c in target)
    require(bool(plain), who, "has a target that is one word", target)
    before = plan.to_json()
    written = exporter.write(plan)
    require(bool(written.files), f"{who}.write", "returns at least one file", written.files)
    for name, text in written.files.items():
        require(
            isinstance(name, str) and PurePath(name).name == name and name not in ("", ".", ".."),
            f"{who}.write", "names files without a folder", name,
        )  # fmt: skip
        require(isinstance(text, str), f"{who}.write", f"returns text for {name}", type(text))
    for line in written.not_expressed:
        require(
            bool(line.strip()) and "\n" not in line, f"{who}.write",
            "says in one line each what the target decides by itself", line,
        )  # fmt: skip
    require(
        exporter.write(plan) == written, f"{who}.write", "gives the same files for the same plan",
        sorted(written.files),
    )  # fmt: skip
    found, wanted = exporter.read(written.files), exporter.expected(plan)
    require(found == wanted, f"{who}.read", "finds what expected() says of the plan", found)
    unlike = exporter.read(exporter.write(other).files)
    require(
        unlike == exporter.expected(other) and unlike != wanted, f"{who}.read",
        "tells two plans apart that the target has to carry out differently", unlike,
    )  # fmt: skip
    require(plan.to_json() == before, who, "leaves the plan as it was", "a changed plan")
