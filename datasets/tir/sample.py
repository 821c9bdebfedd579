"""Sampler: random valid schedules of a task, from MetaSchedule's design space without a search.

The design space gives traces whose random choices are left open; each sample replays one with its
own seed. The same task, target, seed and TVM give the same program.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from foreplan.datasets.tir.target import TargetDevice
from foreplan.datasets.tir.task import program_key
from foreplan.datasets.tir.toolchain import load_tvm
from foreplan.errors import SpecError

#: Draws of one set of rules are numbered from ``variant * VARIANT``.
VARIANT = 1_000_000

#: Jobs per core and widest vector loop of each set of CPU rules; MetaSchedule's own come first.
#: Without the others, tasks without a reduction would have a single program each.
_LIMITS = ((16, 64), (1, 16), (64, 8), (4, 32), (256, 128), (16, 1))


@dataclass(frozen=True, slots=True)
class Sample:
    """One scheduled program.

    Attributes:
        seed: number of the draw; with task and target it says everything.
        module: JSON text of ``tvm.ir.save_json`` of the scheduled module.
        trace: JSON text of the schedule's trace with all decisions.
    """

    seed: int
    module: str
    trace: str


class Sampler:
    """Draws scheduled programs of one task for one target.

    Args:
        module: JSON text of the unscheduled module (`Task.module`).
        device: what to schedule for.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version, or text that it cannot read.
    """

    def __init__(self, module: str, device: TargetDevice) -> None:
        tvm = load_tvm()
        try:
            self._module = tvm.ir.load_json(module)
        except Exception as error:  # TVM raises its own classes, and ValueError for bad JSON
            raise SpecError(
                "task module", got=module[:60], expected="a module that TVM saved"
            ) from error
        self.target = tvm.target.Target(dict(device.options))
        self._kind = device.kind
        self._spaces: dict[int, tuple[Any, list[Any]]] = {}

    def _space(self, variant: int) -> tuple[Any, list[Any]]:
        """Post-processors and sketches of one set of rules; made once."""
        if variant not in self._spaces:
            meta_schedule = load_tvm().s_tir.meta_schedule
            rules = list(meta_schedule.ScheduleRule.create(self._kind))
            if self._kind == "llvm":
                rules = [self._with_limits(rule, *_LIMITS[variant]) for rule in rules]
            generator = meta_schedule.space_generator.PostOrderApply(
                sch_rules=rules,
                postprocs=meta_schedule.Postproc.create(self._kind),
                mutator_probs={},
            )
            context = meta_schedule.TuneContext(
                mod=self._module,
                target=self.target,
                space_generator=generator,
                num_threads=1,
                rand_state=1,
            )
            self._spaces[variant] = generator, list(context.generate_design_space())
        return self._spaces[variant]

    @staticmethod
    def _with_limits(rule: Any, jobs: int, vector: int) -> Any:
        schedule_rule = load_tvm().s_tir.meta_schedule.schedule_rule
        if not isinstance(rule, schedule_rule.ParallelizeVectorizeUnroll):
            return rule
        return schedule_rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=jobs,
            max_vectorize_extent=vector,
            unroll_max_steps=[0, 16, 64, 512],
            unroll_explicit=True,
        )

    def draw(self, seed: int) -> Any | None:
        """Return ``tvm.s_tir.Schedule`` of one draw, or ``None`` if it is no legal program.

        Args:
            seed: ``variant * VARIANT + draw``; the draw chooses among the sketches too.
        """
        tvm = load_tvm()
        generator, sketches = self._space(seed // VARIANT)
        sketch = sketches[seed % len(sketches)]
        # Seed 0 would mean "from the clock", and TVM's generator takes 31 bits.
        schedule = tvm.s_tir.Schedule(
            self._module, seed=1 + (seed * 2654435761) % (2**31 - 2), error_render_level="none"
        )
        try:
            # No decisions: every random choice is made anew.
            trace = tvm.s_tir.schedule.Trace(sketch.trace.insts, {})
            trace.apply_to_schedule(schedule, remove_postproc=True)
            schedule.enter_postproc()
            legal = all(step.apply(schedule) for step in generator.postprocs)
        except (RuntimeError, ValueError, tvm.error.InternalError):
            return None  # a choice that the loops do not allow
        return schedule if legal else None

    def samples(
        self,
        count: int,
        *,
        start: int = 0,
        known: Collection[str] = (),
        patience: int = 150,
    ) -> Iterator[Sample]:
        """Yield distinct valid samples in the order of their seeds.

        Args:
            count: at most so many.
            start: first draw of each set of rules.
            known: programs (`program_key`) that are not wanted again.
            patience: draws in a row without a valid sample, and a tenth of it without a new one,
                after which a set of rules counts as exhausted. An elementwise task on a CPU has
                one program for each set.
        """
        tvm = load_tvm()
        seen, found = set(known), 0
        variants = len(_LIMITS) if self._kind == "llvm" else 1
        for variant in range(variants):
            invalid = repeated = 0
            seed = variant * VARIANT + start
            while found < count and invalid < patience and repeated < patience // 10:
                schedule = self.draw(seed)
                seed += 1
                if schedule is None:
                    invalid += 1
                    continue
                module = tvm.ir.save_json(schedule.mod)
                key = program_key(module)
                if key in seen:
                    repeated += 1
                else:
                    invalid = repeated = 0
                    found += 1
                    seen.add(key)
                    trace = json.dumps(_plain(schedule.trace.as_json()), separators=(",", ":"))
                    yield Sample(seed - 1, module, trace)


def rebuild(module: str, trace: str) -> Any:
    """Return the scheduled module (``tvm.IRModule``) that a trace makes of a task's module.

    Args:
        module: JSON text of the unscheduled module.
        trace: as in `Sample.trace`.

    Raises:
        MissingDataError: no TVM.
        SpecError: TVM of another version, or a trace that does not fit the module.
    """
    tvm = load_tvm()
    schedule = tvm.s_tir.Schedule(tvm.ir.load_json(module), error_render_level="none")
    try:
        tvm.s_tir.schedule.Trace.apply_json_to_schedule(json.loads(trace), schedule)
    except Exception as error:  # whatever the instruction that does not fit raises
        raise SpecError("trace", got=trace[:60], expected="a trace of this task") from error
    return schedule.mod


def _plain(value: Any) -> Any:
    """TVM containers to JSON types."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return value.value if hasattr(value, "value") else str(value)
