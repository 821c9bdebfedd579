"""Real processes over gloo."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from foreplan.cost_models.costs import CostBook
from foreplan.errors import SpecError, VerificationError
from foreplan.planner.base import Planner
from foreplan.planner.pace import PaceProgram, RankPace
from foreplan.planner.plan import Plan
from foreplan.planner.registry import planner
from foreplan.planner.verify.candidates import candidates_of
from foreplan.planner.verify.follow import follow
from foreplan.planner.verify.group import RankFailed
from foreplan.planner.verify.launch import Fleet
from foreplan.planner.verify.local import rank_environment
from foreplan.planner.verify.rounds import Rounds
from foreplan.planner.verify.session import problem_of
from foreplan.planner.verify.verification import load_verification
from foreplan.planner.verify.verify import VerificationRun, verify
from foreplan.planner.verify.wire import Wire, dial

MakePlan = Callable[..., Plan]

#: Two workers need two cores of their own.
pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores for two pinned workers"
)


def workers(home: Path) -> list[str]:
    """Workers of this test, not of another that runs at the same time."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        ours = str(home) in variables.get("PYTHONPATH", "")
        if ours and "foreplan.planner.verify.worker" in words:
            found.append(" ".join(words))
    return found


@pytest.fixture(autouse=True)
def no_orphans(toy: Path) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 300
    while workers(toy) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workers(toy) == []


def assert_obeys(run: VerificationRun) -> None:
    for timelines in run.timelines.values():
        for timeline in timelines:
            schedule = timeline.schedule
            assert timeline.kind == "measured"
            for i, action in enumerate(schedule):
                assert timeline.end_s[i] >= timeline.start_s[i] >= 0.0
                for needed in action.dependencies:
                    assert timeline.start_s[i] >= timeline.end_s[needed] - 1e-9, action


def test_candidates_run_side_by_side_and_the_result_is_right(make_plan: MakePlan) -> None:
    plan = make_plan(
        alternatives={
            "slow": {"slow": 4.0}, "swap": {"order": [1, 0]}, "dies": {"die": "exit"},
            "breaks": {"die": "raise"}, "big": {"die": "memory", "cap_bytes": 1 << 20},
            "unloaded": {"die": "load"}, "stuck": {"deadlock": True}, "alone": {"order": [0]},
        },
        tolerance=50.0, collectives=True, held_bytes=1 << 20,
    )  # fmt: skip
    said: list[str] = []
    run = verify(plan, rounds=3, progress=said.append)
    document = run.document
    assert document is not None
    assert document.plan_digest == plan.digest
    by_name = {c.name: c for c in document.candidates}
    assert next(iter(by_name)) == "chosen"
    # The reference is computed in one process; the toy's result is exact.
    assert [(a.mode, a.passed, a.exact) for a in document.agreement] == [
        ("reference", True, True), ("fast", True, True),
    ]  # fmt: skip
    assert document.passed
    assert_obeys(run)
    # Each rank became its device, on a core of its own.
    devices = document.machine.devices
    assert devices[0].cpu_capability == "AVX2"
    assert devices[1].cpu_capability != "AVX2" or "avx512" not in Path("/proc/cpuinfo").read_text()
    assert [len(device.cores) for device in devices] == [1, 1]
    assert devices[0].cores != devices[1].cores
    assert {device.messages for device in devices} == {"gloo"}
    # What is slow by four takes at least what it sleeps, however busy the machine is.
    toy = problem_of(plan, planner("toy")).workload
    assert min(by_name["slow"].rounds_s) >= 4.0 * toy.seconds * toy.microbatches
    assert min(by_name["chosen"].rounds_s) >= toy.seconds * toy.microbatches
    assert len(by_name["swap"].rounds_s) == 3
    assert len(by_name["alone"].ranks) == 1
    # Failures are named, and do not stop the others.
    assert "rank 1 (localhost/cpu:threads=1): it exited with code 7" in str(by_name["dies"].failure)
    assert "rank 1" in str(by_name["breaks"].failure)
    assert "at 1F2: ValueError: a kernel is broken" in str(by_name["breaks"].failure)
    assert "allocate memory" in str(by_name["big"].failure)
    assert "ValueError: no weights today" in str(by_name["unloaded"].failure)
    assert "deadlock" in str(by_name["stuck"].failure)
    # Memory is compared item by item.
    item = by_name["chosen"].ranks[0].memory[0]
    assert item.predicted_bytes == item.held_bytes == 1 << 20
    assert by_name["chosen"].ranks[0].phases[0].op == "F"
    assert run.timeline is not None
    assert document.times is not None
    assert run.timeline.makespan_s == pytest.approx(sorted(by_name["chosen"].rounds_s)[1], abs=1e-6)
    # Rounds turn: the second one does not start with the first candidate.
    assert said.count("round 3 of 3") == 1


