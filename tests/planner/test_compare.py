"""What `compare` finds is exactly what was changed; documents of two sorts are refused."""

import copy
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from foreplan.errors import SpecError
from foreplan.planner.api import plan
from foreplan.planner.compare import compare, differ, leaves
from foreplan.planner.report.compare_tables import compare_tables
from foreplan.planner.verify.verification import Verification

PROFILES = Path(__file__).parents[1] / "benchmarks" / "profiles"
WORKLOAD = {"batch": 4, "prompt_tokens": 16, "new_tokens": 8}


@pytest.fixture(scope="module")
def made():
    return plan("serving", "tiny-llama-random", "t4,a100-80g", WORKLOAD, costs="roofline")


@pytest.fixture
def write(tmp_path):
    def save(name, document):
        path = tmp_path / name
        path.write_text(json.dumps(document))
        return path

    return save


def document(of):
    return json.loads(of.to_json())


def test_a_plan_and_itself(made, write):
    path = write("a.json", document(made))
    found = compare(path, path)
    assert found.same
    assert found.document()["sections"] == {}
    assert "no difference" in compare_tables(found).plain


def test_each_change_is_found_where_it_belongs(made, write):
    before = document(made)
    del before["provenance"]["planned_for"]
    before["predicted"]["high_s"] = 2 * before["predicted"]["total_s"]  # wide enough for both
    other = copy.deepcopy(before)
    other["predicted"]["total_s"] *= 1.25
    rank = other["predicted"]["ranks"][0]
    rank["memory_bytes"]["weights"] += 1000
    other["workload"]["batch"] = 8  # of which its micro-batches are divisors
    other["provenance"]["seed"] = 7
    other["assumptions"] = [*other["assumptions"], "the moon is full"]
    found = compare(write("a.json", before), write("b.json", other))
    assert set(found.sections) == {"prediction", "memory", "inputs", "provenance"}
    (total,) = found.sections["prediction"]
    assert (total.what, total.change) == ("total_s", pytest.approx(0.25))
    device = rank["device"]
    assert [d.what for d in found.sections["memory"]] == [
        f"{device}: weights_bytes", f"{device}: all_bytes",
    ]  # fmt: skip
    assert [(d.what, d.a, d.b) for d in found.sections["inputs"]] == [("workload.batch", 4, 8)]
    assert [(d.what, d.a, d.b) for d in found.sections["provenance"]] == [
        ("seed", 0, 7), ("assumption", None, "the moon is full"),
    ]  # fmt: skip


def verification(measured_s, passed=True):
    chosen = {"name": "chosen", "role": "chosen", "predicted_s": 1.0, "measured_s": measured_s}
    return Verification.model_validate(
        {
            "plan_digest": "0" * 64, "kind": "serving", "backend": "gloo", "rounds": 5,
            "machine": {"cpu": "x", "cores": 2, "load_before": 0.0, "load_after": 0.0},
            "tolerance": 0.1, "candidates": (chosen,), "passed": passed,
        }
    )  # fmt: skip


def test_verifications(write):
    a, b = verification(1.0), verification(1.5, passed=False)
    found = compare(write("a.json", document(a)), write("b.json", document(b)))
    assert {name: [d.what for d in ds] for name, ds in found.sections.items()} == {
        "times": ["passed", "chosen: measured_s"]
    }


def test_profiles():
    found = compare(PROFILES / "cpu-threads-1.json", PROFILES / "cpu-threads-1-isa-avx2.json")
    times, device = found.sections.values()
    slower = {d.what: d.change for d in times}
    assert slower["linear@bf16/bf16/torch.linear"] > 1.0  # AVX2 has no bf16 products
    assert abs(slower["embedding@bf16/bf16/torch.embedding"]) < 0.1
    assert "device.isa" in {d.what for d in device}


def test_two_sorts_are_refused(made, write):
    path = write("a.json", document(made))
    with pytest.raises(SpecError, match=r"a profile.*expected a plan"):
        compare(path, PROFILES / "cpu-threads-1.json")
    with pytest.raises(SpecError, match=r"foreplan\.plan/1"):
        compare(path, write("b.json", {"schema": "something/1"}))


def test_two_kinds_are_refused(write):
    bubbles = {
        "backbone": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100},
        "encoders": [{"name": "vit", "dims": {"layers": 2, "hidden": 32, "heads": 4}, "tokens": 8,
                      "patch_features": 12}],
        "sequence_length": 16, "microbatch": 1, "microbatches": 2, "plan": {"pp": 2},
    }  # fmt: skip
    one = plan("bubbles", None, "2xa100-80g", bubbles, costs="roofline")
    other = plan("serving", "tiny-llama-random", "t4", WORKLOAD, costs="roofline")
    with pytest.raises(SpecError, match=r"kind serving.*kind bubbles") as caught:
        compare(write("a.json", document(one)), write("b.json", document(other)))
    assert "\n" not in str(caught.value)


plain = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1e3, 1e3) | st.text(max_size=3)
values = st.dictionaries(st.text(max_size=3), plain, max_size=5)


@given(values, values)
def test_differences_are_symmetric_and_complete(a, b):
    there, back = differ(a, b), differ(b, a)
    assert {d.what for d in there} == {d.what for d in back}
    assert differ(a, a) == []
    told = {d.what for d in there}
    for name in {*a, *b} - told:
        same = a.get(name) == b.get(name)
        assert same or a[name] == pytest.approx(b[name], rel=1e-8, abs=1e-11)


def test_leaves_name_what_is_nested():
    assert leaves({"a": [{"b": 1}, {"b": [1, 2]}], "c": {"d": ()}}) == {
        "a.0.b": 1, "a.1.b": [1, 2], "c.d": (),
    }  # fmt: skip


def test_sentences_of_one_side_and_names_of_devices_are_shown_whole(made, write):
    before = document(made)
    after = copy.deepcopy(before)
    after["assumptions"] = [*after["assumptions"], "what the moon does changes nothing here " * 2]
    after["predicted"]["ranks"][0]["compute_s"] *= 1.5
    rank = after["predicted"]["ranks"][0]["device"]
    told = compare_tables(compare(write("a.json", before), write("b.json", after)))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(told)
    text = console.export_text()
    assert f"{rank}: compute" in text
    assert "- assumption of the second alone: what the moon does" in text
