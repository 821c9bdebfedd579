"""`LiveLine`: messages of one stage of a live run, and the times of its passes. Imports torch."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule import Action
from foreplan.errors import ForeplanError, VerificationError
from foreplan.planner.verify.clock import HostClock
from foreplan.planner.verify.gloo_channels import GlooChannels
from foreplan.planner.verify.rank_program import Step

#: Messages of a pass on one rank: an order received and one sent, and the same of what is computed.
_MESSAGES = 4

Times = tuple[tuple[int, int], ...]
#: A slot, its requests by row, and their new tokens.
Back = tuple[int, tuple[int, ...], Tensor]
#: An order and what its pass begins with.
Begun = tuple[Tensor, Tensor]


class LiveLine:
    """See the module.

    Args:
        channels: to the other ranks, made for a clock.
        ring: ranks of the replica's stages, in order.
        place: which of them this is.
        most: passes of a run.

    Attributes:
        away: passes whose tokens are not back yet.
    """

    def __init__(
        self, channels: Callable[[HostClock], GlooChannels], ring: Sequence[int], place: int,
        most: int,
    ) -> None:  # fmt: skip
        self._clock = HostClock(_MESSAGES * (most + 1))
        self._channels = channels(self._clock)
        self._slots, self._first = len(ring), ring[0]
        self._before = ring[place - 1], ring[place]
        self._behind = ring[place], ring[(place + 1) % len(ring)]
        self._places = 0
        self._tags: Counter[tuple[str, str]] = Counter()
        # Apart, because orders are passed on by a thread of their own.
        self._sending: dict[str, deque[int]] = {"order": deque(), "data": deque()}
        self._computed: list[tuple[int, int]] = []
        self._received: list[int] = []
        self._sent: list[int] = []
        self.away = 0
        self._awaited: queue.SimpleQueue[tuple[int, Back] | None] = queue.SimpleQueue()
        self._returned: queue.SimpleQueue[Back | ForeplanError] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[tuple[int, Begun] | ForeplanError | None]
        self._told = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._posting = threading.Lock()

    # What is computed --------------------------------------------------------------------------

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Stamp a pass."""
        start = time.monotonic_ns()
        yield
        self._computed.append((start, time.monotonic_ns()))

    def send(self, made: Tensor) -> None:
        """Send what a pass has made to the next stage, the last one to the first."""
        self._sent.append(self._send(made, "data"))

    # Orders ------------------------------------------------------------------------------------

    def send_order(self, order: Tensor) -> None:
        """Tell the next stage of a pass."""
        self._send(order, "order")

    def listen(self, size: int, buffer: Callable[[Tensor], Tensor | None]) -> None:
        """Hear orders on a thread of its own; `begun` hands them out.

        What a pass begins with is expected as soon as the stage is told of it, while it may still
        compute another: the sender can then send at once, and need not be asked while it computes.

        Args:
            size: of an order.
            buffer: what to receive into for an order; ``None`` at the end of a run.
        """
        self._thread = threading.Thread(target=self._listen, args=(size, buffer), daemon=True)
        self._thread.start()

    def begun(self) -> Begun | None:
        """The next order and what its pass begins with; ``None`` at the end of a run.

        Raises:
            ConnectionLost: another rank has gone.
        """
        told = self._told.get()
        if isinstance(told, ForeplanError):
            raise told
        if told is None:
            return None
        place, begun = told
        self._channels.wait(place)
        self._received.append(place)
        return begun

    def _listen(self, size: int, buffer: Callable[[Tensor], Tensor | None]) -> None:
        try:
            while True:
                order = torch.empty(size, dtype=torch.int64)
                self._channels.wait(self._post(order, "recv", "order"))
                if self._behind[1] != self._first:
                    self.send_order(order)
                x = buffer(order)
                if x is None:
                    self._told.put(None)
                    return
                self._told.put((self._post(x, "recv", "data"), (order, x)))
        except ForeplanError as error:
            self._told.put(error)

    # Tokens, on the first stage ----------------------------------------------------------------

    def expect_tokens(self, slot: int, members: tuple[int, ...], tokens: Tensor) -> None:
        """Post the receive of a pass's tokens; `back` will hand them out."""
        place = self._post(tokens, "recv", "data")
        self._received.append(place)
        self.away += 1
        self._awaited.put((place, (slot, members, tokens)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._await, daemon=True)
            self._thread.start()

    def back(self, patience_s: float | None) -> Back | None:
        """The next pass that is back.

        Args:
            patience_s: how long to wait for it; ``None`` for as long as it takes.

        Returns:
            ``None`` where nothing is back by then.

        Raises:
            ConnectionLost: another rank has gone.
        """
        if not self.away:
            if patience_s is None:
                raise VerificationError("nothing is served and nothing comes")  # a bug
            if patience_s:
                time.sleep(patience_s)
            return None
        try:
            found = (
                self._returned.get(timeout=patience_s)
                if patience_s != 0
                else (self._returned.get_nowait())
            )
        except queue.Empty:
            return None
        if isinstance(found, ForeplanError):
            raise found
        self.away -= 1
        return found

    def _await(self) -> None:
        """Wait for tokens, on a thread of its own: the stage has to see who arrives meanwhile."""
        while (awaited := self._awaited.get()) is not None:
            place, back = awaited
            try:
                self._channels.wait(place)
            except ForeplanError as error:
                self._returned.put(error)
                return
            self._returned.put(back)

    # Its end -----------------------------------------------------------------------------------

    def times(self) -> tuple[Times, Times, Times]:
        """Nanoseconds of what was computed, received and sent, pass by pass; ends the line."""
        self._awaited.put(None)
        if self._thread is not None:
            self._thread.join()
        for sending in self._sending.values():
            while sending:
                self._channels.wait(sending.popleft())
        start, end = self._clock.stamps()
        received, sent = (
            tuple((start[k], end[k]) for k in places) for places in (self._received, self._sent)
        )
        return tuple(self._computed), received, sent

    def _send(self, tensor: Tensor, sort: str) -> int:
        place = self._post(tensor, "send", sort)
        sending = self._sending[sort]
        sending.append(place)
        # What belongs to a pass of a round earlier has arrived.
        while len(sending) > self._slots + 1:
            self._channels.wait(sending.popleft())
        return place

    def _post(self, tensor: Tensor, op: Literal["send", "recv"], sort: str) -> int:
        group = self._behind if op == "send" else self._before
        with self._posting:
            number = self._tags[op, sort]
            self._tags[op, sort] += 1
            place, self._places = self._places, self._places + 1
            step = Step(
                place, Action(op, group[0], HostLaunch(0)), op, group=group,
                tag=2 * number + (sort == "order"),
            )  # fmt: skip
            self._channels.post(place, step, tensor)
        return place
