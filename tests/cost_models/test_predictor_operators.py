from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from tests.cost_models.operator_rows import synthetic

from foreplan.cost_models.commands import (
    evaluate_file,
    operator_stats,
    train_files,
    train_operators,
)
from foreplan.cost_models.evaluation import evaluate
from foreplan.cost_models.model_store import load_operator_model, model_folder
from foreplan.cost_models.operators.baselines import BASELINES, baseline
from foreplan.cost_models.operators.launch_head import head, head_slope
from foreplan.cost_models.operators.operator_experts import overheads
from foreplan.cost_models.operators.operator_features import FAMILIES, features
from foreplan.cost_models.operators.operator_predictor import OperatorPredictor
from foreplan.cost_models.operators.operator_weights import load_experts
from foreplan.cost_models.operators.operator_work import operator_work
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.replay import predict_latency
from foreplan.cost_models.sources.predicted import PredictedSource
from foreplan.datasets.device import Device
from foreplan.datasets.importers import read_operators
from foreplan.datasets.program import Variant, program
from foreplan.datasets.sweeps.operator_table import (
    KINDS,
    OperatorTable,
    operator_table,
    texts,
    write_operators,
)
from foreplan.errors import MissingDataError, SpecError

BF16 = Variant("bf16", "bf16", "torch.linear")


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


#: A convolution of 3 x 3 on 16,384 pixels and 512 channels.
_CONV = {
    "b": 64.0, "cin": 512.0, "cout": 512.0, "window": 3.0, "size": 16.0, "stride": 1.0,
    "padding": 1.0, "groups": 1.0,
}  # fmt: skip


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


def test_few_launch_bound_rows_leave_the_quickest_as_the_launch() -> None:
    # Without small work the launch is at most the quickest call, not a low quantile of long ones.
    one = _one("conv", "fp32", "v100_pcie_32gb", **_CONV)
    table = one.take(np.zeros(100, dtype=np.int64))
    table = replace(table, library=texts(["torch-2.1-cuda"] * 100))
    latency = np.geomspace(60e-6, 1e-2, 100)
    assert overheads(table, latency, np.full(100, 1e-4)) == {"conv": pytest.approx(60e-6)}
    small = overheads(table, latency, np.where(np.arange(100) < 30, 1e-6, 1e-4))
    assert small["conv"] == pytest.approx(np.median(latency[:30]))


def test_a_convolution_along_a_line_is_counted_once_along_it() -> None:
    dims = {"b": 4, "cin": 32, "cout": 64, "window": 5, "size": 1000, "stride": 2, "padding": 2,
            "groups": 4, "line": 1}  # fmt: skip
    work = operator_work(_one("conv", "bfloat16", "h200", **dims))
    # 500 positions of 64 filters, each 5 elements of 8 channels; 1,000 positions of 32 channels.
    assert work.flops[0] == 2 * 4 * 500 * 64 * 8 * 5
    assert work.bytes[0] == 2 * (4 * (1000 * 32 + 500 * 64) + 64 * 8 * 5)
    square = {**dims, "line": 0, "size": 32, "stride": 1, "window": 3, "padding": 1}
    assert operator_work(_one("conv", "bfloat16", "h200", **square)).flops[0] == (
        2 * 4 * 32**2 * 64 * 8 * 9
    )


def test_a_power_limit_costs_convolutions_less_than_products() -> None:
    def share(kind: str, device: str, **dims: float) -> float:
        block = [
            features(_one(kind, "fp32", name, **dims), "conv" if kind == "conv" else "product")
            for name in (device, "v100_pcie_32gb")
        ]
        slower = block[0].structural_s / block[1].structural_s
        return float((slower / (block[0].roofline_s / block[1].roofline_s))[0])

    # A product of the sizes of the convolution (16,384 pixels), on a board of 70 W beside one that
    # holds its clock: the limit takes a factor 2 or so, of the convolution its root.
    product = share("linear", "t4", b=1.0, m=16384.0, n=512.0, k=4608.0)
    conv = share("conv", "t4", **_CONV)
    assert 1.5 < product < 3.0
    assert conv == pytest.approx(product**0.5, rel=0.1)


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


def test_an_estimator_that_was_not_fitted_says_so() -> None:
    with pytest.raises(NotFittedError, match="OperatorPredictor"):
        OperatorPredictor().predict(synthetic(("t4",), 1))


def test_save_and_load(fitted: OperatorPredictor, tmp_path: Path) -> None:
    card = fitted.save(tmp_path / "m", sources=[{"file": "x", "format": "neusight"}])
    assert "MIT" in str(card["sources"])
    again = OperatorPredictor.load(tmp_path / "m")
    table = synthetic(("t4", "h200"), 20)
    # Leaves are kept in half precision.
    assert again.predict(table) == pytest.approx(fitted.predict(table), rel=5e-3)
    experts = load_experts(tmp_path / "m")
    for one, other in ((experts, again), (experts.without({"tu104"}), again.without({"tu104"}))):
        np.testing.assert_array_equal(one.predict_interval(table), other.predict_interval(table))
    (tmp_path / "m" / "weights.safetensors").write_bytes(b"no")
    with pytest.raises(SpecError, match="weights that fit"):
        OperatorPredictor.load(tmp_path / "m")
    (tmp_path / "m" / "card.json").write_text('{"schema": "other"}')
    with pytest.raises(SpecError, match="schema"):
        OperatorPredictor.load(tmp_path / "m")


