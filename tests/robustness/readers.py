"""Every reader of the project with valid inputs, to be broken by `mutations`."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import lzma
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.robustness.mutations import as_json, as_yaml, broken_bytes, broken_document
from tests.robustness.spoken import spoken

import foreplan
from foreplan.datasets.specs import load_document
from foreplan.planner.plan import Plan

Read = Callable[[Path], Any]
DATA = Path(__file__).parent.parent / "cost_models" / "data"
PROFILES = Path(__file__).parent.parent / "benchmarks" / "profiles"


@dataclass(frozen=True)
class Reader:
    """A reader with what it reads.

    Attributes:
        name: for the test's id.
        read: reads a file, and uses what it read as the commands do.
        document: a valid document, plain data; its mutants are written by ``dump``.
        data: a valid file's bytes, where it is no document (or beside it).
        file: name of the file that is broken.
        beside: files around it that are not.
        dump: how documents are written.
    """

    name: str
    read: Read
    document: Callable[[], Any] | None = None
    data: Callable[[], bytes] | None = None
    file: str = "input.json"
    beside: Callable[[], Mapping[str, bytes]] = field(default=dict)
    dump: Callable[[Any], bytes] = as_json

    def valid_bytes(self) -> bytes:
        """The valid file."""
        if self.data is not None:
            return self.data()
        assert self.document is not None
        return self.dump(self.document())

    def mutant(self, seed: int) -> bytes:
        """A broken file, by its seed: even ones are broken as documents, odd ones as bytes."""
        random = Random(f"{self.name}/{seed}")
        if self.document is not None and seed % 2 == 0:
            return self.dump(broken_document(random, self.document()))
        return broken_bytes(random, self.valid_bytes())

    def attempt(self, folder: Path, data: bytes) -> None:
        """Write the files into a fresh folder and read the broken one."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.beside().items():
            (folder / name).write_bytes(content)
        (folder / self.file).write_bytes(data)
        self.read(folder / self.file)


# ---------------------------------------------------------------------------------------- plans

_CPU = {
    "devices": [
        {"name": "cpu:threads=1,isa=avx2", "memory_bytes": 1 << 30},
        {"name": "cpu:threads=1", "memory_bytes": 1 << 30},
    ],
    "tiers": [
        {"group": "all", "scope": "host", "latency_s": 1e-4, "bandwidth_bytes_per_s": 2e9,
         "source": "made up"}
    ],
    "contention": [{"kind": "memory", "factors": {"2": 1.2}}],
}  # fmt: skip
_BUBBLES: dict[str, Any] = {
    "encoders": [{"name": "v", "dims": {"layers": 2, "hidden": 64, "heads": 4}, "tokens": 16}],
    "backbone": {"layers": 4, "hidden": 128, "heads": 8, "vocab": 256},
    "sequence_length": 64, "microbatches": 2, "plan": {"pp": 2},
}  # fmt: skip
WORKLOADS: Mapping[str, dict[str, Any]] = {
    "serving": {"batch": 2, "prompt_tokens": 8, "new_tokens": 3, "bits": [16, 8]},
    "precision": {"batch": 8, "network": "digits_mlp", "indicator": "uniform",
                  "precisions": ["fp32", "bf16"]},
    "bubbles": _BUBBLES,
}  # fmt: skip


@functools.cache
def _made(kind: str) -> Plan:
    model = "tiny-llama-random" if kind == "serving" else None
    return foreplan.plan(kind, model, "2xt4", WORKLOADS[kind], costs="roofline")


@functools.cache
def plan_text(kind: str) -> str:
    """A plan of each kind on two processors, times of the roofline of two T4."""
    document = json.loads(_made(kind).to_json().replace("localhost/t4#", "localhost/x#"))
    labels = ("localhost/cpu:threads=1,isa=avx2", "localhost/cpu:threads=1")
    text = json.dumps(document | {"cluster": _CPU})
    for number, label in enumerate(labels):
        text = text.replace(f"localhost/x#{number}", label)
    return text


