"""`PipelineServer`: exporter to a server that splits layers by a list in its environment.

vLLM and SGLang share the form (``..._PP_LAYER_PARTITION="18,10,10"``) and the checkpoint's
``quantization_config``; words of the command line are their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from foreplan.planner.export import _shell, compressed_tensors
from foreplan.planner.export._pipeline_flags import gpu_environment, read_gpus, unexpressed
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import Handover, serving_workload
from foreplan.planner.plan import Plan
from foreplan.planner.serving.spec import ServingWorkload


class PipelineServer(Exporter):
    """``launch.sh`` and, where layers are quantised, ``quantization_config.json``.

    Attributes:
        title: what the server is called in messages.
        partition: variable that holds the number of layers of each stage.
    """

    title: ClassVar[str]
    partition: ClassVar[str]

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; 3 bits are refused (no kernel of these servers reads them)."""
        handover = Handover.of(plan)
        handover.refuse(compressed_tensors.WEIGHTS, self.title)
        self.check(handover)
        environment, notes = gpu_environment(handover)
        environment[self.partition] = ",".join(map(str, handover.layers))
        text = self.script(handover, serving_workload(plan), environment, notes)
        files = {"launch.sh": text, **compressed_tensors.write(handover)}
        return Written(files, unexpressed(plan, handover))

    def read(self, files: Mapping[str, str]) -> Handover:
        """See `Exporter.read`."""
        environment, _ = _shell.parse(files["launch.sh"])
        layers = tuple(int(n) for n in environment[self.partition].split(","))
        schemes = compressed_tensors.read(files.get(compressed_tensors.FILE), sum(layers))
        return Handover(layers, schemes, read_gpus(environment))

    def check(self, handover: Handover) -> None:
        """Refuse what only this server cannot express.

        Raises:
            SpecError: says which line of the plan.
        """

    @abstractmethod
    def script(
        self,
        handover: Handover,
        workload: ServingWorkload,
        environment: dict[str, str],
        notes: list[str],
    ) -> str:
        """The text of ``launch.sh``."""
