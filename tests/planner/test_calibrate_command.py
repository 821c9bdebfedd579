"""foreplan calibrate: from a server's times to corrected plans; every wrong row is one line."""

import json
import shutil
from pathlib import Path

import pytest

import foreplan
from foreplan.cost_models.sources.calibration import Calibration
from foreplan.errors import MissingDataError, SpecError
from foreplan.planner.calibrate_command import calibrate

PROFILES = Path(__file__).parents[1] / "benchmarks" / "profiles"
MODEL = "demo-llama-random"
WORKLOAD = {"batch": 8, "prompt_tokens": 32, "new_tokens": 16}


@pytest.fixture
def cluster(tmp_path):
    for path in PROFILES.iterdir():
        if path.suffix in (".json", ".yaml"):
            shutil.copy(path, tmp_path)
    return tmp_path / "cluster.yaml"


def write(path, lines):
    path.write_text("\n".join(["device,phase,batch,tokens,bits,latency_ms", *lines]) + "\n")
    return path


def test_a_server_twice_as_slow_makes_plans_twice_as_long(cluster, tmp_path):
    plain = foreplan.plan("serving", MODEL, cluster, WORKLOAD)
    device = str(plain.cluster.ranks()[0].name)
    probe = write(tmp_path / "probe.csv", [f'"{device}",prefill,{b},32,16,1' for b in (1, 2, 4)])
    # What passes cost today: the first run is priced, then written down twice as long.
    from foreplan.cost_models.book import Profiles, cost_book
    from foreplan.planner.api import load_cluster
    from foreplan.planner.calibrate_command import _pass, _read, _rows

    where, folder = load_cluster(cluster)
    profiles = Profiles.of(where, folder)
    book = cost_book(profiles.completed(where), profiles, "measured")
    lines = []
    for rank in where.ranks():
        for phase in ("prefill", "decode"):
            for b in (1, 2, 4, 8):
                line = f'"{rank.name}",{phase},{b},32,16,1'
                text = _read(write(probe, [line]))
                ((at, row),) = _rows(text, probe)
                figures = profiles.by_label[rank.label].device
                row = row.model_copy(update={"latency_ms": 1e2})
                priced = _pass(foreplan.load_model(MODEL), row, rank, figures, book, at)
                seconds = priced.compute_s + priced.memory_s
                lines.append(f'"{rank.name}",{phase},{b},32,16,{2e3 * seconds!r}')
    made = calibrate(cluster, MODEL, write(tmp_path / "run.csv", lines))
    assert len(made) == len({str(rank.name) for rank in where.ranks()})
    for item in made:
        assert item.calibration.error_before == pytest.approx(0.5, abs=1e-6)
        assert item.calibration.error_after < 0.02
        assert Calibration.load(item.path) == item.calibration
    slower = foreplan.plan("serving", MODEL, cluster, WORKLOAD)
    assert slower.predicted.total_s == pytest.approx(2 * plain.predicted.total_s, rel=0.1)
    assert any("are corrected by" in note for note in slower.assumptions)
    assert any("calibration" in name for name in slower.provenance.profiles)
    roofline = foreplan.plan("serving", MODEL, cluster, WORKLOAD, costs="roofline")
    assert roofline.predicted.total_s < slower.predicted.total_s
    again = calibrate(cluster, MODEL, tmp_path / "run.csv")  # not on top of itself
    assert [item.calibration for item in again] == [item.calibration for item in made]


GOOD = '"cpu:threads=1,isa=avx2",prefill,1,16,16,10'


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "no rows"),
        ([GOOD, GOOD], "at least 3"),
        ([GOOD.replace("prefill", "prefil")], "line 2: phase"),
        ([GOOD.replace(",10", ",ten")], "line 2: latency_ms"),
        ([GOOD.replace(",10", ",-1")], "line 2: latency_ms"),
        ([GOOD, "", "", GOOD.replace(",10", ",-1")], "line 5: latency_ms"),
        ([GOOD.replace(",10", ",")], "one of latency_s and latency_ms"),
        ([GOOD.replace(",10", ",1e8")], "check the unit"),
        ([GOOD + ",7"], "more cells than names"),
        ([GOOD.replace("threads=1", "threads=3")], "line 2: device"),
        ([GOOD.replace(",16,16,", ",16,5,")], "bits"),
    ],
)
def test_a_wrong_row_is_named(cluster, tmp_path, lines, text):
    with pytest.raises(SpecError, match=text):
        calibrate(cluster, MODEL, write(tmp_path / "run.csv", lines))
    assert not list(tmp_path.glob("*.calibration.json"))


def test_json_rows_layers_and_devices_without_a_profile(cluster, tmp_path):
    path = tmp_path / "run.json"
    row = {"device": "cpu:threads=1,isa=avx2", "phase": "decode", "batch": 1, "tokens": 40}
    path.write_text(json.dumps([{**row, "layers": "3:1", "latency_s": 0.01}]))
    with pytest.raises(SpecError, match="row 1: layers"):
        calibrate(cluster, MODEL, path)
    path.write_text('{"rows": []}')
    with pytest.raises(SpecError, match="a list of rows"):
        calibrate(cluster, MODEL, path)
    path.write_text("nonsense")
    with pytest.raises(SpecError, match=r"run\.json"):
        calibrate(cluster, MODEL, path)
    bare = tmp_path / "bare.yaml"
    bare.write_text("devices: [{name: t4}]\n")
    path.write_text(json.dumps([{**row, "device": "t4", "latency_s": 0.01}]))
    with pytest.raises(MissingDataError, match="no profile"):
        calibrate(bare, MODEL, path)