def use_plan(path: Path) -> None:
    """Read a plan and do with it what each command does, but for running it."""
    from foreplan.errors import ForeplanError
    from foreplan.planner.export import export_plan, targets
    from foreplan.planner.plan import load_plan
    from foreplan.planner.report.files import write_report
    from foreplan.planner.report.tables import plan_tables
    from foreplan.planner.verify.verify import verify

    plan = load_plan(path)
    plan.to_frame()
    plan._repr_html_()
    steps: list[Callable[[], Any]] = [
        lambda: plan_tables(plan),
        lambda: write_report(plan, path.with_suffix(".html"), trace=path.with_suffix(".trace")),
        lambda: verify(plan, dry_run=True),
    ]
    steps += [
        functools.partial(export_plan, plan, target, path.parent / target) for target in targets()
    ]
    for step in steps:
        # A plan can be sound and yet not for this target or this machine.
        with contextlib.suppress(ForeplanError):
            step()


@functools.cache
def plan_and_run() -> tuple[bytes, bytes]:
    """A plan with a verification of it."""
    from tests.planner.report.conftest import (
        plan_document,
        serving_timeline,
        verification_document,
    )

    from foreplan.datasets.specs import validate
    from foreplan.planner.verify.verification import Verification

    timeline = serving_timeline(steps=3)
    plan = validate(Plan, plan_document(timeline), "plan")
    run = validate(Verification, verification_document(plan, timeline), "run")
    return plan.to_json().encode(), run.to_json().encode()


def _quality() -> Any:
    """A table of losses of the demo model, which has random weights, with a curve."""
    from foreplan.cost_models.quality_table import weights_digest
    from foreplan.datasets.model import load_model

    model = load_model("demo-llama-random")
    return {
        "schema": "foreplan.quality/1", "model": model.name,
        "weights_digest": weights_digest(model), "indicator": "measured_kl",
        "bits": [8, 4], "omega": [[1e-6, 1e-4]] * model.layers,
        "text": "stdlib", "text_digest": "0" * 16, "windows": 16, "length": 255, "seed": 0,
        "curve": {"perplexity": 4.2, "coefficient": 1.0, "exponent": 1.0, "largest_omega": 1e-3,
                  "plans": 16, "error": 0.1},
    }  # fmt: skip


def _use_quality(path: Path) -> None:
    from foreplan.cost_models.quality_table import QualityTable
    from foreplan.datasets.model import load_model
    from foreplan.planner.report.quality_tables import quality_tables

    table = QualityTable.load(path)
    table.check(load_model("demo-llama-random"))
    table.losses((16, 8))
    quality_tables(table)
    if table.curve is not None:
        table.curve.omega(0.1)


def _use_verification(path: Path) -> None:
    from foreplan.planner.plan import load_plan
    from foreplan.planner.report.files import write_report
    from foreplan.planner.report.tables import verification_tables
    from foreplan.planner.verify.verification import load_verification

    run = load_verification(path)
    run._repr_html_()
    plan = load_plan(path.parent / "plan.json")
    verification_tables(run, plan)
    write_report(plan, path.with_suffix(".html"), verification=run)


# ----------------------------------------------------------------------- clusters and profiles


def _cluster() -> Any:
    from tests.planner.report.conftest import CLUSTER

    return CLUSTER | {"contention": [{"kind": "memory", "factors": {"2": 1.1, "3": 1.5}}]}


def _use_cluster(path: Path) -> None:
    from foreplan.datasets.cluster import Cluster
    from foreplan.datasets.cluster_merge import merge
    from foreplan.datasets.specs import validate

    cluster = Cluster.load(path)
    ranks = cluster.ranks()
    cluster.links(range(min(len(ranks), 8)))
    cluster.rebase("a", "b/c").to_yaml()
    cluster._repr_html_()
    cluster.to_frame()
    again = path.with_name("again.yaml")
    again.write_text(cluster.to_yaml(), encoding="utf-8")
    assert Cluster.load(again) == cluster
    merge(cluster, validate(Cluster, {"devices": [{"name": "t4", "host": "other"}]}, "other"))


