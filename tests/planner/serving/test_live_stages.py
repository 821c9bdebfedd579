"""Stages of a replica under traffic, in threads of this process: any number of them."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections import defaultdict
from typing import Any

import pytest

from foreplan.datasets.models.load_model import load_model
from foreplan.datasets.specs import validate
from foreplan.planner.api import load_cluster
from foreplan.planner.base import Problem
from foreplan.planner.serving.live_stage import LiveStage, tokens_alone
from foreplan.planner.serving.live_traffic import LiveRecord
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload
from foreplan.planner.verify.connections import ConnectionLost

KERNELS = {
    "decode/attention": "bf16/bf16/torch.sdpa", "prefill/attention": "bf16/bf16/torch.sdpa",
    "decode/head": "bf16/bf16/torch.linear", "prefill/head": "bf16/bf16/torch.linear",
    "decode/linear/16": "bf16/bf16/torch.linear", "prefill/linear/16": "bf16/bf16/torch.linear",
}  # fmt: skip
BATCH = 6
#: Arrival, prompt, new tokens; more than are held at once.
REQUESTS = [
    [0.0, 5, 4], [0.0, 9, 2], [0.0, 12, 6], [0.0, 3, 1], [0.01, 40, 5], [0.01, 7, 3],
    [0.02, 33, 6], [0.02, 1, 2], [0.3, 8, 4],
]  # fmt: skip


class Wires:
    """Stands in for gloo: a queue for each message."""

    def __init__(self) -> None:
        self.sent: dict[Any, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self.lost = threading.Event()

    def channels(self, clock: Any) -> Any:
        wires, waits = self, {}

        class Channels:
            def post(self, place, step, tensor):
                clock.start(place)
                where = (step.group, step.tag)
                if step.kind == "send":
                    wires.sent[where].put(tensor.clone())
                waits[place] = step.kind, where, tensor

            def wait(self, place):
                kind, where, tensor = waits.pop(place)
                while kind == "recv":
                    try:
                        tensor.copy_(wires.sent[where].get(timeout=0.05))
                        break
                    except queue.Empty:
                        if wires.lost.is_set():
                            raise ConnectionLost("the peer has gone") from None
                clock.end(place)

        return Channels()


def problem_of(
    stages: int, model: str = "tiny-llama-random"
) -> tuple[Problem[Any], ServingDecision]:
    known = load_model(model)
    cuts = [known.layers * k // stages for k in range(stages + 1)]
    decided = {
        "stages": [
            {"rank": k, "device": "localhost/cpu:threads=1", "start": cuts[k], "end": cuts[k + 1],
             "bits": [16] * (cuts[k + 1] - cuts[k]), "kernels": KERNELS}
            for k in range(stages)
        ],
        "prefill_microbatch": 2, "decode_microbatch": 2, "average_bits": 16, "omega": 0,
    }  # fmt: skip
    decision = ServingDecision.model_validate_json(json.dumps(decided))
    fields = {"batch": BATCH, "prompt_tokens": 40, "new_tokens": 6}
    workload = validate(ServingWorkload, fields, "workload")
    cluster, _ = load_cluster("2xcpu:threads=1")
    costs: Any = None
    return Problem(known, cluster, workload, costs), decision


@pytest.mark.parametrize(
    ("stages", "model"),
    [(1, "tiny-llama-random"), (2, "tiny-moe-random"), (3, "tiny-llama-random")],
)
def test_tokens_go_round_any_number_of_stages(one_thread, stages, model):
    problem, decision = problem_of(stages, model)
    replicas = [(decision, BATCH)]
    given = {"requests": REQUESTS, "queues": [list(range(len(REQUESTS)))], "batches": [BATCH],
             "cache_tokens": [150]}  # fmt: skip
    ranks = [LiveStage.of(problem, replicas, k, "reference") for k in range(stages)]
    meeting = threading.Barrier(stages)
    expected = tokens_alone(problem, replicas, given)
    for _ in range(2):  # nothing is left of the first run
        wires, found = Wires(), {}

        def serve(k, wires=wires, found=found):
            found[k] = ranks[k].serve(given, wires.channels, meeting.wait)

        threads = [threading.Thread(target=serve, args=(k,)) for k in range(stages)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        records = [validate(LiveRecord, found[k], "record") for k in range(stages)]
        assert {str(i): list(made) for i, made in records[0].tokens.items()} == expected
        assert {one.slot for one in records[0].passes} == set(range(stages))
        assert len({len(record.compute_ns) for record in records}) == 1
        assert 1 <= records[0].most_held <= BATCH
        assert records[0].most_cached <= 1
        for before, behind in itertools.pairwise(records):
            for (_, made), (start, _) in zip(before.compute_ns, behind.compute_ns, strict=True):
                assert made <= start  # no stage begins what the one before it has not made
        assert all(messages.empty() for messages in wires.sent.values())


@pytest.mark.parametrize("gone", [0, 1])
def test_a_stage_whose_peer_has_gone_says_so(one_thread, gone):
    problem, decision = problem_of(2)
    given = {"requests": REQUESTS, "queues": [list(range(len(REQUESTS)))], "batches": [BATCH],
             "cache_tokens": [150]}  # fmt: skip
    rank = LiveStage.of(problem, [(decision, BATCH)], 1 - gone, "reference")
    wires = Wires()
    wires.lost.set()
    with pytest.raises(ConnectionLost, match="the peer has gone"):
        rank.serve(given, wires.channels, lambda: None)
