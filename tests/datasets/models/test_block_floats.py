"""Experts stored in MXFP4, as gpt-oss is published, are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foreplan.datasets.models.block_floats import BlockFloats, matrix
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import open_weights
from foreplan.errors import SpecError

CONFIG = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 64, "head_dim": 16,
    "num_local_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def drawn(shape: tuple[int, ...], low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape)),
                         dtype=torch.uint8)  # fmt: skip


def test_a_matrix_is_what_transformers_makes_of_it() -> None:
    shapes = BlockFloats("w", 3, 64, 96).shapes
    assert shapes == {"w_blocks": (3, 64, 3, 16), "w_scales": (3, 64, 3)}
    blocks, scales = drawn(shapes["w_blocks"]), drawn(shapes["w_scales"], 90, 160)
    theirs = convert_moe_packed_tensors(blocks, scales)  # [count, k, n]
    for expert in range(3):
        found = matrix(blocks[expert], scales[expert])
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.T, theirs[expert])
    assert theirs.unique().numel() > 100


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """One model twice: as transformers saves it, and with its experts in blocks."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", **CONFIG)
    module: Any = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    packed: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        parameter.data.normal_(0.0, 0.2)
        if name.endswith(("up_proj", "down_proj")) and "experts" in name:
            count, k, n = parameter.shape
            shapes = BlockFloats(name, count, n, k).shapes
            packed |= {key: drawn(size, 120, 128) for key, size in shapes.items()}
            parameter.data.copy_(
                convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
            )
    found = {"plain": tmp_path / "plain", "packed": tmp_path / "packed"}
    for folder in found.values():
        module.save_pretrained(folder)
    file = found["packed"] / "model.safetensors"
    stored = {
        name: tensor for name, tensor in load_file(file).items() if f"{name}_blocks" not in packed
    }
    save_file(stored | packed, file)
    change(found["packed"], quantization_config=MXFP4)
    return found


def change(folder: Path, **fields: object) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | fields))


def test_a_folder_of_blocks_is_the_folder_it_was_made_of(folders: dict[str, Path]) -> None:
    plain, packed = (load_model(folder) for folder in folders.values())
    assert packed.dtype == "bf16"
    assert packed.weights == "trained"
    experts = 2 * 3 * 3 * 64 * 96
    assert plain.checkpoint_bytes == 2 * plain.parameters
    assert packed.checkpoint_bytes == 2 * (plain.parameters - experts) + experts * 17 // 32
    with open_weights(plain) as one, open_weights(packed) as other:  # type: ignore[attr-defined]
        for part in (0, 1, "embedding", "head"):
            assert one.names(part) == other.names(part)
            for name in one.names(part):
                expected = one.tensor(part, name)
                assert torch.equal(other.tensor(part, name), expected)
                pieces = torch.cat(list(other.slices(part, name, 7)))
                assert torch.equal(pieces, expected)


def test_gates_come_before_ups(folders: dict[str, Path]) -> None:
    """A checkpoint has them in turn."""
    stored = load_file(folders["plain"] / "model.safetensors")[
        "model.layers.1.mlp.experts.gate_up_proj"
    ]
    biases = load_file(folders["plain"] / "model.safetensors")[
        "model.layers.1.mlp.experts.gate_up_proj_bias"
    ]
    weights = open_weights(load_model(folders["plain"]))
    fused, bias = weights.tensor(1, "expert.2.up.weight"), weights.tensor(1, "expert.2.up.bias")
    assert torch.equal(fused[:96], stored[2, :, ::2].T)
    assert torch.equal(fused[96:], stored[2, :, 1::2].T)
    assert torch.equal(bias, torch.cat((biases[2, ::2], biases[2, 1::2])))


def test_blocks_that_do_not_fit_are_one_line(folders: dict[str, Path]) -> None:
    change(folders["packed"], quantization_config=MXFP4 | {"quant_method": "fp8"})
    with pytest.raises(SpecError, match=r"quantization_config: got .* unquantised weights"):
        load_model(folders["packed"])
    change(folders["packed"], quantization_config=MXFP4, hidden_size=32)
    with pytest.raises(SpecError, match="shape"):
        load_model(folders["packed"])
    change(folders["packed"], hidden_size=64)
    file = folders["packed"] / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(stored | {name: stored[name][:, 1:].contiguous()}, file)
    with pytest.raises(
        SpecError, match=r"down_proj_scales: got 'U8 \[3, 63, 3\]', expected U8 \[3, 64"
    ):
        load_model(folders["packed"])
    del stored[name]
    save_file(stored, file)
    with pytest.raises(SpecError, match=f"without {name}"):
        load_model(folders["packed"])
