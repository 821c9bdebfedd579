"""`measurement_readers`: programs and operators with latencies."""

from __future__ import annotations

import functools
import gzip
import io
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.robustness.reader import Read, Reader

DATA = Path(__file__).parent.parent / "cost_models" / "data"

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


def tir_lines() -> bytes:
    """A few programs."""
    lines = []
    for text in (DATA / "tir_examples.jsonl").read_text().splitlines()[:3]:
        found = json.loads(text)
        row = {"mod": found["mod"], "median_s": 1e-4, "min_s": 9e-5, "max_s": 2e-4}
        line = {"key": "k", "name": found["name"], "nets": [["n/batch=1", 2]], "rows": [row]}
        lines.append(json.dumps(line | {"task": found["mod"], "families": ["f"]}))
    return "\n".join(lines).encode()


def _tir_line() -> Any:
    return json.loads(tir_lines().split(b"\n")[0])


def _use_tir(path: Path) -> None:
    from foreplan.cost_models.programs.program_data import read_programs

    read_programs([path], "tir-jsonl", device="t4")


def _use_tasks(path: Path) -> None:
    from foreplan.datasets.tir.tir_jsonl import read_tasks

    read_tasks(path)


def _module() -> Any:
    from foreplan.datasets.tir.task import decode_module

    return json.loads(decode_module(_tir_line()["task"]))


def _use_module(path: Path) -> None:
    from foreplan.cost_models.programs.compact_ast import CompactAstEncoder

    CompactAstEncoder().encode(path.read_bytes(), "module")


@functools.cache
def _records() -> bytes:
    from tests.cost_models.programs.test_program_data import record

    from foreplan.datasets.tir.records import write_records

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.parquet"
        write_records([record(number) for number in range(6)], path)
        return path.read_bytes()


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


def operators_parquet(columns: Any = None) -> bytes:
    """A small table of operators, or what is made of these columns."""
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


def measurement_readers() -> list[Reader]:
    """Of programs, operators and their latencies."""
    return [
        Reader("tir-jsonl", _use_tir, _tir_line, tir_lines, file="p.jsonl"),
        Reader("tir-jsonl-gz", _use_tir, data=lambda: gzip.compress(tir_lines(), mtime=0),
               file="p.jsonl.gz"),
        Reader("tir-jsonl-xz", _use_tir, data=lambda: lzma.compress(tir_lines()),
               file="p.jsonl.xz"),
        Reader("tasks", _use_tasks, _tir_line, tir_lines, file="tasks.jsonl"),
        Reader("tir-module", _use_module, _module, file="module.json"),
        Reader("program-records", _use_records, data=_records, file="r.parquet"),
        Reader("operators-parquet", _use_operators("foreplan"), lambda: _OPERATORS,
               file="ops.parquet", dump=operators_parquet),
        Reader("operators-parquet-bytes", _use_operators("foreplan"), data=operators_parquet,
               file="ops.parquet"),
        Reader("neusight-csv", _use_operators("neusight"), data=_csv(NEUSIGHT), file="n.csv"),
        Reader("aiconfigurator-csv", _use_operators("aiconfigurator"), data=_csv(_AICONFIGURATOR),
               file="a.csv"),
        Reader("aiconfigurator-attention", _use_operators("aiconfigurator"),
               data=_csv(_ATTENTION), file="a.csv"),
        Reader("helix-csv", _use_operators("helix"), data=_csv("0,0\n1,2.5\n2,2.6\n4,2.9\n"),
               file="prompt_bs2time.csv"),
        Reader("helix-table", _use_operators("helix"), data=_csv(_HELIX), file="h.csv"),
    ]  # fmt: skip
