"""Quality losses of mixtures of experts: what is lowered, against the runtime, and in a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import foreplan
from foreplan.cost_models.quality import quality_indicators as by
from foreplan.cost_models.quality.quality_table import measure_quality
from foreplan.cost_models.quality.quantised_decoder import QuantisedDecoder
from foreplan.datasets.graphs.causal_lm import causal_lm
from foreplan.datasets.kernels.registry import kernels_for
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.models.weights import open_weights
from foreplan.datasets.program import Variant
from foreplan.errors import SpecError
from foreplan.planner.verify.decoder import DecoderStage
from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

BASE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64,
    "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [1],
                  "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
}  # fmt: skip
PLAIN = Variant("bf16", "bf16", "torch.linear")
ATTENTION = Variant("bf16", "bf16", "torch.sdpa")
SINKS = Variant("bf16", "bf16", "torch.sink_sdpa")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family, of bytes, with predictions that are far from flat."""
    found = {}
    for family, changes in FAMILIES.items():
        config = transformers.AutoConfig.for_model(family, **(BASE | changes))
        found[family] = tmp_path_factory.mktemp(family)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        module.save_pretrained(found[family])
    return found


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, 20))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_is_lowered_with_all_its_experts_and_no_router(
    folders: dict[str, Path], ids: np.ndarray, family: str
) -> None:
    decoder = QuantisedDecoder(load_model(folders[family]))
    plain = causal_lm(decoder.model).eval()
    with torch.inference_mode():
        tokens = torch.from_numpy(ids)
        assert torch.equal(decoder.logits(tokens), plain(input_ids=tokens).logits)
    decoder.lower(2, 4)
    stored = dict(plain.named_parameters())
    for name, parameter in decoder.module.named_parameters():
        quantised = ".layers.2." in name and "proj" in name and not name.endswith("bias")
        if not quantised:
            assert torch.equal(parameter, stored[name]), name
        elif "experts." in name:
            different = (parameter != stored[name]).flatten(1).any(1)
            assert different.all()  # every expert
        else:
            assert not torch.equal(parameter, stored[name]), name


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_runtime_does(
    folders: dict[str, Path], ids: np.ndarray, family: str, bits: int
) -> None:
    """Logits of the same quantised weights by our layers, which are written anew."""
    model = load_model(folders[family])
    decoder = QuantisedDecoder(model)
    decoder.set_bits((bits,) * model.layers)
    storage = {16: "bf16", 8: "int8", 4: "int4"}[bits]
    linear = next(v for v in kernels_for("linear", "cpu") if v.storage == storage)
    attention = SINKS if model.sinks else ATTENTION
    batch, length = ids.shape
    stage = DecoderStage(
        model, 0, model.layers, prefill_batches=(batch,), decode_batches=(batch,), prompt=length,
        positions=length, reference=True,
    )  # fmt: skip
    stage.load(
        open_weights(model),
        StageKernels(
            (PhaseKernels(linear, linear),) * model.layers,
            PhaseKernels(attention, attention), PhaseKernels(PLAIN, PLAIN),
        ),
    )  # fmt: skip
    stage.keep_logits = stage.every_position = True
    stage.prefill(0, torch.from_numpy(ids))
    with torch.inference_mode():
        theirs = decoder.logits(torch.from_numpy(ids)).flatten(0, 1)
    assert stage.logits is not None
    assert torch.allclose(stage.logits, theirs, rtol=1e-3, atol=1e-3)


def test_fewer_bits_cost_more_and_fisher_sees_no_change_of_experts(
    folders: dict[str, Path], ids: np.ndarray
) -> None:
    decoder = QuantisedDecoder(load_model(folders["mixtral"]))
    measured = by.measured_kl(decoder, ids, (16, 8, 4, 3))
    assert (measured[:, 0] == 0).all()
    assert (np.diff(measured, axis=1) > 0).all()
    second_order = by.fisher(decoder, ids, (8, 4), draws=16)
    assert (second_order > 0).all()
    # A row that goes to another expert changes by a jump, which no gradient knows.
    assert measured[0, 1] > 2 * second_order[0, 0]


@pytest.mark.parametrize("indicator", ["output_error", "variance_bound", "hessian"])
def test_what_would_need_single_experts_inputs_is_refused(
    folders: dict[str, Path], indicator: str
) -> None:
    with pytest.raises(SpecError, match=r"layers of experts.*use measured_kl, fisher or weights"):
        measure_quality(
            load_model(folders["olmoe"]), "stdlib", indicator=indicator, windows=1, length=16
        )


def test_a_plan_knows_the_layers_that_cost_most(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(folders["qwen2_moe"])
    text = tmp_path / "text.txt"
    letters = np.random.default_rng(1).integers(97, 123, (1000, 60), dtype=np.uint8)
    text.write_bytes(b"\n".join(bytes(row) for row in letters))
    table = measure_quality(model, str(text), bits=(8, 4), windows=2, length=24)
    assert table.indicator == "measured_kl"
    table.save(tmp_path / "quality.json")
    workload = {
        "batch": 4, "prompt_tokens": 16, "new_tokens": 8, "bits": [8, 4], "min_average_bits": 6.5,
        "quality": str(tmp_path / "quality.json"), "theta_s": 1e3,
    }  # fmt: skip
    plan = foreplan.plan("serving", folders["qwen2_moe"], "a10", workload, costs="roofline")
    (stage,) = plan.decision["stages"]
    worst = int(np.argmax(np.array(table.omega)[:, 1]))
    assert stage["bits"][worst] == 8
    assert plan.decision["omega"] == pytest.approx(
        sum(table.omega[k][0 if b == 8 else 1] for k, b in enumerate(stage["bits"]))
    )
