"""SGLang: ``SGLANG_PP_LAYER_PARTITION`` and the same ``quantization_config`` as vLLM."""

from __future__ import annotations

from foreplan.errors import SpecError
from foreplan.planner.export import _shell
from foreplan.planner.export._pipeline_server import PipelineServer
from foreplan.planner.export.handover import Handover
from foreplan.planner.serving.spec import ServingWorkload


class SglangExporter(PipelineServer):
    """See `PipelineServer`; stages of a host have to follow each other."""

    target = "sglang"
    title = "SGLang"
    command = ("python", "-m", "sglang.launch_server")
    partition = "SGLANG_PP_LAYER_PARTITION"
    degree_flag = "--tp-size"

    def check(self, handover: Handover) -> None:
        """Refuse stages of a host with another host's between them."""
        hosts = [host for host, _ in handover.gpus]
        if hosts != sorted(hosts, key=handover.hosts.index):
            raise SpecError(
                "decision.stages", got=" > ".join(hosts),
                expected="stages of one host beside each other: SGLang numbers nodes in order",
            )  # fmt: skip

    def flags(self, handover: Handover, workload: ServingWorkload) -> dict[str, str]:
        """``sglang.launch_server`` with a node a host."""
        return {
            "--pp-size": str(len(handover.layers)),
            "--tp-size": str(handover.degree),
            "--nnodes": str(len(handover.hosts)),
            "--max-running-requests": str(workload.batch),
            "--context-length": str(workload.prompt_tokens + workload.new_tokens),
            "--model-path": _shell.MODEL,
        }
