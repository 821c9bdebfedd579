"""Measure the links among ranks: messages and collectives, on one host or between two.

The ranks are real processes on gloo (CPUs) or NCCL (GPUs). Sums, gathers and scatters are timed
among all of them, and in groups of 2, 4, ... neighbours at the same time, as lanes make them. Every
kind of collective is timed for sizes from 1 KiB to 64 MiB and fitted by ``seconds = alpha + beta *
payload`` with ``alpha, beta > 0`` and the sum of ``|log(fit / measured)|`` least: small messages
count as much as large ones, and the few sizes that a machine happens to serve in no time do not
decide. Over gloo, collectives are timed between computations and by the mean, as runs meet them.
Payloads are as in `foreplan.datasets.tier`.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize  # type: ignore[import-untyped]

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.ranks._link_run import run_ranks, what_to_do
from foreplan.datasets.tier import Backend, CollectiveFit, CollectiveKind, Tier
from foreplan.datasets.timing.worker_environment import worker_environment
from foreplan.errors import MissingDataError, SpecError

KINDS: tuple[CollectiveKind, ...] = (
    "p2p",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
)
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB .. 64 MiB
#: Seconds after which an end of a link between two hosts gives up: who waits for the other one and
#: measures, and who calls at the other one (assumed: its user has started that one just before).
SERVED_S, ANSWERED_S = 600.0, 60.0


class LinkSample(NamedTuple):
    """Median time of one collective of one size."""

    kind: CollectiveKind
    ranks: int
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured among some ranks.

    Attributes:
        backend: library.
        samples: every (kind, size) measured.
        unsupported: kinds that the backend cannot do here, with its reason.
        beside: by kind and number of ranks the payload of a collective, and the seconds that its
            ranks' computation loses to it while it runs beside that.
        waited: sums and gathers of ranks that compute nothing beside them, through the memory of
            their host; none where they share none.
        lags: by kind and number of ranks what those ranks wait for the slowest of them, over what
            they compute in between.
    """

    backend: Backend
    samples: tuple[LinkSample, ...]
    unsupported: Mapping[str, str]
    beside: Mapping[tuple[str, int], tuple[int, float]] = field(default_factory=dict)
    waited: tuple[LinkSample, ...] = ()
    lags: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def fits(self) -> tuple[CollectiveFit, ...]:
        """A fit for each kind that was measured."""
        return tuple(map(self._with_share, _fits(self.samples)))

    def _with_share(self, fit: CollectiveFit) -> CollectiveFit:
        """A fit with `CollectiveFit.compute_share`, where it was measured."""
        if (fit.kind, fit.ranks) not in self.beside:
            return fit
        payload, lost_s = self.beside[fit.kind, fit.ranks]
        return fit.model_copy(update={"compute_share": max(0.0, lost_s) / fit.seconds(payload)})

    def tier(
        self,
        group: Iterable[str],
        scope: Literal["host", "network"],
        source: str,
        *,
        emulated: bool = False,
    ) -> Tier:
        """A tier with these figures; latency and bandwidth are those of ``p2p``.

        Raises:
            MissingDataError: ``p2p`` was not measured.
        """
        fits = self.fits()
        message = next((fit for fit in fits if fit.kind == "p2p"), None)
        if message is None:
            raise MissingDataError("no message between two ranks was measured")
        largest = max(s.payload_bytes for s in self.samples if s.kind == "p2p")
        # Where the fit sees no cost of a byte, the largest message bounds the bandwidth.
        per_byte = message.beta_s_per_byte or message.seconds(largest) / largest
        return Tier(
            group=tuple(group),
            scope=scope,
            latency_s=message.alpha_s,
            bandwidth_bytes_per_s=1.0 / per_byte,
            collectives=fits,
            waited=tuple(
                fit.model_copy(update={"lag_share": self.lags.get((fit.kind, fit.ranks))})
                for fit in _fits(self.waited)
            ),
            backend=self.backend,
            emulated=emulated,
            source=source,
        )