def test_the_machine_is_timed_between_the_rounds(make_plan: MakePlan) -> None:
    """By a program that was expected to take a tenth of what it can, and by one that fails."""

    def add(kernel: str, expected_s: float) -> PaceProgram:
        return PaceProgram(
            op="add", dims={"rows": 64, "cols": 64}, variant=f"bf16/bf16/torch.{kernel}",
            expected_s=expected_s, priced_s=1.0,
        )  # fmt: skip

    plan = make_plan(alternatives={"alone": {"order": [0]}}, tolerance=50.0)
    pace = tuple(
        RankPace(device=rank.label, programs=(add("add", 1e-9), add("nothing", 1.0)))
        for rank in plan.cluster.ranks()
    )
    hints = plan.verify.model_copy(update={"pace": pace})
    said: list[str] = []
    run = verify(plan.model_copy(update={"verify": hints}), rounds=2, progress=said.append)
    assert run.document is not None
    for ran in run.document.candidates:
        assert all(rank.pace is not None and rank.pace > 10.0 for rank in ran.ranks)
        assert ran.pace is not None
        assert ran.pace > 10.0
        assert ran.error is not None
        assert ran.error < 1.0 < (ran.error_at_pace or 0.0)
    assert run.document.passed, "the machine's speed does not decide"
    assert "times what the profile says" in (run.document.machine_share or "")
    assert not any("not timed" in note for note in run.document.notes)


def test_rivals_are_priced_anew_and_run(make_plan: MakePlan) -> None:
    plan = make_plan(tolerance=50.0, seconds=0.01)
    chosen = planner("toy")
    prices = CostBook((), given=chosen.given(chosen.workload_type(seconds=0.01)))
    run = verify(plan, rounds=1, thorough=True, costs=prices)
    assert run.document is not None
    assert [c.name for c in run.document.candidates] == ["chosen", "rival"]
    rival = run.document.candidates[1]
    assert rival.role == "rival"
    assert rival.predicted_s is not None
    assert rival.predicted_s > plan.predicted.total_s
    assert rival.measured_s is not None


