"""Readers of what is no file of its own: words of a command line, exports read back, messages."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import foreplan
from foreplan.errors import ForeplanError, MissingDataError, SpecError
from foreplan.planner.plan import Plan

Read = Callable[[Path], Any]
TOKEN = "the plan's word"


# ------------------------------------------------------------------------------- command line


def _word(read: Callable[[str], Any]) -> Read:
    """Reads a file as the word that a shell would hand over."""
    return lambda path: read(os.fsdecode(path.read_bytes()))


def _devices(text: str) -> None:
    from foreplan.datasets.inline_cluster import parse_devices
    from foreplan.planner.api import load_cluster

    parse_devices(text).to_yaml()
    load_cluster(text, where="--devices")


def _device_name(text: str) -> None:
    from foreplan.datasets.device_name import DeviceName

    assert DeviceName.parse(str(DeviceName.parse(text))) == DeviceName.parse(text)


def _quantity(text: str) -> None:
    from foreplan.datasets.quantity import Dimension, parse_quantity

    for dimension in Dimension:
        with contextlib.suppress(SpecError):
            assert parse_quantity(text, dimension) >= 0
    parse_quantity(text, Dimension.BYTES)


def _endpoint(text: str) -> None:
    from foreplan.datasets.ranks import links
    from foreplan.planner.verify import wire

    with contextlib.suppress(SpecError):
        links.parse_endpoint(text)
    wire.parse_endpoint(text)


def _workload(text: str) -> None:
    from foreplan.planner.load_workload import load_workload

    load_workload("serving", text)


_WORDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "devices-inline": (_devices, "2xa100-80g@big, 4xt4@small,cpu:threads=2,isa=avx2@small"),
    "device-name": (_device_name, "cpu:threads=2,isa=avx2"),
    "device-slice": (_device_name, "cuda:1/sms=32"),
    "quantity": (_quantity, "3.35e3 GiB"),
    "endpoint": (_endpoint, "[fe80::1]:29500"),
    "workload-inline": (_workload, "batch=2,prompt_tokens=8,new_tokens=3,bits=16+8"),
}


# ------------------------------------------------------------------------------------- exports


@functools.cache
def _plan(kind: str) -> Plan:
    model, workload = None, {}
    if kind == "serving":
        model, workload = "tiny-llama-random", {
            "batch": 2, "prompt_tokens": 8, "new_tokens": 3, "bits": [8],
        }  # fmt: skip
    elif kind == "precision":
        workload = {"batch": 8, "network": "digits_mlp", "indicator": "uniform",
                    "precisions": ["fp32", "bf16"]}  # fmt: skip
    else:
        workload = {
            "encoders": [
                {"name": "v", "dims": {"layers": 2, "hidden": 64, "heads": 4}, "tokens": 16}
            ],
            "backbone": {"layers": 4, "hidden": 128, "heads": 8, "vocab": 256},
            "sequence_length": 64, "microbatches": 2, "plan": {"pp": 2},
        }  # fmt: skip
    return foreplan.plan(kind, model, "2xl4", workload, costs="roofline")


#: Kind of plan and files of each target; `test_readers` sees to it that they are there.
_TARGETS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vllm": ("serving", ("launch.sh", "quantization_config.json")),
    "sglang": ("serving", ("launch.sh",)),
    "tensorrt-llm": ("serving", ("launch.sh", "llm_args.yaml", "hf_quant_config.json")),
    "llama.cpp": ("serving", ("launch.sh", "tensor_types.txt")),
    "torchrun": ("serving", ("launch.sh", "plan.json")),
    "autocast": ("precision", ("rank0.json",)),
    "torchao": ("precision", ("rank0.json",)),
    "torchtitan": ("bubbles", ("launch.sh", "order.csv", "encoder_units.csv")),
    "megatron": ("bubbles", ("launch.sh", "order.csv", "encoder_units.csv")),
}


@functools.cache
def _files(target: str) -> Mapping[str, str]:
    from foreplan.planner.export.exporter import exporter

    return exporter(target).write(_plan(_TARGETS[target][0])).files


def _read_back(target: str) -> Read:
    def read(path: Path) -> None:
        from foreplan.planner.export.exporter import read_back

        text = path.read_bytes().decode(errors="replace")
        read_back(target, {**_files(target), path.name: text})

    return read


def _tables() -> Mapping[str, bytes]:
    return {name: text.encode() for name, text in _files("torchtitan").items()}


def _orders(path: Path) -> None:
    from foreplan.planner.bubbles.execution.order_csv import read_orders

    texts = {
        name: (path.parent / name).read_bytes().decode(errors="replace")
        for name in ("order.csv", "encoder_units.csv")
    }
    read_orders(texts["order.csv"], texts["encoder_units.csv"])


# ------------------------------------------------------------------------------------ messages


@contextlib.contextmanager
def _connected(data: bytes) -> Iterator[socket.socket]:
    """A connection on which somebody says ``data`` and hangs up."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        speaker = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted = stack.enter_context(server.accept()[0])
        speaker.setblocking(False)
        yield _Said(accepted, speaker, data)  # type: ignore[misc]