def _fits(samples: Sequence[LinkSample]) -> tuple[CollectiveFit, ...]:
    groups: dict[tuple[CollectiveKind, int], list[LinkSample]] = {}
    for sample in samples:
        groups.setdefault((sample.kind, sample.ranks), []).append(sample)
    return tuple(fit_samples(group) for group in groups.values())


def fit_samples(samples: Sequence[LinkSample]) -> CollectiveFit:
    """Fit alpha and beta to samples of one kind and number of ranks; see the module."""
    payload = np.array([s.payload_bytes for s in samples], dtype=float)
    seconds = np.array([s.seconds for s in samples])

    def misfit(logs: npt.NDArray[np.float64]) -> float:
        return float(np.abs(np.log((np.exp(logs[0]) + np.exp(logs[1]) * payload) / seconds)).sum())

    # The sum of absolute values has kinks and several valleys: start from every sample's own time.
    slope = float(seconds[payload.argmax()] / payload.max())
    starts = [(np.log(t), np.log(slope)) for t in seconds]
    options = {"maxiter": 2000, "xatol": 1e-12, "fatol": 1e-12}
    found = min(
        (minimize(misfit, start, method="Nelder-Mead", options=options) for start in starts),
        key=lambda result: float(result.fun),
    )
    alpha, beta = (float(v) for v in np.exp(found.x))
    if beta * payload.max() < 1e-6 * alpha:
        beta = 0.0  # no cost of a byte can be seen
    residual = float(np.median(np.abs(alpha + beta * payload - seconds) / seconds))
    return CollectiveFit(
        kind=samples[0].kind,
        ranks=samples[0].ranks,
        alpha_s=alpha,
        beta_s_per_byte=beta,
        residual=residual,
        samples=len(samples),
    )


def measure_links(
    devices: Sequence[DeviceName],
    *,
    cores: Sequence[Sequence[int]] | None = None,
    kinds: Sequence[CollectiveKind] = KINDS,
    sizes: Sequence[int] = SIZES,
    timeout_s: float = 300.0,
) -> Links:
    """Measure among processes of this host, one for each device.

    Args:
        devices: a device a rank, all ``cpu`` (gloo) or all ``cuda`` (NCCL, one rank a GPU).
        cores: cores of each rank; by default one core each where there are enough, else all.
        kinds: what to measure.
        sizes: payloads in bytes.
        timeout_s: give up after this long.

    Raises:
        SpecError: fewer than two devices, or CPUs and GPUs together.
        MissingDataError: a rank failed or the time was up; no process is left behind.
    """
    backend = _backend(devices)
    with tempfile.TemporaryDirectory(prefix="foreplan-links-") as folder:
        shared = {
            "world": len(devices),
            "backend": backend,
            "kinds": list(kinds),
            "sizes": list(sizes),
            "timeout_s": timeout_s,
            # A file needs no free port and no name that resolves.
            "rendezvous": f"file://{folder}/store",
        }
        settings = [
            {**shared, "rank": rank, "device": str(device), "cores": list(mine)}
            for rank, (device, mine) in enumerate(
                zip(devices, cores or _spread(len(devices)), strict=True)
            )
        ]
        environments = [worker_environment(device) for device in devices]
        if backend == "gloo":
            for environment in environments:
                environment["GLOO_SOCKET_IFNAME"] = "lo"
        return _links(run_ranks(settings, environments, timeout_s), backend)


def serve_link(
    endpoint: str,
    *,
    device: DeviceName | None = None,
    kinds: Sequence[CollectiveKind] = KINDS,
    sizes: Sequence[int] = SIZES,
    timeout_s: float = SERVED_S,
) -> Links:
    """Wait at ``HOST:PORT`` for the other host's `connect_link`, and measure the link to it.

    Args:
        endpoint: address of this host as the other one reaches it, and a free port.
        device: what this end is; a CPU with one thread by default.
        kinds: what to measure; this end decides.
        sizes: payloads in bytes.
        timeout_s: give up if nobody came, or it is not over, by then.

    Returns:
        The measurement; the other end gets the same.

    Raises:
        SpecError: not an address, or the port is taken.
        MissingDataError: nobody came, or an end failed.
    """
    _check_address(endpoint)
    more = {"kinds": list(kinds), "sizes": list(sizes), "meeting_s": timeout_s}
    return _two_hosts(endpoint, 0, device, timeout_s, more)


