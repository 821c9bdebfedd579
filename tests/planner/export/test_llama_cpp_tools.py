"""An export of llama.cpp under its own tools, where they are installed.

They are no package: build ``llama-quantize`` and ``llama-server`` from its source, put them on
``PATH``, and install ``gguf``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan
from foreplan.planner.export import export_plan

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
TOOLS = ("llama-quantize", "llama-server")
if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
    pytest.skip(f"{missing[0]} is not on PATH", allow_module_level=True)

WORKLOAD = {"batch": 4, "prompt_tokens": 64, "new_tokens": 8}


def decoder(folder: Path, hidden: int, ffn: int) -> None:
    """A random Llama of four layers in GGUF, with no words."""
    heads, layers, vocab = hidden // 32, 4, 32
    writer = gguf.GGUFWriter(folder / "IN.gguf", "llama")
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        values = generator.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values if len(shape) == 1 else values.astype("float16"))

    add("token_embd", vocab, hidden)
    add("output_norm", hidden)
    add("output", vocab, hidden)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", hidden, hidden)
        add(f"blk.{layer}.attn_norm", hidden)
        add(f"blk.{layer}.ffn_norm", hidden)
        add(f"blk.{layer}.ffn_gate", ffn, hidden)
        add(f"blk.{layer}.ffn_up", ffn, hidden)
        add(f"blk.{layer}.ffn_down", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plan_of(hidden: int, ffn: int, bits: list[int]) -> foreplan.Plan:
    """A plan of such a decoder with these bits layer by layer."""
    model: dict[str, Any] = {
        "name": "random", "family": "llama", "layers": 4, "hidden": hidden, "heads": hidden // 32,
        "kv_heads": hidden // 32, "head_dim": 32, "ffn": ffn, "vocab": 32, "max_positions": 512,
    }  # fmt: skip
    zoo = foreplan.plan("serving", "llama-3.2-1b", "l4", WORKLOAD, costs="roofline")
    assert zoo.model is not None
    own = zoo.model.model_copy(update=model)
    words = {16: "bf16/bf16", 8: "int8/bf16", 4: "int4/bf16", 3: "int3/bf16"}
    stage = zoo.decision["stages"][0] | {
        "end": 4, "bits": bits,
        "kernels": {
            f"{phase}/linear/{b}": f"{words[b]}/torch.linear"
            for phase in ("prefill", "decode") for b in set(bits)
        },
    }  # fmt: skip
    decision = zoo.decision | {"stages": [stage], "average_bits": sum(bits) / 4}
    return zoo.model_copy(update={"model": own, "decision": decision})


@pytest.mark.parametrize(
    ("hidden", "ffn", "types"),
    [
        (256, 512, [{"BF16"}, {"Q8_0"}, {"Q4_K"}, {"Q3_K"}]),
        (224, 512, [{"BF16"}, {"Q8_0"}, {"Q4_0", "Q4_K"}, {"Q4_0", "Q3_K"}]),
        (256, 352, [{"BF16"}, {"Q8_0"}, {"Q4_0", "Q4_K"}, {"Q4_0", "Q3_K"}]),
    ],
)
def test_quantised_tensors_have_the_plans_types(
    hidden: int, ffn: int, types: list[set[str]], tmp_path: Path
) -> None:
    export_plan(plan_of(hidden, ffn, [16, 8, 4, 3]), "llama.cpp", tmp_path)
    decoder(tmp_path, hidden, ffn)
    note = next(
        line for line in (tmp_path / "launch.sh").read_text().splitlines()
        if "llama-quantize" in line
    )  # fmt: skip
    command = shlex.split(note[note.index("llama-quantize") :])
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-500:]
    assert "falling back" not in made.stdout + made.stderr
    found: list[set[str]] = [set() for _ in types]
    for tensor in gguf.GGUFReader(tmp_path / "MODEL.gguf").tensors:
        place = tensor.name.split(".")
        if place[0] == "blk" and not place[2].endswith("norm"):
            found[int(place[1])].add(tensor.tensor_type.name)
    assert found == types


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_the_server_takes_every_flag(kv_bits: int, tmp_path: Path) -> None:
    plan = plan_of(256, 512, [16, 8, 4, 3])
    plan = plan.model_copy(update={"decision": plan.decision | {"kv_bits": kv_bits}})
    export_plan(plan, "llama.cpp", tmp_path)
    started = subprocess.run(
        [tmp_path / "launch.sh", "--version"], env={**os.environ, "MODEL": "none.gguf"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr[-500:]
