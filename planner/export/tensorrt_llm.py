"""TensorRT-LLM: ``pp_partition`` of its LLM arguments and ModelOpt's ``hf_quant_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml

from foreplan.datasets.models.families import MIXTURES
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.tensor_names import linear_modules
from foreplan.errors import SpecError
from foreplan.planner.export import _shell
from foreplan.planner.export._pipeline_flags import (
    gpu_environment,
    read_gpus,
    refuse_older_gpus,
    unexpressed,
)
from foreplan.planner.export.compressed_tensors import OWN_EXPERTS
from foreplan.planner.export.exporter import Exporter, Written
from foreplan.planner.export.handover import Handover, Scheme, serving_workload
from foreplan.planner.plan import Plan

_ARGUMENTS, _QUANTISATION = "llm_args.yaml", "hf_quant_config.json"

#: Algorithms of TensorRT-LLM (``QuantAlgo``) for what a plan can ask.
_ALGORITHM: Mapping[Scheme, str] = MappingProxyType(
    {
        Scheme("int8"): "W8A16",
        Scheme("int4"): "W4A16_AWQ",
        Scheme("fp8", "fp8"): "FP8_PER_CHANNEL_PER_TOKEN",
    }
)
#: Compute capability of the oldest architecture in its documents ("Supported Hardware": Ampere).
_LEAST = 8.0
#: Tokens of a pass unless its arguments say otherwise (``max_num_tokens``): a longer prompt is
#: refused.
_MOST_TOKENS = 8192
#: Families of dense models with one in ``tensorrt_llm/_torch/models/_arch_index.py``.
_DENSE = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "seed_oss", "starcoder2")
#: Families of mixtures with one.
_MIXTURES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")


class TensorRtLlmExporter(Exporter):
    """``launch.sh``, ``llm_args.yaml`` and, for quantised layers, ``hf_quant_config.json``."""

    target = "tensorrt-llm"

    def write(self, plan: Plan) -> Written:
        """See `Exporter.write`."""
        handover = Handover.of(plan).with_plain_cache()
        if plan.model is None:
            raise SpecError("plan.model", got=None, expected="the model that is served")
        if plan.model.family not in (*_DENSE, *MIXTURES):
            raise SpecError(
                "model.family", got=plan.model.family, expected="a family that TensorRT-LLM has",
                fix="export to vllm or sglang",
            )  # fmt: skip
        _refuse_experts(plan.model, handover)
        refuse_older_gpus(plan, _LEAST, "TensorRT-LLM", amd=False)
        known = {Scheme("bf16"), *_ALGORITHM}
        for layer, scheme in enumerate(handover.schemes):
            if scheme not in known:
                raise SpecError(
                    f"decision: layer {layer}",
                    got=f"{scheme.weights} weights, {scheme.activations or '16-bit'} activations",
                    expected="16 bits, or one of " + ", ".join(_ALGORITHM.values()),
                )
        workload = serving_workload(plan)
        environment, notes = gpu_environment(handover)
        arguments = {
            "pipeline_parallel_size": len(handover.layers),
            "tensor_parallel_size": handover.degree,
            "pp_partition": list(handover.layers),
            "max_batch_size": workload.batch,
            "max_seq_len": workload.prompt_tokens + workload.new_tokens,
        }
        if workload.prompt_tokens > _MOST_TOKENS:
            arguments["max_num_tokens"] = workload.prompt_tokens
        quantised = _quantisation(handover, plan.model)
        if quantised:
            notes.append(f"{_QUANTISATION} belongs into MODEL, which ModelOpt quantised by it")
        flags = {"--extra_llm_api_options": f"{_shell.HERE}/{_ARGUMENTS}"}
        text = _shell.script(("trtllm-serve", _shell.MODEL), flags, environment, notes)
        files = {"launch.sh": text, _ARGUMENTS: yaml.safe_dump(arguments, sort_keys=False)}
        return Written({**files, **quantised}, unexpressed(plan, handover))

    def expected(self, plan: Plan) -> object:
        """See `Exporter.expected`; of integers its engines alone have caches, not this backend."""
        return Handover.of(plan).with_plain_cache()

    def read(self, files: Mapping[str, str]) -> Handover:
        """See `Exporter.read`."""
        environment, _ = _shell.parse(files["launch.sh"])
        arguments = yaml.safe_load(files[_ARGUMENTS])
        layers = tuple(arguments["pp_partition"])
        schemes = [Scheme("bf16")] * sum(layers)
        if _QUANTISATION in files:
            by_name = {name: scheme for scheme, name in _ALGORITHM.items()}
            named = json.loads(files[_QUANTISATION])["quantization"]["quantized_layers"]
            for name, entry in named.items():
                schemes[int(name.split(".")[2])] = by_name[entry["quant_algo"]]
        return Handover(
            layers, tuple(schemes), read_gpus(environment), arguments["tensor_parallel_size"]
        )


def _refuse_experts(model: Model, handover: Handover) -> None:
    """Refuse mixtures that the target does not know, or would have to load per expert.

    Raises:
        SpecError: names the model or the first layer with quantised experts.
    """
    if model.experts is None:
        return
    if model.family not in _MIXTURES:
        raise SpecError(
            "model.family", got=model.family,
            expected=f"a mixture that TensorRT-LLM has: {', '.join(_MIXTURES)}",
        )  # fmt: skip
    for layer, scheme in enumerate(handover.schemes):
        if model.layer_classes[layer] == "moe" and scheme != Scheme("bf16"):
            others = "llama.cpp" if model.family in OWN_EXPERTS else "vllm or sglang"
            raise SpecError(
                f"decision: bits of layer {layer}", got=f"experts of {scheme.weights}",
                expected="experts of 16 bits: nothing documents a layer's own precision of experts",
                fix=f"plan again with bits=16, or export to {others}",
            )  # fmt: skip


def _quantisation(handover: Handover, model: Model) -> dict[str, str]:
    layers: dict[str, Any] = {}
    for layer, scheme in enumerate(handover.schemes):
        if scheme in _ALGORITHM:
            entry: dict[str, Any] = {"quant_algo": _ALGORITHM[scheme]}
            if scheme.group:
                entry["group_size"] = scheme.group
            layers |= {f"model.layers.{layer}.{name}": entry for name in linear_modules(model)}
    if not layers:
        return {}
    document = {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": layers,
            "exclude_modules": ["lm_head"],
        }
    }
    return {_QUANTISATION: json.dumps(document, indent=2) + "\n"}
