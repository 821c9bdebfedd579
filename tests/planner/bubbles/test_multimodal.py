"""A workload from a multimodal model's folder: sizes, what a user may still say, a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.models import test_multimodal as published

import foreplan
from foreplan.cost_models.costs import CostBook
from foreplan.errors import SpecError
from foreplan.planner.api import load_cluster
from foreplan.planner.base import Problem
from foreplan.planner.bubbles.spec import BubblesWorkload
from foreplan.planner.bubbles.towers import Tower, backbone_tower, encoder_towers
from foreplan.planner.load_workload import load_workload


def made(tmp_path: Path, config: dict[str, Any], **fields: Any) -> BubblesWorkload:
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"multimodal": str(tmp_path), "sequence_length": 2048, "microbatches": 8} | fields
    found = load_workload("bubbles", asked)
    assert isinstance(found, BubblesWorkload)
    return found


def towers(workload: BubblesWorkload) -> tuple[Tower, Tower]:
    cluster, _ = load_cluster("8xa100-80g")
    problem = Problem(None, cluster, workload, CostBook(()))
    (vision,) = encoder_towers(problem)
    return backbone_tower(problem), vision


def test_llava_weighs_what_its_model_card_says(tmp_path: Path) -> None:
    backbone, vision = towers(made(tmp_path, published.LLAVA))
    assert backbone.gated
    # 6.74e9 with 32000 words; the projector's 20,979,712 include 8192 biases.
    assert backbone.parameters == pytest.approx(6.74e9, rel=2e-3)
    assert vision.exit_parameters == 20_979_712 - 8192
    assert vision.parameters - vision.exit_parameters == pytest.approx(303e6, rel=5e-3)


def test_qwen2_vl_has_an_encoder_of_675_million(tmp_path: Path) -> None:
    workload = made(tmp_path, published.QWEN, encoders=[{"name": "vision", "tokens": 4096}])
    backbone, vision = towers(workload)
    assert vision.parameters == pytest.approx(675e6, rel=2e-3)
    assert vision.exits == ((5120, 5120), (3584, 5120))
    assert workload.encoders[0].features == 1024
    assert backbone.kv_heads == 4
    with pytest.raises(SpecError, match="images of any size"):
        made(tmp_path, published.QWEN)
    with pytest.raises(SpecError, match="one after another"):
        made(tmp_path, published.QWEN, encoders=[{"name": "vision", "tokens": 4098}])


def test_what_the_workload_says_counts(tmp_path: Path) -> None:
    audio = {"name": "audio", "tokens": 64, "dims": {"layers": 2, "hidden": 64, "heads": 2}}
    said = [{"name": "vision", "frozen": True, "images": 2}, audio]
    workload = made(tmp_path, published.INTERNVL, encoders=said)
    vision, other = workload.encoders
    assert (vision.frozen, vision.images, vision.features) == (True, 2, 512)
    assert (vision.merged, other.name) == (4, "audio")
    assert workload.backbone is not None
    assert workload.backbone.vocab == 92553
    # A plan is read again where the folder is not.
    again = BubblesWorkload.model_validate_json(
        workload.model_copy(update={"multimodal": "/nowhere"}).model_dump_json()
    )
    assert again.encoders == workload.encoders


def test_a_plan_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.LLAVA))
    asked = {
        "multimodal": str(tmp_path), "sequence_length": 2048, "microbatches": 8,
        "encoders": [{"name": "vision", "frozen": True}], "plan": {"pp": 4, "tp": 2},
        "unit_layers": [1.0], "encoder_stages": [1],
    }  # fmt: skip
    plan = foreplan.plan("bubbles", None, "8xa100-80g", asked, costs="roofline")
    assert plan.decision["encoders"][0]["name"] == "vision"
    assert plan.workload["backbone"]["layers"] == 32


def test_a_backbone_without_words_is_told_that_they_were_left_out() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 2}
    asked: dict[str, Any] = {"backbone": sizes, "sequence_length": 64, "microbatches": 8}
    asked["encoders"] = [{"name": "vision", "tokens": 64, "dims": sizes}]
    workload = load_workload("bubbles", asked)
    cluster, _ = load_cluster("8xa100-80g")
    with pytest.raises(SpecError, match=r"backbone\.vocab: got 0, .* give it: left out, it is 0"):
        backbone_tower(Problem(None, cluster, workload, CostBook(())))


def test_a_plan_holds_the_sizes_of_an_encoders_folder(tmp_path: Path) -> None:
    """So that it can be verified and reported from another folder, or on another host."""
    folder = tmp_path / "vit"
    folder.mkdir()
    sizes = {
        "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 8,
        "intermediate_size": 256, "image_size": 32,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(sizes))
    fields = {
        "encoders": [{"name": "eye", "model": str(folder), "tokens": 16},
                     {"name": "zoo", "model": "vit-3b", "tokens": 16}],
        "backbone": {"layers": 2, "hidden": 64, "heads": 2, "vocab": 100},
        "sequence_length": 64, "microbatches": 2,
    }  # fmt: skip
    workload = load_workload("bubbles", fields)
    assert isinstance(workload, BubblesWorkload)
    eye, zoo = workload.encoders
    assert (eye.model, zoo.model) == (None, "vit-3b")
    assert eye.dims is not None
    assert (eye.dims.layers, eye.dims.hidden, eye.dims.ffn) == (3, 96, 256)
    assert eye.patch_features == 3 * 8 * 8
    with pytest.raises(SpecError, match="encoder model: got '/nowhere'"):
        load_workload("bubbles", fields | {"encoders": [{"name": "eye", "model": "/nowhere"}]})
