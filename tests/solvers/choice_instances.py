"""Seeded instances of the multiple-choice problem and their oracle; all costs are synthetic."""

from __future__ import annotations

import itertools

import numpy as np

from foreplan.solvers.multiple_choice import Choice, ChoiceItem, ChoicePair, ChoiceProblem, evaluate

BITS = np.array([8, 16, 32])
EMITS = {8: 32, 16: 16, 32: 32}
"""An 8-bit kernel hands on 32-bit results."""


def random_problem(
    seed: int, *, n_items: int | None = None, n_rows: int | None = None, integers: bool = False
) -> ChoiceProblem:
    """A small instance that switches every feature of the problem on and off at random."""
    rng = np.random.default_rng(seed)
    n = n_items or int(rng.integers(1, 8))
    n_rows = int(rng.integers(0, 4)) if n_rows is None else n_rows
    signed, groups, n_states = rng.random() < 0.5, rng.random() < 0.4, int(rng.integers(2, 4))

    def draw(*shape: int) -> np.ndarray:
        low = -4 if signed else 0
        numbers = rng.integers(low, 8, shape).astype(float)
        return numbers if integers else numbers + rng.random(shape)

    items: list[ChoiceItem] = []
    members: dict[int, ChoiceItem] = {}
    for i in range(n):
        kind = rng.choice(["free", "dependent", "pinned"], p=[0.55, 0.3, 0.15])
        if kind == "dependent" and i:
            m = int(rng.integers(1, n_states + 1))
            follows = rng.choice(i, size=min(i, int(rng.integers(1, 4))), replace=False)
            emits = rng.permutation(n_states)[:m]
            items.append(
                ChoiceItem(
                    values=draw(m), weights=draw(m, n_rows), emits=emits, follows=tuple(follows)
                )
            )
            continue
        m = 1 if kind == "pinned" else int(rng.integers(2, 4))
        group = int(rng.integers(2)) if groups and kind == "free" else None
        emits = rng.integers(0, n_states, m)
        if group is not None:
            first = members.setdefault(group, ChoiceItem(values=np.zeros(m), emits=emits))
            m, emits = first.n_options, first.emits
        items.append(ChoiceItem(values=draw(m), weights=draw(m, n_rows), emits=emits, group=group))
    pairs = [
        ChoicePair(
            producer=u,
            consumer=i,
            weights=draw(items[u].n_options, items[i].n_options, n_rows)
            * (rng.random((items[u].n_options, items[i].n_options, 1)) < 0.5),
            values=draw(items[u].n_options, items[i].n_options) * (rng.random() < 0.5),
        )
        for u, i in itertools.permutations(range(n), 2)
        if rng.random() < 1.2 / n
    ]
    problem = ChoiceProblem(
        items=tuple(items), pairs=tuple(pairs), limits=np.zeros(n_rows), base=draw(n_rows)
    )
    usage = sum((item.weights.mean(axis=0) for item in items), problem.base) + sum(
        (pair.weights.mean(axis=(0, 1)) for pair in pairs), np.zeros(n_rows)
    )
    limits = np.round(usage + rng.uniform(-5, 4, n_rows) * np.sqrt(n))
    limits[rng.random(n_rows) < 0.1] = np.inf
    return problem.with_limits(limits)


def brute_force(problem: ChoiceProblem) -> float:
    """Least objective of all choices, ``inf`` if none is feasible; looks at one after the other."""
    best = np.inf
    free = [range(1 if item.dependent else item.n_options) for item in problem.items]
    for options in itertools.product(*free):
        groups: dict[int | None, int] = {}
        if any(
            item.group is not None and groups.setdefault(item.group, option) != option
            for item, option in zip(problem.items, options, strict=True)
        ):
            continue
        score = evaluate(problem, problem.complete(options))
        if score.feasible:
            best = min(best, score.objective)
    return best