class _Said:
    """The hearing end; the other end says more whenever there is room."""

    def __init__(self, hearer: socket.socket, speaker: socket.socket, data: bytes) -> None:
        self._hearer, self._speaker, self._left = hearer, speaker, memoryview(data)

    def recv(self, size: int) -> bytes:
        while self._left:
            try:
                self._left = self._left[self._speaker.send(self._left) :]
            except BlockingIOError:
                break
            except OSError:
                self._left = memoryview(b"")
        if not self._left:
            with contextlib.suppress(OSError):
                self._speaker.shutdown(socket.SHUT_WR)
        return self._hearer.recv(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hearer, name)


_MESSAGES = [
    {"hello": "member", "member": 0, "token": TOKEN},
    {"loaded": 5, "free_bytes": 1 << 30, "gpu_free_bytes": None},
    {"ran": 1, "start_ns": [1, 2], "end_ns": [3, 4], "memory_bytes": {"weights": 5}},
]


def _lines(messages: Any) -> bytes:
    listed = messages if isinstance(messages, list) else [messages]
    return b"".join(json.dumps(message).encode() + b"\n" for message in listed)


def _hear(path: Path) -> None:
    from foreplan.planner.verify.wire import Wire, WireClosed, WireGarbled

    with _connected(path.read_bytes()) as said:
        wire = Wire(said)
        try:
            while True:
                wire.receive(10.0)
        except WireGarbled:
            raise
        except WireClosed:
            pass


def _lead(path: Path) -> None:
    """A stranger, or a worker of another version, speaks to a leader: it goes on."""
    from foreplan.planner.verify.launch import Fleet

    plan = _plan("serving")
    fleet = Fleet(plan, plan.cluster.ranks(), (), TOKEN)
    try:
        data = memoryview(path.read_bytes())
        with socket.create_connection(fleet.endpoint) as speaker:
            speaker.setblocking(False)
            while data:
                try:
                    data = data[speaker.send(data[: 1 << 18]) :]
                except BlockingIOError:
                    pass
                except OSError:
                    break  # the leader has hung up
                fleet.pump(0.0)
        for _ in range(4):
            fleet.pump(0.002)
    finally:
        fleet.close()


def _answer() -> Any:
    return {
        "ran": 0, "start_ns": [5, 6, 7], "end_ns": [8, 9, 10], "result": {"tokens": [[1]]},
        "memory_bytes": {"weights": 10, "kv_cache": 20}, "held_bytes": 100, "clock": 123,
        "ready": {"torch": "2.13", "threads": 1, "cores": [0], "cpu_capability": "AVX2",
                  "gpu": None, "messages": "gloo"},
    }  # fmt: skip


