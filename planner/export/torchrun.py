"""torchrun: the plan itself with a script that starts its ranks; any kind of plan.

``python -m foreplan.planner.verify.worker`` is the program of each rank: it runs the plan and its
baselines and compares. A launcher of its own reads the same plan through `foreplan.load_plan`.

The plan's relative paths (its model's folder) start from the folder of the export, as those of
every plan do from its own; what was measured is written beside the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from foreplan.errors import SpecError
from foreplan.planner.export import _shell
from foreplan.planner.export.exporter import PLAN_FILE, Exporter, Written
from foreplan.planner.plan import Plan
from foreplan.planner.verify.local import WORKER_MODULE


class TorchrunExporter(Exporter):
    """``launch.sh`` and ``plan.json``."""

    target = "torchrun"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; one host, because torchrun needs a process count for each."""
        hosts = plan.cluster.hosts()
        if len(hosts) > 1:
            raise SpecError(
                "cluster", got=", ".join(hosts), expected="one host for this script",
                fix="start 'foreplan verify PLAN.json --rdzv-endpoint HOST:PORT --host NAME' on "
                "each host",
            )  # fmt: skip
        flags = {
            "--nproc-per-node": str(plan.verify.ranks),
            "-m": WORKER_MODULE,
            "-o": f"{_shell.HERE}/verification.json",
        }
        text = _shell.script(("torchrun", "--standalone"), flags, {})
        text = text.replace('  "$@"', f'  "{_shell.HERE}/{PLAN_FILE}" "$@"')
        zoo = sorted({str(rank.name) for rank in plan.cluster.ranks() if rank.name.kind == "zoo"})
        where = (
            f"which devices stand for {' and '.join(zoo)}: its ranks refuse names of the zoo, so "
            "profile the real ones ('foreplan profile') and plan with their cluster.yaml",
        )
        return Written({"launch.sh": text, PLAN_FILE: plan.to_json()}, where if zoo else ())

    def read(self, files: Mapping[str, str]) -> object:
        """See `Exporter.read`: the ranks to be started and the plan's document."""
        _, flags = _shell.parse(files["launch.sh"])
        return int(flags["--nproc-per-node"]), json.loads(files[PLAN_FILE])

    def expected(self, plan: Plan) -> object:
        """See `Exporter.expected`."""
        return plan.verify.ranks, json.loads(plan.to_json())
