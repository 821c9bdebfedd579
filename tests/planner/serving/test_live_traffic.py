"""Traffic served by real processes: tokens as of each request alone, times of the same schedule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import foreplan
from foreplan.cli import main
from foreplan.errors import InfeasibleError, SpecError, VerificationError
from foreplan.planner import traffic_run
from foreplan.planner.report.traffic_tables import served_tables
from foreplan.planner.serving.live_replay import live_replay
from foreplan.planner.serving.live_traffic import LivePass, LiveRecord
from foreplan.planner.serving.traffic_problem import TrafficProblem
from foreplan.planner.traffic_run import check_rows, serve_traffic
from foreplan.planner.verify.wire import WireGarbled

ASKED = {"batch": 4, "prompt_tokens": 24, "new_tokens": 6, "bits": 16}
TRAFFIC = """
requests: 9
rate_per_s: 30
prompt_tokens: {5: 0.3, 11: 0.3, 24: 0.4}
new_tokens: {1: 0.2, 3: 0.4, 6: 0.4}
"""


@pytest.fixture
def run_cli(monkeypatch, capsys):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["foreplan", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def asked_of(kind: str, cluster: Path, folder: Path, traffic: str = TRAFFIC, **fields: object):
    path = folder / "plan.json"
    foreplan.plan(kind, "tiny-llama-random", cluster, ASKED | fields).save(path)
    (folder / "traffic.yaml").write_text(traffic)
    return TrafficProblem.load(path, folder / "traffic.yaml")


def two_stages(cluster: Path) -> Path:
    """So little memory a device that the model needs both."""
    cluster.write_text(cluster.read_text().replace("268435456", "24000000"))
    return cluster


def test_two_stages_serve_what_comes(two_processors, tmp_path):
    asked = asked_of("serving", two_stages(two_processors), tmp_path, prefill_microbatch=2)
    ((decision, _),) = asked.replicas
    assert len(decision.stages) == 2
    run = serve_traffic(asked, rounds=2, tolerance=1e9)
    found = run.document
    assert found.agreement.exact
    assert found.passed
    assert len(run.measured) == 2
    first, last = found.figure("time_to_first_token_p50_s"), found.figure("latency_p99_s")
    assert first is not None
    assert last is not None
    assert 0 < first.low <= first.measured <= first.high
    assert first.measured < last.measured
    assert {(p.device, p.op) for p in found.phases} == {
        (stage.device, op) for stage in decision.stages for op in ("prefill", "decode")
    }
    prefills = next(p.passes for p in found.phases if p.op == "prefill")
    assert 2 * 5 <= prefills <= 2 * len(asked.requests)  # two at a time at most, in two rounds
    for timeline in run.measured:
        schedule = timeline.schedule
        arrived = timeline.end_s[schedule.op == schedule.ops.index("arrive")]
        comes = [request.arrival_s for request in asked.requests]
        assert sorted(arrived) == pytest.approx(sorted(comes), abs=1e-6)
        begun = timeline.start_s[timeline.is_compute & (schedule.rank == 0)]
        assert (np.diff(begun) > 0).all()
        assert begun[0] >= min(comes)
    assert any("random weights" in note for note in found.notes)
    assert any("slice" in note for note in found.notes)
    screen = Console(width=70)
    with screen.capture() as told:
        screen.print(served_tables(found))
    said = " ".join(told.get().split())
    assert "tokens of 9 requests as of each alone: exact" in said
    assert "decode" in said
    assert "…" not in said


def test_replicas_serve_side_by_side(two_processors, tmp_path):
    asked = asked_of("replicas", two_processors, tmp_path, batch=2, replica_devices=1, requests=4)
    assert [len(decision.stages) for decision, _ in asked.replicas] == [1, 1]
    run = serve_traffic(asked, rounds=1, tolerance=1e9)
    assert run.document.agreement.exact
    assert {p.device for p in run.document.phases} == {
        decision.stages[0].device for decision, _ in asked.replicas
    }
    held = run.document.figure("most_held")
    assert held is not None
    assert 1 <= held.measured <= 2


def test_tokens_that_differ_do_not_agree(two_processors, tmp_path):
    asked = asked_of("serving", two_processors, tmp_path)
    right = {k: list(range(k, k + request.new_tokens)) for k, request in enumerate(asked.requests)}

    class Served:
        """Stands in for the processes: what they say when they serve requests alone, together."""

        def __init__(self, together):
            self.record = LiveRecord(begin_ns=0, compute_ns=(), tokens=together)

        def alone(self, traffic):
            return {str(k): tokens for k, tokens in right.items()}

        def start(self, mode):
            return self, ()

        def serve(self, group, traffic, number):
            return [self.record]

        def stop(self):
            pass

    def agreed(together):
        return traffic_run._agreement(Served(together), asked, print)

    same = {k: tuple(tokens) for k, tokens in right.items()}
    assert agreed(same).exact
    for other in (same | {3: (*same[3][:-1], 99)}, {k: same[k] for k in same if k != 3}):
        found = agreed(other)
        assert not found.passed
        assert found.details["equal_requests"] == pytest.approx(8 / 9)


def test_what_cannot_be_served_here_is_refused_before_anything_starts(two_processors, tmp_path):
    def refused(asked: TrafficProblem, error: type[Exception], told: str) -> None:
        with pytest.raises(error, match=told):
            serve_traffic(asked)

    asked = asked_of("serving", two_processors, tmp_path)
    long = tmp_path / "long.csv"
    long.write_text("arrived_at_s,prompt_tokens,new_tokens\n0,8,4\n0.1,25,6\n")
    plan = tmp_path / "plan.json"
    refused(
        TrafficProblem.load(plan, long), SpecError,
        r"^long\.csv: line 3: got '31 tokens', expected at most the 30 that the plan is for; "
        r"shorter requests, or plan with larger",
    )  # fmt: skip
    refused(
        TrafficProblem.load(plan, tmp_path / "traffic.yaml", rate_per_s=1e6), InfeasibleError,
        "serves at most",
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"rounds: got 0"):
        serve_traffic(asked, rounds=0)
    gpus = tmp_path / "gpus.json"
    foreplan.plan("serving", "tiny-llama-random", "2xt4", ASKED, costs="roofline").save(gpus)
    refused(
        TrafficProblem.load(gpus, tmp_path / "traffic.yaml"), SpecError,
        r"--traffic: got .*t4.*, expected processors of this host",
    )  # fmt: skip


def test_a_cache_without_room_for_every_slot_is_refused(two_processors, tmp_path):
    text = two_processors.read_text().replace("count: 2", "count: 3")
    two_processors.write_text(text.replace("268435456", "17000000"))
    asked = asked_of(
        "serving", two_processors, tmp_path, batch=16, decode_microbatch=16, prefill_microbatch=1,
        prompt_tokens=200, bits=8,
    )  # fmt: skip
    assert len(asked.replicas[0][0].stages) == 3
    with pytest.raises(InfeasibleError, match=r"replica 0: the cache of .* for 3 batches of up"):
        check_rows(asked)


def test_ranks_that_speak_of_other_passes_are_no_run(two_processors, tmp_path):
    asked = asked_of("serving", two_stages(two_processors), tmp_path)
    one = LivePass(slot=1, phase="prefill", members=(0,), lengths=(4,), ended=())
    told = {"begin_ns": 0, "compute_ns": ((3, 5),), "received_ns": ((1, 3),), "sent_ns": ((5, 6),)}

    def read(*passes: LivePass, **fields: object):
        first = LiveRecord.model_validate(told | {"passes": passes})
        last = LiveRecord.model_validate(told | fields)
        return live_replay(asked.problem, asked.replicas, asked.requests, [first, last])

    measured, priced = read(one)
    assert measured.passes == priced.passes == ((0, (0,), "prefill"),)
    nothing: dict[str, object] = {"compute_ns": (), "received_ns": (), "sent_ns": ()}
    for passes, fields in (
        ((), {}), ((one.model_copy(update={"members": (99,)}),), {}),
        ((one.model_copy(update={"slot": 2}),), {}), ((one,), nothing),
        ((one,), {"received_ns": (), "sent_ns": ()}),
    ):  # fmt: skip
        with pytest.raises(WireGarbled, match="do not speak of the same passes"):
            read(*passes, **fields)


def test_a_rank_that_fails_is_named(two_processors, tmp_path, monkeypatch):
    asked = asked_of("serving", two_processors, tmp_path)
    told = traffic_run._traffic

    def broken(asked, requests):  # without the replica that the rank is of
        return told(asked, requests).model_copy(update={"queues": ()})

    monkeypatch.setattr(traffic_run, "_traffic", broken)
    with pytest.raises(VerificationError, match=r"rank [01] \(localhost/cpu:threads=1.*IndexError"):
        serve_traffic(asked)


def test_the_command_serves_and_writes_its_document(two_processors, tmp_path, run_cli):
    asked_of("serving", two_processors, tmp_path)
    plan, traffic, output = (str(tmp_path / n) for n in ("plan.json", "traffic.yaml", "v.json"))
    words = ["verify", plan, "--traffic", traffic, "-o", output, "--rounds", "1"]
    for more, told in (
        (["--thorough"], "--thorough: got True, expected nothing beside --traffic"),
        (["--only", "even"], "--only: got"),
        (["--dry-run"], "--dry-run: got"),
    ):
        code, _, said = run_cli(*words, *more)
        assert code == 2
        assert told in said
    code, _, said = run_cli("verify", plan, "--rate", "3")
    assert (code, "--rate: got 3.0, expected nothing without --traffic" in said) == (2, True)
    trace = tmp_path / "trace.json"
    code, printed, _ = run_cli(*words, "--tolerance", "0", "--trace", str(trace), "--json")
    assert code == 5  # no simulation is exact
    document = json.loads(printed)
    assert document == json.loads(Path(output).read_text())
    assert document["schema"] == "foreplan.traffic/1"
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum("arrive" in event["name"] for event in events) >= 2 * 9  # simulated and measured