def test_a_prediction_loads_no_scikit_learn() -> None:
    code = (
        "import sys; from foreplan.cost_models.predictor import Predictor; "
        "from foreplan.datasets.program import Variant, program; "
        "add = program('add', Variant.parse('fp32/fp32/torch.add'), rows=2, cols=768); "
        "Predictor.load().predict([add], 't4'); "
        "print(sorted({'torch', 'sklearn', 'pandas', 'xgboost'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_to_learn_from() -> None:
    table = synthetic(("t4",), 40)
    nobody = operator_table(
        op=table.op, kind=texts(["unknown"] * 40), dtype=table.dtype, library=table.library,
        device=table.device, dims=table.dims, latency_s=table.latency_s,
    )  # fmt: skip
    with pytest.raises(SpecError, match="no usable row of 40"):
        OperatorPredictor().fit(nobody)
    with pytest.raises(SpecError, match="expected at least 30 of a family of known operators"):
        OperatorPredictor().fit(table.take(np.arange(5)))
    with pytest.raises(SpecError, match=r"labels of shape \(3,\)., expected \(40,\)"):
        OperatorPredictor().fit(table, np.ones(3))


@pytest.mark.parametrize("name", ["programs", "processors"])
def test_a_model_of_something_else_is_named(name: str) -> None:
    with pytest.raises(SpecError, match="use pretrained:ops, or a folder that"):
        OperatorPredictor.load(model_folder(f"pretrained:{name}"))


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
    # A third ran on the chip that was held out; of the roofline none is of a fit.
    assert result["taught"] == {"l4": 60, "a100_sxm_80gb": 60}
    assert evaluate_file("roofline", data, "foreplan")["taught"] == {}
    known = read_operators(data, "foreplan")
    with pytest.raises(SpecError, match="--hold-out") as refused:
        train_operators([data], ["foreplan"], tmp_path / "m", hold_out=["nobody"])
    for name in {*known.chips.tolist(), *known.device.tolist()}:
        assert name in refused.value.expected  # and each of them is taken
        train_operators([data], ["foreplan"], tmp_path / "m", hold_out=[name])


def test_a_folder_that_cannot_be_written_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "t.parquet"
    write_operators(synthetic(rows=60), data)
    monkeypatch.setattr(OperatorPredictor, "fit", lambda *_: pytest.fail("it was trained"))
    (tmp_path / "taken" / "card.json").mkdir(parents=True)
    for output in (data / "m", tmp_path / "taken"):
        with pytest.raises(
            SpecError, match=r"expected a (folder to make|path that can be written)"
        ):
            train_files([data], ["foreplan"], output)
    with pytest.raises(SpecError, match="--hold-out"):
        train_files([data], ["foreplan"], tmp_path / "none", hold_out=["nobody"])
    assert not (tmp_path / "none").exists()


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="pretrained:none"):
        load_operator_model("pretrained:none")
    with pytest.raises(MissingDataError, match="crossval"):
        load_operator_model("xgboost")
    with pytest.raises(SpecError, match="trained model: got"):
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


@pytest.mark.parametrize("sizes", [(8192, 50257, 768), (64, 50257, 768), (4096, 1024, 333)])
def test_boards_of_a_swept_chip_lose_by_misaligned_products_as_it_does(
    sizes: tuple[int, int, int],
) -> None:
    """GPT-2's vocabulary is odd; tables of H100s hold multiples of 8, the H200's sweep any size."""
    rows, n, k = sizes
    whole = (rows, -(-n // 8) * 8, -(-k // 8) * 8)
    shipped, variant = Predictor.load(), Variant("bf16", "bf16", "torch.linear")
    asked = [
        program("linear", variant, rows=m, n=n, k=k) for m, n, k in (sizes, whole)
    ]  # fmt: skip
    lost = {}
    for name in ("h200", "h100_sxm", "a100_sxm_80gb"):
        odd, even = (each.mean_s for each in shipped.predict(asked, name))
        lost[name] = odd / even
    assert lost["h200"] > 3.0
    assert lost["h100_sxm"] == pytest.approx(lost["h200"], rel=0.3)
    assert lost["a100_sxm_80gb"] < 1.2, "another chip: nothing is known of it"


def test_what_was_timed_at_any_size_does_not_lose_by_misalignment_twice() -> None:
    """Odd products of the H200's eager table, which the shipped weights have seen."""
    measured = Path(__file__).parents[2] / "datasets" / "measured"
    table = read_operators(measured / "h200_operators.parquet", "foreplan")
    odd = (table.dims["n"] % 8 != 0) | (table.dims["k"] % 8 != 0)
    rows = np.flatnonzero(np.isin(table.kind, ["linear", "bmm"]) & odd)[:600]
    part = table.take(rows)
    error = np.abs(load_operator_model("pretrained:ops").predict(part) / part.latency_s - 1.0)
    assert len(rows) == 600
    assert np.mean(error) < 0.15


@pytest.mark.parametrize("wrong", ["linear", None, 3, [3], "program"])
def test_what_is_no_list_of_programs_is_refused(wrong: Any) -> None:
    item = program("linear", Variant("fp16", "fp16", "torch.linear"), rows=8, n=16, k=32)
    given = item if wrong == "program" else wrong
    with pytest.raises(SpecError, match=r"Predictor\.predict: programs: got .* a list of programs"):
        Predictor.load().predict(given, "t4")
    with pytest.raises(SpecError, match=r"Predictor\.predict: device: got nothing"):
        Predictor.load().predict([item], cast("str", None))
    assert Predictor.load().predict(iter([item]), "t4") == Predictor.load().predict([item], "t4")  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"execution": 3}, {"phase": 3}])
def test_a_number_in_place_of_a_word_is_refused(asked: Any) -> None:
    with pytest.raises(SpecError, match="got 3, expected one of"):
        predict_latency("bert-tiny", "t4", **asked)
