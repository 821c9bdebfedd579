from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from foreplan.datasets.importers import read_operators
from foreplan.datasets.sweeps.operator_table import OperatorTable, write_operators
from foreplan.errors import SpecError

UPSTREAM_BMM = """OPName,Latency,Device,Torch Version,Kernel Name,B,M,N,K
bmm,0.5,NVIDIA H100 80GB HBM3,2.1.0+cu121,ampere_sgemm,8,128,64,256
bmm,0.7,Tesla T4,2.1.0+cu121,volta_sgemm,8,128,64,256
"""
GEMM = """framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency
TRTLLM,1.0,NVIDIA L40S,gemm,torch_flow,bfloat16,16,4096,1024,0.01
VLLM,0.9,Made-up GPU,gemm,x,nvfp4,16,4096,1024,0.02
"""
ATTENTION = """framework,op_name,batch_size,isl,num_heads,num_key_value_heads,head_dim,attn_dtype,\
kv_cache_dtype,step,latency,device
TRTLLM,context_attention,2,1024,32,8,128,bfloat16,fp8,0,0.4,NVIDIA L40S
TRTLLM,generation_attention,2,1,32,0,128,bfloat16,bfloat16,1023,0.1,NVIDIA L40S
"""
NCCL = """framework,version,device,op_name,kernel_source,nccl_dtype,num_gpus,message_size,latency
TRTLLM,2.27,NVIDIA A100-SXM4-80GB,all_reduce,NCCL,half,8,1024,0.02
"""
OWN = "op,kind,dtype,library,device,m,n,k,latency_s\nx,{kind},fp32,torch,t4,{m},8,16,0.001\n"


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_neusight_upstream_csv_contracts_n(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "bmm.csv", UPSTREAM_BMM), "neusight")
    assert list(table.op) == ["bmm", "bmm"]
    assert list(table.device) == ["NVIDIA H100 80GB HBM3", "Tesla T4"]
    assert list(table.chips) == ["gh100", "tu104"]
    # (B, M, N) x (B, N, K): N is contracted
    assert (table.dims["m"][0], table.dims["n"][0], table.dims["k"][0]) == (128, 256, 64)
    assert table.latency_s == pytest.approx([5e-4, 7e-4])
    assert set(table.library) == {"torch-2.1-cuda"}


def test_neusight_elementwise_and_unknown_operator(tmp_path: Path) -> None:
    text = "OPName,Latency,Device,B,H\nVECadd,0.03,Tesla T4,4,8\nmystery,0.03,Tesla T4,4,8\n"
    table = read_operators(_write(tmp_path / "v.csv", text), "neusight")
    assert list(table.kind) == ["elementwise", "unknown"]
    assert list(table.op) == ["VECadd", "mystery"]
    assert table.dims["inputs"][0] == 2


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "bmm.csv.gz"
    path.write_bytes(gzip.compress(UPSTREAM_BMM.encode()))
    assert len(read_operators(path, "neusight")) == 2


def test_xz(tmp_path: Path) -> None:
    path = tmp_path / "bmm.csv.xz"
    packed = lzma.compress(UPSTREAM_BMM.encode())
    path.write_bytes(packed)
    assert len(read_operators(path, "neusight")) == 2
    path.write_bytes(packed[:-20])
    with pytest.raises(SpecError, match=r"bmm\.csv\.xz"):
        read_operators(path, "neusight")


def test_a_folder_instead_of_a_file_names_its_tables(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a table of operators is one file"):
        read_operators(tmp_path, "neusight")
    for name in ("b.csv", "a.csv.xz", "notes.txt"):
        (tmp_path / name).write_text("")
    with pytest.raises(SpecError, match=r"say .*/a\.csv\.xz, or another of its 2 tables"):
        read_operators(tmp_path, "neusight")


def test_aiconfigurator_gemm_names_ops_by_dtype(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "g.csv", GEMM), "aiconfigurator")
    assert list(table.op) == ["gemm/bfloat16", "gemm/nvfp4"]
    assert list(table.library) == ["trtllm", "vllm"]
    assert table.device_of("Made-up GPU") is None
    assert table.chip_of("Made-up GPU") == "Made-up GPU"


