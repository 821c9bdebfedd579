"""torchtitan: its flags, the order as PyTorch's schedule file, and the encoder units beside it.

torchtitan hands the file to ``torch.distributed.pipelining``, which adds transfers itself. Units
are for whoever inserts encoder work, because PyTorch's form has no word for it.

Left to itself torchtitan counts embedding and head as a layer each and cuts the model by that
(``pipeline_parallel_first_stage_less_layers``, ``..._last_...``, both 1), and takes its own size of
a batch for the micro-batches of a step: the flags state all of these. Stages of unlike size are no
flag of it, but a field of its configuration (``module_fqns_per_model_part``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    tables,
    torchrun_command,
)
from foreplan.planner.plan import Plan

_GROUP = "--parallelism."
#: Its CUDA graphs take no pipeline, and it refuses to start with both.
_NO_GRAPHS = "--training.disable_cuda_graphs"
#: What it computes again is no flag but a subcommand, behind which it takes no flag of another
#: group.
_RECOMPUTE = "activation-checkpoint:"
#: Names of the modules of each stage, where stages are of unlike size.
PARTS = "module_parts.json"


class TorchtitanExporter(Exporter):
    """``launch.sh``, ``order.csv``, ``encoder_units.csv``; ``module_parts.json`` at need."""

    target = "torchtitan"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`."""
        made = TrainingPipeline.of(plan)
        workload = validate(BubblesWorkload, plan.workload, "plan: workload")
        each = made.batch // made.dp
        flags = {
            f"{_GROUP}pipeline_parallel_degree": str(made.pp),
            f"{_GROUP}tensor_parallel_degree": str(made.tp),
            # Whole parameters on every replica, or parts of them.
            f"{_GROUP}data_parallel_replicate_degree": "1"
            if workload.sharded_optimizer
            else str(made.dp),
            f"{_GROUP}data_parallel_shard_degree": str(made.dp)
            if workload.sharded_optimizer
            else "1",
            **(_equal_stages(made.layers[0]) if made.even else {}),
            f"{_GROUP}pipeline_parallel_microbatch_size": str(made.microbatch),
            # Of the two words for an order from a file that with as many stages a rank.
            f"{_GROUP}pipeline_parallel_schedule": "PipelineScheduleMulti"
            if made.chunks > 1
            else "PipelineScheduleSingle",
            f"{_GROUP}pipeline_parallel_schedule_csv": f"{_shell.HERE}/{ORDER}",
            # Without a pipeline torchtitan accumulates the gradients of micro-batches.
            "--training.local_batch_size": str(each if made.pp > 1 else made.microbatch),
            "--training.global_batch_size": str(made.batch),
            "--training.seq_len": str(workload.sequence_length),
        }
        order, units = tables(plan)
        files = {ORDER: order, UNITS: units}
        left = [*_NOT_EXPRESSED, *encoders_again(plan), *placed(plan)]
        if not made.even:
            files[PARTS] = json.dumps(_parts(made.layers), indent=2) + "\n"
            left.insert(0, _UNLIKE)
        torchrun, hosts = torchrun_command(plan)
        notes = (
            "for torchtitan 0.3; model and data arguments (--module, --config) come behind", *hosts
        )  # fmt: skip
        command = (*torchrun, "-m", "torchtitan.train", *([_NO_GRAPHS] if made.pp > 1 else []))
        text = _shell.script(command, flags, {}, notes, (_RECOMPUTE + _kept(made),))
        return Written({"launch.sh": text, **files}, tuple(left))

    def read(self, files: Mapping[str, str]) -> object:
        """See `Exporter.read`."""
        _, flags = _shell.parse(files["launch.sh"])
        number = {name.removeprefix(_GROUP): int(v) for name, v in flags.items() if v.isdigit()}
        orders = read_orders(files[ORDER], files[UNITS])
        stages = 1 + max(
            int(word.partition(op)[0])
            for order in orders for word in order.split() if not word.startswith("e")
            for op in "FBIW" if op in word
        )  # fmt: skip
        if PARTS in files:
            parts = json.loads(files[PARTS])
            layers = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        else:
            layers = (number["pipeline_parallel_layers_per_stage"],) * stages
        return TrainingPipeline(
            number["data_parallel_shard_degree"] * number["data_parallel_replicate_degree"],
            number["pipeline_parallel_degree"], number["tensor_parallel_degree"], layers,
            number["pipeline_parallel_microbatch_size"], number["--training.global_batch_size"],
            orders, files["launch.sh"].split(_RECOMPUTE)[1].strip(),
        )  # fmt: skip

    def expected(self, plan: Plan) -> object:
        """See `Exporter.expected`."""
        made = TrainingPipeline.of(plan)
        return replace(made, recompute=_kept(made))


def _kept(made: TrainingPipeline) -> str:
    """Torchtitan's word: its fused attention never keeps what ``selective`` leaves out here."""
    return "full" if made.recompute == "full" else "none"


def _equal_stages(layers: int) -> dict[str, str]:
    """Flags for as many layers in every stage, embedding and head counted as none."""
    return {
        f"{_GROUP}pipeline_parallel_layers_per_stage": str(layers),
        f"{_GROUP}pipeline_parallel_first_stage_less_layers": "0",
        f"{_GROUP}pipeline_parallel_last_stage_less_layers": "0",
    }


def _parts(layers: Sequence[int]) -> list[list[str]]:
    """Modules of each virtual stage, by torchtitan's names of a decoder's."""
    ends = [0, *itertools.accumulate(layers)]
    parts = [
        [f"layers.{layer}" for layer in range(start, end)]
        for start, end in itertools.pairwise(ends)
    ]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


_UNLIKE = (
    "how many layers a stage has: no flag takes unlike stages; "
    f"parallelism.module_fqns_per_model_part of your configuration has to be the lists of {PARTS}"
)
_NOT_EXPRESSED = (
    "encoder units: torchtitan's schedules have no word for them; encoder_units.csv says behind "
    "which pass of its rank, or half layer of a pass, each stands",
)
