from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone

from foreplan.cost_models.baselines import BASELINES, baseline
from foreplan.cost_models.commands import evaluate_file, operator_stats, train_operators
from foreplan.cost_models.evaluation import evaluate
from foreplan.cost_models.graph_programs import Step
from foreplan.cost_models.launch_head import head, head_slope
from foreplan.cost_models.model_store import load_operator_model
from foreplan.cost_models.operator_features import FAMILIES, features
from foreplan.cost_models.operator_predictor import OperatorPredictor
from foreplan.cost_models.operator_work import operator_work
from foreplan.cost_models.predicted import PredictedSource
from foreplan.cost_models.predictor import Predictor, program_table, recorded_libraries
from foreplan.cost_models.replay import replay_book, replay_steps
from foreplan.datasets import device_zoo
from foreplan.datasets.device import Device
from foreplan.datasets.operator_cases import graph_cases
from foreplan.datasets.operator_table import (
    DIMS,
    KINDS,
    UNKNOWN,
    OperatorTable,
    includes_launch,
    operator_table,
    texts,
    write_operators,
)
from foreplan.datasets.program import Program, Variant, program
from foreplan.errors import MissingDataError, SpecError

BF16 = Variant("bf16", "bf16", "torch.linear")


def synthetic(
    devices: tuple[str, ...] = ("t4", "l4", "a100_sxm_80gb"), rows: int = 200
) -> OperatorTable:
    """Products that take twice their roofline and 5 us."""
    rng = np.random.default_rng(0)
    count = rows * len(devices)
    dims = {name: np.round(2 ** rng.uniform(4, 12, count)) for name in ("m", "n", "k")}
    table = operator_table(
        op=texts(["gemm/bfloat16"] * count),
        kind=texts(["linear"] * count),
        dtype=texts(["bfloat16"] * count),
        library=texts(["trtllm"] * count),
        device=texts(np.repeat(devices, rows)),
        dims={"b": np.ones(count), **dims},
        latency_s=np.ones(count),
    )
    latency = 5e-6 + 2 * operator_work(table).roofline_s
    return operator_table(
        op=table.op, kind=table.kind, dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=latency,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted() -> OperatorPredictor:
    return OperatorPredictor(trees=60).fit(synthetic())


def test_work_of_a_linear_by_hand() -> None:
    table = synthetic(("t4",), 1)
    work = operator_work(table)
    m, n, k = (table.dims[name][0] for name in ("m", "n", "k"))
    assert work.flops[0] == 2 * m * n * k
    assert work.bytes[0] == 2 * (m * k + n * k + m * n)
    assert work.peak[0] == 6.5e13  # no bf16 on a T4: its fp16
    assert work.bandwidth[0] == 3.2e11


def test_causal_attention_counts_visible_pairs() -> None:
    table = _one("context_attention", "bfloat16/bfloat16", b=1, queries=4, keys=4, heads=1,
                 kv_heads=1, head_dim=8)  # fmt: skip
    assert operator_work(table).flops[0] == 4 * 8 * 10
    windowed = _one("context_attention", "bfloat16/bfloat16", b=1, queries=4, keys=4, heads=1,
                    kv_heads=1, head_dim=8, window=2)  # fmt: skip
    assert operator_work(windowed).flops[0] == 4 * 8 * 7


def _one(kind: str, dtype: str, device: str = "l4", **dims: float) -> OperatorTable:
    return operator_table(
        op=texts([kind]), kind=texts([kind]), dtype=texts([dtype]), library=texts(["trtllm"]),
        device=texts([device]), dims={name: np.array([size]) for name, size in dims.items()},
        latency_s=np.array([1e-3]),
    )  # fmt: skip


def test_every_kind_has_a_family_and_features() -> None:
    assert {kind for kinds in FAMILIES.values() for kind in kinds} == set(KINDS)
    for family, kinds in FAMILIES.items():
        for kind in kinds:
            dims = dict.fromkeys(KINDS[kind], 8.0) | {"padding": 0.0, "pattern": 1.0}
            dtype = "bfloat16/fp8" if "attention" in kind else "bfloat16"
            table = _one(kind, dtype, **{name: dims[name] for name in KINDS[kind]})
            block = features(table, family)
            assert block.values.shape == (1, len(block.names))
            assert np.isfinite(block.structural_s).all()
            assert (block.bound_s <= block.roofline_s * 1.0001).all()


def test_head_hides_short_kernels_and_adds_long_ones() -> None:
    overhead = np.array([26e-6, 26e-6, 0.0])
    device = np.array([1e-6, 1e-3, 1e-3])
    total = head(overhead, device)
    assert total[0] == pytest.approx(26e-6, rel=1e-3)
    assert total[1] == pytest.approx(1e-3 + 0.55 * 26e-6, rel=1e-3)
    assert total[2] == pytest.approx(1e-3)
    step = 1e-6
    slope = (head(overhead, device * np.exp(step)) - total) / step
    assert head_slope(overhead, device) == pytest.approx(slope, rel=1e-3, abs=1e-12)


def test_learns_seen_devices_and_carries_over(fitted: OperatorPredictor) -> None:
    seen = synthetic()
    assert np.median(np.abs(fitted.predict(seen) / seen.latency_s - 1)) < 0.05
    unseen = synthetic(("l40s", "h200"))
    assert np.median(np.abs(fitted.predict(unseen) / unseen.latency_s - 1)) < 0.4


def test_never_faster_than_the_bound(fitted: OperatorPredictor) -> None:
    table = synthetic(("b200", "p4", "mi210"), 300)
    bound = features(table, "product").bound_s
    assert (fitted.predict(table) >= bound * 0.999).all()


def test_interval_is_wider_for_strangers(fitted: OperatorPredictor) -> None:
    mean, low, high = fitted.predict_interval(synthetic(("t4", "h200"), 5))
    assert (low < mean).all()
    assert (mean < high).all()
    assert high[-1] / mean[-1] > high[0] / mean[0]


def test_without_a_chip_is_training_without_it() -> None:
    table = synthetic()
    one = OperatorPredictor(trees=20).fit(table).without({"tu104"}).predict(table)
    two = OperatorPredictor(trees=20).fit(table.take(table.chips != "tu104")).predict(table)
    assert one == pytest.approx(two)


def test_estimator_contract(fitted: OperatorPredictor) -> None:
    model = OperatorPredictor(trees=7, seed=3)
    assert clone(model).get_params() == model.get_params()
    assert not [name for name in vars(model) if name.endswith("_")]
    assert model.fit(synthetic(rows=60)) is model
    same = OperatorPredictor(trees=7, seed=3).fit(synthetic(rows=60))
    assert np.array_equal(model.predict(synthetic()), same.predict(synthetic()))


def test_save_and_load(fitted: OperatorPredictor, tmp_path: Path) -> None:
    card = fitted.save(tmp_path / "m", sources=[{"file": "x", "format": "neusight"}])
    assert "MIT" in str(card["sources"])
    again = OperatorPredictor.load(tmp_path / "m")
    table = synthetic(("t4", "h200"), 20)
    # Leaves are kept in half precision.
    assert again.predict(table) == pytest.approx(fitted.predict(table), rel=5e-3)
    (tmp_path / "m" / "weights.safetensors").write_bytes(b"no")
    with pytest.raises(SpecError, match="weights that fit"):
        OperatorPredictor.load(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_text('{"schema": "other"}')
    with pytest.raises(SpecError, match="schema"):
        OperatorPredictor.load(tmp_path / "m")


def test_nothing_to_learn_from() -> None:
    table = synthetic(("t4",), 40)
    nobody = operator_table(
        op=table.op, kind=texts(["unknown"] * 40), dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=table.latency_s,
    )  # fmt: skip
    with pytest.raises(SpecError, match="no usable row"):
        OperatorPredictor().fit(nobody)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_keep_the_contract(name: str) -> None:
    table = synthetic(rows=60)
    model = baseline(name)
    assert model.fit(table) is model
    predicted = model.predict(synthetic(("h200",), 10))
    assert predicted.shape == (10,)
    assert (predicted > 0).all()


def test_unsupported_rows_are_counted() -> None:
    strange = _one("linear", "nvfp4", b=1, m=8, n=8, k=8)
    table = OperatorTable.concat([synthetic(("t4",), 5), strange])
    document = evaluate(baseline("roofline"), table)
    assert document["unsupported"] == 1
    assert document["by_device_op"]["l4"]["linear"]["count"] == 0  # type: ignore[index]
    assert document["overall"]["count"] == 5  # type: ignore[index]
    assert json.loads(json.dumps(document, allow_nan=False))


def test_device_the_zoo_lacks_counts_unless_figures_are_given() -> None:
    table = synthetic(("t4",), 5)
    table = operator_table(
        op=table.op, kind=table.kind, dtype=table.dtype, library=table.library,
        device=texts(["my-gpu"] * 5), dims=table.dims, latency_s=table.latency_s,
    )  # fmt: skip
    assert np.isnan(baseline("roofline").predict(table)).all()
    mine = Device(
        name="my-gpu", chip="x", vendor="me", kind="cuda", memory_bandwidth=1e12, units=10,
        peak_flops={"bf16/matrix": 1e14},
    )  # fmt: skip
    given = operator_table(
        op=table.op, kind=table.kind, dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=table.latency_s, devices={"my-gpu": mine},
    )  # fmt: skip
    assert np.isfinite(baseline("roofline").predict(given)).all()


def test_train_and_evaluate_files(tmp_path: Path) -> None:
    write_operators(synthetic(rows=60), tmp_path / "t.parquet")
    data = tmp_path / "t.parquet"
    card = train_operators([data], ["foreplan"], tmp_path / "m", hold_out=["tu104"])
    assert card["held_out"] == ["tu104"]
    result = evaluate_file(str(tmp_path / "m"), data, "foreplan")
    assert set(result) >= {"overall", "by_device", "by_op", "by_device_op", "unsupported"}
    assert set(result["overall"]) == {  # type: ignore[call-overload]
        "mape", "median_ape", "p90_ape", "within_10pct", "count"
    }  # fmt: skip
    assert operator_stats(data, "foreplan")["rows"] == 180
    with pytest.raises(SpecError, match="--hold-out"):
        train_operators([data], ["foreplan"], tmp_path / "m", hold_out=["nobody"])


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="pretrained:none"):
        load_operator_model("pretrained:none")
    with pytest.raises(MissingDataError, match="crossval"):
        load_operator_model("xgboost")
    with pytest.raises(SpecError, match="--model"):
        load_operator_model(str(tmp_path))


def test_shipped_model_prices_programs() -> None:
    source = PredictedSource()
    small = program("linear", BF16, rows=8, n=4096, k=4096)
    large = program("linear", BF16, rows=4096, n=4096, k=4096)
    times = [source.estimate(work, "a100_sxm_80gb") for work in (small, large)]
    assert times[0] is not None
    assert times[1] is not None
    # 32 MiB of weights at 2 TB/s; 137 GFLOP at 312 TFLOP/s
    assert 14e-6 < times[0].mean_s < 50e-6
    assert 4.4e-4 < times[1].mean_s < 9e-4
    assert times[1].low_s < times[1].mean_s < times[1].high_s
    assert times[0].source == "predicted"
    four = program("linear", Variant("int4", "bf16", "x"), rows=8, n=8192, k=8192)
    sixteen = program("linear", BF16, rows=8, n=8192, k=8192)
    wide, narrow = (source.estimate(w, "l40s") for w in (sixteen, four))
    assert wide is not None
    assert narrow is not None
    assert narrow.mean_s < 0.6 * wide.mean_s


def test_outside_of_what_was_seen() -> None:
    source = PredictedSource()
    argmax = program("argmax", Variant("bf16", "bf16", "torch.argmax"), rows=8, cols=100)
    assert source.estimate(argmax, "a100_sxm_80gb") is None
    assert source.estimate(program("linear", BF16, rows=8, n=8, k=8), "cuda:0") is None
    with pytest.raises(MissingDataError, match="argmax"):
        Predictor.load().predict([argmax], "t4")


@pytest.mark.parametrize(
    ("name", "format_name", "most"),
    [("neusight_ops_train", "neusight", 0.06), ("aiconfigurator_gemm", "aiconfigurator", 0.04),
     ("helix_layer_times_llama1_30b", "helix", 0.13)],
)  # fmt: skip
def test_shipped_model_on_shared_data(name: str, format_name: str, most: float) -> None:
    folder = os.environ.get("FOREPLAN_DATA")
    if not folder:
        pytest.skip("FOREPLAN_DATA names no folder of public latency data")
    result = evaluate_file("pretrained:ops", Path(folder, f"{name}.parquet"), format_name)
    assert result["unsupported"] == 0
    assert result["overall"]["mape"] < most  # type: ignore[index]


def recorded(device: str = "h200", count: int = 4000) -> OperatorTable:
    """Torch's operators inside graphs, each 1.5 us and twice its roofline; depthwise 10 times."""
    cases = list(itertools.islice(graph_cases(0), count))
    table = operator_table(
        op=texts(c.op for c in cases), kind=texts(c.kind for c in cases),
        dtype=texts(c.dtype for c in cases), library=texts(["torch_graph-2.11-cuda"] * count),
        device=texts([device] * count),
        dims={name: np.array([c.dims.get(name, 0) for c in cases], dtype=np.float64)
              for name in DIMS},
        latency_s=np.ones(count),
    )  # fmt: skip
    factor = np.where(table.dims["groups"] > 1, 10.0, 2.0)
    return replace(table, latency_s=1.5e-6 + factor * operator_work(table).roofline_s)


def conv(kernel: str = "torch.conv2d", groups: int = 1, dtype: str = "bf16") -> Program:
    return program("conv", Variant(dtype, dtype, kernel), batch=32, groups=groups, cin=128,
                   cout=128, taps=9, inputs=784, outputs=784)  # fmt: skip


BF = Variant("bf16", "bf16", "torch.any")
#: Programs that no published table has in 16 bits, and small ones, which launches hide there.
ASKED = {
    "conv": conv(),
    "channels last": conv("torch.conv2d_channels_last"),
    "input gradient": conv("torch.conv2d_input_gradient"),
    "weight gradient": conv("torch.conv2d_weight_gradient"),
    "depthwise": conv(groups=128),
    "reduction": program("reduction", BF, rows=4096, cols=512),
    "embedding": program("embedding", BF, rows=512, cols=2048),
    "norm": program("norm", Variant("bf16", "bf16", "torch.batch_norm"), rows=64, cols=3136),
    "copy": program("elementwise", Variant("bf16", "bf16", "torch.clone"), rows=64, cols=256,
                    inputs=1),
    "update": program("adamw", BF, parameters=10_000_000),
    "product": program("linear", Variant("bf16", "bf16", "torch.linear"), rows=8, n=256, k=256),
}  # fmt: skip


def test_operators_of_graphs_price_graphs(tmp_path: Path) -> None:
    both = OperatorTable.concat([synthetic(("a100_sxm_80gb", "h100_sxm"), 60), recorded()])
    path = tmp_path / "ops.parquet"
    write_operators(both, path)
    train_operators([path], ["foreplan"], tmp_path / "model")
    predictor = Predictor.load(str(tmp_path / "model"))
    h200 = device_zoo.device("h200")
    book = replay_book(h200, predictor=predictor)
    steps = [Step(name, name, "forward", work) for name, work in ASKED.items()]
    found = replay_steps(steps, book, h200, execution="graph", gap_s=0.0)
    assert {price.source for price in found.prices} == {"predicted"}
    for (name, work), price in zip(ASKED.items(), found.prices, strict=True):
        roofline = max(work.flops / 9.89e14, work.bytes / 4.8e12)
        factor = 10.0 if name == "depthwise" else 2.0
        assert price.mean_s == pytest.approx(1.5e-6 + factor * roofline, rel=0.5), name
    # Nothing that is small costs what a launch does.
    assert found.prices[-1].mean_s < 3e-6


def test_published_rows_answer_where_no_graph_was_recorded() -> None:
    model = OperatorPredictor(trees=20).fit(
        OperatorTable.concat([synthetic(("h100_sxm", "a100_sxm_80gb"), 60), recorded(count=1500)])
    )
    libraries = recorded_libraries(model, device_zoo.device("h200"))
    assert libraries["conv_weight_gradient", "bfloat16"] == "torch_graph-2.11-cuda"
    # Of the same chip, with products of its own.
    board = recorded_libraries(model, device_zoo.device("h100_sxm"))
    assert ("linear", "bfloat16") not in board
    assert ("conv", "bfloat16") in board
    assert recorded_libraries(model, device_zoo.device("a100_sxm_80gb")) == {}
    found = program_table([*ASKED.values()], device_zoo.device("a100_sxm_80gb"))
    kinds = dict(zip(ASKED, found.kind, strict=True))
    assert kinds["input gradient"] == "conv"
    assert kinds["norm"] == "layernorm"
    assert {kinds[name] for name in ("depthwise", "reduction", "embedding")} == {UNKNOWN}
    assert not found.dims["channels_last"].any()


def test_launches_are_of_eager_calls_alone() -> None:
    names = ("torch-2.11-cuda", "torch_graph-2.11-cuda", "trtllm", "sglang")
    assert [includes_launch(name) for name in names] == [True, False, False, False]
    model = OperatorPredictor(trees=5).fit(recorded(count=1500))
    assert not any(expert.overhead_s for expert in model.experts_)


def test_odd_rows_of_a_round_product_are_asked_for_as_round_ones() -> None:
    """`graph_cases` round all sizes of a product or none; an odd ``m`` alone was never drawn."""
    h200 = device_zoo.device("h200")
    library = {("linear", "bfloat16"): "torch_graph-2.11-cuda"}

    def rows(n: int, k: int, known: dict[tuple[str, str], str]) -> list[float]:
        asked = [program("linear", BF, rows=m, n=n, k=k) for m in (1, 64, 197)]
        return [float(m) for m in program_table(asked, h200, known).dims["m"]]

    assert rows(2048, 512, library) == [64, 64, 256]
    assert rows(2048, 510, library) == rows(2047, 512, library) == [1, 64, 197]
    assert rows(2048, 512, {}) == [1, 64, 197]


def test_types_of_sixteen_bits_teach_each_other() -> None:
    table = recorded(count=1200)
    slow = replace(table, latency_s=np.where(
        np.char.startswith(table.dtype.astype(str), "float16"), 3.0, 1.0) * table.latency_s,
    )  # fmt: skip
    one, two = (OperatorPredictor(trees=20).fit(each).experts_ for each in (table, slow))
    changed = {
        (a.family, a.dtype) for a, b in zip(one, two, strict=True)
        if not np.array_equal(a.trees.value, b.trees.value)
    }  # fmt: skip
    assert {("product", "bfloat16"), ("product", "float16")} <= changed
    assert not any(dtype == "fp32" for _, dtype in changed)
    counts = {(e.family, e.dtype): e.rows for e in one}
    assert counts["product", "bfloat16"] == counts["product", "float16"]


def test_shared_caches_are_asked_of_published_tables() -> None:
    kind = ("generation_attention", "bfloat16/bfloat16")
    asked = [
        program("attention", BF, batch=4, queries=1, keys=512, heads=32, kv_heads=heads,
                head_dim=128)
        for heads in (8, 32)
    ]  # fmt: skip
    found = program_table(asked, device_zoo.device("h200"), {kind: "torch_graph-2.11-cuda"})
    assert list(found.library) == ["trtllm", "torch_graph-2.11-cuda"]


def test_a_sweep_does_not_speak_over_a_published_table() -> None:
    """A board of the same chip has a table of its own under another library's name."""
    own = synthetic(("h100_sxm", "a100_sxm_80gb"))
    alone = OperatorPredictor(trees=20).fit(own)
    both = OperatorPredictor(trees=20).fit(OperatorTable.concat([own, recorded(count=600)]))
    asked = own.take(own.device == "h100_sxm")
    asked = replace(asked, library=texts(["sglang"] * len(asked)))
    np.testing.assert_array_equal(alone.predict(asked), both.predict(asked))
