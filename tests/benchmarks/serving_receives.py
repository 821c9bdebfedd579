"""What a receive that waits takes from the passes beside it, and how long a message takes.

``python tests/benchmarks/serving_receives.py DEVICE DEVICE`` (``cuda:0/sms=66 cuda:1/sms=32``)
starts a process for each, which times prefill and decode passes of four layers of llama-3.1-8b, as
a serving plan records them: alone, while a receive of NCCL's waits for the other process, and while
a message of the copy engines does. Both measure at the same time, so that the conditions are the
same for both. Then messages of a decode and of a prefill pass go to and fro. Prints a JSON line a
process. On two processors (``cpu:threads=1 cpu:threads=1``) gloo stands for NCCL: a rehearsal.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import ForeplanError

BITS = (16, 4)
LINEAR = {
    "cuda": {16: "bf16/bf16/torch.linear", 4: "int4/bf16/foreplan.fragment_linear"},
    "cpu": {16: "bf16/bf16/torch.linear", 4: "int4/bf16/torch.int4pack_mm"},
}
#: As in the cases of `serving_gpus.py`: rows of a prefill and of a decode pass.
PROMPT, PREFILLS, DECODES = 512, 2, 8
LAYERS = 4
#: Thread blocks of NCCL's pair connections; 2 is what the runtime asks for.
BLOCKS = (2, 1)
TRIPS = 40
LIMIT_S = 60.0

Pass = Callable[[], object]


class Rank:
    """One process.

    Args:
        device: what it becomes.
        rank: 0 or 1.
        store: file that both know.
    """

    def __init__(self, device: str, rank: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.placement import take_seat

        self.name, self.rank = DeviceName.parse(device), rank
        self.seat = take_seat(self.name, ())
        self.device, self.gpu = self.seat.device, self.name.kind == "cuda"
        self._cuda: Any = torch.cuda
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit
        )

    def measure(self) -> dict[str, Any]:
        """Everything, in one document."""
        import torch

        with self.seat.computing(), torch.inference_mode():
            rows = {"prefill": PREFILLS * PROMPT, "decode": DECODES}
            sizes = {phase: n * self._model().hidden for phase, n in rows.items()}
            self._buffers = {
                phase: torch.zeros(size, dtype=torch.bfloat16, device=self.device)
                for phase, size in sizes.items()
            }
            ways = self._ways()
            passes = self._passes()
            found: dict[str, Any] = {"device": str(self.name), "passes": {}, "messages": {}}
            found["passes"]["alone"] = self._timed(passes)
            for name, (send, receive) in ways.items():
                receive("prefill")
                time.sleep(0.05)  # it has come to its wait
                found["passes"][f"{name} waits"] = self._timed(passes)
                self._meet()
                send("prefill")
                self._meet()
            found["passes"]["alone again"] = self._timed(passes)
            for name, (send, receive) in ways.items():
                found["messages"][name] = {
                    phase: self._to_and_fro(partial(send, phase), partial(receive, phase))
                    for phase in rows
                }
            return found

    def _model(self) -> Any:
        from foreplan.datasets.models.load_model import load_model

        sizes = {"hidden": 256, "ffn": 512, "vocab": 512, "heads": 2, "kv_heads": 2}
        small = {} if self.gpu else sizes
        return load_model("llama-3.1-8b").model_copy(update={"layers": LAYERS + 2, **small})

    def _passes(self) -> dict[str, Pass]:
        """Passes of layers that neither embed nor choose, by phase and bits."""
        import torch

        from foreplan.datasets.models.weights import open_weights
        from foreplan.datasets.program import Variant
        from foreplan.planner.verify.decoder import DecoderStage
        from foreplan.planner.verify.pass_graphs import PassGraphs
        from foreplan.planner.verify.stage_kernels import PhaseKernels, StageKernels

        def alike(text: str) -> PhaseKernels:
            return PhaseKernels(Variant.parse(text), Variant.parse(text))

        model, found = self._model(), {}
        self._kept: list[Any] = []  # graphs keep addresses, not tensors
        graphs = PassGraphs(self.device) if self.gpu else None
        for bits in BITS:
            stage = DecoderStage(
                model, 1, LAYERS + 1, prefill_batches=(PREFILLS,) * (DECODES // PREFILLS),
                decode_batches=(DECODES,), prompt=PROMPT, positions=PROMPT + 2,
                device=str(self.device),
            )  # fmt: skip
            linear = alike(LINEAR[self.name.kind][bits])
            stage.load(
                open_weights(model, seed=0, device=self.device),
                StageKernels((linear,) * LAYERS, alike("bf16/bf16/torch.sdpa")),
            )
            for phase, rows in (("prefill", PREFILLS * PROMPT), ("decode", DECODES)):
                x = torch.randn(rows, model.hidden, device=self.device).bfloat16()
                body: Pass = (
                    partial(stage.prefill, 0, x) if phase == "prefill"
                    else partial(stage.decode, 0, 1, x)
                )  # fmt: skip
                self._kept += [stage, x]
                if graphs is not None:
                    graphs.warm_up(body)  # type: ignore[arg-type]
                    body = graphs.record(body)  # type: ignore[arg-type]
                found[f"{phase} {bits} bits"] = body
        return found

    def _timed(self, passes: dict[str, Pass]) -> dict[str, float]:
        """Median milliseconds of each pass, all of them in turns."""
        times: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(12 if self.gpu else 2):
            for name, body in passes.items():
                times[name] += [self._one(body) for _ in range(2)][1:]
        return {name: round(statistics.median(each), 4) for name, each in times.items()}

    def _one(self, body: Pass) -> float:
        if not self.gpu:
            started = time.perf_counter()
            body()
            return 1e3 * (time.perf_counter() - started)
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        end.synchronize()  # not the device: a receive waits on it
        return float(start.elapsed_time(end))

    def _ways(self) -> dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]]:
        """By name a send to the other process and a receive from it, queued on a stream."""
        found: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {}
        if not self.gpu:
            found["gloo"] = self._library(None)
            return found
        for blocks in BLOCKS:
            found[f"nccl, {blocks} blocks"] = self._library(blocks)
        found["copies"] = self._copies()
        return found

    def _library(self, blocks: int | None) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
        import torch
        import torch.distributed as dist

        from foreplan.planner.verify.connections import pair_options

        ways: list[Any] = []
        for source in range(2):  # a communicator for each direction, as a run has them
            if blocks is None:
                ways.append(dist.new_group([0, 1], backend="gloo"))
                continue
            options = pair_options(timedelta(seconds=LIMIT_S))
            options.config.max_ctas = blocks
            ways.append(dist.new_group([0, 1], backend="nccl", pg_options=options))
            # NCCL connects at the first message, which both ends have to call.
            first = [torch.zeros(1, device=self.device)]
            call = ways[-1].send if self.rank == source else ways[-1].recv
            call(first, 1 - self.rank, 0).wait()
        if self.gpu:
            self._cuda.synchronize()
        there, here = (ways[0], ways[1]) if self.rank == 0 else (ways[1], ways[0])
        sending = self._cuda.Stream(self.device) if self.gpu else None
        receiving = self._cuda.Stream(self.device) if self.gpu else None
        waiting: list[Any] = []

        def send(phase: str, stream: Any = sending) -> None:
            made = self._buffers[phase]
            with self._cuda.stream(stream):
                work = there.send([made], 1 - self.rank, 0)
                if self.gpu:
                    work.wait()
                else:
                    waiting.append(work)

        def receive(phase: str, stream: Any = receiving) -> None:
            with self._cuda.stream(stream):
                work = here.recv([self._landing(phase)], 1 - self.rank, 0)
                if self.gpu:
                    work.wait()
                else:
                    waiting.append(work)

        return send, receive

    def _landing(self, phase: str) -> Any:
        import torch

        landings = self.__dict__.setdefault("_landings", {})
        if phase not in landings:
            landings[phase] = torch.zeros_like(self._buffers[phase])
        return landings[phase]

    def _copies(self) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
        from foreplan.planner.verify.exchange import exchange
        from foreplan.planner.verify.peer_memory import Offer, PeerMemory

        tags = {phase: k for k, phase in enumerate(self._buffers)}
        peers = PeerMemory(
            {2 * k + self.rank: self._landing(phase) for phase, k in tags.items()}, self.device
        )
        told = exchange(peers.offers())
        offers = {int(tag): Offer(*o) for part in told for tag, o in part.items()}
        peers.open([2 * k + 1 - self.rank for k in tags.values()], offers)
        sending, receiving = (self._cuda.Stream(self.device) for _ in range(2))
        self._meet()

        def send(phase: str, stream: Any = sending) -> None:
            peers.send(2 * tags[phase] + 1 - self.rank, self._buffers[phase], stream)

        def receive(phase: str, stream: Any = receiving) -> None:
            peers.receive(2 * tags[phase] + self.rank, stream)

        return send, receive

    def _to_and_fro(self, send: Callable[..., Any], receive: Callable[..., Any]) -> float:
        """Microseconds of a message, half of a round trip."""
        self._meet()
        if not self.gpu:
            return 0.0
        stream = self._cuda.Stream(self.device)
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        for trip in range(TRIPS + 4):
            if trip == 4:
                start.record(stream)
            for step in (send, receive) if self.rank == 0 else (receive, send):
                step(stream=stream)
        end.record(stream)
        end.synchronize()
        return round(1e3 * start.elapsed_time(end) / (2 * TRIPS), 2)

    def _meet(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def main(devices: list[str]) -> int:
    """Start both processes and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        running = []
        for rank, device in enumerate(devices):
            environment = worker_environment(DeviceName.parse(device)) | {"NCCL_NVLS_ENABLE": "0"}
            command = [sys.executable, __file__, "rank", str(rank), store, device]
            running.append(subprocess.Popen(command, env=environment))
        try:
            ended = time.monotonic() + LIMIT_S
            codes: list[int | None] = [None, None]
            # Where one has failed the other would wait for it until its own limit.
            while None in codes and not any(codes):
                codes = [process.poll() for process in running]
                if time.monotonic() > ended:
                    print(f"not done within {LIMIT_S:g} s", file=sys.stderr)
                    return 1
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
    return max(abs(code or 0) for code in codes)


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        where, store, device = int(sys.argv[2]), sys.argv[3], sys.argv[4]
        code = 0
        try:
            print(json.dumps(Rank(device, where, store).measure()), flush=True)
        except ForeplanError as error:
            print(error, file=sys.stderr, flush=True)
            code = error.exit_code
        os._exit(code)  # threads of gloo may abort an interpreter that ends
    sys.exit(main(sys.argv[1:3]))
