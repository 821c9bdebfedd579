"""`PipelineServer`: exporter to a server that splits layers by a list in its environment.

vLLM and SGLang share the form (``..._PP_LAYER_PARTITION="18,10,10"``) and the checkpoint's
``quantization_config``; words of the command line are their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from foreplan.cost_models.roofline import without_bf16
from foreplan.errors import SpecError
from foreplan.planner.export import _shell, compressed_tensors
from foreplan.planner.export._pipeline_flags import (
    gpu_environment,
    read_gpus,
    refuse_older_gpus,
    unexpressed,
)
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import (
    Handover,
    replica_plans,
    serving_decision,
    serving_workload,
)
from foreplan.planner.plan import Plan
from foreplan.planner.serving.spec import ServingWorkload

#: Compute capability that vLLM (0.21, "Requirements") and SGLang (FlashInfer) ask for.
_LEAST = 7.5
SERVING, REPLICAS, FIRST_PORT = "serving", "replicas", 8000
#: Field of a checkpoint's configuration that says how its weights are stored.
_FIELD = "quantization_config"
#: Where a script hands on the caller's arguments.
_REST = '"$@"'


class PipelineServer(Exporter):
    """``launch.sh`` and, where layers are quantised, ``quantization_config.json``.

    Attributes:
        title: what the server is called in messages.
        command: what starts it.
        partition: variable that holds the number of layers of each stage.
        degree_flag: flag that holds the number of GPUs of each stage.
    """

    title: ClassVar[str]
    command: ClassVar[tuple[str, ...]]
    partition: ClassVar[str]
    degree_flag: ClassVar[str]

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; 3 bits are refused (no kernel of these servers reads them).

        Of a plan of replicas, one server each with a port of its own, for a load balancer in front.

        Raises:
            SpecError: another kind of plan, or what the server cannot express.
        """
        if plan.kind not in (SERVING, REPLICAS):
            raise SpecError(
                "plan.kind", got=plan.kind, expected=f"{SERVING} or {REPLICAS}, for this target"
            )
        if plan.kind != REPLICAS:
            return self._one(plan)
        files: dict[str, str] = {}
        lines: dict[str, None] = {}
        parts = replica_plans(plan)
        for number, part in enumerate(parts):
            written = self._one(part)
            for name, text in written.files.items():
                if name == "launch.sh":
                    text = text.replace(_REST, f"--port {FIRST_PORT + number} {_REST}")
                    named = _numbered(compressed_tensors.FILE, number)
                    text = text.replace(compressed_tensors.FILE, named)
                files[_numbered(name, number)] = text
            lines.update(dict.fromkeys(written.not_expressed))
        last = FIRST_PORT + len(parts) - 1
        balanced = f"which request goes where: balance over ports {FIRST_PORT} to {last} by rate"
        return Written(files, (*lines, balanced))

    def _one(self, plan: Plan) -> Written:
        handover = Handover.of(plan).with_plain_cache()
        handover.refuse(compressed_tensors.WEIGHTS, self.title)
        refuse_older_gpus(plan, _LEAST, self.title, amd=True)
        self.check(handover)
        environment, notes = gpu_environment(handover)
        environment[self.partition] = ",".join(map(str, handover.layers))
        flags = self.flags(handover, serving_workload(plan))
        ranks = plan.cluster.ranks()
        if without_bf16(ranks[r] for r in serving_decision(plan).ranks):
            flags["--dtype"] = "float16"  # both servers refuse a checkpoint's bf16 there
        family = "" if plan.model is None else plan.model.family
        quantised = compressed_tensors.write(handover, family)
        if quantised:
            notes.append(f"MODEL's config.json holds {compressed_tensors.FILE} as {_FIELD}")
        text = _shell.script(self.command, flags, environment, notes)
        return Written({"launch.sh": text, **quantised}, unexpressed(plan, handover))

    def expected(self, plan: Plan) -> object:
        """What `read` has to find: a `Handover`, or one for each replica."""
        if plan.kind != REPLICAS:
            return Handover.of(plan).with_plain_cache()
        return tuple(Handover.of(part).with_plain_cache() for part in replica_plans(plan))

    def read(self, files: Mapping[str, str]) -> Handover | tuple[Handover, ...]:
        """See `Exporter.read`."""
        if "launch.sh" in files:
            return self._read_one(files)
        count = sum(name.endswith(".sh") for name in files)
        names = ("launch.sh", compressed_tensors.FILE)
        return tuple(
            self._read_one({n: files[_numbered(n, k)] for n in names if _numbered(n, k) in files})
            for k in range(count)
        )

    def _read_one(self, files: Mapping[str, str]) -> Handover:
        environment, flags = _shell.parse(files["launch.sh"])
        layers = tuple(int(n) for n in environment[self.partition].split(","))
        schemes = compressed_tensors.read(files.get(compressed_tensors.FILE), sum(layers))
        return Handover(layers, schemes, read_gpus(environment), int(flags[self.degree_flag]))

    def check(self, handover: Handover) -> None:
        """Refuse what only this server cannot express.

        Raises:
            SpecError: says which line of the plan.
        """

    @abstractmethod
    def flags(self, handover: Handover, workload: ServingWorkload) -> dict[str, str]:
        """What follows the command; `degree_flag` is among it."""


def _numbered(name: str, number: int) -> str:
    """``launch_2.sh`` of ``launch.sh``."""
    stem, dot, ending = name.partition(".")
    return f"{stem}_{number}{dot}{ending}"
