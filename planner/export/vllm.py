"""vLLM: ``VLLM_PP_LAYER_PARTITION`` and a mixed-precision ``quantization_config``."""

from __future__ import annotations

from foreplan.planner.export import _shell
from foreplan.planner.export._pipeline_server import PipelineServer
from foreplan.planner.export.handover import Handover
from foreplan.planner.serving.spec import ServingWorkload


class VllmExporter(PipelineServer):
    """See `PipelineServer`."""

    target = "vllm"
    title = "vLLM"
    command = ("vllm", "serve", _shell.MODEL)
    partition = "VLLM_PP_LAYER_PARTITION"
    degree_flag = "--tensor-parallel-size"

    def flags(self, handover: Handover, workload: ServingWorkload) -> dict[str, str]:
        """``vllm serve`` over processes of a host, or over Ray."""
        return {
            "--pipeline-parallel-size": str(len(handover.layers)),
            "--tensor-parallel-size": str(handover.degree),
            "--distributed-executor-backend": "mp" if handover.one_host else "ray",
            "--max-num-seqs": str(workload.batch),
            "--max-model-len": str(workload.prompt_tokens + workload.new_tokens),
        }