def test_aiconfigurator_attention(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "a.csv", ATTENTION), "aiconfigurator")
    assert list(table.kind) == ["context_attention", "generation_attention"]
    assert list(table.dtype) == ["bfloat16/fp8", "bfloat16/bfloat16"]
    assert list(table.dims["queries"]) == [1024, 1]
    assert list(table.dims["keys"]) == [1024, 1024]
    assert list(table.dims["kv_heads"]) == [8, 32]


def test_aiconfigurator_nccl(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "n.csv", NCCL), "aiconfigurator")
    assert list(table.kind) == ["collective"]
    assert table.dims["message_bytes"][0] == 2048


@pytest.mark.parametrize(
    "sizes",
    ["moe_dtype,num_tokens,hidden_size,topk", "mla_dtype,batch_size,isl,num_heads"],
)
def test_other_tables_of_aiconfigurator_are_kept_as_unknown(tmp_path: Path, sizes: str) -> None:
    text = f"framework,device,op_name,{sizes},latency\nSGLang,NVIDIA B200,moe,fp8,16,4096,8,0.25\n"
    table = read_operators(_write(tmp_path / "other.csv", text), "aiconfigurator")
    assert (list(table.op), list(table.kind), list(table.device)) == (
        ["moe"], ["unknown"], ["NVIDIA B200"],
    )  # fmt: skip
    assert table.latency_s == pytest.approx([0.25e-3])


def test_helix_upstream_csv_takes_names_from_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "llama1_30b" / "t4x2"
    folder.mkdir(parents=True)
    table = read_operators(_write(folder / "prompt_bs2time.csv", "0,0\n100,12.5\n"), "helix")
    assert (table.op[0], table.device[0], len(table)) == ("prompt", "t4x2", 1)
    assert table.dims["shards"][0] == 2
    assert table.chips[0] == "tu104"


