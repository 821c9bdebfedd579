"""Megatron-LM: its layout flags, and the order it does not take with the encoder units beside it.

Megatron-LM makes its own (interleaved) 1F1B from the layout. What a plan changes in it (warm-ups,
encoder units between passes) is handed over as tables: ``order.csv`` has a row a rank, in PyTorch's
words, ``encoder_units.csv`` a line a unit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from foreplan.datasets.specs import validate
from foreplan.planner.bubbles.execution.order_csv import read_orders
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.export import _shell
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.training_pipeline import (
    ORDER,
    UNITS,
    TrainingPipeline,
    encoders_again,
    placed,
    processes,
    tables,
    torchrun_command,
)
from foreplan.planner.plan import Plan

_RECOMPUTE: Mapping[str, dict[str, str]] = {
    "none": {},
    "selective": {"--recompute-granularity": "selective"},
    "full": {
        "--recompute-granularity": "full", "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
    },
}  # fmt: skip


class MegatronExporter(Exporter):
    """``launch.sh``, ``order.csv`` and ``encoder_units.csv``."""

    target = "megatron"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`."""
        made = TrainingPipeline.of(plan)
        workload = validate(BubblesWorkload, plan.workload, "plan: workload")
        stages = [f"t*{count}" for count in made.layers]
        layout = "E" + "|".join(stages) + "L"
        flags = {
            "--pipeline-model-parallel-size": str(made.pp),
            "--tensor-model-parallel-size": str(made.tp),
            # Embedding, layers of each virtual stage, loss; stages are dealt to ranks in turn.
            "--pipeline-model-parallel-layout": layout,
            "--num-layers": str(sum(made.layers)),
            "--micro-batch-size": str(made.microbatch),
            "--global-batch-size": str(made.batch),
            "--seq-length": str(workload.sequence_length),
            **_RECOMPUTE[made.recompute],
        }
        switches = ["--sequence-parallel"] if made.tp > 1 else []
        switches += ["--use-distributed-optimizer"] if workload.sharded_optimizer else []
        torchrun, hosts = torchrun_command(plan)
        command = (*torchrun, "pretrain_gpt.py", *switches)
        notes = (
            "from a Megatron-LM checkout; model, data and training arguments come behind", *hosts,
        )  # fmt: skip
        order, units = tables(plan)
        left = (*_NOT_EXPRESSED, *encoders_again(plan), *placed(plan))
        text = _shell.script(command, flags, {}, notes)
        return Written({"launch.sh": text, ORDER: order, UNITS: units}, left)

    def read(self, files: Mapping[str, str]) -> object:
        """See `Exporter.read`."""
        _, flags = _shell.parse(files["launch.sh"])
        pp, tp = (int(flags[f"--{k}-model-parallel-size"]) for k in ("pipeline", "tensor"))
        layers = re.findall(r"t\*(\d+)", flags["--pipeline-model-parallel-layout"])
        devices = processes(files["launch.sh"])
        return TrainingPipeline(
            devices // (pp * tp), pp, tp, tuple(map(int, layers)),
            int(flags["--micro-batch-size"]), int(flags["--global-batch-size"]),
            read_orders(files[ORDER], files[UNITS]),
            flags.get("--recompute-granularity", "none"),
        )  # fmt: skip

    def expected(self, plan: Plan) -> object:
        """See `Exporter.expected`."""
        return TrainingPipeline.of(plan)


_NOT_EXPRESSED = (
    "the order of passes: Megatron-LM runs its own 1F1B of this layout; order.csv is the plan's",
    "encoder units: its schedules have no word for them; encoder_units.csv says behind which pass "
    "of its rank, or half layer of a pass, each stands",
)
