"""Passes of mixtures of experts as `foreplan predict` captures and prices them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from foreplan.cost_models.lowering.graph_programs import model_steps
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.ranking import rank_devices
from foreplan.cost_models.sources.expert_parts import expert_parts
from foreplan.datasets import device_zoo
from foreplan.datasets.experts import touched_experts
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.model import Model
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import SpecError

SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = SIZES | {"model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 8}
QWEN = SIZES | {
    "model_type": "qwen2_moe", "intermediate_size": 1024, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 512, "num_experts": 16, "mlp_only_layers": [2],
}  # fmt: skip


def _model(folder: Path, config: dict[str, object]) -> Model:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder)


def _of(model: Model, op: str, **shape: object) -> Counter[Program]:
    steps = model_steps(model, batch=2, tokens=24, **shape)  # type: ignore[arg-type]
    works = (step.work for step in steps if isinstance(step.work, Program))
    return Counter(work for work in works if work.op == op)


def test_a_pass_multiplies_rows_by_the_weights_of_their_experts(tmp_path: Path) -> None:
    found = _of(_model(tmp_path / "mixtral", MIXTRAL), "grouped")
    drawn = {"rows": 48, "experts": 8, "active": 2}
    bf16 = Variant("bf16", "bf16", "torch.linear")
    assert found == {
        program("grouped", bf16, **drawn, n=1024, k=256): 4,  # gate and up
        program("grouped", bf16, **drawn, n=256, k=512): 4,
    }


def test_dense_layers_among_them_stay_dense(tmp_path: Path) -> None:
    """The third layer of four has a plain MLP, so that the first two are not all."""
    model = _model(tmp_path / "qwen", QWEN)
    assert sum(_of(model, "grouped").values()) == 2 * 3
    linears = _of(model, "linear")
    plain = program("linear", Variant("bf16", "bf16", "torch.linear"), rows=48, n=1024, k=256)
    assert linears[plain] == 2


def test_a_training_step_has_the_gradients_of_rows_and_weights(tmp_path: Path) -> None:
    model = _model(tmp_path / "mixtral", MIXTRAL)
    forward, step = _of(model, "grouped"), _of(model, "grouped", phase="training")
    assert sum(step.values()) == 2 * sum(forward.values())
    gradients = _of(model, "grouped_gradient", phase="training")
    assert sum(gradients.values()) == sum(forward.values())
    products = [*step.elements(), *gradients.elements()]
    assert sum(p.flops for p in products) == 3 * sum(p.flops for p in forward.elements())


@pytest.mark.parametrize("op", ["grouped", "grouped_gradient"])
@pytest.mark.parametrize("rows", [1, 3, 40, 4000])
def test_parts_do_the_work_of_the_whole(op: str, rows: int) -> None:
    bf16 = Variant("bf16", "bf16", "torch.linear")
    whole = program(op, bf16, rows=rows, experts=64, active=6, n=512, k=128)
    parts = expert_parts(whole)
    assert parts is not None
    products = [(part, share) for part, share in parts if part.op == "linear"]
    # Between whole numbers of rows and of experts both are weighed, each by itself.
    assert sum(p.flops * s for p, s in products) == pytest.approx(whole.flops, rel=1e-9)
    zeros = sum(part.bytes * share for part, share in parts if part.op == "fill")
    left_out = 64 - touched_experts(rows, 64, 6)
    expected = 2 * 512 * 128 * left_out if op == "grouped_gradient" else 0
    assert zeros == pytest.approx(expected, abs=1e-3)


def test_a_mixture_lies_between_its_active_and_all_of_its_weights() -> None:
    """Of an H200: one token reads the active experts, many read all, and more are never faster.

    As a graph: eagerly the host decides what one token takes.
    """
    model, board = load_model("mixtral-8x7b"), device_zoo.device("h200")
    predictor, found = Predictor.load(), []
    for tokens in (1, 16, 128, 1024):
        ranked = rank_devices(
            model, board, sequence_length=tokens, predictor=predictor, execution="graph"
        )
        found.append(ranked.fastest)
    assert all(more.latency_s > less.latency_s for less, more in pairwise(found))
    assert board.memory_bandwidth is not None
    assert board.peak("bf16") is not None
    read_s = 2 * model.active_parameters / board.memory_bandwidth
    assert read_s < found[0].latency_s < 3 * read_s
    assert found[2].latency_s > 2 * model.parameters / board.memory_bandwidth
    assert found[3].latency_s > 2 * model.active_parameters * 1024 / (board.peak("bf16") or 0)
    assert all(replay.low_s <= replay.latency_s <= replay.high_s for replay in found)


def test_what_transformers_lacks_is_said_to_be_priced_elsewhere() -> None:
    with pytest.raises(SpecError, match="'foreplan plan serving' prices it"):
        model_steps(load_model("deepseek-moe-16b"), batch=1, tokens=8)
