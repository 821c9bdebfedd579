"""`measure_host`: prices of a GPU's host for its profile, measured in a process of its own.

``python -m foreplan.cost_models.passes.host_measuring cuda:0`` writes them as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.profile import HostTimes
from foreplan.datasets.specs import validate
from foreplan.datasets.timing.child_process import ChildEnded, ChildProcess
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import MissingDataError

#: Of a process that loads torch and transformers, times fifty kinds of calls and seven networks:
#: half a minute on an idle host.
_TIMEOUT_S = 300.0


def measure_host(device: DeviceName, *, timeout_s: float = _TIMEOUT_S) -> HostTimes:
    """What calls take the host of a device of this machine.

    Args:
        device: ``cuda:N``; a slice has the host of its GPU. A CPU is its own host: operators cost
            nothing there, views and Python do.
        timeout_s: the process is ended then.

    Raises:
        MissingDataError: it could not be measured here.
    """
    word = "cpu" if device.kind == "cpu" else f"cuda:{device.index or 0}"
    child = ChildProcess(
        "foreplan.cost_models.passes.host_measuring", [word], environment=worker_environment(device)
    )
    try:
        found = child.receive(timeout_s)
    except ChildEnded as ended:
        raise MissingDataError(f"{device}: no prices of its host: {ended}") from ended
    finally:
        child.end()
    return validate(HostTimes, found, f"host of {device}")


def main() -> None:
    """Measure and answer; see the module."""
    # Answers have a descriptor of their own; what libraries print goes to the log.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch

    from foreplan.cost_models.passes.end_to_end_networks import CALIBRATION
    from foreplan.cost_models.passes.end_to_end_passes import measured_host

    cpu = sys.argv[1] == "cpu"
    dtype: Any = torch.float32 if cpu else torch.bfloat16
    prices = measured_host(sys.argv[1], dtype, sys.argv[2:] or CALIBRATION, lines=False)
    print(json.dumps(prices.document()), file=channel, flush=True)


if __name__ == "__main__":
    main()