def test_where_a_fork_would_not_be_safe_jobs_are_fresh_processes(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_THREAD", "1")
    plan = make_plan()
    toy_planner = planner("toy")
    (candidate,) = candidates_of(plan, toy_planner, problem_of(plan, toy_planner))
    with Fleet(plan, candidate.ranks, (0, 1), "word") as fleet:
        runner = Rounds(
            fleet, "gloo", "localhost", rounds=1, timeout_s=300.0, load_timeout_s=300.0,
            say=lambda text: None,
        )  # fmt: skip
        results = runner.once(candidate, "fast")
    assert [result is not None and result["sum"] for result in results] == [[3.0, 3.0]] * 2


def test_processes_that_rest_stand_still_and_run_when_they_are_woken(make_plan: MakePlan) -> None:
    plan = make_plan()
    toy_planner = planner("toy")
    (candidate,) = candidates_of(plan, toy_planner, problem_of(plan, toy_planner))
    with Fleet(plan, candidate.ranks, (0, 1), "word") as fleet:
        group = fleet.start(candidate.jobs("gloo", "fast", 60.0), (0, 1), 60.0)
        group.gather("ready", 60.0)
        children = [
            child for process in fleet.local._processes.values()
            for child in psutil.Process(process.pid).children()
        ]  # fmt: skip
        assert len(children) == 2
        for resting in (True, False, True):
            group.rest(resting)
            deadline = time.monotonic() + 30.0
            while resting != all(c.status() == psutil.STATUS_STOPPED for c in children):
                assert time.monotonic() < deadline
                fleet.pump(0.01)
        group.say({"run": 0, "result": True})
        with pytest.raises(RankFailed, match="no answer for 0 s"):
            group.gather("ran", 0.3)
        group.rest(False)
        assert [answer["result"]["sum"] for answer in group.gather("ran", 60.0)] == [[3.0, 3.0]] * 2
        group.rest(True)
        group.stop()
        assert psutil.wait_procs(children, timeout=30.0)[1] == [], "ended though they stood still"


def test_a_worker_that_was_ended_between_two_groups_is_named(make_plan: MakePlan) -> None:
    plan = make_plan()
    toy_planner = planner("toy")
    (candidate,) = candidates_of(plan, toy_planner, problem_of(plan, toy_planner))
    with Fleet(plan, candidate.ranks, (0, 1), "word") as fleet:
        fleet.local._processes[0].kill()
        while not fleet.local.dead() or 0 in fleet._members:
            fleet.pump(0.1)
        with pytest.raises(RankFailed, match="its worker has gone: it was ended by SIGKILL"):
            fleet.start(candidate.jobs("gloo", "fast", 60.0), (0, 1), 60.0)


def test_a_wrong_result_is_not_passed(make_plan: MakePlan) -> None:
    run = verify(make_plan(broken="fast", tolerance=50.0), rounds=1, only=())
    assert run.document is not None
    assert [(a.mode, a.passed) for a in run.document.agreement] == [
        ("reference", True), ("fast", False),
    ]  # fmt: skip
    assert not run.document.passed


@pytest.mark.parametrize("where", [(Rounds, "reference"), (Planner, "agree")])
def test_times_outlive_an_interruption(
    where: tuple[type, str], make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, interrupted)
    document = verify(make_plan(), rounds=1).document
    assert document is not None
    assert document.candidates[0].measured_s is not None
    assert not document.passed
    assert [a.details["failure"] for a in document.agreement] == [
        "interrupted before it was compared"
    ]
    assert "result NOT COMPARED" in document.summary


@pytest.mark.parametrize(
    ("decision", "timeout_s", "message"),
    [
        ({"die": "exit"}, 300.0, r"rank 1 \(localhost/cpu:threads=1\): it exited with code 7"),
        ({"die": "hang"}, 2.0, r"rank \d .*: (no answer for 7 s|.*[Tt]imed? ?out)"),
    ],
)
def test_a_chosen_plan_that_fails_is_one_clear_error(
    make_plan: MakePlan, decision: dict[str, Any], timeout_s: float, message: str
) -> None:
    plan = make_plan(decision)
    begin = time.monotonic()
    with pytest.raises(VerificationError, match=message):
        verify(plan, rounds=1, timeout_s=timeout_s)
    assert time.monotonic() - begin < 1800, "it waited for a rank that hangs for an hour"


def test_what_cannot_run_is_refused_before_anything_starts(make_plan: MakePlan) -> None:
    with pytest.raises(SpecError, match="deadlock"):
        verify(make_plan({"deadlock": True}))
    with pytest.raises(SpecError, match="deadlock"):
        verify(make_plan({"deadlock": True}), dry_run=True)
    with pytest.raises(SpecError, match="did you mean 'slow'"):
        verify(make_plan(alternatives={"slow": {"slow": 2.0}}), only=["slwo"])
    for rounds in (0, 1.5):
        with pytest.raises(SpecError, match="rounds"):
            verify(make_plan(), rounds=rounds)
    for tolerance in (-1.0, math.nan, math.inf):
        with pytest.raises(SpecError, match="--tolerance"):
            verify(make_plan(), tolerance=tolerance)
    zoo = [{"name": "t4", "host": "a"}, {"name": "t4", "host": "b"}]
    with pytest.raises(SpecError, match="--rdzv-endpoint"):
        verify(make_plan(devices=zoo))
    with pytest.raises(SpecError, match="published figures only"):
        verify(make_plan(devices=zoo), rdzv_endpoint="127.0.0.1:1", host="a")
    with pytest.raises(SpecError, match="one of a, b"):
        verify(make_plan(devices=zoo), rdzv_endpoint="127.0.0.1:1", host="c")
    twice = [{"name": "cuda:0"}, {"name": "cuda:0/sms=16"}]
    with pytest.raises(SpecError, match="cuda"):
        verify(make_plan(devices=twice))


def test_a_dry_run_says_what_would_start(make_plan: MakePlan) -> None:
    run = verify(make_plan({"cap_bytes": 1 << 20}, {"slow": {"slow": 2.0}}), dry_run=True)
    assert run.document is None
    first = run.processes[0]
    assert (first.candidate, first.rank, first.capacity_bytes) == ("chosen", 0, 1 << 20)
    assert first.environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert [process.candidate for process in run.processes] == ["chosen"] * 2 + ["slow"] * 2
    assert len(first.cores) == 1
    assert not run.refused
    assert repr(run) == "<VerificationRun: a dry run of 4 processes>"
    one = verify(make_plan(alternatives={"slow": {}, "late": {}}), dry_run=True, only="slow")
    assert {process.candidate for process in one.processes} == {"chosen", "slow"}


def test_a_dry_run_says_what_cannot_run_here(make_plan: MakePlan) -> None:
    devices = [{"name": "t4"}, {"name": "cpu:threads=1"}]
    plan = make_plan(alternatives={"slow": {"slow": 2.0}}, devices=devices)
    run = verify(plan, dry_run=True)
    assert set(run.refused) == {"chosen", "slow"}
    assert "expected a device of this machine" in run.refused["chosen"]


def start(code: str, *, core: int | None = None, cwd: Path | None = None) -> subprocess.Popen[str]:
    def pin() -> None:
        # Jobs that a shell put into the background inherit that Ctrl-C is ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if core is not None:
            os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[core]])

    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=cwd, preexec_fn=pin,
    )  # fmt: skip