def _profile() -> Any:
    document = json.loads((PROFILES / "cpu-threads-1.json").read_text())
    rows = document["rows"]
    return document | {"rows": rows[:: max(1, len(rows) // 12)]}


def _use_profile(path: Path) -> None:
    from foreplan.cost_models.costs import Copy, HostLaunch
    from foreplan.cost_models.tables import InterpolatedSource, MeasuredSource
    from foreplan.datasets.profile import Profile

    profile = Profile.load(path)
    for source in (MeasuredSource(profile), InterpolatedSource(profile)):
        for work in (*list(profile.by_program)[:20], Copy(1 << 20), HostLaunch(2)):
            source.estimate(work, profile.device.name)
    profile.to_json()


def _device() -> Any:
    return {
        "name": "my_gpu", "chip": "x100", "vendor": "nvidia", "kind": "cuda",
        "peak_flops": {"fp16/matrix": "312 TFLOP/s", "fp32/vector": 19.5e12},
        "memory_bytes": "80 GiB", "memory_bandwidth": "2 TB/s", "units": 108,
        "clock_hz": "1.41 GHz", "sources": {"memory_bytes": "data sheet"},
    }  # fmt: skip


def _use_device(path: Path) -> None:
    from foreplan.datasets.device import Device

    device = Device.load(path)
    device.vector()
    device.peak("fp16")
    json.dumps(device.model_dump(mode="json"))


def _fit() -> Any:
    rows = [row for row in _profile()["rows"] if row["status"] == "ok"]
    device = _profile()["device"]
    return {"schema": "foreplan.fit/1", "law": "rates/1", "device": device, "tasks": rows}


def _use_fit(path: Path) -> None:
    from foreplan.cost_models.device_fit import DeviceFit

    fit = DeviceFit.load(path)
    _ = fit.programs, fit.seconds


def _journal() -> bytes:
    from foreplan.datasets.profile_journal import SCHEMA

    result = {"times_s": [1e-5, 2e-5], "samples": 2, "calls": 1, "preempted": 0,
              "cache_state": "cold", "load": 0.1, "clock_hz": None, "error": None}  # fmt: skip
    line = {"op": "linear", "dims": {"m": 8, "n": 64, "k": 64},
            "variant": "bf16/bf16/torch.linear", "round": 0, "result": result}  # fmt: skip
    lines = [{"schema": SCHEMA, "identity": {"a": 1}}, {"figures": {"bandwidth": 1e9}}, line]
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


def _use_journal(path: Path) -> None:
    from foreplan.datasets.measurement import percentiles
    from foreplan.datasets.profile_journal import ProfileJournal

    with ProfileJournal(path) as journal:
        journal.resume({"a": 1})
        for part in journal.parts.values():
            if part.times_s:
                percentiles([part])


# --------------------------------------------------------------------------------------- models

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "torch_dtype": "float32", "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
_QWEN = {k: v for k, v in _LLAMA.items() if k not in ("architectures", "rope_scaling")} | {
    "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64,
    "max_window_layers": 1, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 64,
    "n_positions": 64, "vocab_size": 64, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}  # fmt: skip


def _use_model(path: Path) -> None:
    from foreplan.datasets.model import load_model

    model = load_model(path.parent)
    _ = model.parameters, model.max_sequence, model.kv_bytes_per_token("bf16")


@functools.cache
def _weights() -> bytes:
    import numpy as np
    from safetensors.numpy import save

    from foreplan.datasets.model import load_model
    from foreplan.datasets.tensor_names import embedding_sources, head_sources, layer_sources

    folder = Path(__file__).parent / "_model"
    folder.mkdir(exist_ok=True)
    try:
        (folder / "config.json").write_bytes(as_json(_LLAMA))
        model = load_model(folder)
    finally:
        shutil.rmtree(folder)
    found: dict[str, Any] = {}
    parts = [embedding_sources(model, "model."), head_sources(model, "model.")]
    parts += [layer_sources(model, layer, "model.") for layer in range(model.layers)]
    for part in parts:
        for source in part.values():
            for index, name in enumerate(source.names):
                found[name] = np.zeros(source.stored_shape(index), dtype=np.float32)
    return bytes(save(found))


def _use_weights(path: Path) -> None:
    from foreplan.datasets.model import load_model
    from foreplan.datasets.weights import open_weights

    model = load_model(path.parent)
    source = open_weights(model)
    for part in ("embedding", 0, "head"):
        for name in source.names(part):
            source.tensor(part, name)


def _index() -> Any:
    header = json.loads(_weights()[8 : 8 + int.from_bytes(_weights()[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    return {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}


# -------------------------------------------------------------------------------- measurements


def _tir_lines() -> bytes:
    lines = []
    for text in (DATA / "tir_examples.jsonl").read_text().splitlines()[:3]:
        found = json.loads(text)
        row = {"mod": found["mod"], "median_s": 1e-4, "min_s": 9e-5, "max_s": 2e-4}
        line = {"key": "k", "name": found["name"], "nets": [["n/batch=1", 2]], "rows": [row]}
        lines.append(json.dumps(line | {"task": found["mod"], "families": ["f"]}))
    return "\n".join(lines).encode()


def _tir_line() -> Any:
    return json.loads(_tir_lines().split(b"\n")[0])


def _use_tir(path: Path) -> None:
    from foreplan.cost_models.program_data import read_programs

    read_programs([path], "tir-jsonl", device="t4")


def _use_tasks(path: Path) -> None:
    from foreplan.datasets.tir.tir_jsonl import read_tasks

    read_tasks(path)


def _module() -> Any:
    from foreplan.datasets.tir.task import decode_module

    return json.loads(decode_module(_tir_line()["task"]))


def _use_module(path: Path) -> None:
    from foreplan.cost_models.compact_ast import CompactAstEncoder

    CompactAstEncoder().encode(path.read_bytes(), "module")


@functools.cache
def _records() -> bytes:
    from tests.cost_models.test_program_data import record

    from foreplan.datasets.tir.records import write_records

    path = Path("/dev/shm") / "foreplan-records.parquet"
    try:
        write_records([record(number) for number in range(6)], path)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)


def _use_records(path: Path) -> None:
    from foreplan.cost_models.commands import evaluate_file

    evaluate_file("roofline", path, "foreplan")


_OPERATORS = {
    "op": ["linear", "linear", "bmm"], "kind": ["linear", "linear", "bmm"],
    "dtype": ["float16"] * 3, "library": ["torch"] * 3, "device": ["t4", "h200", "mine"],
    "b": [1.0, 1.0, 4.0],
    "m": [8.0, 16.0, 32.0], "n": [64.0] * 3, "k": [64.0] * 3, "latency_s": [1e-5, 2e-5, 3e-5],
    "source_row": [0, 1, 2],
}  # fmt: skip


def _operators_parquet(columns: Any = None) -> bytes:
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

    sink = io.BytesIO()
    try:
        pq.write_table(pa.table(_OPERATORS if columns is None else columns), sink)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return b"PAR1"  # no table is made of this
    return sink.getvalue()


def _csv(rows: str) -> Callable[[], bytes]:
    return lambda: rows.encode()


def _use_operators(format_name: str, device: str | None = None) -> Read:
    def read(path: Path) -> None:
        from foreplan.cost_models.commands import evaluate_file, operator_stats
        from foreplan.datasets.importers import read_operators

        read_operators(path, format_name, device=device)
        operator_stats(path, format_name)
        evaluate_file("roofline", path, format_name, device=device)

    return read


# ------------------------------------------------------------------------------ shipped weights


def _pretrained(name: str, file: str) -> Callable[[], bytes]:
    from foreplan.cost_models.model_store import PRETRAINED

    return lambda: (PRETRAINED / name / file).read_bytes()


def _beside_pretrained(name: str, file: str) -> Callable[[], Mapping[str, bytes]]:
    return lambda: {file: _pretrained(name, file)()}


def _use_ops_model(path: Path) -> None:
    from foreplan.cost_models.model_store import load_operator_model
    from foreplan.datasets.importers import read_operators

    model = load_operator_model(str(path.parent))
    table = path.with_name("ops.parquet")
    table.write_bytes(_operators_parquet())
    model.predict(read_operators(table, "foreplan"))


def _use_programs_model(path: Path) -> None:
    from foreplan.cost_models.program_commands import load_program_model
    from foreplan.cost_models.program_data import read_programs

    model: Any = load_program_model(str(path.parent))
    known = model.known_devices()
    lines = path.with_name("programs.jsonl")
    lines.write_bytes(_tir_lines())
    model.predict(read_programs([lines], "tir-jsonl", device="t4", known=known).table)


def _steps() -> Any:
    return {
        "schema": "foreplan.steps/2",
        "works": [["linear", [8, 64, 64], "bf16/bf16/torch.linear"],
                  ["linear", [8, 64, 64], "bf16/bf16/torch.linear", "x", 2]],
        "steps": [["op", "aten.linear", "layers.0", 0, 1], ["op", "aten.linear", "", 1, 3]],
    }  # fmt: skip


def _use_steps(path: Path) -> None:
    from unittest.mock import patch

    from foreplan.cost_models import step_store
    from foreplan.datasets.model_zoo import zoo_model

    model = zoo_model("tiny-llama-random")
    key = step_store._key(model, 1, 8, "inference")
    path.rename(path.with_name(f"{key}.json"))
    with patch.object(step_store, "model_steps", lambda *a, **k: []):
        steps, _ = step_store.stored_steps(
            model, batch=1, tokens=8, phase="inference", folder=path.parent
        )
    for step in steps:
        hash(step.work)


# ------------------------------------------------------------------------------------ the list


def _workload(kind: str) -> Read:
    def read(path: Path) -> None:
        from foreplan.planner.api import load_workload

        load_workload(kind, str(path))

    return read


def readers() -> dict[str, Reader]:
    """Every reader by name."""
    some = {"config.json": as_json(_LLAMA)}
    found = [
        *(Reader(f"plan-{kind}", use_plan, lambda kind=kind: json.loads(plan_text(kind)),
                 lambda kind=kind: plan_text(kind).encode())
          for kind in WORKLOADS),
        Reader("plan-gpus", use_plan, lambda: json.loads(_made("serving").to_json())),
        Reader("plan-yaml", use_plan, lambda: json.loads(plan_text("serving")),
               file="plan.yaml", dump=as_yaml),
        *(Reader(f"workload-{kind}", _workload(kind), lambda kind=kind: WORKLOADS[kind],
                 file="w.yaml", dump=as_yaml) for kind in WORKLOADS),
        Reader("verification", _use_verification, lambda: json.loads(plan_and_run()[1]),
               beside=lambda: {"plan.json": plan_and_run()[0]}),
        Reader("cluster-yaml", _use_cluster, _cluster, file="cluster.yaml", dump=as_yaml),
        Reader("cluster-json", _use_cluster, _cluster),
        Reader("profile", _use_profile, _profile),
        Reader("device", _use_device, _device, file="device.yaml", dump=as_yaml),
        Reader("device-fit", _use_fit, _fit),
        Reader("quality", _use_quality, _quality),
        Reader("journal", _use_journal, data=_journal, file="j.jsonl"),
        *(Reader(f"config-{config['model_type']}", _use_model, lambda config=config: config,
                 file="config.json") for config in (_LLAMA, _QWEN, _GPT2)),
        Reader("safetensors", _use_weights, data=_weights, file="model.safetensors",
               beside=lambda: some),
        Reader("safetensors-header", _use_weights, _header, file="model.safetensors",
               beside=lambda: some, dump=_with_header),
        Reader("safetensors-index", _use_weights, _index, file="model.safetensors.index.json",
               beside=lambda: some | {"a.safetensors": _weights()}),
        Reader("tir-jsonl", _use_tir, _tir_line, _tir_lines, file="p.jsonl"),
        Reader("tir-jsonl-gz", _use_tir, data=lambda: _gzip(_tir_lines()), file="p.jsonl.gz"),
        Reader("tir-jsonl-xz", _use_tir, data=lambda: lzma.compress(_tir_lines()),
               file="p.jsonl.xz"),
        Reader("tasks", _use_tasks, _tir_line, _tir_lines, file="tasks.jsonl"),
        Reader("tir-module", _use_module, _module, file="module.json"),
        Reader("program-records", _use_records, data=_records, file="r.parquet"),
        Reader("operators-parquet", _use_operators("foreplan"), lambda: _OPERATORS,
               file="ops.parquet", dump=_operators_parquet),
        Reader("operators-parquet-bytes", _use_operators("foreplan"), data=_operators_parquet,
               file="ops.parquet"),
        Reader("neusight-csv", _use_operators("neusight"), data=_csv(NEUSIGHT), file="n.csv"),
        Reader("aiconfigurator-csv", _use_operators("aiconfigurator"), data=_csv(_AICONFIGURATOR),
               file="a.csv"),
        Reader("aiconfigurator-attention", _use_operators("aiconfigurator"),
               data=_csv(_ATTENTION), file="a.csv"),
        Reader("helix-csv", _use_operators("helix"), data=_csv("0,0\n1,2.5\n2,2.6\n4,2.9\n"),
               file="prompt_bs2time.csv"),
        Reader("helix-table", _use_operators("helix"), data=_csv(_HELIX), file="h.csv"),
        Reader("ops-card", _use_ops_model,
               lambda: json.loads(_pretrained("ops", "card.json")()), file="card.json",
               beside=_beside_pretrained("ops", "weights.safetensors")),
        Reader("ops-weights", _use_ops_model, data=_pretrained("ops", "weights.safetensors"),
               file="weights.safetensors", beside=_beside_pretrained("ops", "card.json")),
        Reader("programs-card", _use_programs_model,
               lambda: json.loads(_pretrained("programs", "card.json")()), file="card.json",
               beside=_beside_pretrained("programs", "weights.safetensors")),
        Reader("programs-weights", _use_programs_model,
               data=_pretrained("programs", "weights.safetensors"), file="weights.safetensors",
               beside=_beside_pretrained("programs", "card.json")),
        Reader("steps", _use_steps, _steps),
        Reader("yaml", load_document, _cluster, file="x.yaml", dump=as_yaml),
    ]  # fmt: skip
    found += [Reader(**of) for of in spoken()]
    return {reader.name: reader for reader in found}


def _gzip(data: bytes) -> bytes:
    import gzip

    return gzip.compress(data, mtime=0)


def _header() -> Any:
    data = _weights()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def _with_header(header: Any) -> bytes:
    data = _weights()
    length = int.from_bytes(data[:8], "little")
    text = as_json(header)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


NEUSIGHT = """OPName,Latency,Device,Torch Version,B,M,N,K,H
bmm,0.5,NVIDIA H100 80GB HBM3,2.1.0+cu121,8,128,64,256,
VECadd,0.7,Tesla T4,2.1.0+rocm,8,,,,64
"""
_AICONFIGURATOR = """framework,version,device,op_name,gemm_dtype,m,n,k,latency
TRTLLM,1.0,NVIDIA L40S,gemm,bfloat16,16,4096,1024,0.01
VLLM,0.9,Made-up GPU,gemm,nvfp4,16,4096,1024,0.02
"""
_ATTENTION = """framework,op_name,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,\
kv_cache_dtype,step,latency,device
TRTLLM,context_attention,2,1024,32,8,128,bfloat16,fp8,0,0.4,NVIDIA L40S
TRTLLM,generation_attention,2,1,32,0,128,bfloat16,bfloat16,1023,0.1,NVIDIA L40S
"""
_HELIX = "model,device,phase,tokens,layer_ms\nllama1_30b,a100,decode,8,1.5\nx,t4x2,prompt,16,2\n"
