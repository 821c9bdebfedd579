"""vLLM: ``VLLM_PP_LAYER_PARTITION`` and a mixed-precision ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping

from foreplan.planner.export import _shell, compressed_tensors
from foreplan.planner.export._pipeline_flags import gpu_environment, read_gpus, unexpressed
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import Handover, serving_workload
from foreplan.planner.plan import Plan


class VllmExporter(Exporter):
    """``launch.sh`` and, where layers are quantised, ``quantization_config.json``."""

    target = "vllm"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; 3 bits are refused (no kernel of vLLM reads them)."""
        handover = Handover.of(plan)
        handover.refuse(compressed_tensors.WEIGHTS, "vLLM")
        workload = serving_workload(plan)
        environment, notes = gpu_environment(handover)
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, handover.layers))
        flags = {
            "--pipeline-parallel-size": str(len(handover.layers)),
            "--tensor-parallel-size": "1",
            "--distributed-executor-backend": "mp" if handover.one_host else "ray",
            "--max-num-seqs": str(workload.batch),
            "--max-model-len": str(workload.prompt_tokens + workload.new_tokens),
        }
        text = _shell.script(("vllm", "serve", "${MODEL:?folder of the model}"), flags,
                             environment, notes)  # fmt: skip
        text = text.replace("'${MODEL:?folder of the model}'", '"${MODEL:?folder of the model}"')
        return Written(
            {"launch.sh": text, **compressed_tensors.write(handover)}, unexpressed(plan, handover)
        )

    def read(self, files: Mapping[str, str]) -> Handover:
        """See `Exporter.read`."""
        environment, _ = _shell.parse(files["launch.sh"])
        layers = tuple(int(n) for n in environment["VLLM_PP_LAYER_PARTITION"].split(","))
        schemes = compressed_tensors.read(files.get(compressed_tensors.FILE), sum(layers))
        return Handover(layers, schemes, read_gpus(environment))
