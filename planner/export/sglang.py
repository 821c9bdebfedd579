"""SGLang: ``SGLANG_PP_LAYER_PARTITION`` and the same ``quantization_config`` as vLLM."""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.errors import SpecError
from foreplan.planner.export import _shell, compressed_tensors
from foreplan.planner.export._pipeline_flags import gpu_environment, read_gpus, unexpressed
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import Handover, serving_workload
from foreplan.planner.plan import Plan


class SglangExporter(Exporter):
    """``launch.sh`` and, where layers are quantised, ``quantization_config.json``."""

    target = "sglang"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; stages of a host have to follow each other."""
        handover = Handover.of(plan)
        handover.refuse(compressed_tensors.WEIGHTS, "SGLang")
        hosts = [host for host, _ in handover.gpus]
        if hosts != sorted(hosts, key=handover.hosts.index):
            raise SpecError(
                "decision.stages", got=" > ".join(hosts),
                expected="stages of one host beside each other: SGLang numbers nodes in order",
            )  # fmt: skip
        workload = serving_workload(plan)
        environment, notes = gpu_environment(handover)
        environment["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, handover.layers))
        flags = {
            "--pp-size": str(len(handover.layers)),
            "--tp-size": "1",
            "--nnodes": str(len(handover.hosts)),
            "--max-running-requests": str(workload.batch),
            "--context-length": str(workload.prompt_tokens + workload.new_tokens),
        }
        text = _shell.script(("python", "-m", "sglang.launch_server"), flags, environment, notes)
        text = text.replace('  "$@"', '  --model-path "${MODEL:?folder of the model}" "$@"')
        return Written(
            {"launch.sh": text, **compressed_tensors.write(handover)}, unexpressed(plan, handover)
        )

    def read(self, files: Mapping[str, str]) -> Handover:
        """See `Exporter.read`."""
        environment, _ = _shell.parse(files["launch.sh"])
        layers = tuple(int(n) for n in environment["SGLANG_PP_LAYER_PARTITION"].split(","))
        schemes = compressed_tensors.read(files.get(compressed_tensors.FILE), sum(layers))
        return Handover(layers, schemes, read_gpus(environment))
