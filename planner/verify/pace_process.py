"""`keep_pace`: the process that times programs on one rank while a plan is verified.

It has the rank's cores and times by the very process that profiles are measured by, and as it did:
where a profile knows what a pass takes of a processor, programs run one behind the other, as in a
step, which finds some of its operands in its caches; else each by itself. In a pass that no profile
knows, small programs took up to four times as long as in the profile, and a machine that had not
changed came out twice as slow. The mean counts and not the median, with what other processes took
of the core: that is what a step meets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foreplan.datasets.timing.host_memory import free_bytes
from foreplan.datasets.timing.measuring import Effort, Worker
from foreplan.errors import MissingDataError
from foreplan.planner.verify.placement import assign_cores, gpu_free_bytes
from foreplan.planner.verify.wire import Wire

if TYPE_CHECKING:
    from foreplan.planner.verify.session import Job

#: A turn of a processor, all its programs; on a GPU, of each of them (chosen; cores of a shared
#: host change their speed by a third within a second or so, and a turn should see both).
_EFFORT = {
    "cpu": Effort(min_s=0.8, min_samples=3, max_s=1.6, timeout_s=60.0, max_samples=1 << 30),
    "cuda": Effort(min_s=0.06, min_samples=3, max_s=0.1, timeout_s=60.0),
}
#: Memory that a CPU's process may take: a plan may state programs of any size. Those of decoders
#: come with weights that no cache holds together, some 0.3 GB each.
_MEMORY_BYTES = 4 << 30


def keep_pace(wire: Wire, job: Job) -> None:
    """Time the programs of a job each time the leader says so.

    Raises:
        SpecError: there is no such program.
        MissingDataError: the device cannot be measured here, or none of the programs.
        WireClosed: the leader has hung up.
    """
    device, cores = job.devices[job.place], assign_cores(job.devices)[job.place]
    calls = [(one.program, one.calls) for one in job.programs]
    effort = _EFFORT[device.kind]
    cap = _MEMORY_BYTES if device.kind == "cpu" else None
    with Worker(device, cores=cores, memory_bytes=cap) as worker:

        def seconds() -> list[float | None]:
            if device.kind == "cpu" and not job.in_pass:
                one = replace(
                    effort, min_s=effort.min_s / len(calls), max_s=effort.max_s / len(calls)
                )
                return [worker.measure(item, one, keep=True).mean_s for item, _ in calls]
            found = worker.measure_pass(calls, effort, keep=True)
            if job.issued:
                return [m.mean_s and max(m.mean_s, m.issue_s or 0.0) for m in found]
            return [m.mean_s for m in found]

        if all(found is None for found in seconds()):
            raise MissingDataError("none of the programs of the profile ran")
        free = free_bytes()
        wire.send({"ready": 1, "free_bytes": free, "gpu_free_bytes": gpu_free_bytes()})
        while "time" in wire.receive():
            wire.send({"timed": seconds()})