@pytest.mark.parametrize(
    ("text", "format_name", "told"),
    [
        ("OPName,Latency,Device,B,M,N,K\nbmm,-1,Tesla T4,1,2,3,4\n", "neusight", "of 1e-07 to"),
        (
            "OPName,Latency,Device,B,M,N,K\nbmm,1e-297,Tesla T4,1,2,3,4\n",
            "neusight",
            r"line 2, column Latency: got 1e-297, expected a latency of 1e-07 to 1e\+09 ms",
        ),
        ("OPName,Latency,Device,B,M,N,K\nbmm,1,Tesla T4,1,2.5,3,4\n", "neusight", "whole number"),
        ("OPName,Latency,Device,B,M,N,K\nbmm,1,Tesla T4,1,x,3,4\n", "neusight", "numbers"),
        ("OPName,Latency,B,M,N,K\nbmm,1,1,2,3,4\n", "neusight", "a column device or gpu"),
        ("OPName,Latency,Device\n", "neusight", "at least one"),
        ("a,b\n1,2\n", "aiconfigurator", "gemm, attention or nccl"),
        ("a,b\n1,2\n", "nonsense", "one of foreplan, neusight"),
        ("\x00\x01", "neusight", "expected"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, text: str, format_name: str, told: str) -> None:
    with pytest.raises(SpecError, match=told) as caught:
        read_operators(_write(tmp_path / "bad.csv", text), format_name)
    assert "\n" not in str(caught.value)


HELIX = "model,device,phase,tokens,layer_ms\nllama1_30b,{device},{phase},2,0.9\n"


@pytest.mark.parametrize(
    ("text", "format_name"),
    [
        (HELIX.format(device="", phase="decode"), "helix"),
        (NCCL.replace("NVIDIA A100-SXM4-80GB", ""), "aiconfigurator"),
        (ATTENTION.replace("NVIDIA L40S", " "), "aiconfigurator"),
        (GEMM.replace("device", "system").replace("Made-up GPU", ""), "aiconfigurator"),
        (UPSTREAM_BMM.replace("Tesla T4", ""), "neusight"),
        (OWN.format(kind="linear", m=4).replace(",t4,", ",,"), "foreplan"),
    ],
)
def test_a_row_without_a_device_is_refused_where_none_is_given(
    tmp_path: Path, text: str, format_name: str
) -> None:
    path = _write(tmp_path / "bare.csv", text)
    told = r"line [23], column (?i:device|system): got nothing, expected the device .*--device"
    with pytest.raises(SpecError, match=told):
        read_operators(path, format_name)
    assert read_operators(path, format_name, device="l4").device[-1] == "l4"


@pytest.mark.parametrize(
    ("phase", "told"),
    [
        ("foo", "line 2, column phase: got 'foo', expected one of decode, prompt"),
        ("decod", "got 'decod', expected one of decode, prompt; did you mean decode?"),
        ("", "column phase: got nothing, expected one of"),
    ],
)
def test_another_phase_of_helix_is_refused(tmp_path: Path, phase: str, told: str) -> None:
    path = _write(tmp_path / "phase.csv", HELIX.format(device="a100", phase=phase))
    with pytest.raises(SpecError, match=told):
        read_operators(path, "helix")


def test_an_imported_table_knows_helix_devices(tmp_path: Path) -> None:
    text = HELIX.format(device="a100", phase="decode").rstrip()
    more = text.splitlines()[-1].replace("a100", "t4x2")
    raw = read_operators(_write(tmp_path / "raw.csv", f"{text}\n{more}\n"), "helix")
    write_operators(raw, tmp_path / "imported.parquet")
    imported = read_operators(tmp_path / "imported.parquet", "foreplan")
    assert list(imported.device) == list(raw.device) == ["a100", "t4x2"]
    assert imported.devices == raw.devices
    assert set(imported.devices) == {"a100", "t4x2"}
    # Another's a100 is none of Helix's.
    ours = read_operators(
        _write(tmp_path / "own.csv", OWN.format(kind="linear", m=4).replace(",t4,", ",a100,")),
        "foreplan",
    )
    assert ours.devices == {}


def test_broken_parquet_and_missing_file(tmp_path: Path) -> None:
    broken = tmp_path / "x.parquet"
    broken.write_bytes(b"PAR1 and no more")
    with pytest.raises(SpecError, match="Parquet"):
        read_operators(broken, "neusight")
    with pytest.raises(SpecError, match="readable"):
        read_operators(tmp_path / "none.csv", "neusight")


def test_round_trip(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "bmm.csv", UPSTREAM_BMM), "neusight")
    write_operators(table, tmp_path / "t.parquet")
    again = read_operators(tmp_path / "t.parquet", "foreplan")
    assert list(again.op) == list(table.op)
    assert again.latency_s == pytest.approx(table.latency_s)
    assert all(np.array_equal(again.dims[name], table.dims[name]) for name in table.dims)


def test_concat_and_take(tmp_path: Path) -> None:
    one = read_operators(_write(tmp_path / "bmm.csv", UPSTREAM_BMM), "neusight")
    two = read_operators(_write(tmp_path / "g.csv", GEMM), "aiconfigurator")
    both = OperatorTable.concat([one, two])
    assert len(both) == 4
    assert list(both.take(both.kind == "linear").device) == ["NVIDIA L40S", "Made-up GPU"]


@pytest.mark.parametrize(
    ("name", "format_name", "rows"),
    [
        ("neusight_ops_train", "neusight", 256_509),
        ("aiconfigurator_gemm", "aiconfigurator", 106_848),
        ("aiconfigurator_attention", "aiconfigurator", 135_753),
        ("aiconfigurator_nccl", "aiconfigurator", 1_512),
        ("helix_layer_times_llama1_30b", "helix", 599),
    ],
)
def test_shared_data(name: str, format_name: str, rows: int) -> None:
    folder = os.environ.get("FOREPLAN_DATA")
    if not folder:
        pytest.skip("FOREPLAN_DATA names no folder of public latency data")
    table = read_operators(Path(folder, f"{name}.parquet"), format_name)
    assert len(table) == rows
    assert "unknown" not in set(table.kind)
    assert all(table.device_of(device) is not None for device in set(table.device))


def test_a_linear_needs_no_batch(tmp_path: Path) -> None:
    table = read_operators(_write(tmp_path / "own.csv", OWN.format(kind="linear", m=4)), "foreplan")
    assert {name: table.dims[name][0] for name in "bmnk"} == {"b": 1, "m": 4, "n": 8, "k": 16}
    head, row = OWN.format(kind="linear", m=4).splitlines()
    text = f"{head},b\n{row},\n{row.replace('linear', 'bmm')},3\n"
    mixed = read_operators(_write(tmp_path / "mixed.csv", text), "foreplan")
    assert mixed.dims["b"].tolist() == [1, 3]


@pytest.mark.parametrize("column", [True, False])
def test_own_rows_without_a_device_ran_on_the_given_one(tmp_path: Path, column: bool) -> None:
    text = OWN.format(kind="linear", m=4)
    text = text.replace(",t4,", ",,") if column else text.replace(",device", "").replace(",t4", "")
    path = _write(tmp_path / "own.csv", text)
    assert read_operators(path, "foreplan", device="l4").device[0] == "l4"
    named = _write(tmp_path / "named.csv", OWN.format(kind="linear", m=4))
    assert read_operators(named, "foreplan", device="l4").device[0] == "t4"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OWN.format(kind="bmm", m=4), "line 2, column b: got nothing.*a bmm has b, m, n, k"),
        (OWN.format(kind="linear", m=0), "line 2, column m: got 0.0"),
        (OWN.format(kind="linear", m=""), "line 2, column m: got nothing, expected a whole"),
        (OWN.format(kind="linear", m=-4), "line 2, column m: got -4.0"),
        (OWN.format(kind="linear", m=4.5), "line 2, column m: got 4.5, expected a whole number"),
        (
            OWN.format(kind="linear", m=4).replace("0.001", "-0.001"),
            r"line 2, column latency_s: got -0.001, expected a latency of 1e-10 to 1e\+06 s",
        ),
        (
            "op,kind,dtype,library,device,rows,cols,inputs,function,latency_s\n"
            "x,elementwise,fp32,torch,h200,4,4,1,99,0.001\n",
            "line 2, column function: got 99.0, expected at most .* later version",
        ),
        ("op,m,latency_ms\nx,1,1\n", "no column kind, dtype, library, device, latency_s"),
        (OWN.format(kind="linear", m=4).replace(",", ";"), "apart by semicolons.*by commas"),
        (OWN.format(kind="linear", m=4).replace(",", "\t"), "apart by tabs.*by commas"),
        ('[{"op": "linear", "m": 4}]', "got 'JSON', expected a CSV or Parquet file"),
    ],
)
def test_own_rows_with_wrong_figures_are_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        read_operators(_write(tmp_path / "own.csv", text), "foreplan")


