"""`Fleet`: the leader of a verification: its workers on every host, and the groups they form.

The leader listens; workers call in from this host, from others (`follow`) or from under torchrun.
It then starts *groups*, one child a rank for one candidate decision, and tells them when to run.
Everything has a time limit, and a rank that dies is named with its device and the reason; the other
ranks of its group are ended, and the rest of the fleet goes on.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foreplan.datasets.cluster_entry import Rank
from foreplan.errors import ForeplanError, SpecError, VerificationError
from foreplan.planner.plan import Plan
from foreplan.planner.verify.answers import whole
from foreplan.planner.verify.group import Group, Peer, RankFailed
from foreplan.planner.verify.local import LocalProcesses
from foreplan.planner.verify.session import Job
from foreplan.planner.verify.wire import Message, Wire, WireClosed, WireGarbled


class Fleet:
    """Workers, one a device; use as a context manager.

    Args:
        plan: what is verified; workers get it from here.
        ranks: the cluster's ranks that take part.
        here: indices of those whose workers this process starts.
        token: word by which workers are known.
        listen: address and port (0 for a free one) to listen at.
        folder: that the plan's relative paths start from here, the plan's own; each host has its
            own.
        address: the address by which workers find this host; ``listen``'s if left out.
        join_timeout_s: how long workers may take to call in.
        say: hears what is going on.
        listening: told the port as soon as it is known.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Sequence[Rank],
        here: Collection[int],
        token: str,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        folder: str | Path = "",
        address: str | None = None,
        join_timeout_s: float = 180.0,
        say: Callable[[str], None] = lambda text: None,
        listening: Callable[[int], None] = lambda port: None,
    ) -> None:
        self._plan = plan.written_for(folder)
        self._ranks = {rank.index: rank for rank in ranks}
        self._here = set(here)
        self._token = token
        self._join_timeout_s = join_timeout_s
        self._say = say
        self._selector = selectors.DefaultSelector()
        self._members: dict[int, Wire] = {}
        self._loaded: set[int] = set()
        # Memory of each host when its workers were up, and of each GPU by its rank's label.
        self.free_bytes: dict[str, int] = {}
        self._followers: dict[str, Wire] = {}
        self._groups: dict[int, Group] = {}
        self._next = 0
        try:
            self._server = socket.create_server(listen)
        except OSError as error:
            raise SpecError(
                "--rdzv-endpoint", got=f"{listen[0]}:{listen[1]}",
                expected=f"an address of this host with a free port ({error.strerror})",
            ) from error  # fmt: skip
        self.endpoint = (address or listen[0], int(self._server.getsockname()[1]))
        self._selector.register(self._server, selectors.EVENT_READ)
        self.local = LocalProcesses(self.endpoint, token, folder)
        listening(self.endpoint[1])

    # ------------------------------------------------------------------------------ its lifetime

    def __enter__(self) -> Self:
        try:
            self.local.start(self._ranks[index] for index in sorted(self._here))
            self._await_members()
        except BaseException:  # Ctrl-C too: no worker outlives this process
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.tell_followers({"error": _told(error)})
        self.close()

    def close(self) -> None:
        """End all workers."""
        for wire in (*self._members.values(), *self._followers.values()):
            with contextlib.suppress(WireClosed):
                wire.send({"exit": 1})
        self.local.close()
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, Wire | socket.socket):
                key.fileobj.close()
        self._selector.close()

    def tell_followers(self, message: Message) -> None:
        """Say something to the `follow` of every other host."""
        for wire in self._followers.values():
            with contextlib.suppress(WireClosed):
                wire.send(message)

    def _await_members(self) -> None:
        deadline = time.monotonic() + self._join_timeout_s
        missing = set(self._ranks)
        while missing:
            self.pump(0.1)
            missing = set(self._ranks) - self._loaded
            for index, how in self.local.dead().items():
                raise VerificationError(
                    f"the worker of {self._ranks[index].label} did not start: {how}; it said "
                    f"last: {self.local.tail(index) or 'nothing'}"
                )
            if missing and time.monotonic() > deadline:
                labels = ", ".join(self._ranks[index].label for index in sorted(missing))
                hosts = sorted({self._ranks[index].host for index in missing - self._here})
                fix = None
                if hosts:
                    fix = (
                        f"start 'foreplan verify' with the same plan on {', '.join(hosts)}, with "
                        f"--rdzv-endpoint {self.endpoint[0]}:{self.endpoint[1]} and --host"
                    )
                raise VerificationError(
                    f"no word from {labels} for {self._join_timeout_s:.0f} s", fix=fix
                )
        self._say(f"{len(self._loaded)} workers are up")

    # ---------------------------------------------------------------------------------- its groups

    def start(self, jobs: Sequence[Job], members: Sequence[int], timeout_s: float) -> Group:
        """Start one process a job and let them find each other.

        Args:
            jobs: one a rank of the schedule.
            members: cluster rank of each.
            timeout_s: for starting.

        Raises:
            RankFailed: a rank could not start.
        """
        self._next += 1
        group = self._groups[self._next] = Group(self, self._next, jobs, members)
        try:
            for rank, (job, member) in enumerate(zip(jobs, members, strict=True)):
                order = {"fork": group.number, "rank": rank, "job": job.model_dump(mode="json")}
                try:
                    if member not in self._members:  # lost between two groups
                        raise WireClosed(self.local.dead().get(member, "it closed its connection"))
                    self._members[member].send(order)
                except WireClosed as error:
                    raise RankFailed(
                        rank, job.label, f"its worker has gone: {error}", "VerificationError"
                    ) from error
            group.gather("here", timeout_s)
            if jobs[0].kind in ("rank", "live"):
                port = group.whole("store", timeout_s, 0)
                first = group.peers[0]
                away = first.wire is not None and first.member not in self._here
                host = first.wire.there if first.wire is not None and away else self.endpoint[0]
                for rank in range(1, len(jobs)):
                    group.say({"store": [host, port]}, to=rank)
        except BaseException:
            group.stop()
            raise
        return group

    def stop(self, group: Group) -> None:
        """End the processes of a group."""
        self._groups.pop(group.number, None)
        self._tell_workers(group, "kill")
        for peer in group.peers:
            if peer.wire is not None:
                self._forget(peer.wire)

    def rest(self, group: Group, resting: bool) -> None:
        """Let the processes of a group stand still, or go on."""
        self._tell_workers(group, "rest" if resting else "wake")

    def _tell_workers(self, group: Group, what: str) -> None:
        for peer in group.peers:
            member = self._members.get(peer.member)
            if member is not None:
                with contextlib.suppress(WireClosed):  # `gather` finds out why
                    member.send({what: group.number})

    # -------------------------------------------------------------------------------- its messages

    def pump(self, timeout_s: float) -> None:
        """Hear what there is to hear, for at most ``timeout_s``."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                connection, _ = self._server.accept()
                stranger = Wire(connection, known=False)
                self._selector.register(stranger, selectors.EVENT_READ, self._greet)
                continue
            wire, hear = key.fileobj, key.data
            if not isinstance(wire, Wire):
                continue
            try:
                for message in wire.pump():
                    hear = hear(wire, message) or hear
            except WireClosed:
                self._forget(wire)
                hear(wire, {"lost": 1})

    def _forget(self, wire: Wire) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(wire)
        wire.close()

    def _greet(self, wire: Wire, message: Message) -> Any:
        """The first message of a connection says who is there."""
        if "lost" in message:
            return None
        hello = message.get("hello")
        token = str(message.get("token", "")).encode(errors="replace")
        if not hmac.compare_digest(token, self._token.encode()):
            if hello in ("member", "host"):
                with contextlib.suppress(WireClosed):
                    wire.send({"error": "the leader verifies another plan"})
            raise WireGarbled("not the word of this plan")
        wire.trust()
        if hello == "member":
            index = whole(message, "member")
            if index not in self._ranks:
                # Another host thought that a candidate could run which this one knows cannot.
                with contextlib.suppress(WireClosed):
                    wire.send({"unneeded": 1})
                raise WireClosed("a worker that is not needed")
            self._members[index] = wire
            with contextlib.suppress(WireClosed):
                wire.send({"plan": self._plan.model_dump(mode="json", by_alias=True)})
            return self._hear(wire, lambda word: self._of_member(index, word))
        if hello == "host":
            host, members = str(message.get("host")), message.get("members")
            if not isinstance(members, list):
                raise WireGarbled("a host without its members")
            self._followers[host] = wire
            self._check_follower(host, members)
            return self._hear(wire, self._of_follower)
        if hello == "job":
            group, rank = self._groups.get(whole(message, "job")), whole(message, "rank")
            if group is not None and rank < len(group.peers):
                peer = group.peers[rank]
                peer.wire = wire
                peer.inbox.append({"here": 1})
                return self._hear(wire, lambda word: self._of_peer(peer, word))
        raise WireClosed("nobody who is waited for")

    def _hear(self, wire: Wire, ear: Callable[[Message], None]) -> Callable[[Wire, Message], None]:
        def hear(_: Wire, message: Message) -> None:
            ear(message)

        self._selector.modify(wire, selectors.EVENT_READ, hear)
        return hear

    def _of_member(self, index: int, word: Message) -> None:
        if "loaded" in word:
            host = self._ranks[index].host
            if word.get("gpu_free_bytes") is not None:
                self.free_bytes[self._ranks[index].label] = whole(word, "gpu_free_bytes")
            free = whole(word, "free_bytes")
            self.free_bytes[host] = min(self.free_bytes.get(host, free), free)
            self._loaded.add(index)
        elif "exited" in word and whole(word, "exited") in self._groups:
            for peer in self._groups[whole(word, "exited")].peers:
                if peer.member == index:
                    peer.how = str(word.get("how"))
                    peer.lost_at = peer.lost_at or time.monotonic()
        elif "lost" in word:
            self._members.pop(index, None)
            for group in self._groups.values():
                for peer in group.peers:
                    if peer.member == index:
                        peer.lost_at = peer.lost_at or time.monotonic()
                        peer.how = peer.how or "the worker of its device has gone"

    def _check_follower(self, host: str, members: Collection[int]) -> None:
        lacking = [
            r.label for r in self._ranks.values() if r.host == host and r.index not in members
        ]
        if lacking:
            raise VerificationError(
                f"{host} cannot be {', '.join(lacking)}", fix="leave out what needs it with --only"
            )

    def _of_follower(self, word: Message) -> None:
        if "dead" in word:
            raise VerificationError(str(word["dead"]))

    def _of_peer(self, peer: Peer, word: Message) -> None:
        if "lost" in word:
            peer.lost_at = peer.lost_at or time.monotonic()
            peer.closed = True
        else:
            peer.inbox.append(word)


def _told(error: BaseException) -> str:
    """What followers are told of the leader's end."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, ForeplanError) else type(error).__name__
