"""The command line: its surface is frozen; every bad input is one line and the right exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from foreplan import cli
from foreplan.cli._app import Interrupted, resumable

SURFACE = Path(__file__).parent / "cli_surface.json"
TIMES = ["--forward-ms", "2", "--backward-input-ms", "2", "--backward-weight-ms", "1"]
PIPELINE = ["simulate", "pipeline", "--schedule", "zb-h1", "--stages", "4", "--microbatches", "8"]
HERE, CLI_SURFACE = str(Path(__file__).parent), str(SURFACE)
SERVED = ["-m", "tiny-llama-random", "-d", "2xt4", "--costs", "roofline", "-w"]
WORKLOAD = "batch=4,prompt_tokens=16,new_tokens=8"
CLUSTER = {
    "devices": [{"name": "t4", "count": 2}],
    "tiers": [
        {
            "group": "all", "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e10,
            "source": "test",
        }
    ],
}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in a folder of its own; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["foreplan", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


@pytest.fixture
def plan(run):
    """A plan in plan.json, as a document."""
    Path("cluster.json").write_text(json.dumps(CLUSTER))
    code, _, err = run(
        "plan", "serving", "-m", "tiny-llama-random", "-c", "cluster.json", "-w", WORKLOAD,
        "--costs", "roofline",
    )  # fmt: skip
    assert code == 0, err
    return json.loads(Path("plan.json").read_text())


def surface():
    """Commands with their arguments and options, from the command tree."""

    def describe(command):
        if hasattr(command, "commands"):
            return {name: describe(sub) for name, sub in sorted(command.commands.items())}
        return sorted(
            word for p in command.params for word in (p.opts if p.opts[0][0] == "-" else [p.name])
        )

    return describe(typer.main.get_command(cli.app))


def test_only_what_is_there_is_said_to_be_kept(tmp_path):
    with pytest.raises(KeyboardInterrupt), resumable(tmp_path / "nothing"):
        raise KeyboardInterrupt
    with pytest.raises(Interrupted, match="is kept in"), resumable(tmp_path):
        raise KeyboardInterrupt


def test_surface_is_frozen():
    """After an intended change: python -m tests.test_cli > tests/cli_surface.json."""
    assert surface() == json.loads(SURFACE.read_text())


@pytest.mark.parametrize("words", [[], ["dataset"], ["simulate"], ["cluster"]])
@pytest.mark.parametrize("columns", ["60", "100"])
def test_help_lists_whole_sentences(run, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run(*words, "--help")
    assert code == 0
    listed = " ".join(out.split("Commands:")[1].split())
    assert "..." not in listed
    assert listed.endswith(".")
    assert all(len(line) <= int(columns) for line in out.splitlines())


def test_json_is_one_document_and_nothing_else(run):
    code, out, _ = run(*PIPELINE, *TIMES, "--json")
    assert code == 0
    assert set(json.loads(out)) == {
        "bubble_rate", "iteration_s", "makespan_s", "peak_activations"
    }  # fmt: skip


def test_same_inputs_give_the_same_bytes(run, plan):
    first = Path("plan.json").read_bytes()
    words = ["plan", "serving", "-m", "tiny-llama-random", "-c", "cluster.json", "-w", WORKLOAD]
    code, _, _ = run(*words, "--costs", "roofline")
    assert code == 0
    assert Path("plan.json").read_bytes() == first


BAD = {
    "unknown command": (["plam"], 2, "plam"),
    "unknown option": (["devices", "--colour"], 2, "--colour"),
    "unknown schedule": ([*PIPELINE[:3], "zb-h9", *PIPELINE[4:], *TIMES], 2, "zb-h1"),
    "zero stages": ([*PIPELINE[:5], "0", *PIPELINE[6:], *TIMES], 2, "at least 1"),
    "negative time": ([*PIPELINE, *TIMES, "--transfer-ms", "-1"], 2, "'--transfer-ms'"),
    "no number": ([*PIPELINE, *TIMES, "--transfer-ms", "x"], 2, "--transfer-ms"),
    "unknown kind": (["plan", "surving", "-d", "t4"], 2, "serving"),
    "no cluster": (["plan", "serving", "-m", "gpt2"], 2, "--cluster"),
    "no model": (["plan", "serving", "-d", "t4", "-w", WORKLOAD], 2, "model"),
    "unknown model": (["plan", "serving", "-m", "gpt5", "-d", "t4", "-w", WORKLOAD], 2, "gpt5"),
    "unknown device": (["plan", "serving", "-m", "gpt2", "-d", "2xt9", "-w", WORKLOAD], 2, "t9"),
    "zero devices": (["plan", "serving", "-m", "gpt2", "-d", "0xt4", "-w", WORKLOAD], 2, "count"),
    "unknown field": (
        ["plan", "serving", "-m", "gpt2", "-d", "t4", "-w", WORKLOAD + ",bacth=3"], 2, "bacth"
    ),
    "negative size": (
        ["plan", "serving", "-m", "gpt2", "-d", "t4", "-w", "batch=-1,prompt_tokens=4"], 2, "batch"
    ),
    "unknown costs": (
        ["plan", "serving", "-m", "gpt2", "-d", "t4", "-w", WORKLOAD, "--costs", "magic"], 2,
        "measured",
    ),
    "missing file": (["verify", "nowhere.json"], 2, "nowhere.json"),
    "missing cluster": (["plan", "serving", "-m", "gpt2", "-c", "no.yaml"], 2, "no.yaml"),
    "does not fit": (
        ["plan", "serving", "-m", "llama-2-70b", "-d", "t4", "-w", WORKLOAD], 3, "GiB"
    ),
    "nothing measured": (
        ["plan", "serving", "-m", "gpt2", "-d", "cpu:threads=1", "-w", WORKLOAD], 4, "memory"
    ),
    "no folder": (
        ["plan", "serving", "-m", "gpt2", "-d", "t4", "-w", WORKLOAD, "--costs", "roofline",
         "-o", "no/such/folder/plan.json"], 2, "plan.json",
    ),
    "a zoo device is not here": (["profile", "t4"], 2, "t4"),
    "a dataset of a zoo device": (["dataset", "build", "-d", "t4", "-o", "x"], 2, "t4"),
    "nothing to evaluate": (
        ["evaluate", "--model", "pretrained:ops", "--data", "no.csv", "--format", "neusight"], 2,
        "no.csv",
    ),
    "one file to merge": (["cluster", "merge", "a.yaml", "-o", "b.yaml"], 2, "a.yaml"),
    "both ends of a link": (
        ["profile", "--serve", "a:1", "--link", "b:2", "--peer", "x"], 2, "--serve or --link"
    ),
    "a peer of no link": (["profile", "--peer", "b"], 2, "--serve or --link with it"),
    "a link and devices": (
        ["profile", "cpu:threads=1", "--link", "b:2", "--peer", "b"], 2, "the link alone"
    ),
    "a link to no address": (["profile", "--link", "b", "--peer", "b"], 2, "--link: got 'b'"),
    "an end at no port": (
        ["profile", "--serve", "b:99999", "--peer", "b"], 2, "--serve: got 'b:99999'"
    ),
    "quality of no model": (["quality", "byte-lama"], 2, "byte-lama"),
    "quality of random weights": (["quality", "gpt2"], 2, "random weights"),
    "quality on no text": (["quality", "byte-llama", "--text", "no.txt"], 2, "no.txt"),
    "quality on a folder": (["quality", "byte-llama", "--text", HERE], 2, "directory"),
    "quality on bytes": (["quality", "byte-llama", "--text", sys.executable], 2, "UTF-8"),
    "quality at unknown bits": (["quality", "byte-llama", "--bits", "5"], 2, "[3, 4, 8]"),
    "quality at lossless bits": (["quality", "byte-llama", "--bits", "16"], 2, "[3, 4, 8]"),
    "quality at equal bits": (
        ["quality", "byte-llama", "--bits", "8", "--bits", "8"], 2, "different"
    ),
    "quality of too much": (["quality", "byte-llama", "--windows", "100000000"], 2, "windows"),
    "quality elsewhere": (["quality", "byte-llama", "--device", "tpu"], 2, "tpu"),
    "quality into a folder": (["quality", "byte-llama", "-o", "."], 2, "a file"),
    "a price without a floor": (
        ["plan", "replicas", *SERVED, WORKLOAD + ",objective=price"], 2,
        "min_throughput_tokens_per_s",
    ),
    "a price of nothing priced": (
        ["plan", "replicas", *SERVED, WORKLOAD + ",objective=tokens_per_price"], 4, "price_per_hour"
    ),
    "sooner than can be": (
        ["plan", "replicas", *SERVED, WORKLOAD + ",max_time_to_first_token_s=1e-9"], 3, "sooner"
    ),
    "degree in words": (
        ["plan", "serving", *SERVED, WORKLOAD + ",tensor_parallel=three"], 2,
        "auto, or a number of devices from 1 to 1024",
    ),
    "costs of no table": (["plan", "serving", *SERVED, WORKLOAD, "--costs", "helix:no.csv"], 2,
                          "no.csv"),
    "costs of a table without a name": (
        ["plan", "serving", *SERVED, WORKLOAD, "--costs", "helix:"], 2, "helix:FILE"
    ),
    "costs of weights without a name": (
        ["plan", "serving", *SERVED, WORKLOAD, "--costs", "predicted:"], 2, "predicted:FOLDER"
    ),
    "costs of no weights": (
        ["plan", "serving", *SERVED, WORKLOAD, "--costs", "predicted:nowhere"], 2,
        "a trained model's folder",
    ),
    "unknown costs beside": (["plan", "serving", *SERVED, WORKLOAD, "--beside", "magic"], 2,
                             "--beside"),
    "a text that is not there": (
        ["plan", "serving", "-m", "byte-llama", *SERVED[2:], WORKLOAD + ",text=no.txt"], 2, "no.txt"
    ),
    "perplexity without a text": (
        ["plan", "serving", *SERVED, WORKLOAD + ",max_perplexity_increase=0.1"], 2, "text=stdlib"
    ),
    "no Ray there": (["dataset", "build", "-o", "x", "--ray", "nohost.invalid:1"], 4, "nohost"),
    "no address of Ray": (["profile", "-o", "x", "--ray", "local:junk"], 2, "local:junk"),
    "no tracker there": (
        ["dataset", "build", "-o", "x", "--rpc", "127.0.0.1:1/k", "--chip", "c"], 4, "127.0.0.1:1"
    ),
    "no address of a tracker": (
        ["dataset", "build", "-o", "x", "--rpc", "junk", "--chip", "c"], 2, "HOST:PORT/KEY"
    ),
    "no samples": (["dataset", "build", "-o", "x", "--samples", "0"], 2, "--samples"),
    "negative minutes": (["dataset", "build", "-o", "x", "--minutes", "-1"], 2, "--minutes"),
    "calibration of nothing": (
        ["calibrate", "no.yaml", "--measured", "no.csv", "-m", "gpt2"], 2, "no.yaml"
    ),
    "traffic on no plan": (["simulate", "traffic", CLI_SURFACE, "--traffic", "t.yaml"], 2, "plan"),
    "real traffic on no plan": (["verify", CLI_SURFACE, "--traffic", "t.yaml"], 2, "plan"),
    "a profile that is not there": (
        ["predict", "gpt2", "-d", "cpu:threads=1", "--profile", "no.json"], 2, "no.json"
    ),
    "negative seed": (["plan", "serving", *SERVED, WORKLOAD, "--seed", "-1"], 2, "seed"),
    "more passes than can be simulated": (
        [*PIPELINE[:5], "100000", "--microbatches", "100000", *TIMES], 2, "at most 1000000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(run, name):
    words, expected, part = BAD[name]
    code, out, err = run(*words)
    assert code == expected, err
    assert err.count("\n") == 1
    assert err.startswith("foreplan: error: ")
    assert part in err
    assert out == ""
    assert [*Path().rglob("*")] == []


def test_an_error_is_a_document_too(run):
    code, out, _ = run("verify", "nowhere.json", "--json")
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 2
    assert error["type"] == "SpecError"


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "newer schema": lambda text: text.replace("foreplan.plan/1", "foreplan.plan/2"),
    "another schema": lambda text: text.replace("foreplan.plan/1", "something/1"),
    "unknown field": lambda text: text.replace('"kind"', '"kin"'),
    "wrong type": lambda text: text.replace('"total_s"', '"total_ms"'),
    "a stage short": lambda text: text.replace('"start": 0', '"start": 1'),
    "no JSON": lambda text: "stages: [",
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_damaged_plan_is_refused(run, plan, name, command):
    Path("bad.json").write_text(DAMAGE[name](Path("plan.json").read_text()))
    code, _, err = run(command, "bad.json", "-o", "out.file")
    assert code == 2, err
    assert err.count("\n") == 1
    assert "bad.json" in err
    assert not Path("out.file").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--tolerance", "-1"], "--tolerance"),
        (["--tolerance", "nan"], "--tolerance"),
        (["--report", "no/such/report.html"], "report.html"),
        (["--trace", "no/such/trace.json"], "trace.json"),
        (["-o", "."], "a file"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_what_would_fail_after_the_run_is_refused_before(run, plan, words, part):
    code, _, err = run("verify", "plan.json", *words)
    assert code == 2
    assert err.count("\n") == 1
    assert part in err
    assert not Path("verification.json").exists()


def test_a_plan_for_devices_that_are_not_here(run, plan):
    code, _, err = run("verify", "plan.json")
    assert code in (2, 4)
    assert err.count("\n") == 1
    assert "t4" in err


def test_dry_run_starts_nothing(run, plan):
    code, out, _ = run("verify", "plan.json", "--dry-run", "--rounds", "3", "--json")
    assert code == 0
    said = json.loads(out)
    names = ["chosen", *(other["name"] for other in plan["alternatives"])]
    assert [one["name"] for one in said["candidates"]] == names
    totals = [p["predicted"]["total_s"] for p in (plan, *plan["alternatives"])]
    assert said["expected_s"] == pytest.approx(4 * sum(totals))  # one round warms up
    held = [sum(r["memory_bytes"].values()) for r in plan["predicted"]["ranks"]]
    chosen = [p for p in said["processes"] if p["candidate"] == "chosen"]
    assert [p["memory_bytes"] for p in chosen] == held
    assert said["candidates"][0]["memory_bytes"] == sum(held)
    for only in (names[1:2], ["chosen"]):  # each decision takes minutes to run
        words = [word for name in only for word in ("--only", name)]
        code, out, _ = run("verify", "plan.json", "--dry-run", "--json", *words)
        found = [one["name"] for one in json.loads(out)["candidates"]]
        assert found == list(dict.fromkeys(["chosen", *only]))
    code, out, _ = run("verify", "plan.json", "--dry-run")
    assert code == 0
    assert "Nothing was started" in " ".join(out.split())
    assert "Not on this host" in out
    assert all("a device of this machine" in one["refused"] for one in said["candidates"])
    assert not Path("verification.json").exists()


@pytest.mark.xdist_group("serial")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_a_profile_leaves_no_process_and_a_journal(tmp_path, number):
    words = [sys.executable, "-m", "foreplan.cli", "profile", "cpu:threads=1", "-o", str(tmp_path)]
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # Jobs that a shell put into the background inherit that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    journal = tmp_path / "cpu-threads-1.json.journal"
    while time.monotonic() < deadline and not (journal.exists() and journal.stat().st_size > 2000):
        time.sleep(0.1)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".lock")]
    assert "error: interrupted; what was measured is kept in" in err.strip().splitlines()[-1]
    assert journal.exists()
    assert not (tmp_path / "cpu-threads-1.json").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


class CompiledCode:
    """Calls that end as compiled ones may after Ctrl-C."""

    def __call__(self, *_, **__):
        inner = SystemError("returned a result with an exception set")
        inner.__cause__ = KeyboardInterrupt()
        raise SystemError("returned a result with an exception set") from inner


def at_once(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [at_once, CompiledCode()])
def test_an_interrupted_plan_says_that_it_starts_anew(run, monkeypatch, interrupted):
    monkeypatch.setattr("foreplan.planner.plan_command.plan_files", interrupted)
    code, out, err = run("plan", "serving", *SERVED, WORKLOAD, "-o", "plan.json", "--json")
    assert code == 130
    assert err.strip() == "foreplan: error: interrupted; the same command starts anew"
    assert json.loads(out)["error"]["exit_code"] == 130
    assert not Path("plan.json").exists()


def test_an_evaluation_of_no_row_prints_one_document(run):
    Path("theirs.csv").write_text(
        "op,kind,dtype,library,device,m,n,k,latency_s\n"
        "linear,linear,fp32,torch-2.1-cuda,t99,664,1607,874,0.0004\n"
    )
    code, out, _ = run("evaluate", "-m", "roofline", "--data", "theirs.csv", "--json")
    assert (code, list(json.loads(out))) == (4, ["error"])


@pytest.mark.parametrize("error", [BrokenPipeError(), None])
def test_a_closed_pipe_ends_as_sigpipe_does(run, monkeypatch, error):
    def closed(*_, **__):
        if error is not None:
            raise error
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            sys.exit(1)  # as rich and click do

    monkeypatch.setattr("foreplan.cli._app.json.dumps", closed)
    monkeypatch.setattr("foreplan.cli._drop_output", lambda: None)
    assert run("devices", "--json") == (141, "", "")


@pytest.mark.parametrize("columns", ["0", "00"])
def test_no_columns_are_an_unknown_width(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = run("devices", "t4")
    assert code == 0
    assert "t4" in out


def test_compare(run, plan):
    Path("other.json").write_text(json.dumps(plan | {"kind": "precision"}))
    code, out, _ = run("compare", "plan.json", "plan.json", "--json")
    assert code == 0
    assert json.loads(out)["same"] is True
    for words in (["plan.json", "other.json"], ["plan.json", "cluster.json"], ["plan.json", "no"]):
        code, out, err = run("compare", *words)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1


def test_doctor_fails_where_something_is_missing(run, monkeypatch):
    from foreplan.planner import doctor

    probed = {
        "realtime": {"allowed": True}, "speeds": {"alone": 1.0, "together": 1.0}, "gpus": [],
        "cpu": {"bf16/bf16/torch.linear": ""},
        "torch": {"version": "2", "cuda": None, "gloo": True, "nccl": False},
        "tvm": {"tvm": "0.27", "ffi": "0.1", "targets": ["llvm"]},
    }  # fmt: skip
    monkeypatch.setattr(doctor, "_probe", lambda timeout_s: probed)
    code, out, _ = run("doctor", "--json")
    assert code == 0
    assert all(json.loads(out)["ready"].values())
    probed["tvm"] = {"error": "not installed"}
    code, out, err = run("doctor")
    assert (code, err) == (4, "")
    assert "cannot build data sets" in " ".join(out.split())


COMPLETED = {
    "foreplan p": ["profile", "predict", "plan"],
    "foreplan plan ": ["serving", "replicas", "precision", "bubbles"],
    "foreplan plan serving --cos": ["--costs"],
    "foreplan plan serving --costs r": ["roofline"],
    "foreplan plan serving -d l4,2xh2": ["l4,2xh200"],
    "foreplan devices h100_s": ["h100_sxm"],
    "foreplan profile --for p": ["precision"],
    "foreplan predict gpt2 --phase t": ["training"],
    "foreplan train --start ": ["pretrained:ops", "pretrained:programs"],
    "foreplan quality byte-llama --indicator f": ["fisher"],
    "foreplan evaluate --format t": ["tir-jsonl"],
    "foreplan dataset build --network res": ["resnet-18", "resnet-50"],
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_commands_options_and_values(typed):
    start = "import sys; sys.argv[0] = 'foreplan'; from foreplan.cli import main; main()"
    asked = {"_FOREPLAN_COMPLETE": "complete_bash", "COMP_WORDS": typed}
    asked["COMP_CWORD"] = str(len(typed.split(" ")) - 1)
    done = subprocess.run(
        [sys.executable, "-c", start], env=os.environ | asked, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert [w for w in done.stdout.split() if w in COMPLETED[typed]] == COMPLETED[typed]


def test_predict_takes_inline_clusters(run):
    words = ["predict", "gpt2", "--costs", "roofline", "--json", "--devices"]
    code, inline, err = run(*words, "2xa100-80g,4xt4@small")
    assert code == 0, err
    found = [json.loads(text) for text in (inline, run(*words, "a100-80g,t4")[1])]
    for answer in found:
        assert answer.pop("captured")  # anew, or from the steps kept on disk
    assert found[0] == found[1]
    code, _, err = run(*words, "2xt9")
    assert code == 2
    assert "t9" in err


if __name__ == "__main__":
    print(json.dumps(surface(), indent=1))