def _use_answer(path: Path) -> None:
    from foreplan.planner.verify.answers import device_of, memory_of, record_of, result_of, whole
    from foreplan.planner.verify.wire import WireGarbled

    try:
        answer = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WireGarbled("no message") from error
    if not isinstance(answer, dict):
        raise WireGarbled("no message")
    for read in (
        lambda: record_of(answer, 3), lambda: memory_of(answer), lambda: result_of(answer),
        lambda: device_of(answer, "x/cpu").model_dump_json(), lambda: whole(answer, "clock"),
    ):  # fmt: skip
        with contextlib.suppress(ForeplanError):
            read()


# --------------------------------------------------------------------------------- links.json


_KEY = {"devices": ["cpu:threads=1,isa=avx2", "cpu:threads=1"], "host": "me", "software": {},
        "links": "measured between computations and through shared memory, with waits"}  # fmt: skip


def _links() -> Any:
    tier = {"group": ["me"], "scope": "host", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9,
            "source": "measured"}  # fmt: skip
    return {"of": _KEY, "tiers": [tier], "contention": [
        {"kind": "memory", "host": "me", "factors": {"2": 1.2}, "source": "measured"}],
        "passes": {
            "programs": [{"op": "add", "dims": {"rows": 2, "cols": 8},
                          "variant": "fp32/fp32/torch.add", "calls": 2}],
            "price_s": {"cpu:threads=1": 1e-5},
            "contention": {"kind": "training", "factors": {"1": 0.9, "2": 1.1}}}}  # fmt: skip


def _use_links(path: Path) -> None:
    from types import SimpleNamespace

    from rich.console import Console

    from foreplan.datasets.device_name import DeviceName
    from foreplan.planner import host_together

    devices = [DeviceName.parse(name) for name in _KEY["devices"]]
    profile = SimpleNamespace(software={}, device=SimpleNamespace(chip="c"))
    profiles: Any = dict.fromkeys(devices, profile)

    def again(*_: Any, **__: Any) -> Any:
        raise MissingDataError("measured again")

    with (
        patch.object(host_together, "measure_links", again),
        patch.object(host_together, "measure_contention", again),
        open(os.devnull, "w") as nothing,
    ):
        host_together.together(devices, profiles, {}, path.parent, "me", Console(file=nothing))


# ---------------------------------------------------------------------------------------- list


def spoken() -> list[dict[str, Any]]:
    """Arguments of a `Reader` each."""
    made: list[dict[str, Any]] = [
        {"name": name, "read": _word(read), "data": text.encode, "file": "word"}
        for name, (read, text) in _WORDS.items()
    ]
    for target, (_, files) in _TARGETS.items():
        for file in files:
            made.append(
                {"name": f"export-{target}-{file}", "read": _read_back(target), "file": file,
                 "data": lambda target=target, file=file: _files(target)[file].encode()}
            )  # fmt: skip
            if file.endswith(".json"):
                made[-1]["document"] = lambda target=target, file=file: json.loads(
                    _files(target)[file]
                )
    for file in ("order.csv", "encoder_units.csv"):
        made.append(
            {"name": file, "read": _orders, "file": file, "beside": _tables,
             "data": lambda file=file: _tables()[file]}
        )  # fmt: skip
    made += [
        {"name": "wire", "read": _hear, "document": lambda: _MESSAGES, "dump": _lines,
         "data": lambda: _lines(_MESSAGES), "file": "said"},
        {"name": "wire-leader", "read": _lead, "document": lambda: _MESSAGES[:2], "dump": _lines,
         "data": lambda: _lines(_MESSAGES[:2]), "file": "said"},
        {"name": "wire-answer", "read": _use_answer, "document": _answer},
        {"name": "links-json", "read": _use_links, "document": _links, "file": "links.json"},
    ]  # fmt: skip
    return made
