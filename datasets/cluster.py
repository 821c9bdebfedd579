"""Cluster: the devices a plan may use, how they are joined, and what is only assumed of them.

A cluster is written by ``foreplan profile``, by hand (YAML), or inline (``2xa100-80g,4xt4``, see
`foreplan.datasets.inline_cluster`). Its *ranks* are the devices one by one, in the order of the
document; a rank is called ``host/device`` and, where a host has several of a name,
``host/device#k``.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from foreplan.datasets import device_zoo
from foreplan.datasets.cluster_entry import DeviceEntry, Rank
from foreplan.datasets.device_name import DeviceName
from foreplan.datasets.quantity import format_bandwidth, format_bytes, format_seconds
from foreplan.datasets.specs import StrictModel, dump_document, nearest
from foreplan.datasets.tier import EVERYONE, Backend, Contention, ContentionKind, Tier
from foreplan.errors import MissingDataError, SpecError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


class Cluster(StrictModel):
    """Devices, tiers that join them, contention among them, and assumptions made for them."""

    devices: Annotated[tuple[DeviceEntry, ...], Field(strict=False, min_length=1)]
    tiers: Annotated[tuple[Tier, ...], Field(strict=False)] = ()
    contention: Annotated[tuple[Contention, ...], Field(strict=False)] = ()
    assumptions: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """What no measurement and no user said; every plan repeats it."""

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        singles = [(e.host, e.name) for e in self.devices if e.name.kind == "cuda"]
        for host, name in singles:
            if singles.count((host, name)) > 1:
                raise ValueError(f"{name} of {host} once")
        words = {str(entry.name) for entry in self.devices}
        for host in self.hosts():
            if host in words:
                raise ValueError(f"a host that is not called like a device, as {host!r} is")
        seen: dict[tuple[str, Backend | None, frozenset[int]], int] = {}
        for position, tier in enumerate(self.tiers):
            members = self._members[position]
            other = seen.setdefault((tier.scope, tier.backend, members), position)
            if other != position:
                raise ValueError(f"tiers that differ: tiers[{other}] and tiers[{position}] do not")
        measured: set[tuple[str, str | None]] = set()
        for item in self.contention:
            if item.host is not None and item.host not in self.hosts():
                raise ValueError(f"contention of a host in devices, not of {item.host!r}")
            if (item.kind, item.host) in measured:
                raise ValueError(f"contention for {item.kind} once for each host")
            measured.add((item.kind, item.host))
        return self

    # ------------------------------------------------------------------------------- what it has

    def hosts(self) -> tuple[str, ...]:
        """Return the hosts, in the order of the document."""
        return tuple(dict.fromkeys(entry.host for entry in self.devices))

    def ranks(self) -> tuple[Rank, ...]:
        """Return every device one by one, in the order of the document."""
        return self._ranks

    def link(self, a: Rank | int, b: Rank | int, backend: Backend | None = None) -> Tier:
        """Return the tier that joins two ranks: of those that fit, the one of fewest ranks.

        Args:
            a: a rank of this cluster, or its index.
            b: another one.
            backend: only figures of this library, or of none in particular.

        Raises:
            SpecError: an index out of range, or the same rank twice.
            MissingDataError: no tier joins them.
        """
        first, second = self._rank(a), self._rank(b)
        if first.index == second.index:
            raise SpecError("link", got=first.label, expected="two different ranks")
        asked = first.index, second.index, backend
        if asked not in self._found:
            self._found[asked] = self._narrowest(first, second, backend)
        return self._found[asked]

    def taken_beside(self, kind: str, group: Sequence[int]) -> float:
        """Return what computation loses to a collective beside it, over the collective's own time.

        Args:
            kind: of the collective.
            group: its ranks by index.

        Returns:
            Of the slowest kind of link (`Tier.taken_beside`); 0 where nobody has measured how the
            ranks reach each other, which the collective's price says.
        """
        try:
            tiers = self.links(group)
        except MissingDataError:
            return 0.0
        return max((tier.taken_beside(kind, len(group)) for tier in tiers), default=0.0)

    def lag(self, kind: str, group: Sequence[int]) -> float:
        """Return what ranks wait for the slowest of them where they meet on the spot.

        Args:
            kind: of the collective in which they meet.
            group: its ranks by index.

        Returns:
            Share of what they compute between two meetings (`Tier.lag`), of the kind of link with
            the most; 0 for a single rank, and where nobody has measured it.
        """
        if len(group) < 2:
            return 0.0
        try:
            tiers = self.links(group)
        except MissingDataError:
            return 0.0
        return max((tier.lag(kind, len(group)) for tier in tiers), default=0.0)

    def links(self, group: Iterable[int], backend: Backend | None = None) -> tuple[Tier, ...]:
        """Return the tiers over which the ranks of a group reach each other, each once.

        Args:
            group: ranks by index.
            backend: as for `link`.

        Raises:
            SpecError: an index out of range.
            MissingDataError: no tier joins two of them.
        """
        asked = tuple(dict.fromkeys(group)), backend
        if asked not in self._joined:
            self._joined[asked] = self._tiers_between([self._rank(i) for i in asked[0]], backend)
        return self._joined[asked]

    def _tiers_between(self, ranks: list[Rank], backend: Backend | None) -> tuple[Tier, ...]:
        """See `links`."""
        pairs: dict[tuple[Hashable, Hashable], tuple[Rank, Rank]] = {}
        hosts: dict[str, list[Rank]] = {}
        # Pairs of hosts are as many as squares of them; what joins two depends on the network
        # tiers of both alone, so that one pair stands for all of its kind.
        kinds: dict[frozenset[int], list[Rank]] = {}
        for rank in ranks:
            hosts.setdefault(rank.host, []).append(rank)
            kind = frozenset(t for t in self._networks if rank.index in self._members[t])
            firsts = kinds.setdefault(kind, [])
            if len(firsts) < 2 and rank.host not in {first.host for first in firsts}:
                firsts.append(rank)
        for here in hosts.values():
            pairs |= {(a.index, b.index): (a, b) for a, b in itertools.combinations(here, 2)}
        for one, other in itertools.combinations_with_replacement(kinds, 2):
            for a, b in itertools.product(kinds[one], kinds[other]):
                if a.host != b.host:
                    pairs.setdefault((one, other), (a, b))
        tiers = [self.link(a, b, backend) for a, b in pairs.values()]
        return tuple({id(tier): tier for tier in tiers}.values())

    def slowdown(self, host: str, kind: ContentionKind, ranks: int) -> float | None:
        """Return how much slower work is when several ranks of a host run together.

        Args:
            host: the host; an entry of its own goes before one for every host.
            kind: what the work is bound by.
            ranks: ranks at work at the same time, this one included.

        Returns:
            Time over the time alone (of ``training`` over the profile's), 1.0 for one rank where
            nothing else was measured; ``None`` for a number not measured.
        """
        found = self.measured_contention(host, kind, ranks)
        if found is None:
            return 1.0 if ranks <= 1 else None
        return found.factors[ranks]

    def measured_contention(self, host: str, kind: ContentionKind, ranks: int) -> Contention | None:
        """Return the entry that `slowdown` reads; ``None`` where nobody has measured it.

        Args:
            host: as for `slowdown`.
            kind: likewise.
            ranks: likewise.
        """
        for wanted in (host, None):
            for item in self.contention:
                if item.kind == kind and item.host == wanted and ranks in item.factors:
                    return item
        return None

    # ------------------------------------------------------------------------------ as a document

    def to_yaml(self) -> str:
        """Return the document; equal clusters give equal bytes, and it reads back equal."""
        return dump_document(self.model_dump(mode="json", exclude_defaults=True))

    def to_json(self) -> str:
        """Return the same as JSON, for a file that is named so."""
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True), indent=2) + "\n"

    def rebase(self, old: str | os.PathLike[str], new: str | os.PathLike[str]) -> Cluster:
        """Return the cluster with its profile paths relative to another folder.

        Args:
            old: folder of the file the cluster was read from.
            new: folder it will be written to.
        """

        def moved(entry: DeviceEntry) -> DeviceEntry:
            if entry.profile is None:
                return entry
            path = Path(os.path.relpath(Path(old) / entry.profile, new)).as_posix()
            return entry.model_copy(update={"profile": path})

        return Cluster(
            devices=tuple(moved(entry) for entry in self.devices),
            tiers=self.tiers,
            contention=self.contention,
            assumptions=self.assumptions,
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields; what was derived from the old ones is derived anew."""
        made = super().model_copy(update=update, deep=deep)
        for name, value in vars(Cluster).items():
            if isinstance(value, functools.cached_property):
                made.__dict__.pop(name, None)
        return made

    # ------------------------------------------------------------------------------- in a notebook

    def to_frame(self) -> pd.DataFrame:
        """One row a rank: label, host, device, memory in bytes, profile, price an hour."""
        import pandas as pd

        return pd.DataFrame(
            {
                "rank": rank.label,
                "host": rank.host,
                "device": str(rank.name),
                "memory_bytes": rank.memory_bytes,
                "profile": rank.profile,
                "price_per_hour": rank.price_per_hour,
            }
            for rank in self.ranks()
        )

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the memory of each rank as a bar, in GiB; where it is not known there is none."""
        import matplotlib.pyplot as plt

        ranks = self.ranks()
        if axes is None:
            _, axes = plt.subplots(figsize=(8, 0.4 * len(ranks) + 1.0))
        axes.barh([r.label for r in ranks], [(r.memory_bytes or 0) / (1 << 30) for r in ranks])
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        return axes

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(r.label)}</td>"
            f"<td>{'' if r.memory_bytes is None else format_bytes(r.memory_bytes)}</td></tr>"
            for r in self.ranks()
        )
        tiers = "".join(
            f"<li>{html.escape(t.label)}: {format_bandwidth(t.bandwidth_bytes_per_s)}, "
            f"{format_seconds(t.latency_s)}{' (emulated)' if t.emulated else ''}</li>"
            for t in self.tiers
        )
        return f"<table><tr><th>rank</th><th>memory</th></tr>{rows}</table><ul>{tiers}</ul>"

    # ----------------------------------------------------------------------------------- internal

    def _rank(self, rank: Rank | int) -> Rank:
        index = rank if isinstance(rank, int) else rank.index
        if not 0 <= index < len(self._ranks):
            raise SpecError("rank", got=index, expected=f"a rank from 0 to {len(self._ranks) - 1}")
        return self._ranks[index]

    @functools.cached_property
    def _found(self) -> dict[tuple[int, int, Backend | None], Tier]:
        """What `link` has found: planners ask for the same few pairs thousands of times."""
        return {}

    @functools.cached_property
    def _joined(self) -> dict[tuple[tuple[int, ...], Backend | None], tuple[Tier, ...]]:
        """What `links` has found; a group's pairs are as many as squares of it."""
        return {}

    def _narrowest(self, first: Rank, second: Rank, backend: Backend | None) -> Tier:
        """See `link`."""
        same_host = first.host == second.host
        best: tuple[int, int] | None = None
        for position, tier in enumerate(self.tiers):
            members = self._members[position]
            if (
                (tier.scope == "host") == same_host
                and (backend is None or tier.backend in (None, backend))
                and first.index in members
                and second.index in members
            ):
                # A tier of scope "host" is as wide as its part on this host.
                width = self._widths[position][first.host] if same_host else len(members)
                best = (width, position) if best is None else min(best, (width, position))
        if best is None:
            raise MissingDataError(
                f"no tier of the cluster joins {first.label} and {second.label}"
                + ("" if backend is None else f" with {backend}"),
                fix=_measuring(first, second),
            )
        return self.tiers[best[1]]

    @functools.cached_property
    def _ranks(self) -> tuple[Rank, ...]:
        total: dict[tuple[str, DeviceName], int] = {}
        for entry in self.devices:
            key = (entry.host, entry.name)
            total[key] = total.get(key, 0) + entry.count
        ranks: list[Rank] = []
        used = dict.fromkeys(total, 0)
        for entry in self.devices:
            key = (entry.host, entry.name)
            published = entry.published()
            memory = entry.memory_bytes or (published.memory_bytes if published else None)
            for _ in range(entry.count):
                number = f"#{used[key]}" if total[key] > 1 else ""
                used[key] += 1
                label = f"{entry.host}/{entry.name}{number}"
                ranks.append(
                    Rank(
                        len(ranks),
                        entry.name,
                        entry.host,
                        label,
                        memory,
                        entry.profile,
                        entry.price_per_hour,
                    )
                )
        return tuple(ranks)

    @functools.cached_property
    def _widths(self) -> tuple[Counter[str], ...]:
        """Of each tier, its ranks by host."""
        return tuple(
            Counter(self._ranks[index].host for index in members) for members in self._members
        )

    @functools.cached_property
    def _networks(self) -> tuple[int, ...]:
        """Positions of the tiers between hosts."""
        return tuple(t for t, tier in enumerate(self.tiers) if tier.scope != "host")

    @functools.cached_property
    def _members(self) -> tuple[frozenset[int], ...]:
        """Indices of the ranks of each tier."""
        by_word: dict[str, set[int]] = {EVERYONE: set(range(len(self._ranks)))}
        for rank in self._ranks:
            name = str(rank.name)
            for word in (rank.host, name, f"{rank.host}/{name}", rank.label):
                by_word.setdefault(word, set()).add(rank.index)
        members = []
        for position, tier in enumerate(self.tiers):
            found: set[int] = set()
            for word in tier.group:
                known = group_word(word, by_word)
                if known is None:
                    guess = nearest(word, by_word)
                    raise ValueError(
                        f"tiers[{position}].group of hosts and devices of this cluster, not "
                        f"{word!r}" + (f" (did you mean {guess!r}?)" if guess else "")
                    )
                found |= by_word[known]
            members.append(frozenset(found))
        return tuple(members)


def _measuring(a: Rank, b: Rank) -> str:
    """What makes the link of two ranks known."""
    if a.host == b.host:
        if a.name.kind == b.name.kind == "cuda" and a.name.index == b.name.index:
            once = "slices of one GPU cannot run at the same time; plan for one of them, or as if"
            return f"{once} they were apart: {a.name}@a,{b.name}@b"
        return (
            f"'foreplan profile' on {a.host} measures the links of its devices; or write one under "
            f"tiers (scope: host); devices apart on hosts of their own: {a.name}@a,{b.name}@b"
        )
    return (
        f"'foreplan profile --serve HOST:PORT' on {a.host} and 'foreplan profile --link HOST:PORT' "
        f"on {b.host} measure it, or write it under tiers (scope: network)"
    )


def group_word(word: str, known: Iterable[str]) -> str | None:
    """Find a group's word, also where it is another name of a zoo device (``a100-80g``)."""
    if word in known:
        return word
    host, slash, name = word.rpartition("/") if word.count("/") == 1 else ("", "", word)
    name, hash_, number = name.partition("#")
    if not device_zoo.is_known(name):
        return None
    canonical = host + slash + device_zoo.canonical(name) + hash_ + number
    return canonical if canonical in known else None
