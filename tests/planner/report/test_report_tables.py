"""Terminal tables: complete, within the width, without colour, safe against a stranger's texts."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foreplan.cost_models.roofline import FACTOR
from foreplan.datasets import device_zoo
from foreplan.datasets.profile import Profile
from foreplan.datasets.specs import validate
from foreplan.planner.bubbles.spec import Encoder
from foreplan.planner.registry import planner
from foreplan.planner.report._grid import Column, Grid
from foreplan.planner.report.decision import DecisionView
from foreplan.planner.report.field_tables import fields_table, workload_fields
from foreplan.planner.report.operator_tables import error_table, left_out, stats_table, tuning_table
from foreplan.planner.report.predict_tables import predict_tables
from foreplan.planner.report.tables import (
    device_table,
    devices_table,
    pipeline_table,
    plan_tables,
    profile_table,
    verification_tables,
)

WIDTHS = (40, 60, 80, 100, 200)


def shown(renderable: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(renderable)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    return text


def test_a_bound_that_the_simulator_is_far_from_says_so(plan):
    """A law of steady rates is met exactly and still lies below the simulated total."""
    total_s = plan.predicted.total_s
    for lower_s, said in ((0.8 * total_s, True), (total_s, False), (0.0, False)):
        bound = plan.bound.model_copy(update={"lower_s": lower_s, "gap": 0.0})
        text = shown(plan_tables(plan.model_copy(update={"bound": bound})), 110)
        assert ("this one takes 25 % more" in " ".join(text.split())) == said


def test_a_bound_of_nothing_is_no_bound(plan):
    bound = plan.bound.model_copy(update={"lower_s": 0.0, "gap": 1.0})
    text = shown(plan_tables(plan.model_copy(update={"bound": bound})), 110)
    assert re.search(r"proven bound +none", text)
    assert "less than 0 s" not in text
    assert "proven gap" not in text


def test_what_a_predictor_said_was_not_measured(plan):
    share = {"measured": 0.5, "predicted": 0.4, "theory": 0.1}
    source = plan.provenance.model_copy(update={"source_share": share})
    text = shown(plan_tables(plan.model_copy(update={"provenance": source})), 300)
    assert "time, 40 % comes from a predictor and 10 % comes from published figures, not" in text
    source = source.model_copy(update={"source_share": {"measured": 0.995, "theory": 0.005}})
    text = shown(plan_tables(plan.model_copy(update={"provenance": source})), 300)
    assert "NOT MEASURED" not in text


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_at_every_width(plan, width):
    text = shown(plan_tables(plan), width)
    for word in ("RANDOM WEIGHTS", "SLICE OF A CHIP", "EMULATED LINK", "NOT MEASURED"):
        assert word in text
    assert "[chosen]" in text
    assert "12.85 GiB" in text
    assert "0–13" in text
    assert "tight" in text


def test_plan_says_why_and_how_sure(plan):
    text = shown(plan_tables(plan), 110)
    assert "31 % slower (predicted)" in text
    assert "does not meet every limit; 18 % faster (predicted)" in text
    assert "rank 1 (hosta/t4) needs 18.2 GiB of 15 GiB" in text
    assert "in 75 % of 64 draws" in text
    assert "layers 15 + 13 + 4 (12 %); even split (6.2 %)" in text
    assert "on t4 (roofline, ×0.5 to ×2): best choice in 90 % once known" in text
    assert re.search(r"proven gap +0.6 %", text)
    assert "every prompt is padded" in text


def test_a_plan_under_a_time_limit_says_how_often_it_keeps_it(plan):
    sure = plan.confidence.model_copy(update={"in_time": 0.5, "probability_best": 0.0})
    text = shown(plan_tables(plan.model_copy(update={"confidence": sure})), 110)
    assert re.search(r"in its time limit +in 50 % of 64 draws of all prices", text)
    assert "in 0 %; else it is late, or a better one is in time too" in " ".join(text.split())
    assert "best choice  " not in text


def test_numbers_are_never_broken(plan, verification):
    narrow = shown(plan_tables(plan), 60) + shown(verification_tables(verification, plan), 60)
    for number in ("735.1 ms", "771.9 ms", "4.8 %", "14.93 GiB", "3.783 GiB"):
        assert number in narrow


@pytest.mark.parametrize("width", WIDTHS)
def test_verification_at_every_width(plan, verification, width):
    text = shown(verification_tables(verification, plan), width)
    assert text.startswith("PASSED: ")
    assert "regret" in text
    assert "int4 everywhere" in text.replace("\n", " ")
    assert "note: the host had other load" in text.replace("\n", " ")


@pytest.mark.parametrize("width", [60, 140])
def test_a_failure_is_told_at_every_width(plan, verification, width):
    told = shown(verification_tables(verification, plan), width)
    assert "out of memory at 1decode0.3" in told.replace("\n", " ")


def test_quality_stands_beside_what_was_foretold(plan, make_verification):
    document = make_verification().model_dump(mode="json", by_alias=True)
    document["candidates"][0]["quality"] = {"perplexity": 5.125, "omega": 0.25}
    document["candidates"][1]["quality"] = {"perplexity": 5.25}
    judged = make_verification(candidates=document["candidates"])
    told = shown(verification_tables(judged, plan), 140)
    assert "Quality on held-out text" in told
    for word in ("5.125", "5.25", "predicted omega", f"{plan.predicted.metrics['omega']:.4g}"):
        assert word in told
    assert "held-out" not in shown(verification_tables(make_verification(), plan), 140)


def test_what_a_run_cannot_weigh_is_not_held_against_the_ledger(make_verification):
    document = make_verification().model_dump(mode="json", by_alias=True)
    kib = 1024
    document["candidates"][0]["ranks"][0]["memory"] = [
        {"item": "weights", "predicted_bytes": 300 * kib, "held_bytes": 300 * kib},
        {"item": "buffers", "predicted_bytes": None, "held_bytes": 30 * kib},
        {"item": "workspace", "predicted_bytes": 200 * kib, "held_bytes": None},
    ]
    judged = make_verification(candidates=document["candidates"])
    told = shown(verification_tables(judged), 140)
    row = next(line for line in told.splitlines() if "500 KiB" in line)
    for word in ("200 KiB", "330 KiB", "+10 %"):
        assert word in row


@pytest.mark.parametrize("width", [60, 140])
def test_what_only_a_plan_has_as_a_phase_is_no_failure_of_the_run(make_verification, width):
    document = make_verification().model_dump(mode="json", by_alias=True)
    document["candidates"][0]["ranks"][0]["phases"].append(
        {"op": "beside", "predicted_s": 1.476e-3, "measured_s": None, "error": None}
    )
    told = shown(verification_tables(make_verification(candidates=document["candidates"])), width)
    phase = told[told.index("beside") :]  # a line, or a record of four where there is no room
    row = "beside 1.476 ms in the others –"
    record = "beside predicted 1.476 ms measured in the others error –"
    assert " ".join(phase.split()).startswith((row, record))


def test_verification_without_its_plan(verification):
    text = shown(verification_tables(verification))
    assert "this plan [chosen]" in text
    assert "prefill" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_that_is_far_off_says_whether_it_waited(make_verification, width):
    document = make_verification().model_dump(mode="json", by_alias=True)
    chosen = document["candidates"][0]
    assert "the error is" not in shown(verification_tables(make_verification()), width)
    chosen["measured_s"] *= 1.5
    chosen["error"] = 1 - chosen["predicted_s"] / chosen["measured_s"]
    told = shown(verification_tables(make_verification(candidates=[chosen])), width)
    assert "most of the error is waiting, not work: rank " in " ".join(told.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_a_machine_that_is_slow_now_is_told(make_verification, width):
    chosen = make_verification().model_dump(mode="json", by_alias=True)["candidates"][0]
    assert "at pace" not in shown(verification_tables(make_verification()), width)
    chosen["measured_s"] *= 1.5
    chosen["error"] = 1 - chosen["predicted_s"] / chosen["measured_s"]
    chosen["pace"] = chosen["measured_s"] / chosen["predicted_s"]
    chosen["error_at_pace"] = 0.0
    told = shown(verification_tables(make_verification(candidates=[chosen])), width)
    assert "at that pace 0 %; profile again" in " ".join(told.split())
    assert "error at pace" in " ".join(told.split()) or width < 100


def test_a_failed_run(make_verification):
    failed = {"name": "chosen", "role": "chosen", "predicted_s": 0.7, "failure": "rank 0 died"}
    text = shown(verification_tables(make_verification(candidates=[failed], passed=False)))
    assert text.startswith("NOT PASSED: rank 0 died")


def test_a_plan_of_another_kind(bare_plan):
    text = shown(plan_tables(bare_plan), 60)
    assert "local-sgd plan: t4" in text
    assert "tau 4: 1.5 s predicted" in text
    assert "Alternatives" not in text


def test_hostile_texts_stay_texts(make_plan):
    plan = make_plan(
        assumptions=["\x1b[31mred\x1b[0m", "[bold]markup[/bold]", "left\u202etfel", "a\x00b\r\nc"]
    )
    text = shown(plan_tables(plan))
    assert "[bold]markup[/bold]" in text
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "- a b c" in text


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_devices(width):
    zoo = [device_zoo.device(name) for name in device_zoo.names()]
    text = shown(devices_table(zoo), width)
    assert all(device.name in text for device in zoo)
    assert "320 GB/s" in text


def test_one_device_has_its_sources():
    text = shown(device_table(device_zoo.device("t4")), 100)
    assert "65 TFLOP/s" in text
    assert "NVIDIA T4 datasheet" in text


def test_a_device_says_how_fast_it_reads_again_where_that_changes():
    reads = ((1 << 20, 1e11), (2 << 20, 9e10), (4 << 20, 3e10), (64 << 20, 2.6e10), (1 << 30, 1e10))
    device = device_zoo.device("t4").model_copy(update={"reread_bandwidth": reads})
    text = " ".join(shown(device_table(device), 100).split())
    assert "reads again 90 GB/s up to 2 MiB, 26 GB/s up to 64 MiB, 10 GB/s beyond" in text
    assert "reads again" not in shown(device_table(device_zoo.device("t4")), 100)


def test_pipeline():
    document = {
        "bubble_rate": 0.2727, "iteration_s": 0.011, "makespan_s": 0.012,
        "peak_activations": [4, 3, 2.5, 1],
    }  # fmt: skip
    text = shown(pipeline_table(document), 60)
    assert "27.27 %" in text
    assert "11 ms" in text
    assert "2.5" in text


def test_pipeline_of_many_stages_is_short():
    document = {"bubble_rate": 0.1, "iteration_s": 1.0, "makespan_s": 1.0,
                "peak_activations": [8] * 64}  # fmt: skip
    assert len(shown(pipeline_table(document)).splitlines()) < 10


def test_profile():
    row = {"op": "linear", "dims": {"rows": 1, "n": 8, "k": 8}, "variant": "fp32/fp32/aten"}
    rows = [
        row | {"status": "ok", "median_s": 1e-5, "low_s": 9e-6, "high_s": 1.2e-5, "samples": 9},
        row | {"dims": {"rows": 2, "n": 8, "k": 8}, "status": "failed", "error": "no kernel"},
    ]
    device = {"name": "cpu:threads=1", "chip": "x", "vendor": "v", "kind": "cpu",
              "slice": "1 of 8 threads", "memory_bandwidth": 1e10}  # fmt: skip
    document = {"schema": "foreplan.profile/1", "device": device, "software": {"torch": "2.11"},
                "rows": rows}  # fmt: skip
    text = shown(profile_table(validate(Profile, document, "profile")), 60)
    assert "1 of 8 threads" in text
    assert "linear" in text
    assert "30 %" in text
    assert "10 GB/s" in text


def test_what_devices_choose_is_grouped():
    """Operators of equal variants share a row, and numbered names a pattern."""
    names = ["embed", *(f"blocks.{i}.{part}" for i in range(3) for part in ("up", "down"))]
    low = dict.fromkeys(names, "int8") | {"embed": "fp32"}
    high = dict.fromkeys(names, "fp32") | {"blocks.1.down": "bf16"}
    view = DecisionView.of(
        {
            "workers": [
                {"rank": 0, "device": "here/a", "operators": low},
                {"rank": 1, "device": "here/b", "operators": high},
            ],
            "buckets": [["x", "y"], ["z"]],
            "omega": 0.5,
        }
    )
    (table,) = view.choices
    assert table.name == "operators"
    assert table.devices == ("here/a", "here/b")
    assert table.rows == (
        ("embed", 1, ("fp32", "fp32")),
        ("blocks.*.up (×3), blocks.*.down (×2)", 5, ("int8", "fp32")),
        ("blocks.1.down", 1, ("int8", "bf16")),
    )
    assert dict(view.fields) == {"buckets": "2 (entries: 2, 1)", "omega": "0.5"}
    other = DecisionView.of({"workers": [{"device": "a", "operators": {"x": 1}}, {"device": "b"}]})
    assert not other.choices
    numbered = {"workers": [{"device": "a", "operators": {"0": "int8", "2": "int8"}}]}
    assert DecisionView.of(numbered).choices[0].rows == (("0, 2", 2, ("int8",)),)


def test_fields_of_records_inside_a_workload_are_listed():
    """Nobody guesses the fields of an encoder from the name of the list that holds it."""
    workload = planner("bubbles").workload_type
    text = shown(fields_table("bubbles", workload), 80)
    heads = [line for line in text.splitlines() if line.startswith("Fields of")]
    assert heads == [
        "Fields of a bubbles workload, for --workload", "Fields of encoders",
        "Fields of encoders.dims, backbone", "Fields of plan", "Fields of times",
    ]  # fmt: skip
    (encoders,) = (f for f in workload_fields(workload) if f["name"] == "encoders")
    assert {f["name"] for f in encoders["fields"]} == set(Encoder.model_fields)
    assert all(f["meaning"] for f in encoders["fields"])
    assert not any("fields" in f for f in workload_fields(planner("serving").workload_type))


PREDICTED = {
    "model": "gpt2", "dtype": "fp32", "batch": 1, "sequence_length": 128,
    "shape": "1 x 128 tokens", "here": {}, "phase": "inference",
    "execution": "eager", "costs": "predicted", "bf16_as": {"t4": "fp16"}, "scans": True,
    "unpriced": {"xavier": "no figures on xavier", "thor": "no figures on thor"},
    "devices": [{
        "device": "a100_sxm_80gb", "latency_s": 0.0101, "low_s": 0.005, "high_s": 0.02,
        "limit": "device", "fits": True, "device_kind": "cuda", "device_s": 0.01,
        "by_source_s": {"roofline": 0.001},
        "by_kind_s": {"linear": 0.008, "norm": 0.002},
        "unsupported": [{"operator": "create: aten.arange", "count": 2}], "evaluated": [],
    }],
}  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_predictions(width):
    text = shown(predict_tables(PREDICTED), width)
    assert "no bf16 on t4: it is priced as fp16" in " ".join(text.split())
    for said in ("a100_sxm_80gb", "10.1 ms", "80 %", "aten.arange x2", "fp32", "xavier, thor: no"):
        assert said in text
    assert ("5 ms" in text) == (width >= 70)
    assert "10 %" in text  # of the time is the roofline's, at every width
    assert "published figures" not in text
    assert "evaluation mode" not in text
    assert "┃" not in text  # one look for every table


def test_what_training_mode_did_not_reach_is_named():
    device = {**PREDICTED["devices"][0], "evaluated": ["model.encoder", ""]}
    text = shown(predict_tables({**PREDICTED, "devices": [device]}), 100)
    assert "evaluation mode" in text
    assert "model.encoder, the whole model" in text


def test_a_rank_of_figures_alone_says_so():
    device = {**PREDICTED["devices"][0], "by_source_s": {"roofline": 0.01}}
    text = " ".join(shown(predict_tables({**PREDICTED, "devices": [device]}), 80).split())
    assert "100 %" in text
    assert f"published figures alone, as {FACTOR[1]:g} times what they allow at best" in text


def test_why_nobody_knows_whether_a_device_holds_the_pass():
    bare = {**PREDICTED["devices"][0], "device": "mine", "fits": None}
    host = {**bare, "device": "epyc_9755", "device_kind": "cpu"}
    one, other, both, none = (
        " ".join(shown(predict_tables({**PREDICTED, "devices": rows}), 80).split())
        for rows in ([bare], [host], [bare, host], PREDICTED["devices"])
    )
    file, processor = "fits ?: figures of mine state no memory", "which no figure tells"
    assert [file in text for text in (one, other, both, none)] == [True, False, True, False]
    assert [processor in text for text in (one, other, both, none)] == [False, True, True, False]


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_errors_and_counts(width):
    errors = {"count": 1234, "mape": 0.081, "median_ape": 0.05, "p90_ape": 0.2, "within_10pct": 0.7}
    none = {"count": 0, "mape": None, "median_ape": None, "p90_ape": None, "within_10pct": None}
    result = {
        "overall": errors, "unsupported": 7, "by_device": {"t4": errors},
        "by_device_op": {"t4": {"gemm/bfloat16": errors, "conv": none}},
        "unsupported_why": {"device mine is not in the zoo": 7},
    }  # fmt: skip
    text = shown(error_table(result), width)
    assert "mine" in text
    assert "1,234" in text
    assert "8.1 %" in text
    assert text.count("t4") == 1 or width < 60  # once for its rows
    assert "trained" not in text
    assert "1,200 rows" in shown(error_table(result | {"taught": {"t4": 1200}}), width)
    counts = {"rows": 9, "chips": {"t4": "tu104"}, "by_device_op": {"t4": {"conv": 9}}}
    assert "tu104" in shown(stats_table(counts), width)
    assert "not in the zoo" not in shown(stats_table(counts | {"not_in_zoo": []}), width)
    assert "not in the zoo: mine;" in shown(stats_table(counts | {"not_in_zoo": ["mine"]}), width)
    nothing = {"rows": 0, "chips": {}, "by_device_op": {}, "failed": {"timeout": 3}}
    assert "0 rows, 3 failed" in shown(stats_table(nothing), width)


def test_what_was_not_trained_on_is_said():
    assert left_out({"left_out": {"noisy": 0, "unsupported": 0}}) == left_out({}) == ""
    said = left_out({"left_out": {"noisy": 1234, "unsupported": 2}})
    assert said.startswith("left out: 1,234 programs whose repetitions spread too far")
    assert said.endswith("and 2 programs that cannot be read")


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 120])
def test_no_word_and_no_number_is_broken(width):
    names = ["linear@int8/bf16/torch.dequant_linear", "even split, fastest bits", "chosen"]
    numbers = ["12.74 ms", "3.264e+04", "-0.0002045"]
    told = ["as fast (predicted)", "does not meet every limit; 92 % slower", "–"]
    grid = Grid(
        "Grid",
        [
            Column("decision", names),
            Column("predicted perplexity increase", numbers, numeric=True),
            Column("tokens", numbers, numeric=True),
            Column("compared", told),
        ],
    )
    text = shown(grid, width)
    assert max(map(len, text.splitlines())) <= width
    for number in numbers:
        assert text.count(number) == 2
    words = text.split()
    for word in " ".join([*names, *told]).split():
        assert word in words or len(word) > width - 4


def test_columns_that_a_terminal_has_no_room_for_are_named_or_shown_as_records():
    columns = [
        Column("limit", ["memory of a"]),
        Column("used", ["4.25 GiB"], numeric=True),
        Column("free", ["1.75 GiB"], numeric=True, least=60),
    ]
    assert "1.75 GiB" in shown(Grid("Limits", columns), 60)
    assert "too narrow" not in shown(Grid("Limits", columns), 60)
    narrow = shown(Grid("Limits", columns), 40)
    assert "1.75 GiB" not in narrow
    assert narrow.splitlines()[-1].strip() == "too narrow for: free"
    records = shown(Grid("Limits", columns), 14)
    assert "too narrow" not in records
    assert "1.75 GiB" in " ".join(records.split())


def test_tunings_that_only_their_library_tells_apart_are_named_by_it():
    kinds = {"linear": {"rows": 3, "mape_before": 0.2, "mape_unseen": 0.1}}
    card = {
        "tunings": [
            {"device": {"name": "t4"}, "dtype": dtype, "library": library, "kinds": kinds}
            for dtype, library in (("fp32", "torch-2.1"), ("fp32", "trtllm"), ("fp16", "trtllm"))
        ]
    }
    grid = tuning_table(card)
    assert grid.columns[0].cells == [
        "t4 linear fp32 torch-2.1", "t4 linear fp32 trtllm", "t4 linear fp16",
    ]  # fmt: skip