SCRIPT = """
import sys
from foreplan.planner.plan import load_plan
from foreplan.planner.verify.verify import verify
run = verify(load_plan({plan!r}), rounds=2, progress=lambda text: print(text, flush=True){more})
run.document.save({output!r})
"""


def test_two_hosts_meet_at_an_endpoint(make_plan: MakePlan, tmp_path: Path) -> None:
    """One machine plays both hosts: a working directory and a core each."""
    devices = [{"name": "cpu:threads=1,isa=avx2", "host": "west"},
               {"name": "cpu:threads=1", "host": "east"}]  # fmt: skip
    plan = make_plan(devices=devices, tolerance=50.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for core, host in enumerate(("east", "west")):
        home = tmp_path / host
        home.mkdir()
        plan.save(home / "plan.json")
        more = f", rdzv_endpoint='127.0.0.1:{port}', host='{host}'"
        code = SCRIPT.format(plan="plan.json", output="v.json", more=more)
        running.append(start(code, core=core, cwd=home))
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    west = load_verification(tmp_path / "west" / "v.json")
    assert load_verification(tmp_path / "east" / "v.json") == west
    assert west.passed
    assert all(a.exact for a in west.agreement)
    assert west.machine.devices[0].cores != west.machine.devices[1].cores
    # One kernel, so the clocks differ by nothing: offsets must not have moved ranks apart.
    assert west.times is not None
    assert max(west.times.start_us) < 1e7


def test_another_plan_is_refused_at_the_endpoint(make_plan: MakePlan) -> None:
    devices = [{"name": "cpu:threads=1", "host": "west"}, {"name": "cpu:threads=1", "host": "east"}]
    plan = make_plan(devices=devices)
    ranks = plan.cluster.ranks()
    ports: queue.Queue[int] = queue.Queue()
    problems: list[Exception] = []

    def lead() -> None:
        try:
            with Fleet(plan, ranks, (), plan.digest, join_timeout_s=3.0, listening=ports.put):
                pass
        except VerificationError as error:
            problems.append(error)

    leader = threading.Thread(target=lead)
    leader.start()
    endpoint = ("127.0.0.1", ports.get(timeout=60))
    with pytest.raises(VerificationError, match="verifies another plan"):
        follow([], "east", endpoint, make_plan(devices=devices, steps=2).digest)
    leader.join()
    assert "no word from west/cpu:threads=1, east/cpu:threads=1" in str(problems[0])
    assert "with --rdzv-endpoint" in str(problems[0])
    assert "--host" in str(problems[0])


def test_a_host_that_lacks_a_device_is_named_and_one_too_many_is_let_go(
    make_plan: MakePlan,
) -> None:
    devices = [{"name": "cpu:threads=1", "host": "west"}, {"name": "cpu:threads=1", "host": "east"}]
    plan = make_plan(devices=devices)
    west, east = plan.cluster.ranks()
    with Fleet(plan, [west], (0,), "word", join_timeout_s=30.0) as fleet:
        environment = rank_environment(east, "word")
        command = ["--leader", f"127.0.0.1:{fleet.endpoint[1]}", "--member", "1"]
        spare = subprocess.Popen(
            [sys.executable, "-P", "-m", "foreplan.planner.verify.worker", *command],
            env=environment,
        )
        while spare.poll() is None:
            fleet.pump(0.1)
        assert spare.returncode == 0
        with contextlib.closing(dial(fleet.endpoint, 5.0)) as wire:
            wire.send({"hello": "host", "host": "west", "members": [], "token": "word"})
            fleet.pump(5.0)  # the connection; then its message
            with pytest.raises(VerificationError, match="west cannot be west/cpu:threads=1"):
                fleet.pump(5.0)


def test_an_interrupted_leader_says_so_to_the_other_hosts(make_plan: MakePlan) -> None:
    plan = make_plan()
    west, _ = plan.cluster.ranks()

    def lead() -> None:
        with Fleet(plan, [west], (0,), "word", join_timeout_s=30.0) as fleet:
            wires.append(dial(fleet.endpoint, 5.0))
            wires[0].send({"hello": "host", "host": "west", "members": [0], "token": "word"})
            fleet.pump(5.0)  # the connection; then its message
            fleet.pump(5.0)
            raise KeyboardInterrupt

    wires: list[Wire] = []
    with pytest.raises(KeyboardInterrupt):
        lead()
    with contextlib.closing(wires[0]) as wire:
        assert wire.receive(5.0) == {"error": "interrupted"}


def test_torchrun_starts_the_ranks(make_plan: MakePlan, tmp_path: Path) -> None:
    plan = make_plan(alternatives={"slow": {"slow": 2.0}}, tolerance=50.0)
    plan.save(tmp_path / "plan.json")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "-m", "foreplan.planner.verify.worker", "plan.json", "-o", "v.json", "--rounds", "2",
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # torchrun leaves a folder behind
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = load_verification(tmp_path / "v.json")
    assert document.passed
    assert document.machine.devices[0].cpu_capability == "AVX2"
    assert [c.name for c in document.candidates if c.measured_s] == ["chosen", "slow"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_from_outside_leaves_nothing_behind(
    make_plan: MakePlan, tmp_path: Path, number: signal.Signals
) -> None:
    plan = make_plan(seconds=1.0)
    plan.save(tmp_path / "plan.json")
    process = start(SCRIPT.format(plan="plan.json", output="v.json", more=""), cwd=tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("warm-up"):
            break
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "site"]


def test_a_plan_cannot_name_code(make_plan: MakePlan, tmp_path: Path) -> None:
    data = json.loads(make_plan().to_json())
    data["kind"] = "os:system"
    with pytest.raises(SpecError, match="os:system"):
        verify(Plan.model_validate_json(json.dumps(data)))