def test_a_cell_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    text = "OPName,Latency,Device,B,M,N,K\nBMM,0.1,T4,4,8,8,8\nBMM,,T4,4,8,8,8\n"
    with pytest.raises(SpecError, match="line 3, column Latency: got nothing, expected a latency"):
        read_operators(_write(tmp_path / "neusight.csv", text), "neusight")


def test_a_cell_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    text = UPSTREAM_BMM.replace("Tesla T4", "Tesla T4 \xe9")
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecError, match=r"column device: .*0xe9.*texts in UTF-8"):
        read_operators(path, "neusight")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_table_in_utf_16_says_so(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "wide.csv"
    text = UPSTREAM_BMM if encoding == "utf-16" else f"\ufeff{UPSTREAM_BMM}"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(SpecError, match=r"got 'text in UTF-16', .*save it again as CSV in UTF-8"):
        read_operators(path, "neusight")


@pytest.mark.parametrize("twice", ["Latency", "latency"])
def test_two_columns_of_one_name_are_refused_where_they_are_read(
    tmp_path: Path, twice: str
) -> None:
    lines = UPSTREAM_BMM.splitlines()
    text = "\n".join([f"{lines[0]},{twice}", *(f"{line},9" for line in lines[1:])])
    with pytest.raises(SpecError, match=r"got 'Latency, .*expected one column of that name"):
        read_operators(_write(tmp_path / "twice.csv", text), "neusight")
    unread = text.replace(f",{twice}\n", ",Note\n").replace("Kernel Name", "Note")
    assert len(read_operators(_write(tmp_path / "unread.csv", unread), "neusight")) == 2
