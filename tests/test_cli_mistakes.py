"""Mistakes of somebody who has just met the command line: one line that says what mends it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foreplan
from foreplan import cli
from foreplan.datasets.importers import read_operators
from foreplan.datasets.sweeps.operator_table import write_operators
from foreplan.errors import SpecError
from foreplan.planner.registry import planner

SERVING = ("plan", "serving", "-d", "2xt4", "-w", "batch=2,prompt_tokens=8,new_tokens=2")
EVALUATE = ("evaluate", "-m", "roofline", "--data", "mine.csv")


@pytest.fixture
def err(monkeypatch, capsys, tmp_path):
    """Run a command that fails, in a folder with a model and a table; gives code and stderr."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    Path("mine.csv").write_text('{"op": "linear", "latency_s": 1}\n')

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["foreplan", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((*SERVING, "-m", "mine/config.json"), "did you mean 'mine'?"),
        ((*SERVING, "-m", "nobodys"), "`foreplan models` lists the zoo"),
        (("plan", "serving", "-d", "2xt4", "-m", "gpt2"), "batch, prompt_tokens, new_tokens: got"),
        (("predict", "gpt2"), "--devices: got nothing"),
        (("predict", "gpt2", "-d", "t4", "--phase", "train"), "did you mean training?"),
        (("devices", "6000"), "say which: rtx_a6000, rtx_pro_6000"),
        (("devices", ""), "device: got '', expected a device of the zoo"),
        ((*EVALUATE, "--format", "neusigt"), "did you mean neusight?"),
        ((*EVALUATE,), "mine.csv: got 'JSON', expected a CSV or Parquet file"),
        (("predict", "", "-d", "t4"), "model: got '', expected a folder, or a name of the zoo"),
        (("plan", "serving", "-m", "gpt2", "-d", "t4", "-w", "batch=4;prompt_tokens=3"),
         "fields go apart by commas, as in batch=4,prompt_tokens=64"),
        (("plan", "serving", "-m", "tiny-llama-random", "-c", "2xt4"),
         "expected a file, and there is none of that name; devices by their names are --devices"),
        (("profile", "-w", "batch=1"), "--workload: got 'batch=1', expected --model with it"),
        (("evaluate", "-m", "pretrained:programs", "--data", "mine.csv"),
         "expected measured programs (a folder that 'dataset build' wrote, or --format tir-jsonl), "
         "which pretrained:programs predicts; for this data use -m pretrained:ops"),
        (("evaluate", "-m", "pretrained:program", "--data", "mine.csv"), "pretrained:programs"),
        (("evaluate", "-m", "mine", "--data", "mine.csv"), "trained model: got 'mine', expected"),
        (("compare", "mine", "mine.csv"), "mine: got a folder, expected a plan, a verification or "
         "a profile, two of one sort; such as mine/config.json"),
        (("compare", "no.json", "no.json"), "no.json: got 'No such file or directory', expected a "
         "plan, a verification or a profile"),
        (("compare", "mine/config.json", "no.json"), "got a document without a schema, expected a"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_mending(err, words, told):
    code, text = err(*words)
    assert code == (4 if "no shipped model" in text else 2)
    assert told in text
    assert text.startswith("foreplan: error: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_an_evaluation_of_no_row_is_no_success(err, words):
    Path("theirs.csv").write_text(
        "op,kind,dtype,library,device,m,n,k,latency_s\n"
        "linear,linear,fp32,torch-2.1-cuda,t99,664,1607,874,0.0004\n"
    )
    code, text = err("evaluate", "-m", "roofline", "--data", "theirs.csv", *words)
    assert code == 4
    assert "no row could be predicted; device t99 is not in the zoo; --device-file" in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("model", ["pretrained:ops", "pretrained:programs", "roofline"])
def test_a_folder_of_operator_tables_is_none_of_programs(err, model):
    Path("mine.csv").write_text(
        "op,kind,dtype,library,device,m,n,k,latency_s\n"
        "linear,linear,fp32,torch-2.1-cuda,t4,664,1607,874,0.0004\n"
    )
    tables = Path("tables")
    tables.mkdir()
    write_operators(read_operators("mine.csv", "foreplan"), tables / "mine.parquet")
    code, text = err("evaluate", "-m", model, "--data", "tables")
    assert code == 2
    assert "--data: got 'tables', expected a folder of measured programs, or a file of" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_tables_need_no_utf8(tmp_path, encoding):
    """Nor names that are no text: what cannot be shown is shown plainly, as the rest."""
    name = b"plan\xff.json"
    run = subprocess.run(
        [sys.executable, "-m", "foreplan.cli", *SERVING, "-m", "gpt2", "--costs", "roofline",
         "-o", name],
        cwd=tmp_path, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert (Path(os.fsdecode(tmp_path)) / os.fsdecode(name)).is_file()
    told = run.stdout.decode(encoding)
    assert ("layers 0–11" if encoding == "utf-8" else "layers 0-11") in told
    assert "plan?.json" in run.stderr.decode(encoding)


@pytest.mark.parametrize("words", [(), ("cluster",), ("simulate",)])
def test_no_command_shows_the_help(err, words):
    code, text = err(*words)
    assert code == 2
    assert text.startswith("Usage: ")


@pytest.mark.parametrize("module", ["foreplan", "foreplan.cli"])
def test_a_module_calls_itself_by_the_command_s_name(module):
    run = subprocess.run(
        [sys.executable, "-m", module, "plan", "-h"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("Usage: foreplan plan ")


@pytest.mark.parametrize(
    ("schema", "fix"),
    [("foreplan.plan/0", "/1; plan again"), ("foreplan.plan/9", "; use a newer foreplan, or plan"),
     ("foreplan.plan/x", "expected foreplan.plan/1\n")],
)  # fmt: skip
def test_another_version_says_which_way_to_go(err, schema, fix):
    Path("plan.json").write_text(json.dumps({"schema": schema}))
    assert fix in err("report", "plan.json")[1]


def test_one_device_a_prediction():
    with pytest.raises(SpecError, match="one name of the zoo"):
        foreplan.predict_latency("gpt2", ["t4", "l4"])


def test_a_module_is_no_described_model_and_a_mapping_no_cluster():
    with pytest.raises(SpecError, match="register_network"):
        foreplan.load_model(object())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="inline cluster"):
        foreplan.load_cluster({"t4": 1})  # type: ignore[arg-type]


class Halves:
    """A task whose batch has no target."""

    name = "halves"

    def module(self):
        import torch

        return torch.nn.Linear(4, 4)

    def batch(self, step, rank):
        import torch

        return torch.zeros(8, 4)

    def loss(self, output, target):
        return output.sum()


@pytest.mark.parametrize(
    ("build", "told"),
    [(lambda *_: None, "NoneType without name, module, batch, loss"),
     (lambda *_: Halves(), "network halves: batch: got 'Tensor'")],
)  # fmt: skip
def test_a_network_that_is_no_task_is_refused(build, told):
    work = {"network": "mine", "batch": 8}
    with foreplan.register_network("mine", build), pytest.raises(SpecError, match=told):
        foreplan.plan("precision", None, "2xt4", work, costs="roofline")


class Pairs(Halves):
    """Four samples a batch, in a mapping by name."""

    name = "pairs"

    def module(self):
        import torch

        class Rows(torch.nn.Linear):
            def forward(self, given):
                return super().forward(given["rows"])

        return torch.nn.Sequential(Rows(4, 4), torch.nn.Linear(4, 4))

    def batch(self, step, rank):
        import torch

        return ({"rows": torch.zeros(4, 4)},), torch.zeros(4, 4)


def test_throughput_counts_no_samples_that_a_batch_does_not_have():
    work = {"network": "pairs", "batch": 64}
    with foreplan.register_network("pairs", lambda *_: Pairs()):
        with pytest.raises(SpecError, match=r"batch: got 64, expected the samples .* pairs: 4"):
            foreplan.plan("precision", None, "2xt4", work, costs="roofline")
        plan = foreplan.plan("precision", None, "2xt4", work | {"batch": 4}, costs="roofline")
    metrics = plan.predicted.metrics
    assert metrics["throughput_samples_per_s"] == pytest.approx(8 / metrics["iteration_s"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"phase": "train"}, "phase: got 'train', expected one of inference, training"),
     ({"costs": "measured"}, "costs: got 'measured', expected a profile"),
     ({"costs": "guess"}, "costs: got 'guess'"),
     ({"batch": 2.5}, "batch: got 2.5, expected a whole number"),
     ({"inputs": (1,)}, "inputs: got 'tuple', expected batch and sequence_length")],
)  # fmt: skip
def test_a_prediction_of_something_else_is_refused(fields, told):
    with pytest.raises(SpecError, match=re.escape(told)):
        foreplan.predict_latency("tiny-llama-random", "t4", **fields)


def test_a_module_in_a_file_is_for_predict(err):
    assert "'foreplan predict FILE.py'" in err("plan", "serving", "-m", "net.py:Net", "-d", "t4")[1]


def test_an_unknown_planner_is_said_first(err):
    assert "got 'servng'" in err("plan", "servng", "-m", "gpt2")[1]


def test_an_empty_workload_is_no_folder(err):
    told = err("plan", "serving", "-m", "gpt2", "-d", "t4", "-w", "")[1]
    assert "--workload: got '', expected FIELD=VALUE" in told


def test_the_command_is_a_module_too():
    called = [sys.executable, "-m", "foreplan", "verify", "no.json"]
    ended = subprocess.run(called, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith("foreplan: error: no.json: ")


@pytest.mark.parametrize("words", [("models",), ("models", "--json"), ("--version",)])
def test_a_full_disk_behind_stdout_is_one_line(words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "foreplan", *words], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=120,
        )  # fmt: skip
    assert ended.returncode == 2
    told = "foreplan: error: standard output: got 'No space left on device', expected a place"
    assert ended.stderr.startswith(told)
    assert ended.stderr.count("\n") == 1


def test_a_prediction_is_shown_in_one_line():
    found = foreplan.predict_latency("tiny-llama-random", "t4", costs="roofline", sequence_length=8)
    assert len(repr(found)) < 300
    assert "latency_s" in repr(found)


def test_a_plan_is_exported_from_its_file(tmp_path):
    work = {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}
    plan = foreplan.plan("serving", "gpt2", "2xt4", work, costs="roofline")
    plan.save(tmp_path / "plan.json")
    written = foreplan.export_plan(str(tmp_path / "plan.json"), "torchrun", str(tmp_path / "out"))
    sketch = foreplan.verify(tmp_path / "plan.json", dry_run=True).processes
    assert sketch == foreplan.verify(plan, dry_run=True).processes
    assert written == foreplan.export_plan(plan, "torchrun", tmp_path / "again")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {*written.files, "export.sha256"}


@pytest.mark.parametrize("kind", ["serving", "replicas", "precision", "bubbles"])
def test_a_workloads_fields_are_told(monkeypatch, capsys, kind):
    monkeypatch.setattr(sys, "argv", ["foreplan", "plan", kind, "--fields", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)
    assert [field["name"] for field in found] == list(planner(kind).workload_type.model_fields)
    assert all(field["meaning"] for field in found)
    assert any(field["required"] for field in found)


def test_models_are_listed(monkeypatch, capsys):
    for words in (["models"], ["models", "--json"]):
        monkeypatch.setattr(sys, "argv", ["foreplan", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        assert "llama-2-13b" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("models",), ("models", "--json"), ("report", "no.json")])
def test_closed_output_is_no_traceback(words):
    called = f"{sys.executable} -m foreplan {' '.join(words)}"
    for closing in (">&-", ">&- 2>&-"):
        ended = subprocess.run(
            ["bash", "-c", f"exec {called} {closing}"], stderr=subprocess.PIPE, text=True,
            timeout=120,
        )  # fmt: skip
        assert ended.returncode == (2 if "no.json" in words else 0)
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("sink", ["| true", "> /dev/full"])
def test_an_error_that_nobody_takes_is_no_traceback(sink):
    called = f"{sys.executable} -m foreplan nothing --json"
    ended = subprocess.run(
        ["bash", "-c", f"{called} {sink}; exit ${{PIPESTATUS[0]}}"],
        stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "foreplan: error: No such command 'nothing'.\n"


ROWS = (
    "op,kind,dtype,library,device,m,n,k,latency_s\n"
    "linear,linear,fp32,torch-2.1-cuda,t4,664,1607,874,0.000392885\n"
)


def test_what_is_read_is_not_written_over(err):
    """A slip of ``-o`` would lose what took minutes to make."""
    work = {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}
    foreplan.plan("serving", "gpt2", "t4", work, costs="roofline").save(Path("plan.json"))
    Path("plans").symlink_to(".")
    Path("cluster.yaml").write_text("devices: [{name: t4}]\n")
    Path("work.yaml").write_text("batch: 2\nprompt_tokens: 8\nnew_tokens: 2\n")
    Path("rows.csv").write_text(ROWS)
    Path("net.py").write_text("import torch\nmodel = torch.nn.Linear(4, 4)\n")
    before = {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    asked = ("plan", "serving", "-m", "gpt2", "-c", "cluster.yaml", "-w", "work.yaml", "-o")
    for words in (
        ("report", "plan.json", "-o", "plans/plan.json"),
        ("report", "plan.json", "-o", "page.html", "--trace", "plan.json"),
        ("verify", "plan.json", "-o", "plan.json"),
        ("verify", "plan.json", "--report", "plan.json"),
        (*asked, "cluster.yaml"),
        (*asked, "work.yaml"),
        ("simulate", "traffic", "plan.json", "--traffic", "work.yaml", "--trace", "plan.json"),
        ("simulate", "traffic", "plan.json", "--traffic", "work.yaml", "--trace", "work.yaml"),
        ("dataset", "import", "rows.csv", "--format", "foreplan", "-o", "plans/rows.csv"),
        ("predict", "net.py", "--devices", "t4", "--trace", "net.py"),
        (
            "predict",
            "gpt2",
            "--devices",
            "t4",
            "--device-file",
            "work.yaml",
            "--trace",
            "work.yaml",
        ),
        ("quality", "byte-llama", "--text", "work.yaml", "-o", "work.yaml"),
    ):
        code, told = err(*words)
        assert code == 2, words
        assert "got 'a file that is read here', expected another to write" in told, words
    assert before == {path: path.read_bytes() for path in Path().iterdir() if path.is_file()}


def test_two_documents_are_not_written_into_one_file(err):
    work = {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}
    foreplan.plan("serving", "gpt2", "t4", work, costs="roofline").save(Path("plan.json"))
    for words in (
        ("report", "plan.json", "-o", "page", "--trace", "./page"),
        ("verify", "plan.json", "-o", "page", "--trace", "page"),
        ("verify", "plan.json", "--trace", "page", "--report", "page"),
    ):
        code, told = err(*words)
        assert code == 2, words
        assert "got 'one file for two documents', expected a file for each" in told, words
        assert not Path("page").exists()
    assert err("report", "plan.json", "-o", "page", "--trace", "none/trace")[0] == 2
    assert not Path("page").exists()  # nor is one of two written


def test_what_is_no_cluster_or_workload_is_named():
    work = {"batch": 2, "prompt_tokens": 8, "new_tokens": 2}
    with pytest.raises(SpecError, match=r"the pair that load_cluster returns.*its first part"):
        foreplan.plan("serving", "gpt2", foreplan.load_cluster("t4"), work)
    with pytest.raises(SpecError, match=r"workload: got \[2, 8, 2\], expected fields by name"):
        foreplan.plan("serving", "gpt2", "t4", [2, 8, 2])
