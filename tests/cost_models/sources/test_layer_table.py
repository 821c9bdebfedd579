"""Whole decoder layers: a table as a source of prices, and as a test of the operator predictor."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import foreplan
from foreplan.cost_models.book import Profiles, cost_book, cost_choice_or_file
from foreplan.cost_models.costs import CostBook, Estimate
from foreplan.cost_models.predictor import Predictor
from foreplan.cost_models.roofline import RooflineSource
from foreplan.cost_models.sources.layer_table import LayerTableSource
from foreplan.cost_models.sources.layer_times import LayerRun, layer_errors, main, summary
from foreplan.datasets import device_zoo
from foreplan.datasets.importers import read_operators
from foreplan.datasets.inline_cluster import parse_devices
from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.program import Variant, program
from foreplan.errors import MissingDataError, SpecError

MODEL = load_model("llama-30b")
BF16 = Variant("bf16", "bf16", "torch.linear")
SDPA = Variant("bf16", "bf16", "torch.sdpa")
ROWS = """model,device,phase,tokens,layer_ms
llama1_30b,t4,decode,2,4
llama1_30b,t4,decode,4,6
llama1_30b,t4,prompt,100,10
llama1_30b,t4,prompt,200,20
llama1_30b,t4x2,decode,2,1
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(tmp_path: Path, text: str = ROWS) -> LayerTableSource:
    return LayerTableSource(read_operators(write(tmp_path / "t.csv", text), "helix"))


def attention(batch: int, queries: int, keys: int, **dims: int):
    shape = {"heads": 52, "kv_heads": 52, "head_dim": 128} | dims
    return program("attention", SDPA, batch=batch, queries=queries, keys=keys, **shape)


def layer_s(source: LayerTableSource, phase: str, tokens: int, device: str = "t4") -> float:
    run = LayerRun(prompt=tokens, dtype="bf16").programs(MODEL, phase, tokens)
    return sum(source.estimate(item, device).mean_s * count for item, count in run)


def test_the_programs_of_a_layer_sum_to_the_table(tmp_path):
    source = table(tmp_path)
    assert source.devices == ("t4",)
    assert layer_s(source, "decode", 2) == pytest.approx(4e-3)
    assert layer_s(source, "decode", 3) == pytest.approx(5e-3)
    assert layer_s(source, "decode", 1) == pytest.approx(4e-3)
    assert layer_s(source, "prompt", 150) == pytest.approx(15e-3)
    beyond = source.estimate(attention(1, 300, 300), "Tesla T4")
    assert (beyond.mean_s, beyond.source) == (pytest.approx(30e-3), "extrapolated")


def test_what_is_no_part_of_the_table_is_left_to_others(tmp_path):
    source = table(tmp_path)
    head = program("linear", BF16, rows=4, n=32000, k=6656)
    assert source.estimate(head, "t4") is None
    assert source.estimate(attention(2, 1, 9), "v100_sxm2_16gb") is None
    assert source.estimate(attention(2, 1, 9), "cuda:0") is None


def test_layers_that_the_table_does_not_hold_have_no_price_at_all(tmp_path):
    source = table(tmp_path)
    int4 = Variant("int4", "bf16", "torch.dequant_linear")
    behind = CostBook([source, RooflineSource(device_zoo.device("t4"))])
    for work, told in (
        (program("linear", int4, rows=4, n=6656, k=6656), "none of int4"),
        (attention(2, 1, 9, heads=32, kv_heads=32), "6656 features in 52 heads"),
        (attention(1, 900, 900), "900 tokens"),
        (replace(attention(2, 1, 9), op="capped_attention"), "the model's .* capped scores"),
        (program("experts", BF16, rows=2, experts=8, active=2, ffn=64, hidden=6656), "or experts"),
    ):
        with pytest.raises(MissingDataError, match=told):
            behind.cost(work, "t4")


def test_tables_without_layers_are_refused(tmp_path):
    with pytest.raises(SpecError, match="layers of 0 models"):
        table(tmp_path, "model,device,phase,tokens,layer_ms\nllama1_30b,t4x2,decode,2,1\n")
    mixed = ROWS + "llama2_70b,t4,decode,2,5\n"
    with pytest.raises(SpecError, match="layers of 2 models"):
        table(tmp_path, mixed)


