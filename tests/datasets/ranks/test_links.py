"""Real processes over loopback, and once between two network namespaces."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.ranks import links as links_module
from foreplan.datasets.ranks.links import (
    KINDS,
    Links,
    LinkSample,
    connect_link,
    fit_samples,
    measure_links,
    parse_endpoint,
    serve_link,
)
from foreplan.errors import MissingDataError, SpecError

CPU = DeviceName.parse("cpu:threads=1")
AVX2 = DeviceName.parse("cpu:threads=1,isa=avx2")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
SIZES = (1 << 10, 1 << 16, 1 << 20)


def _ranks_running() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            mine = f'"parent": {os.getpid()}'.encode()
            if b"foreplan.datasets.ranks._link_rank" in words and any(mine in w for w in words):
                found.append(int(path.parent.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_messages_and_collectives_of_unlike_local_ranks() -> None:
    found = measure_links([CPU, AVX2], sizes=SIZES)
    measured = {sample.kind for sample in found.samples}
    assert {"p2p", "all_reduce", "broadcast"} <= measured
    assert measured | set(found.unsupported) == set(KINDS)
    assert {(s.kind, s.payload_bytes) for s in found.samples} == {
        (kind, size) for kind in measured for size in SIZES
    }
    assert all(1e-6 < sample.seconds < 60.0 for sample in found.samples)
    tier = found.tier(["localhost"], "host", "measured here")
    assert tier.backend == "gloo"
    assert tier.bandwidth_bytes_per_s > 1e6
    fit = tier.fit("all_reduce", 2)
    assert fit is not None
    assert fit.samples == len(SIZES)
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        # The one core of a rank carries the bytes: what it does beside loses time to that.
        assert kind in found.unsupported or tier.taken_beside(kind, 2) > 0.0
    assert tier.taken_beside("broadcast", 2) == 0.0
    assert not _ranks_running()


def test_sums_among_some_of_the_ranks_are_measured_too() -> None:
    found = measure_links([CPU] * 3, sizes=SIZES[:1], kinds=["p2p", "all_reduce", "broadcast"])
    groups = {(sample.kind, sample.ranks) for sample in found.samples}
    # One pair of the three; the third rank keeps step with it.
    assert groups == {("p2p", 2), ("all_reduce", 3), ("all_reduce", 2), ("broadcast", 3)}
    assert set(found.beside) == {("all_reduce", 3), ("all_reduce", 2)}
    assert not _ranks_running()


def test_both_ends_of_a_served_link_get_the_same() -> None:
    endpoint = f"127.0.0.1:{_free_port()}"
    served: list[Links] = []

    def serve() -> None:
        served.append(serve_link(endpoint, kinds=["p2p"], sizes=SIZES[:2], timeout_s=300))

    other = threading.Thread(target=serve)
    other.start()
    connected = connect_link(endpoint, timeout_s=300)
    other.join()
    assert served == [connected]
    assert [s.payload_bytes for s in connected.samples] == list(SIZES[:2])
    assert not _ranks_running()


def test_nobody_there_is_missing_data_in_time() -> None:
    endpoint = f"127.0.0.1:{_free_port()}"
    started = time.monotonic()
    with pytest.raises(MissingDataError, match=f"--serve {endpoint}"):
        connect_link(endpoint, timeout_s=0.5)
    assert time.monotonic() - started < 290, "it did not give up in time"


def test_a_host_that_nobody_knows_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(SpecError, match=r"nohost:7.*name or address is known"):
        connect_link("nohost:7", timeout_s=300)


def test_who_called_gives_the_measurement_as_long_as_who_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []

    def run(settings: list[dict[str, float]], _: object, timeout_s: float) -> dict[str, object]:
        limits.append((settings[0]["meeting_s"], settings[0]["timeout_s"], timeout_s))
        return {"samples": [], "beside": [], "waited": [], "lags": [], "unsupported": {}}

    monkeypatch.setattr(links_module, "run_ranks", run)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        connect_link(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=5.0)
    assert limits == [(5.0, 600.0, 600.0)]


def test_an_address_of_another_host_cannot_be_served() -> None:
    with pytest.raises(SpecError, match="of this host"):
        serve_link("192.0.2.1:29400", timeout_s=1)


def test_a_failing_rank_ends_all() -> None:
    with pytest.raises(MissingDataError, match="not measured"):
        measure_links([CPU, CPU], cores=[[0], [9999]], timeout_s=30)
    assert not _ranks_running()


def test_interrupting_leaves_no_process() -> None:
    code = (
        "import signal\n"
        "from foreplan.datasets.device_name import DeviceName\n"
        "from foreplan.datasets.ranks.links import measure_links\n"
        # Jobs that a shell put into the background inherit that Ctrl-C is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "d = DeviceName.parse('cpu:threads=1')\n"
        "print('go', flush=True)\n"
        "measure_links([d, d])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert run.stdout is not None
    run.stdout.readline()
    deadline = time.monotonic() + 300
    while len(children := _children(run.pid)) < 2:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    run.send_signal(2)
    run.wait(timeout=300)
    run.stdout.close()
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable: 10.83.0.1 in the first, 10.83.0.2 in the second."""
    tag = f"fp{os.getpid() % 10000}"
    a, b = f"{tag}a", f"{tag}b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in (a, b):
            ip("netns", "add", name)
        ip("link", "add", f"{a}0", "netns", a, "type", "veth", "peer", f"{b}0", "netns", b)
        for number, name in ((1, a), (2, b)):
            ip("-n", name, "addr", "add", f"10.83.0.{number}/24", "dev", f"{name}0")
            ip("-n", name, "link", "set", f"{name}0", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield a, b
    for name in (a, b):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.skipif(not Path("/usr/sbin/ip").exists(), reason="needs iproute2")
def test_link_between_two_network_namespaces(namespaces: tuple[str, str]) -> None:
    call = (
        "import sys\n"
        "from foreplan.datasets.ranks import links\n"
        "more = {'sizes': (1024, 65536)} if sys.argv[1] == 'serve_link' else {}\n"
        "found = getattr(links, sys.argv[1])('10.83.0.1:29400', timeout_s=300, **more)\n"
        "print(sorted({s.kind for s in found.samples}), len(found.samples))\n"
    )
    runs = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", call, side],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
        )
        for name, side in zip(namespaces, ("serve_link", "connect_link"), strict=True)
    ]
    said = [run.communicate(timeout=330)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert said[0] == said[1]
    assert b"p2p" in said[0]


def test_fit_recovers_alpha_and_beta() -> None:
    samples = [
        LinkSample("p2p", 2, size, 4e-5 + size * 1e-9) for size in (1 << 10, 1 << 14, 1 << 20)
    ]
    fit = fit_samples(samples)
    assert fit.alpha_s == pytest.approx(4e-5)
    assert fit.beta_s_per_byte == pytest.approx(1e-9)
    assert fit.residual < 1e-9
    noise = np.random.default_rng(0)
    noisy = [s._replace(seconds=s.seconds * noise.uniform(0.9, 1.1)) for s in samples]
    assert fit_samples(noisy).residual < 0.1
    falling = [LinkSample("p2p", 2, 10, 1.0), LinkSample("p2p", 2, 1000, 0.5)]
    assert fit_samples(falling).beta_s_per_byte == 0.0
    tier = Links("gloo", tuple(falling), {}).tier(["all"], "host", "t")
    assert np.isfinite(tier.bandwidth_bytes_per_s)
    with pytest.raises(MissingDataError, match="message"):
        Links("gloo", (), {}).tier(["all"], "host", "t")


def test_what_is_lost_beside_a_collective_is_a_share_of_its_own_time() -> None:
    samples = [
        LinkSample(kind, 2, size, 1e-4 + 1e-9 * size)
        for kind in ("p2p", "all_reduce") for size in (1 << 10, 1 << 20, 1 << 26)
    ]  # fmt: skip
    size = 8 << 20
    links = Links("gloo", tuple(samples), {}, {("all_reduce", 2): (size, 3e-3)})
    tier = links.tier(["all"], "host", "t")
    fit = tier.fit("all_reduce", 2)
    assert fit is not None
    assert tier.taken_beside("all_reduce", 2) * fit.seconds(size) == pytest.approx(3e-3)
    slower = tier.model_copy(update={"compute_share": 0.5})
    assert slower.taken_beside("all_reduce", 2) == tier.taken_beside("all_reduce", 2)
    assert slower.taken_beside("all_gather", 2) == slower.taken_beside("p2p", 2) == 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.5:29400", ("10.0.0.5", 29400)), ("[::1]:80", ("::1", 80)), ("h-1:1", ("h-1", 1))],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", "host", ":1", "h:0", "h:70000", "h:x", "a/b:1", "::1:80"])
