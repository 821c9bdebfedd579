"""Quality losses of a small decoder: what they are by definition, and their document."""

import itertools

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from foreplan.cost_models.quality import quality_indicators as by
from foreplan.cost_models.quality.perplexity_curve import PerplexityCurve
from foreplan.cost_models.quality.quality_table import QualityTable, measure_quality, weights_digest
from foreplan.cost_models.quality.quantised_decoder import QuantisedDecoder
from foreplan.datasets.graphs.causal_lm import causal_lm
from foreplan.datasets.models.load_model import load_model
from foreplan.errors import SpecError

BITS = (8, 4, 3)


@pytest.fixture(scope="module")
def folder(trained_decoder):
    return trained_decoder(3, 2, 64)  # two heads share keys and values


@pytest.fixture
def decoder(folder):
    return QuantisedDecoder(load_model(folder))


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 256, (3, 25))


def test_at_16_bits_the_decoder_is_the_stored_model(decoder, ids):
    plain = causal_lm(decoder.model).eval()
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        expected = plain(input_ids=tokens).logits
        assert torch.equal(decoder.logits(tokens), expected)
        decoder.lower(1, 3)
        assert not torch.allclose(decoder.logits(tokens), expected)
        decoder.set_bits((16,) * 3)
        assert torch.equal(decoder.logits(tokens), expected)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phi3", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
        ("granite", {"attention_multiplier": 0.1, "residual_multiplier": 0.5}),
        ("gpt_neox", {}),
    ],
)
def test_what_loading_changes_is_stored_as_the_module_holds_it(family, fields, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
             "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    config = transformers.AutoConfig.for_model(family, **sizes, **fields)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    module.save_pretrained(tmp_path)
    tokens = torch.arange(40).view(2, 20)
    decoder = QuantisedDecoder(load_model(tmp_path))
    with torch.inference_mode():
        expected, found = module(input_ids=tokens).logits, decoder.logits(tokens)
    assert (found - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("bits", BITS)
def test_a_lowered_weight_is_within_half_a_step(decoder, bits):
    exact = dict(decoder.stored(0, 16))
    for name, weight in decoder.stored(0, bits):
        rms = float((weight - exact[name]).square().mean().sqrt())
        # Rounding to nearest leaves step / sqrt(12); bf16 scales and zeros add to it.
        assert rms <= 0.5 * decoder.squared_step(0, name, bits) ** 0.5
        assert rms >= 0.15 * decoder.squared_step(0, name, bits) ** 0.5


def test_measured_divergence_is_the_definition(decoder, ids):
    found = by.measured_kl(decoder, ids, (16, *BITS))
    assert (found[:, 0] == 0).all()
    assert (found[:, 1:] > 0).all()
    assert (np.diff(found, axis=1) > 0).all()  # fewer bits cost more
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        p = decoder.logits(tokens).double().softmax(-1)
        decoder.lower(2, 4)
        q = decoder.logits(tokens).double().softmax(-1)
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert found[2, 2] == pytest.approx(expected, rel=1e-3)


def test_rounded_caches_diverge_a_little_and_are_put_back(decoder, ids):
    tokens = torch.from_numpy(ids)
    exact = decoder.logits(tokens)
    lost = by.cache_kl(decoder, ids)
    assert 0 < lost < by.measured_kl(decoder, ids, (3,)).sum()
    assert torch.equal(decoder.logits(tokens), exact)
    with torch.inference_mode(), decoder.rounded_cache():
        q = decoder.logits(tokens).double().log_softmax(-1)
    p = exact.double().log_softmax(-1)
    assert lost == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_fisher_is_the_divergence_of_small_changes(decoder, ids):
    measured = by.measured_kl(decoder, ids, (8,))
    second_order = by.fisher(decoder, ids, (8,), draws=240, seed=1)
    # 240 draws of a squared normal: 9 % deviation; both are of the same three windows.
    assert second_order == pytest.approx(measured, rel=0.35)


def test_output_error_and_variance_bound_are_their_formulas(decoder, ids):
    seen = {}
    attention = decoder.module.get_submodule("model.layers.1.self_attn.o_proj")
    hook = attention.register_forward_pre_hook(lambda part, x: seen.update(x=x[0].detach()))
    with torch.inference_mode():
        decoder.logits(torch.from_numpy(ids))
    hook.remove()
    rows = seen["x"].reshape(-1, 64)
    exact, low = (dict(decoder.stored(1, b))["out"] for b in (16, 4))
    alone = float((rows @ (low - exact).T).square().sum() / (rows @ exact.T).square().sum())
    bound = 64 * decoder.squared_step(1, "out", 4) * float(rows.var(correction=0)) / 4
    assert 0 < alone < by.output_error(decoder, ids, (4,))[1, 0]
    assert 0 < bound < by.variance_bound(decoder, ids, (4,))[1, 0]
    # The bound is one on the variance that rounding adds to an output.
    assert float((rows @ (low - exact).T).var(correction=0)) < bound


def test_every_indicator_keeps_the_contract_and_leaves_the_decoder_whole(decoder, ids):
    before = [p.clone() for p in decoder.module.parameters()]
    made = [
        by.measured_kl(decoder, ids, (16, *BITS)),
        by.fisher(decoder, ids, (16, *BITS), draws=2),
        by.output_error(decoder, ids, (16, *BITS)),
        by.variance_bound(decoder, ids, (16, *BITS)),
        by.hessian(decoder, ids, (16, *BITS)),
        by.depth(3, (16, *BITS)),
        by.random_order(3, (16, *BITS), 0),
    ]
    by.plan_quality(decoder, ids, [(3, 4, 8)])
    for omega in made:
        assert omega.shape == (3, 4)
        assert np.isfinite(omega).all()
        assert (omega >= 0).all()
        assert (omega[:, 0] == 0).all()
    for mine, then in zip(decoder.module.parameters(), before, strict=True):
        assert torch.equal(mine, then)
        assert not mine.requires_grad


def test_random_plans_are_mixed_and_their_own(ids):
    plans = by.random_plans(12, BITS, 40, 0)
    assert plans == by.random_plans(12, BITS, 40, 0) != by.random_plans(12, BITS, 40, 1)
    assert {b for plan in plans for b in plan} == {16, *BITS}


# ------------------------------------------------------------------------------------------ curve


@given(
    c=st.floats(0.1, 10), g=st.floats(0.5, 2), scale=st.floats(1e-4, 1e-1),
    nats=st.floats(0.5, 4),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_curve_finds_what_it_was_made_of_and_is_monotone(c, g, scale, nats):
    omega = scale * np.linspace(0.1, 1, 9)
    curve = PerplexityCurve.fit(omega, c * omega**g, nats)
    assert (curve.coefficient, curve.exponent) == pytest.approx((c, g), rel=1e-3)
    assert curve.error < 1e-3
    rises = [curve.increase(x) for x in (0, *omega)]
    assert rises[0] == 0
    assert all(a < b for a, b in itertools.pairwise(rises))
    assert curve.omega(curve.increase(scale / 2)) == pytest.approx(scale / 2, rel=1e-9)


def test_a_curve_needs_plans_that_lose_something():
    with pytest.raises(SpecError, match="lose something"):
        PerplexityCurve.fit([0, 0, 0, 1, 2], [0, 0, 0, 0.1, 0.2], 1.0)
    with pytest.raises(SpecError, match="lose something"):
        PerplexityCurve.fit([1, 2, 3, 4], [-1, -1, -1, -1], 1.0)


# --------------------------------------------------------------------------------------- document


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(np.random.default_rng(1).integers(0, 128, 4096, np.uint8).tobytes())
    return str(file)


def test_a_table_is_measured_saved_and_read_again(folder, text, tmp_path):
    model = load_model(folder)
    table = measure_quality(model, text, windows=2, length=24, bits=(8, 3))
    assert (table.indicator, table.bits, table.length) == ("measured_kl", (8, 3), 24)
    table.save(tmp_path / "quality.json")
    again = QualityTable.load(tmp_path / "quality.json")
    assert again == table == measure_quality(model, text, windows=2, length=24, bits=(8, 3))
    again.check(model)
    losses = again.losses((16, 3))
    assert (losses[:, 0] == 0).all()
    assert losses[:, 1] == pytest.approx([r[1] for r in table.omega])


def test_a_table_belongs_to_its_weights_and_bits(folder, text):
    model = load_model(folder)
    said: list[str] = []
    table = measure_quality(
        model, text, windows=1, length=100_000, bits=(8,), indicator="weights", say=said.append
    )
    most = model.max_sequence
    assert said[0] == f"length 100000: cut to {most - 1}, as {model.name} attends to {most}"
    assert table.length == most - 1
    table = measure_quality(model, text, windows=1, length=8, bits=(8,), indicator="weights")
    with pytest.raises(SpecError, match="no 4 bits"):
        table.losses((16, 4))
    other = load_model("demo-llama-random")
    assert weights_digest(other) != weights_digest(model)
    with pytest.raises(SpecError, match="other weights"):
        table.check(other)
    with pytest.raises(SpecError, match="random weights"):
        measure_quality(other, text)
    with pytest.raises(SpecError, match="did you mean 'fisher'"):
        measure_quality(model, text, indicator="fischer")
    for bits in ((5,), (16, 8), (8, 8), ()):
        with pytest.raises(SpecError, match="different numbers of"):
            measure_quality(model, text, bits=bits)
    with pytest.raises(SpecError, match="at most 266305 of 63 tokens"):
        measure_quality(model, text, windows=10**8)
    for device in ("tpu", "cuda:99"):
        with pytest.raises(SpecError, match="a device of this machine: cpu"):
            measure_quality(model, text, windows=1, length=8, device=device)
    (folder / "short.txt").write_text("short\n")
    with pytest.raises(SpecError, match="more than 63"):
        measure_quality(model, str(folder / "short.txt"))