def test_costs_from_a_table_by_name(tmp_path):
    path = write(tmp_path / "t.csv", ROWS)
    cluster = parse_devices("2xt4", "test")
    book = cost_book(cluster, Profiles(), cost_choice_or_file(f"helix:{path}"))
    label = cluster.ranks()[0].label
    assert book.cost(attention(2, 1, 9), label) == Estimate(4e-3, 4e-3, 4e-3, "measured")
    assert book.cost(program("linear", BF16, rows=4, n=32000, k=6656), label).source == "predicted"
    for wrong in ("helix", "nonsense"):
        with pytest.raises(SpecError, match="one of measured"):
            cost_choice_or_file(wrong)
    with pytest.raises(SpecError, match="helix:FILE"):
        cost_choice_or_file("helix:")
    with pytest.raises(SpecError, match="readable"):
        cost_book(cluster, Profiles(), "helix:none.csv")


def test_a_table_that_prices_nothing_of_a_plan_is_refused(tmp_path):
    path = write(tmp_path / "t.csv", ROWS)
    with pytest.raises(SpecError, match=r"t\.csv: devices: got \['t4'.*one of the cluster"):
        cost_book(parse_devices("2xh200", "test"), Profiles(), f"helix:{path}")
    workload = {"network": "byte_lm", "batch": 2}
    for given in ({"costs": f"helix:{path}"}, {"beside": [f"helix:{path}"]}):
        where = "--costs" if "costs" in given else "--beside"
        with pytest.raises(SpecError, match=rf"{where}: got .*of which precision plans are made"):
            foreplan.plan("precision", None, "2xt4", workload, **given)


def test_a_plan_of_other_bits_than_a_table_has_is_refused(tmp_path):
    path = write(tmp_path / "t.csv", ROWS)
    workload = {"batch": 2, "prompt_tokens": 100, "new_tokens": 4, "bits": [8]}
    with pytest.raises(MissingDataError, match=r"prices 16 bits alone.*plan with bits=16"):
        foreplan.plan("serving", "llama-30b", "8xt4", workload, costs=f"helix:{path}")
    workload["bits"] = [16, 8]
    plan = foreplan.plan("serving", "llama-30b", "8xt4", workload, costs=f"helix:{path}")
    assert set(plan.decision["stages"][0]["bits"]) == {16}


class Constant:
    """A millisecond a program."""

    def estimate(self, work, device):
        return Estimate.exact(1e-3)


def test_errors_are_those_of_the_sums(tmp_path):
    rows = read_operators(write(tmp_path / "t.csv", ROWS), "helix")
    found = layer_errors(rows, MODEL, CostBook([Constant()]), {"t4": "t4"})
    # Four linears, two norms, two additions and four others: 12 ms.
    assert [list(e.predicted_s) for e in found] == [pytest.approx([12e-3] * 2)] * 2
    result = summary(found)
    assert result["cells"]["t4/decode"]["mape"] == pytest.approx((12 / 4 + 12 / 6) / 2 - 1)
    assert result["overall"]["count"] == 4
    with pytest.raises(MissingDataError, match="no decode row"):
        layer_errors(rows, MODEL, CostBook([Constant()]), {"v100": "t4"})


def _shared() -> Path:
    folder = os.environ.get("FOREPLAN_DATA")
    if not folder:
        pytest.skip("FOREPLAN_DATA names no folder of public latency data")
    return Path(folder, "helix_layer_times_llama1_30b.parquet")


def test_layers_from_operators_alone_are_close_to_the_public_table(capsys):
    """The acceptance figure: 20 % mean over T4, V100, L4 and A100, no row of it in training."""
    main(["--data", str(_shared()), "--contexts", "512", "--prompts", "512"])
    out = capsys.readouterr().out
    overall = json.loads(out)["context 512, prompts of 512"]["overall"]
    assert overall["count"] == 371
    assert overall["mape"] < 0.20


def test_experts_on_whole_layers_have_no_say_in_it():
    """Weights trained on the table's rows answer for whole layers only: without them, the same."""
    full = Predictor.load()
    bare = Predictor.load()
    bare.model.experts_ = [e for e in bare.model.experts_ if e.family != "layer"]
    assert len(bare.model.experts_) < len(full.model.experts_)
    assert all(e.library != "helix" for e in bare.model.experts_)
    programs = [p for p, _ in LayerRun().programs(MODEL, "decode", 8)]
    for name in ("t4", "v100_sxm2_16gb", "l4", "a100_sxm_40gb"):
        assert full.supported(programs, name) == bare.supported(programs, name)
