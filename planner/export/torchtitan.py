"""torchtitan: its flags, the order as PyTorch's schedule file, and the encoder units beside it.

torchtitan hands the file to ``torch.distributed.pipelining``, which adds transfers itself. Units
are for whoever inserts encoder work, because PyTorch's form has no word for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreplan.errors import SpecError
from foreplan.planner.bubbles.execution.order_csv import read_orders
from foreplan.planner.export import _shell
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.training_pipeline import (
    ORDER,
    UNITS,
    TrainingPipeline,
    encoders_again,
    placed,
    tables,
)
from foreplan.planner.plan import Plan

_GROUP = "--parallelism."


class TorchtitanExporter(Exporter):
    """``launch.sh``, ``order.csv`` and ``encoder_units.csv``."""

    target = "torchtitan"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; torchtitan cuts the model into equal stages."""
        made = TrainingPipeline.of(plan)
        if not made.even:
            raise SpecError(
                "decision.stages", got=f"{', '.join(map(str, made.layers))} layers",
                expected="as many in every stage, for torchtitan",
                fix="plan for like devices with a pp and chunks that divide the layers",
            )  # fmt: skip
        flags = {
            f"{_GROUP}pipeline_parallel_degree": str(made.pp),
            f"{_GROUP}tensor_parallel_degree": str(made.tp),
            f"{_GROUP}data_parallel_shard_degree": str(made.dp),
            f"{_GROUP}pipeline_parallel_layers_per_stage": str(made.layers[0]),
            f"{_GROUP}pipeline_parallel_microbatch_size": str(made.microbatch),
            f"{_GROUP}pipeline_parallel_schedule": "PipelineScheduleMulti",
            f"{_GROUP}pipeline_parallel_schedule_csv": ORDER,
            "--training.global_batch_size": str(made.batch),
            "--activation_checkpoint.mode": _kept(made),
        }
        order, units = tables(plan)
        left = (*_NOT_EXPRESSED, *encoders_again(plan), *placed(plan))
        text = _shell.script(("./run_train.sh",), flags, {}, ("from a torchtitan checkout",))
        return Written({"launch.sh": text, ORDER: order, UNITS: units}, left)

    def read(self, files: Mapping[str, str]) -> object:
        """See `Exporter.read`."""
        _, flags = _shell.parse(files["launch.sh"])
        number = {name.removeprefix(_GROUP): int(v) for name, v in flags.items() if v.isdigit()}
        orders = read_orders(files[ORDER], files[UNITS])
        layers = number["pipeline_parallel_layers_per_stage"]
        stages = 1 + max(
            int(word.partition(op)[0])
            for order in orders for word in order.split() if not word.startswith("e")
            for op in "FBIW" if op in word
        )  # fmt: skip
        return TrainingPipeline(
            number["data_parallel_shard_degree"], number["pipeline_parallel_degree"],
            number["tensor_parallel_degree"], (layers,) * stages,
            number["pipeline_parallel_microbatch_size"], number["--training.global_batch_size"],
            orders, flags["--activation_checkpoint.mode"],
        )  # fmt: skip

    def expected(self, plan: Plan) -> object:
        """See `Exporter.expected`."""
        made = TrainingPipeline.of(plan)
        return replace(made, recompute=_kept(made))


def _kept(made: TrainingPipeline) -> str:
    """Torchtitan's word: its fused attention never keeps what ``selective`` leaves out here."""
    return "full" if made.recompute == "full" else "none"


_NOT_EXPRESSED = (
    "encoder units: torchtitan's schedules have no word for them; encoder_units.csv says behind "
    "which pass of its rank each stands",
)
