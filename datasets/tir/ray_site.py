"""RaySite: programs are built and timed by actors on the nodes of a Ray cluster.

An actor holds the same child process that measures on this machine, so a program that crashes ends
that child and nothing of Ray. Libraries travel through the driver: what one node builds, any node
of the same chip times. Records carry the node's own chip and load.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

from foreplan.datasets.ranks.ray_cluster import Node, connected, nodes, place
from foreplan.datasets.timing.child_process import ChildEnded
from foreplan.datasets.tir.site import builder_process, timer_process
from foreplan.datasets.tir.target import TargetDevice, target_device
from foreplan.datasets.tir.toolchain import require_tvm
from foreplan.errors import ForeplanError, MissingDataError, SpecError

#: Beyond a request's own limit, for messages and libraries to travel.
_TRAVEL_S = 180.0


class Answer(NamedTuple):
    """What an actor returns: a reply, or how its child ended; and what it built."""

    reply: dict[str, Any] | None
    ended: tuple[str, str]
    library: bytes


class _NodeWorker:
    """The actor: one child of its node."""

    def __init__(self, role: str, kind: str) -> None:
        self._worker = builder_process(kind) if role == "builder" else timer_process(kind)
        # An actor is killed, and removes nothing then: there is a folder from a request to `close`.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._library = Path()
        self._count = 0

    def describe(self, name: str) -> dict[str, Any] | str:
        """Fields of the node's `TargetDevice` and versions, or why it has none."""
        try:
            return {"device": asdict(target_device(name)), "versions": asdict(require_tvm())}
        except ForeplanError as error:
            return str(error)

    def ask(self, request: dict[str, Any], timeout_s: float, library: bytes | None) -> Answer:
        """Answer one request; ``library`` is what a timing needs and this actor has not got."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="foreplan-")
            self._library = Path(self._folder.name) / "programs.so"
        if library is not None:
            self._library.unlink(missing_ok=True)
            self._count += 1  # a path that was loaded once is not loaded again
            self._library = Path(self._folder.name) / f"programs-{self._count}.so"
            self._library.write_bytes(library)
        try:
            reply = self._worker.ask({**request, "library": str(self._library)}, timeout_s)
        except ChildEnded as ended:
            return Answer(None, (ended.status, str(ended)), b"")
        built = b""
        if request["do"] == "build" and self._library.exists():
            built = self._library.read_bytes()
            self._library.unlink()
        return Answer(reply, ("", ""), built)

    def close(self) -> None:
        """End the child and forget the library; the next request starts another."""
        self._worker.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class RayWorker:
    """A worker of one node, as this process sees it."""

    def __init__(self, ray: Any, node: Node, role: str, device: TargetDevice) -> None:
        self._ray, self._node, self._role, self._device = ray, node, role, device
        self._actor: Any = None
        self._sent = ""

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            ChildEnded: the child on the node died or took too long.
            MissingDataError: the node left the cluster, or has no room.
        """
        ray = self._ray
        if self._actor is None:
            gpus = int(self._role == "timer" and self._device.kind == "cuda")
            self._actor = place(
                ray, _NodeWorker, self._node, self._role, self._device.kind, gpus=gpus
            )
            self._sent = ""
        path = Path(request["library"])
        library = None
        if request["do"] == "time" and str(path) != self._sent:
            library = path.read_bytes()
        try:
            answer = ray.get(
                self._actor.ask.remote(dict(request), timeout_s, library),
                timeout=timeout_s + _TRAVEL_S,
            )
        except ray.exceptions.GetTimeoutError as error:
            self._drop()
            raise ChildEnded("timeout", f"no answer from {self._node.host}") from error
        except ray.exceptions.RayError as error:
            self._drop()
            if self._node.identifier not in {node.identifier for node in nodes(ray)}:
                raise MissingDataError(
                    f"node {self._node.host} left the Ray cluster",
                    fix="run the same command again: it goes on with what is left to do",
                ) from error
            raise ChildEnded("fault", f"the worker on {self._node.host} ended") from error
        if library is not None:
            self._sent = str(path)
        if answer.library:
            path.write_bytes(answer.library)
        if answer.reply is None:
            raise ChildEnded(*answer.ended)
        reply: dict[str, Any] = answer.reply
        return reply

    def close(self) -> None:
        """End the child on the node; the next request starts another."""
        self._sent = ""
        if self._actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(self._actor.close.remote(), timeout=_TRAVEL_S)

    def _drop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self._ray.kill(actor)


class RaySite:
    """Nodes of a Ray cluster that have one chip. Use as a context manager.

    Args:
        address: ``local``, ``auto`` or ``HOST:PORT``.
        name: device on every node, as ``cpu:threads=1,isa=avx2`` or ``cuda``: then each GPU.
        builders: workers of a node that build.
        chip: only nodes with this silicon.

    Raises:
        MissingDataError: on entering: no Ray, no cluster, no node with the device.
        SpecError: on entering: nodes of several chips and none chosen.
    """

    def __init__(
        self, address: str, name: str, *, builders: int = 1, chip: str | None = None
    ) -> None:
        self._address, self._name, self._chip = address, name, chip
        self._each = max(1, builders)
        self._stack = contextlib.ExitStack()
        self._timers: list[tuple[Node, TargetDevice]] = []

    @property
    def devices(self) -> list[TargetDevice]:
        """What programs are timed on: a CPU core of each node, or every GPU."""
        return [device for _, device in self._timers]

    @property
    def builders(self) -> int:
        """Workers that build, of all nodes."""
        return len(self._hosts) * self._each

    def __enter__(self) -> Self:
        try:
            self._ray = self._stack.enter_context(connected(self._address))
            self._find()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def builder(self, number: int) -> RayWorker:
        """A worker that builds; they go round the nodes."""
        device = self._timers[0][1]
        return RayWorker(self._ray, self._hosts[number % len(self._hosts)], "builder", device)

    def timer(self, number: int) -> RayWorker:
        """A worker that times, on the node of that device."""
        node, device = self._timers[number]
        return RayWorker(self._ray, node, "timer", device)

    def _find(self) -> None:
        cuda = self._name.startswith("cuda")
        refused = {}
        for node in nodes(self._ray):
            if cuda and not node.gpus:
                continue
            actor = place(
                self._ray, _NodeWorker, node, "timer", "cuda" if cuda else "llvm", gpus=int(cuda)
            )
            word = "cuda:0" if cuda else self._name
            described = self._ray.get(actor.describe.remote(word), timeout=_TRAVEL_S)
            self._ray.kill(actor)
            if isinstance(described, str):
                refused[node.host] = described
                continue
            if described["versions"] != asdict(require_tvm()):
                refused[node.host] = f"it has {described['versions']}, this machine another TVM"
                continue
            device = TargetDevice(**described["device"])
            self._timers += [(node, device)] * (node.gpus if cuda else 1)
        chips = {device.chip for device in self.devices}
        if self._chip is not None:
            self._timers = [pair for pair in self._timers if pair[1].chip == self._chip]
        if not self._timers:
            reasons = "; ".join(f"{host}: {reason}" for host, reason in refused.items())
            raise MissingDataError(
                f"no node of the Ray cluster has {self._name}"
                + (f" of chip {self._chip} (there are {', '.join(sorted(chips))})" if chips else "")
                + (f": {reasons}" if reasons else "")
            )
        if len({device.target for device in self.devices}) > 1 or (
            self._chip is None and len(chips) > 1
        ):
            raise SpecError(
                "--ray", got=", ".join(sorted(chips)), expected="one chip", fix="choose by --chip"
            )
        self._hosts = list(dict.fromkeys(node for node, _ in self._timers))
