"""Traffic: what is drawn and read, and that a replay serves every request once within its cache."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import foreplan
from foreplan.cost_models.simulator import Simulator
from foreplan.datasets.specs import validate
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.plan_command import plan_files
from foreplan.planner.report.traffic_tables import traffic_table
from foreplan.planner.serving import ServingPlanner
from foreplan.planner.serving.batching import Batching
from foreplan.planner.serving.replica_server import cache_tokens
from foreplan.planner.serving.traffic import Request, Traffic, load_traffic
from foreplan.planner.serving.traffic_replay import check_rate, largest_rate, replay, servers_of
from foreplan.planner.traffic_command import simulate_traffic

PLANNER = ServingPlanner()


@pytest.fixture(scope="module")
def served():
    """Two stages by force of memory; the problem is made once."""
    return {}


def problem_and_replicas(make_problem, copies=1):
    problem = make_problem(12, 12, prompt_tokens=32, new_tokens=8, bits=[16, 8])
    decision = PLANNER.decide(problem).decision
    return problem, [(decision, problem.workload.batch)] * copies


requests_of = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 64), st.integers(1, 12)), min_size=1, max_size=24
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(requests_of)
def test_every_request_is_served_once_and_caches_hold(make_problem, served, drawn):
    if not served:
        served["it"] = problem_and_replicas(make_problem)
    problem, replicas = served["it"]
    requests = [Request(t, p, n) for t, p, n in sorted(drawn)]
    found = replay(problem, replicas, requests)
    prefills = [i for _, members, phase in found.passes if phase == "prefill" for i in members]
    assert sorted(prefills) == list(range(len(requests)))
    made = np.zeros(len(requests), dtype=int)
    for _, members, _ in found.passes:
        made[list(members)] += 1
    assert made.tolist() == [r.new_tokens for r in requests]
    assert 0 < found.most_cached <= 1
    assert found.most_held <= problem.workload.batch
    assert (found.first_s > 0).all()
    assert (found.total_s >= found.first_s).all()
    assert found.tokens == sum(r.new_tokens for r in requests)
    assert found.clock_off_s < 1e-9
    _caches_hold(problem, replicas, requests, found)


def _caches_hold(problem, replicas, requests, found):
    """Recount from the timeline what is held from the first pass's start to the last one's end."""
    schedule, timeline = found.timeline.schedule, found.timeline
    prefill = schedule.ops.index("prefill")
    starts = timeline.start_s[(schedule.op == prefill) & (schedule.stage == 0)]
    arrival = np.array([r.arrival_s for r in requests])
    held, k = [], 0
    for _, members, phase in found.passes:
        if phase == "prefill":
            held += [(starts[k], requests[i], arrival[i] + found.total_s[i]) for i in members]
            k += 1
    most = cache_tokens(problem, replicas[0][0])
    for moment in starts:
        inside = [r.prompt_tokens + r.new_tokens for a, r, b in held if a <= moment < b - 1e-12]
        assert sum(inside) <= most
        assert len(inside) <= found.most_held


def test_no_more_requests_are_held_than_the_launch_files_allow(make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    decision, batch = replicas[0]
    crowd = [Request(0.0, 16, 4)] * 30
    assert cache_tokens(problem, decision) >= 30 * 20 > 2 * batch * 20  # caches would hold all
    found = replay(problem, replicas, crowd)
    assert found.most_held == batch
    for _, members, _ in found.passes:
        assert len(members) <= max(decision.decode_microbatch, -(-batch // len(decision.stages)))
    wider = replay(problem, [(decision, 2 * batch)], crowd)
    assert wider.most_held == 2 * batch
    assert wider.throughput_tokens_per_s > found.throughput_tokens_per_s


def test_the_policys_clock_is_the_simulators(make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    assert len(replicas[0][0].stages) == 2
    requests = [Request(0.01 * k, 16 + 7 * (k % 5), 1 + k % 9) for k in range(40)]
    found = replay(problem, replicas, requests)
    schedule = found.timeline.schedule
    busy = [
        sorted(
            (found.timeline.start_s[i], found.timeline.end_s[i])
            for i in np.flatnonzero(found.timeline.is_compute & (schedule.rank == rank))
        )
        for rank in range(schedule.ranks)
    ]
    for spans in busy:  # no stage does two things at once
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
    first = [r.arrival_s for r in requests]
    starts = found.timeline.start_s[schedule.op == schedule.ops.index("prefill")]
    assert starts.min() >= min(first)
    assert found.clock_off_s < 1e-9


def test_passes_written_down_again_are_the_same_schedule(make_problem, monkeypatch):
    problem, replicas = problem_and_replicas(make_problem)
    requests = [Request(0.01 * k, 16 + 7 * (k % 5), 1 + k % 9) for k in range(40)]
    passes, decide = [], Batching.next_pass

    def heard(self, slot, now_s):
        found = decide(self, slot, now_s)
        passes.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(Batching, "next_pass", heard)
    found = replay(problem, replicas, requests)
    log, (server,) = servers_of(problem, replicas)
    server.follow(requests, passes)
    again, before = log.builder.build(), found.timeline.schedule
    assert again.works == before.works
    for one, other in ((again.op, before.op), (again.dependency, before.dependency)):
        assert np.array_equal(one, other)
    timeline = Simulator(again).run(np.array(log.seconds))
    assert np.array_equal(timeline.end_s, found.timeline.end_s)


def test_prompts_are_priced_padded_and_decode_at_its_longest_request(make_problem):
    problem = make_problem(256.0, prompt_tokens=32, new_tokens=8, bits=[16])
    replicas = [(PLANNER.decide(problem).decision, problem.workload.batch)]

    def seconds(phase, *requests):
        timeline = replay(problem, replicas, [Request(0.0, *each) for each in requests]).timeline
        schedule = timeline.schedule
        mine = (schedule.op == schedule.ops.index(phase)) & (schedule.stage == 0)
        return (timeline.end_s - timeline.start_s)[mine]

    alone = [float(seconds("prefill", (prompt, 1))[0]) for prompt in (20, 32, 33, 40)]
    assert alone[0] == pytest.approx(alone[1])
    assert alone[2] == pytest.approx(alone[3])  # of the 40 tokens that the plan is for, not 64
    assert alone[1] < alone[2] < seconds("prefill", (64, 1))[0]
    steps = seconds("decode", (32, 9))
    assert (np.diff(steps) > 0).all()  # a key more each, between two multiples of 32
    assert np.diff(steps) == pytest.approx(np.diff(steps)[0] * np.ones(len(steps) - 1))
    unlike, alike = (seconds("decode", (short, 3), (32, 3))[-1] for short in (8, 32))
    assert unlike == pytest.approx(alike)
    assert unlike > seconds("decode", (32, 3))[-1]


def test_slower_arrivals_wait_less_and_saturation_is_said(make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    fields = {"requests": 60, "rate_per_s": 1.0, "prompt_tokens": 32, "new_tokens": {4: 1, 8: 1}}
    base = validate(Traffic, fields, "traffic")
    most = largest_rate(problem, replicas, base.draw())

    def waits(share):
        drawn = base.model_copy(update={"rate_per_s": share * most}).draw()
        return replay(problem, replicas, drawn).figures()

    slow, fast = waits(0.1), waits(3.0)
    assert slow["time_to_first_token_p90_s"] < fast["time_to_first_token_p90_s"]
    assert fast["throughput_requests_per_s"] <= most * 1.1
    check_rate(base.model_copy(update={"rate_per_s": 0.3 * most}).draw(), most)
    with pytest.raises(InfeasibleError, match="serves at most"):
        check_rate(base.model_copy(update={"rate_per_s": 5 * most}).draw(), most)


def test_the_largest_rate_is_the_plans_however_few_requests_tell_it(make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    alike = [Request(0.0, 32, 8)] * 64
    most = largest_rate(problem, replicas, alike)
    for few in (1, 3):
        assert largest_rate(problem, replicas, alike[:few]) == pytest.approx(most, rel=0.25)
    # So that a trace of few requests is not refused at a rate that the plan serves.
    soon = [Request(k / (0.7 * most), 32, 8) for k in range(4)]
    check_rate(soon, largest_rate(problem, replicas, soon))


def test_two_replicas_share_the_requests(make_problem):
    problem, one = problem_and_replicas(make_problem)
    requests = [Request(0.0, 32, 8)] * 40
    alone, both = replay(problem, one, requests), replay(problem, one * 2, requests)
    assert both.throughput_tokens_per_s > 1.6 * alone.throughput_tokens_per_s
    assert {replica for replica, _, _ in both.passes} == {0, 1}


def test_requests_that_no_cache_holds_are_refused(make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    longest = problem.model.max_sequence
    with pytest.raises(SpecError, match="request 2"):
        replay(problem, replicas, [Request(0, 8, 8), Request(0, longest, 8)])
    with pytest.raises(SpecError, match="at least one"):
        replay(problem, replicas, [])


def test_requests_that_launch_files_refuse_are_counted(tmp_path):
    asked = {"batch": 4, "prompt_tokens": 32, "new_tokens": 8}
    foreplan.plan("serving", "tiny-llama-random", "2xt4", asked, costs="roofline").save(
        tmp_path / "plan.json"
    )
    (tmp_path / "t.csv").write_text(
        "arrived_at_s,prompt_tokens,new_tokens\n0,32,8\n0.1,33,8\n0.2,8,8\n"
    )
    with pytest.raises(SpecError, match=r"--profiles: got .*nowhere', expected a folder"):
        simulate_traffic(tmp_path / "plan.json", tmp_path / "t.csv", folder=tmp_path / "nowhere")
    found = simulate_traffic(tmp_path / "plan.json", tmp_path / "t.csv")
    assert (found.batches, found.longest, found.too_long) == ((4,), 40, 1)
    screen = Console(width=40)
    with screen.capture() as told:
        screen.print(traffic_table(found))
    said = " ".join(told.get().split())
    assert "1 of 3 requests are longer than the 40 tokens" in said
    assert "saturates at" in said
    assert "…" not in said  # no name is cut off
    assert found.document()["longer_than_planned"] == 1
    events = json.loads(found.trace())["traceEvents"]
    assert any("prefill" in event["name"] for event in events)


def test_profiles_are_found_from_the_plan_wherever_the_command_runs(tmp_path, monkeypatch):
    measured, made = tmp_path / "profiles", tmp_path / "made" / "today"
    shutil.copytree(Path(__file__).parents[2] / "benchmarks" / "profiles", measured)
    made.mkdir(parents=True)
    (tmp_path / "t.csv").write_text("arrived_at_s,prompt_tokens,new_tokens\n0,32,8\n")
    plan_files(
        "serving", "demo-llama-random", measured / "cluster.yaml",
        "batch=8,prompt_tokens=32,new_tokens=16", costs="measured", seed=0,
        output=made / "plan.json",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    first = simulate_traffic(made / "plan.json", tmp_path / "t.csv")
    # A plan that left its profiles behind.
    alone = shutil.copy(made / "plan.json", tmp_path)
    monkeypatch.chdir(made)
    with pytest.raises(SpecError, match=r"profiles/cpu.*No such file.*--profiles DIR"):
        simulate_traffic(Path(alone), tmp_path / "t.csv")
    moved = simulate_traffic(Path(alone), tmp_path / "t.csv", folder=made)
    assert first.document() == moved.document()


def test_lengths_are_a_number_or_shares(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "requests: 1\nrate_per_s: 1\nprompt_tokens: [8]\nnew_tokens: 1"
    )
    with pytest.raises(SpecError, match=r"prompt_tokens: .*a number of tokens, or shares"):
        load_traffic(tmp_path / "t.yaml")


def test_draws_follow_the_histogram(tmp_path):
    text = "requests: 4000\nrate_per_s: 5\nprompt_tokens: {16: 3, 64: 1}\nnew_tokens: 7\n"
    (tmp_path / "t.yaml").write_text(text)
    drawn = load_traffic(tmp_path / "t.yaml")
    assert np.mean([r.prompt_tokens == 16 for r in drawn]) == pytest.approx(0.75, abs=0.03)
    assert {r.new_tokens for r in drawn} == {7}
    assert len(drawn) / drawn[-1].arrival_s == pytest.approx(5, rel=0.1)
    assert drawn == load_traffic(tmp_path / "t.yaml")
    assert load_traffic(tmp_path / "t.yaml", rate_per_s=50)[-1].arrival_s < drawn[-1].arrival_s


def test_traces_are_read_with_either_names(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,10,3\n1.5,20,4\n")
    assert load_traffic(path) == (Request(0.0, 20, 4), Request(1.0, 10, 3))
    assert load_traffic(path, rate_per_s=10)[-1].arrival_s == pytest.approx(0.1)
    for text, what in (
        ("a,b\n1,2\n", "header: .*arrived_at_s,prompt_tokens"), ("", "0 requests"),
        ("arrived_at_s,prompt_tokens,new_tokens\n1,0,3\n", "prompt_tokens"),
        ("arrived_at_s,prompt_tokens,new_tokens\nnan,1,3\n", "line 2: arrived_at_s"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(SpecError, match=what):
            load_traffic(path)
    fields = {"requests": 1, "rate_per_s": 1, "prompt_tokens": {}, "new_tokens": 1}
    with pytest.raises(SpecError):
        validate(Traffic, fields, "t")


def test_a_wrong_row_is_named_by_its_line(tmp_path):
    path, head = tmp_path / "trace.csv", "arrived_at_s,prompt_tokens,new_tokens\n"
    for text, told in (
        (head + "\n1,8,8\n\n2,x,8\n", "trace.csv: line 5: prompt_tokens: got 'x'"),
        (head + "1,8,8\n2,8,8,9\n", "trace.csv: line 3: got '4 cells', expected the header's 3"),
        (head + "1,8\n", "trace.csv: line 2: new_tokens: got nothing"),
        ("arrived_at," + head + "1,2,8,8\n", "trace.csv: header: .*each once"),
    ):
        path.write_text(text)
        with pytest.raises(SpecError, match=told):
            load_traffic(path)


def test_a_request_that_is_too_long_is_named_by_its_line_not_its_turn(tmp_path, make_problem):
    problem, replicas = problem_and_replicas(make_problem)
    longest = problem.model.max_sequence
    path = tmp_path / "trace.csv"
    path.write_text(f"arrived_at_s,prompt_tokens,new_tokens\n5,{longest},8\n1,8,8\n")
    with pytest.raises(SpecError, match=r"^trace\.csv: line 2: got"):
        largest_rate(problem, replicas, load_traffic(path))
    path = tmp_path / "drawn.yaml"
    path.write_text(f"requests: 2\nrate_per_s: 1\nprompt_tokens: {longest}\nnew_tokens: 8\n")
    with pytest.raises(SpecError, match=r"^drawn\.yaml: got"):
        largest_rate(problem, replicas, load_traffic(path))


def test_a_rate_of_requests_that_come_at_once_is_refused(tmp_path):
    drawn, trace = tmp_path / "t.yaml", tmp_path / "t.csv"
    drawn.write_text(
        "requests: 3\nrate_per_s: 1\narrivals: together\nprompt_tokens: 8\nnew_tokens: 8\n"
    )
    trace.write_text("arrived_at_s,prompt_tokens,new_tokens\n3,8,8\n3,8,8\n")
    for path in (drawn, trace):
        assert {request.arrival_s for request in load_traffic(path)} == {0.0}
        with pytest.raises(SpecError, match=r"--rate: got 4, expected .*one after another"):
            load_traffic(path, rate_per_s=4)
