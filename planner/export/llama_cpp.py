"""llama.cpp: ``--tensor-split`` by layers and a tensor-type file for ``llama-quantize``.

llama.cpp gives layer i of L to the first device whose running share exceeds i / (L + 1), because
the output counts as one more layer (``llama_model::load_tensors``). The exporter therefore hands
the output to the last device and derives the layers again from the flag that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from foreplan.cost_models.roofline import without_bf16
from foreplan.errors import SpecError
from foreplan.planner.export import _shell, gguf_types
from foreplan.planner.export._pipeline_flags import gpu_environment, read_gpus, unexpressed
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import Handover, serving_decision, serving_workload
from foreplan.planner.plan import Plan
from foreplan.planner.serving.spec import ServingWorkload

#: Families without a model in llama.cpp.
_UNKNOWN = ("opt",)
#: A cache of 8 bits: groups of 32 share a scale, where the plan's heads have one each. Values are
#: quantised with flash attention alone.
_CACHE = {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--flash-attn": "on"}
#: Positions of a request's cache come in blocks (``n_ctx_seq`` in llama.cpp's ``llama-context``).
_POSITIONS = 256


class LlamaCppExporter(Exporter):
    """``launch.sh`` and, where layers are quantised, ``tensor_types.txt``."""

    target = "llama.cpp"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`; one host only, weights only."""
        handover = Handover.of(plan)
        handover.refuse(("bf16", *gguf_types.TYPE), "llama.cpp")
        handover.refuse_groups("llama.cpp")
        if plan.model is not None and plan.model.family in _UNKNOWN:
            raise SpecError(
                "model.family", got=plan.model.family, expected="a family that llama.cpp has",
                fix="export to vllm or sglang",
            )  # fmt: skip
        rounded = [i for i, s in enumerate(handover.schemes) if s.activations is not None]
        if rounded:
            raise SpecError(
                f"decision: layer {rounded[0]}", got="8-bit activations",
                expected="weights only: llama.cpp chooses how it rounds activations",
                fix="plan again with quantise_activations=false",
            )  # fmt: skip
        if not handover.one_host:
            raise SpecError(
                "decision.stages", got=", ".join(handover.hosts),
                expected="one host: llama.cpp's RPC devices have no names in a plan",
            )  # fmt: skip
        workload = serving_workload(plan)
        environment, notes = gpu_environment(handover)
        split = [*handover.layers[:-1], handover.layers[-1] + 1]
        flags = {
            "--tensor-split": ",".join(map(str, split)),
            "--split-mode": "layer",
            "--n-gpu-layers": str(len(handover.schemes) + 1),
            "--parallel": str(workload.batch),
            "--ctx-size": str(workload.batch * (workload.prompt_tokens + workload.new_tokens)),
            "--model": "${MODEL:?GGUF file of the model}",
        } | (_CACHE if handover.cache_bits == 8 else {})
        plain = _plain(plan)
        types = gguf_types.write(handover, plan.model, plain)
        if types:
            notes.append(
                f"MODEL is by llama-quantize --tensor-type-file {gguf_types.FILE} "
                f"--token-embedding-type {plain} --output-tensor-type {plain} IN.gguf MODEL.gguf "
                "Q4_K_M"
            )
        text = _shell.script(("llama-server",), flags, environment, notes)
        left = (
            *unexpressed(plan, handover),
            *gguf_types.larger(handover, plan.model),
            *_cached(workload),
        )
        return Written({"launch.sh": text, **types}, left)

    def read(self, files: Mapping[str, str]) -> Handover:
        """See `Exporter.read`."""
        environment, flags = _shell.parse(files["launch.sh"])
        split = [float(word) for word in flags["--tensor-split"].split(",")]
        count = int(flags["--n-gpu-layers"]) - 1
        schemes = gguf_types.read(files.get(gguf_types.FILE, ""), count)
        cache_bits = 8 if _CACHE.items() <= flags.items() else 16
        return Handover(
            layers_by_split(split, count), schemes, read_gpus(environment),
            cache_bits=cache_bits,
        )  # fmt: skip


def _plain(plan: Plan) -> str:
    """GGUF's type of 16 bits for the plan's GPUs."""
    ranks = plan.cluster.ranks()
    return "f16" if without_bf16(ranks[r] for r in serving_decision(plan).ranks) else "bf16"


def _cached(workload: ServingWorkload) -> tuple[str, ...]:
    """A line on a larger cache than the plan's, where there is one."""
    asked = workload.prompt_tokens + workload.new_tokens
    held = -(-asked // _POSITIONS) * _POSITIONS
    if held == asked:
        return ()
    return (f"positions of a request's KV cache: llama.cpp rounds the plan's {asked} up to {held}",)


def layers_by_split(split: list[float], layers: int) -> tuple[int, ...]:
    """Layers that llama.cpp gives each device for ``--tensor-split``, in its own arithmetic."""
    running = np.cumsum(np.asarray(split, dtype=np.float32), dtype=np.float32)
    shares = running / running[-1]
    places = np.arange(layers, dtype=np.float32) / np.float32(layers + 1)
    owner = np.searchsorted(shares, places, side="right")
    return tuple(int(n) for n in np.bincount(owner, minlength=len(split)))