def connect_link(
    endpoint: str, *, device: DeviceName | None = None, timeout_s: float = ANSWERED_S
) -> Links:
    """Measure the link to the host that waits in `serve_link` at ``HOST:PORT``.

    Args:
        endpoint: the address given there.
        device: what this end is; a CPU with one thread by default.
        timeout_s: give up if the other end does not answer by then. Once it has, that it is over
            may take as long as it does there: on a slow link minutes.

    Raises:
        SpecError: not an address, or a host that nobody knows.
        MissingDataError: nobody answers there, or an end failed.
    """
    _wait_for(endpoint, timeout_s)
    return _two_hosts(endpoint, 1, device, SERVED_S, {"meeting_s": timeout_s})


def parse_endpoint(endpoint: str, where: str = "endpoint") -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        SpecError: no such form, or no such port.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", endpoint)
    if match is None or not 0 < int(match[3]) < 65536:
        raise SpecError(where, got=endpoint, expected="HOST:PORT, such as 10.0.0.5:29400")
    return match[1] or match[2], int(match[3])


# ----------------------------------------------------------------------------------- processes


def _two_hosts(
    endpoint: str, rank: int, device: DeviceName | None, timeout_s: float, more: dict[str, Any]
) -> Links:
    host, port = parse_endpoint(endpoint)
    device = device or DeviceName.parse("cpu:threads=1")
    backend = _backend([device, device])
    settings = {
        "rank": rank,
        "world": 2,
        "backend": backend,
        "device": str(device),
        "cores": [],
        "host": host,
        "port": port,
        "timeout_s": timeout_s,
        **more,
    }
    return _links(run_ranks([settings], [worker_environment(device)], timeout_s), backend)


def _check_address(endpoint: str) -> None:
    """Raise `SpecError` if a store could not listen at the endpoint."""
    host, port = parse_endpoint(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise SpecError(
            "endpoint", got=f"{endpoint} ({error.strerror})",
            expected="an address of this host and a free port",
        ) from error  # fmt: skip


def _wait_for(endpoint: str, timeout_s: float) -> None:
    """Wait until somebody listens at the endpoint."""
    host, port = parse_endpoint(endpoint)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
                raise SpecError(
                    "endpoint", got=endpoint, expected="a host whose name or address is known here"
                ) from error
            if time.monotonic() > deadline:
                raise MissingDataError(
                    f"nobody answered at {endpoint} within {timeout_s:g} s "
                    f"({error.strerror or error})",
                    fix=what_to_do({"host": host, "port": port, "rank": 1}),
                ) from error
            time.sleep(0.1)


def _backend(devices: Sequence[DeviceName]) -> Backend:
    kinds = {device.kind for device in devices}
    if len(devices) < 2:
        raise SpecError("devices", got=[str(d) for d in devices], expected="at least two")
    if kinds == {"cpu"}:
        return "gloo"
    if kinds == {"cuda"}:
        return "nccl"
    raise SpecError("devices", got=[str(d) for d in devices], expected="all cpu or all cuda")


def _spread(ranks: int) -> list[list[int]]:
    mine = sorted(os.sched_getaffinity(0))
    return [[mine[rank]] if ranks <= len(mine) else mine for rank in range(ranks)]


def _links(answer: Mapping[str, Any], backend: Backend) -> Links:
    samples = tuple(LinkSample(*sample) for sample in answer["samples"])
    beside = {(kind, int(n)): (int(size), float(lost)) for kind, n, size, lost in answer["beside"]}
    waited = tuple(LinkSample(*sample) for sample in answer["waited"])
    lags = {(kind, int(ranks)): float(share) for kind, ranks, share in answer["lags"]}
    return Links(backend, samples, dict(answer["unsupported"]), beside, waited, lags)