def test_wrong_endpoints_are_spec_errors(text: str) -> None:
    with pytest.raises(SpecError, match="HOST:PORT"):
        parse_endpoint(text)


def test_ranks_must_be_alike_and_several() -> None:
    with pytest.raises(SpecError, match="at least two"):
        measure_links([CPU])
    with pytest.raises(SpecError, match="all cpu or all cuda"):
        measure_links([CPU, DeviceName.parse("cuda:0")])
    assert links_module._backend([DeviceName.parse("cuda:0"), DeviceName.parse("cuda:1")]) == "nccl"


def test_a_few_quick_answers_do_not_decide_the_fit() -> None:
    # Measured over gloo between two pinned cores of a virtual machine, in microseconds.
    seen = [(1024, 2000), (4096, 24), (16384, 30), (65536, 1997), (262144, 1976), (1048576, 2000),
            (4194304, 1906), (16777216, 3624), (67108864, 13496)]  # fmt: skip
    fit = fit_samples([LinkSample("p2p", 2, size, us * 1e-6) for size, us in seen])
    assert 1.5e-3 < fit.alpha_s < 2.5e-3
    assert 1e-10 < fit.beta_s_per_byte < 2.5e-10


def test_sums_through_shared_memory_have_prices_of_their_own() -> None:
    found = measure_links([CPU, CPU], sizes=SIZES[:2], kinds=["p2p", "all_reduce", "all_gather"])
    assert {(s.kind, s.ranks, s.payload_bytes) for s in found.waited} == {
        (kind, 2, size) for kind in ("all_reduce", "all_gather") for size in SIZES[:2]
    }
    assert all(0.0 < sample.seconds < 60.0 for sample in found.waited)
    tier = found.tier(["localhost"], "host", "measured here")
    assert {fit.kind for fit in tier.waited} == {"all_reduce", "all_gather"}
    assert all(fit.compute_share is None for fit in tier.waited)
    assert found.lags == {(fit.kind, fit.ranks): fit.lag_share for fit in tier.waited}
    assert all(tier.lag(kind, 2) >= 0.0 for kind in ("all_reduce", "all_gather"))
    assert tier.lag("all_reduce", 4) == tier.lag("reduce_scatter", 2) == 0.0, "not measured"
    assert not _ranks_running()


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_dies_or_stops_is_named_in_one_line(signal_name: str) -> None:
    found: list[str] = []

    def measure() -> None:
        with pytest.raises(MissingDataError) as raised:
            measure_links([CPU, AVX2], timeout_s=10.0 if signal_name == "SIGSTOP" else 300.0)
        found.append(str(raised.value))

    other = threading.Thread(target=measure)
    other.start()
    deadline = time.monotonic() + 300
    victim = None
    while victim is None:
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
        for pid in _ranks_running():
            with contextlib.suppress(OSError):
                if b'"rank": 1' in Path(f"/proc/{pid}/cmdline").read_bytes():
                    victim = pid
    os.kill(victim, getattr(signal, signal_name))
    other.join(timeout=300)
    (line,) = found
    assert "\n" not in line
    assert "run it again" in line
    if signal_name == "SIGKILL":
        assert "rank 1 (cpu:threads=1,isa=avx2)" in line
        assert "died with code -9" in line
    assert not _ranks_running()