class TransformerInstance:
    """Training graph of a transformer at 8, 16 or 32 bits, with gradient buckets as rows.

    A block has 15 operators: eight matrix products that choose; a dropout and two additions that
    follow; softmax, activation and two norms that are pinned. With 12 blocks that is BERT-base's
    183 operators and 230 edges (97 free, 36 dependent, 50 pinned). Post-norm additions follow a
    pinned norm and stay at 32 bits; pre-norm ones follow all before them. Row ``q`` is the time
    until bucket ``q`` is reduced, the last row is memory. 8-bit kernels are slower than 16-bit
    ones, as for training on T4, and save memory. ``tightness`` and ``memory`` place the limits
    between what 16 and 32 bits (for memory: 8 and 16 bits) need everywhere; with ``memory`` below
    1 the uniform 16-bit ``start`` does not fit.
    """

    def __init__(
        self,
        blocks: int = 12,
        buckets: int = 13,
        seed: int = 0,
        *,
        shared: bool = False,
        pre_norm: bool = False,
        tightness: float = 0.35,
        memory: float = 1.5,
        casts: float = 0.03,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.blocks, self.buckets, self.n_rows = blocks, buckets, buckets + 1
        self.shared, self.pre_norm, self.casts = shared, pre_norm, casts
        self.depth, self.items, self.pairs = 0.0, list[ChoiceItem](), list[ChoicePair]()
        self.drawn: dict[tuple[str, int], tuple[int, tuple[np.ndarray, ...]]] = {}
        x = self._product("embedding", -1, 2.0)
        if not pre_norm:
            x = self._pinned(x)
        for k in range(blocks):
            self.depth = k / blocks
            x = self._block(x, k)
        self.depth = 1.0
        self._pinned(x)
        names = (*(f"bucket {q}" for q in range(buckets)), "memory")
        free = np.full(self.n_rows, np.inf)
        problem = ChoiceProblem(
            items=tuple(self.items), pairs=tuple(self.pairs), limits=free, rows=names
        )
        low, fast, slow = (evaluate(problem, uniform(problem, option)).usage for option in range(3))
        limits = fast + tightness * (slow - fast)
        limits[-1] = low[-1] + memory * (fast[-1] - low[-1])
        self.problem = problem.with_limits(limits)
        self.start = uniform(problem, 1)

    def _block(self, x: int, k: int) -> int:
        residual = x
        if self.pre_norm:
            x = self._pinned(x)
        q, key, v = (self._product(name, k, 1.0, x) for name in ("q", "k", "v"))
        probabilities = self._pinned(self._product("scores", k, 0.4, q, key))
        context = self._product("context", k, 0.4, probabilities, v)
        dropped = self._dependent(self._product("out", k, 1.0, context))
        residual = self._dependent(dropped, residual)
        x = self._pinned(residual)
        if not self.pre_norm:
            residual = x
        up = self._pinned(self._product("up", k, 4.0, x))
        x = self._dependent(self._product("down", k, 4.0, up), residual)
        return x if self.pre_norm else self._pinned(x)

    def _product(self, name: str, block: int, size: float, *sources: int) -> int:
        """A matrix product; equal blocks share its costs and its choice."""
        key = (name, 0 if self.shared and block >= 0 else block)
        if key not in self.drawn:
            rng = self.rng
            work = size * rng.uniform(0.8, 1.2)
            forward = work * np.array([0.75, 0.4, 1.0]) * rng.uniform(0.9, 1.1, 3)
            backward = 2 * work * np.array([0.45, 0.4, 1.0])
            loss = size * rng.lognormal(0, 1) * np.array([1.0, rng.uniform(0.02, 0.3), 0.0])
            memory = size * np.array([0.25, 0.5, 1.0]) * rng.uniform(0.8, 1.2)
            self.drawn[key] = len(self.drawn), (forward, backward, loss, memory)
        group, (forward, backward, loss, memory) = self.drawn[key]
        item = ChoiceItem(
            values=loss,
            weights=np.column_stack([self._times(forward, backward), memory]),
            emits=[EMITS[b] for b in BITS],
            group=group,
        )
        return self._append(item, BITS, sources, size)

    def _dependent(self, *sources: int) -> int:
        times = self._times(np.array([0.1, 0.06]), np.array([0.1, 0.06]))
        weights = np.column_stack([times, [0.2, 0.1]])
        item = ChoiceItem(values=[0.0] * 2, weights=weights, emits=[32, 16], follows=sources)
        return self._append(item, np.array([32, 16]), sources, 0.5)

    def _pinned(self, *sources: int) -> int:
        weights = np.column_stack([self._times(np.array([0.1]), np.array([0.2])), [0.3]])
        item = ChoiceItem(values=[0.0], weights=weights, emits=[32])
        return self._append(item, np.array([32]), sources, 0.5)

    def _times(self, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Every bucket waits for the forward pass and for the backward pass of the later layers."""
        done = 1 - self.depth <= (np.arange(self.buckets) + 1) / self.buckets
        times: np.ndarray = forward[..., None] + backward[..., None] * done
        return times

    def _append(
        self, item: ChoiceItem, bits: np.ndarray, sources: tuple[int, ...], size: float
    ) -> int:
        """Add an operator and the casts on its in-edges, forward and backward."""
        for u in sources:
            emitted = self.items[u].emits[:, None]
            # Quantising to 8 bits costs about five times a cast between floats.
            forward = self.casts * size * (emitted != bits) * np.where(bits == 8, 4.9, 1.0)
            backward = self.casts * size * (emitted != np.where(bits == 32, 32, 16))
            weights = np.zeros((*forward.shape, self.n_rows))
            weights[..., :-1] = self._times(forward, backward)
            self.pairs.append(ChoicePair(producer=u, consumer=len(self.items), weights=weights))
        self.items.append(item)
        return len(self.items) - 1


def uniform(problem: ChoiceProblem, option: int) -> Choice:
    """Every item at this option, or at its last one."""
    return problem.complete([min(option, item.n_options - 1) for item in problem.items])
