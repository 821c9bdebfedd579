"""`model_readers`: model folders, shipped predictors and cached steps."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.robustness.measurement_readers import operators_parquet, tir_lines
from tests.robustness.mutations import as_json
from tests.robustness.reader import Reader

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32", "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
_QWEN = {k: v for k, v in _LLAMA.items() if k not in ("architectures", "rope_scaling")} | {
    "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64,
    "max_window_layers": 1, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 64,
    "n_positions": 64, "vocab_size": 64, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def _use_model(path: Path) -> None:
    from foreplan.datasets.models.load_model import load_model

    model = load_model(path.parent)
    _ = model.parameters, model.max_sequence, model.kv_bytes_per_token("bf16")


@functools.cache
def _weights() -> bytes:
    import numpy as np
    from safetensors.numpy import save

    from foreplan.datasets.models.load_model import load_model
    from foreplan.datasets.models.tensor_names import embedding_sources, head_sources, layer_sources

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(as_json(_LLAMA))
        model = load_model(folder)
    found: dict[str, Any] = {}
    parts = [embedding_sources(model, "model."), head_sources(model, "model.")]
    parts += [layer_sources(model, layer, "model.") for layer in range(model.layers)]
    for part in parts:
        for source in part.values():
            for index, name in enumerate(source.names):
                found[name] = np.zeros(source.stored_shape(index), dtype=np.float32)
    return bytes(save(found))


def _use_weights(path: Path) -> None:
    from foreplan.datasets.models.load_model import load_model
    from foreplan.datasets.models.weights import open_weights

    model = load_model(path.parent)
    source = open_weights(model)
    for part in ("embedding", 0, "head"):
        for name in source.names(part):
            source.tensor(part, name)


def _index() -> Any:
    header = json.loads(_weights()[8 : 8 + int.from_bytes(_weights()[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    return {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}


def _pretrained(name: str, file: str) -> Callable[[], bytes]:
    from foreplan.cost_models.model_store import PRETRAINED

    return lambda: (PRETRAINED / name / file).read_bytes()


def _beside_pretrained(name: str, file: str) -> Callable[[], Mapping[str, bytes]]:
    return lambda: {file: _pretrained(name, file)()}


def _use_ops_model(path: Path) -> None:
    from foreplan.cost_models.model_store import load_operator_model
    from foreplan.datasets.importers import read_operators

    model = load_operator_model(str(path.parent))
    table = path.with_name("ops.parquet")
    table.write_bytes(operators_parquet())
    model.predict(read_operators(table, "foreplan"))


def _use_programs_model(path: Path) -> None:
    from foreplan.cost_models.programs.program_commands import load_program_model
    from foreplan.cost_models.programs.program_data import read_programs

    model: Any = load_program_model(str(path.parent))
    known = model.known_devices()
    lines = path.with_name("programs.jsonl")
    lines.write_bytes(tir_lines())
    model.predict(read_programs([lines], "tir-jsonl", device="t4", known=known).table)


def _steps() -> Any:
    return {
        "schema": "foreplan.steps/6",
        "works": [["linear", [8, 64, 64], "bf16/bf16/torch.linear"],
                  ["linear", [8, 64, 64], "bf16/bf16/torch.linear", "x", 2]],
        "steps": [["linear", "aten.linear", "forward", 0, 1, ["linear", 0, True, 0]],
                  ["linear", "aten.linear", "backward", 1, 3, None]],
    }  # fmt: skip


def _use_steps(path: Path) -> None:
    from unittest.mock import patch

    from foreplan.cost_models.lowering import step_store
    from foreplan.datasets.models.model_zoo import zoo_model

    model = zoo_model("tiny-llama-random")
    kept = step_store.kept_steps(model, 1, 8, "inference", False, path.parent)
    path.rename(kept.path)
    with patch.object(step_store, "model_steps", lambda *a, **k: []):
        steps, _ = step_store.stored_steps(
            model, batch=1, tokens=8, phase="inference", folder=path.parent
        )
    for step in steps:
        hash(step.work)


def _header() -> Any:
    data = _weights()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _with_header(header: Any) -> bytes:
    data = _weights()
    length = int.from_bytes(data[:8], "little")
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def model_readers() -> list[Reader]:
    """Of models of every sort."""
    some = {"config.json": as_json(_LLAMA)}
    return [
        *(Reader(f"config-{config['model_type']}", _use_model, lambda config=config: config,
                 file="config.json") for config in (_LLAMA, _QWEN, _GPT2)),
        Reader("safetensors", _use_weights, data=_weights, file="model.safetensors",
               beside=lambda: some),
        Reader("safetensors-header", _use_weights, _header, file="model.safetensors",
               beside=lambda: some, dump=_with_header),
        Reader("safetensors-index", _use_weights, _index, file="model.safetensors.index.json",
               beside=lambda: some | {"a.safetensors": _weights()}),
        Reader("ops-card", _use_ops_model,
               lambda: json.loads(_pretrained("ops", "card.json")()), file="card.json",
               beside=_beside_pretrained("ops", "weights.safetensors")),
        Reader("ops-weights", _use_ops_model, data=_pretrained("ops", "weights.safetensors"),
               file="weights.safetensors", beside=_beside_pretrained("ops", "card.json")),
        Reader("programs-card", _use_programs_model,
               lambda: json.loads(_pretrained("programs", "card.json")()), file="card.json",
               beside=_beside_pretrained("programs", "weights.safetensors")),
        Reader("programs-weights", _use_programs_model,
               data=_pretrained("programs", "weights.safetensors"), file="weights.safetensors",
               beside=_beside_pretrained("programs", "card.json")),
        Reader("steps", _use_steps, _steps),
    ]  # fmt: skip
