"""`ServingPlanner`: which layers on which device, at how many bits, in which micro-batches.

How it chooses: for every pair of micro-batch sizes the exact solver of ``solvers.chain_partition``
finds the best order of devices, cuts and bits under memory and quality limits, with a proven bound;
the best few answers are replayed by the simulator, which knows what the solver's law leaves out
(growing contexts, unlike micro-batches, ranks of one host that slow each other down), and the
fastest replay is the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from foreplan.cost_models.memory import MemoryLedger
from foreplan.cost_models.schedule import Schedule
from foreplan.cost_models.timeline import Timeline
from foreplan.datasets.cluster import Cluster
from foreplan.datasets.models.model import Model
from foreplan.datasets.models.model_limits import refuse_longer
from foreplan.errors import InfeasibleError, SpecError
from foreplan.planner.base import Agreement, Bound, Choice, Kernels, Live, Planner, Problem
from foreplan.planner.predict import Forecast
from foreplan.planner.serving.baselines import serving_baselines
from foreplan.planner.serving.cache_choice import choose_cache, with_cache
from foreplan.planner.serving.cases import Answers, alone, solve_cases
from foreplan.planner.serving.chain import ServingChains, stage_items
from foreplan.planner.serving.check import check_decision
from foreplan.planner.serving.infeasible import why_infeasible
from foreplan.planner.serving.kernel_notes import expert_notes, kernel_notes
from foreplan.planner.serving.pipeline import ServingSchedule
from foreplan.planner.serving.pricing import MicroBatches, Pricing
from foreplan.planner.serving.quality import plan_quality
from foreplan.planner.serving.rivals import serving_near, serving_rivals
from foreplan.planner.serving.spec import ServingDecision, ServingWorkload
from foreplan.planner.serving.time_limits import late, missed, time_limits
from foreplan.solvers.chain_limits import TimeLimits

#: What a plan says whose processors share layers (docs/results/serving_cpu.md).
_SUMS_OF_PROCESSORS = (
    "sums between processors take as long as they did between the profile's computations; a run "
    "took 1.4 times as long as planned: verify, or set tensor_parallel=1"
)
_FAST = (
    "linears by the fastest kernels everywhere: no faster plan has those that take least memory "
    "everywhere, and the bound is of these two choices"
)
_LEAN = (
    "linears by the kernels that take least memory everywhere, because the fastest leave too "
    "little of it; the bound is of these two choices"
)
#: Relative gap at which the solver stops; how far from the best an answer may be to be replayed.
GAP, REPLAY_WITHIN, REPLAYS = 1e-4, 0.02, 6


#: Objective by the solver's law, decision, and what the simulator says of it.
_Replay = tuple[float, ServingDecision, Forecast]


class ServingPlanner(Planner[ServingWorkload, ServingDecision]):
    """Plans the service of one decoder-only language model on a cluster of unlike devices."""

    kind: ClassVar[str] = "serving"
    whole_layers: ClassVar[bool] = True
    workload_type = ServingWorkload
    decision_type = ServingDecision
    # Greedy tokens of unlike instruction sets part after one near tie, so that planned kernels are
    # compared under teacher forcing.
    modes: ClassVar[tuple[str, ...]] = ("reference", "forced")

    # ------------------------------------------------------------------------------- decide

    def decide(self, problem: Problem[ServingWorkload]) -> Choice[ServingDecision]:
        """Best decision found and what is proven about it.

        Raises:
            InfeasibleError: the model does not fit, or the quality limit cannot be met.
            MissingDataError: a price or the memory of a device is not known.
        """
        if problem.workload.kv_bits != "auto":
            return self._decide(problem)
        if serving_model(problem).latent is not None:  # which are never quantised
            return self._decide(with_cache(problem, 16))

        def worth(fixed: Problem[ServingWorkload], decision: ServingDecision) -> float:
            return self.objective(fixed, decision, Forecast.of(self, fixed, decision).total_s)

        eight = with_cache(problem, 8).workload
        try:
            known = plan_quality(serving_model(problem), eight, problem.seed).knows_cache
        except InfeasibleError:  # 8 bits alone lose more than a limit allows
            return self._decide(with_cache(problem, 16))
        return choose_cache(problem, self._decide, worth, measured=known)

    def _decide(self, problem: Problem[ServingWorkload]) -> Choice[ServingDecision]:
        chains = self._chains(problem)
        # By the solver's law a token may be a hundredth later than when simulated: limits that the
        # fastest answer of all keeps must not hinder it.
        answers, replays = self._replayed(problem, chains, TimeLimits())
        if not replays:
            raise why_infeasible(chains)
        worth = [self.objective(problem, each, forecast.total_s) for _, each, forecast in replays]
        if missed(problem.workload, replays[int(np.argmin(worth))][2].metrics):
            answers, replays = self._in_time(problem, chains, answers, replays)
            worth = [self.objective(problem, each, found.total_s) for _, each, found in replays]
        chosen = int(np.argmin(worth))
        law_s, decision, _ = replays[chosen]
        lower = min(answers.lower_s, answers.best_s, law_s)
        bound = Bound(
            status="optimal" if answers.proven else "feasible",
            lower_s=lower,
            gap=max(0.0, (law_s - lower) / law_s),
            solver="chain_partition",
            evaluations=answers.evaluations,
        )
        close = {
            (f"{d.stages[0].device} alone, " if len(d.stages) == 1 < len(decision.stages) else "")
            + f"micro-batches of {d.prefill_microbatch} and {d.decode_microbatch}": d
            for k, (_, d, _) in enumerate(replays)
            if k != chosen
        }
        close |= serving_near(chains, decision, seed=problem.seed)
        # What is late cannot be the best in a draw; the law that found them knows no time limit.
        close = {name: d for name, d in close.items() if self.judged(problem, d).limits_met}
        notes = self.assumptions(problem)
        notes += tuple(f"{chains.name(k)} is left out: {why}" for k, why in chains.unable().items())
        ranks = problem.cluster.ranks()
        if any(s.degree > 1 and ranks[s.rank].name.kind == "cpu" for s in decision.stages):
            notes = (*notes, _SUMS_OF_PROCESSORS)
        notes += kernel_notes(decision.stages, ranks)
        notes += expert_notes(serving_model(problem), decision.stages, ranks)
        if any(sizes.lean for sizes in chains.sizes()):
            notes = (*notes, _LEAN if chains.leaner(decision) else _FAST)
        return Choice(decision, bound, notes, close)

    def _in_time(
        self, problem: Problem[ServingWorkload], chains: ServingChains, free: Answers,
        fastest: list[_Replay],
    ) -> tuple[Answers, list[_Replay]]:  # fmt: skip
        """What meets the time limits when simulated, and what the solver knows of it.

        Answers that the solver finds under the limits, and those of the fastest that keep them all
        the same. Where there is none, what others would do: the law, which is off by a little, may
        leave out what is in time.

        Args:
            problem: with limits.
            chains: its chain problems.
            free: answers without limits.
            fastest: the best of them.

        Raises:
            InfeasibleError: nothing is in time.
        """
        workload = problem.workload
        answers, limited = self._replayed(problem, chains, time_limits(workload))
        kept = [each for each in limited + fastest if not missed(workload, each[2].metrics)]
        if not limited or not kept:
            answers = dataclasses.replace(free, proven=False)
        if kept:
            return answers, kept
        for decision in self.baselines(problem).values():
            if not isinstance(decision, str) and self.judged(problem, decision).limits_met:
                found = Forecast.of(self, problem, decision)
                kept.append((self.objective(problem, decision, found.total_s), decision, found))
        if kept:
            return answers, kept
        if not limited:
            raise why_infeasible(chains)
        raise late(workload, limited[0][2].metrics)

    def _replayed(
        self, problem: Problem[ServingWorkload], chains: ServingChains, limits: TimeLimits
    ) -> tuple[Answers, list[_Replay]]:
        """The solver's answers under time limits; those near the best by it, each simulated.

        Where the best is a pipeline, so is what one device alone does.
        """
        answers = solve_cases(chains, limits, gap=GAP, within=REPLAY_WITHIN)
        ranked, best = sorted(answers.found, key=lambda answer: answer[0]), answers.best_s
        near = [a for a in ranked if a[0] <= best * (1 + REPLAY_WITHIN)][:REPLAYS]
        if near and len(near[0][2].stages) > 1:
            near += alone(chains, limits, gap=GAP)
        decisions = [chains.decision(sizes, assignment) for _, sizes, assignment in near]
        return answers, [
            (law_s, decision, Forecast.of(self, problem, decision))
            for (law_s, _, _), decision in zip(near, decisions, strict=True)
        ]

    def _chains(self, problem: Problem[ServingWorkload]) -> ServingChains:
        """The chain problems of a problem, which baselines and rivals are made of too."""
        made: ServingChains = problem.kept.get(
            ServingChains, lambda: self._made_chains(problem), lambda _: 0
        )
        return made

    def _made_chains(self, problem: Problem[ServingWorkload]) -> ServingChains:
        model, workload = serving_model(problem), problem.workload
        total = workload.prompt_tokens + workload.new_tokens
        refuse_longer(model, total, "workload", f"{total} tokens a request")
        quality = plan_quality(model, workload, problem.seed)
        return ServingChains(
            Pricing(model, workload, problem.costs),
            problem.cluster,
            tuple(rank.capacity for rank in problem.cluster.ranks()),
            quality.omega,
            quality.max_omega,
            quality.cache_omega,
        )

    def assumptions(self, problem: Problem[Any]) -> tuple[str, ...]:
        """What every serving plan rests on."""
        model = serving_model(problem)
        notes = ["every prompt is padded to prompt_tokens and every request makes new_tokens"]
        notes += plan_quality(model, problem.workload, problem.seed).notes
        if model.weights == "random":
            notes.append(
                f"{model.name} has random weights: times hold for trained ones too, tokens and "
                "quality mean nothing, and only plans of equal average bits compare"
            )
        return tuple(notes)

    # ------------------------------------------------------------------------------- decisions

    def baselines(self, problem: Problem[ServingWorkload]) -> dict[str, ServingDecision | str]:
        """Even, memory-proportional and min-max splits; see `serving_baselines`.

        Where the bits of the KV cache are open, with the first number with which any of them fits.
        """
        found: dict[str, ServingDecision | str] = {}
        for bits in problem.workload.caches:
            found = serving_baselines(
                self._chains(with_cache(problem, bits)),
                lambda decision: Forecast.of(self, problem, decision).total_s,
            )
            if not all(isinstance(made, str) for made in found.values()):
                break
        return found

    def rivals(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, count: int
    ) -> dict[str, ServingDecision]:
        """Random feasible decisions predicted within 10 % of ``decision``."""
        return serving_rivals(
            self._chains(with_cache(problem, decision.kv_bits)),
            decision,
            count,
            seed=problem.seed,
            total_s=lambda other: Forecast.of(self, problem, other).total_s,
        )

    def objective(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, total_s: float
    ) -> float:
        """Simulated seconds, and the seconds that the workload says quality loss is worth."""
        return total_s + problem.workload.theta_s * decision.omega

    def judged(
        self, problem: Problem[ServingWorkload], decision: ServingDecision
    ) -> ServingDecision:
        """Late where it is so when simulated; quality and memory know no prices."""
        if time_limits(problem.workload).none or not decision.limits_met:
            return decision
        late = missed(problem.workload, Forecast.of(self, problem, decision).metrics)
        return decision.model_copy(update={"limits_met": not late})

    def schedule(self, problem: Problem[ServingWorkload], decision: ServingDecision) -> Schedule:
        """Prefill, then decode, stage by stage; see `ServingSchedule`.

        Raises:
            SpecError: a decision for another model, cluster or workload; see `check_decision`.
        """
        check_decision(serving_model(problem), problem.cluster, problem.workload, decision)
        pricing = Pricing(serving_model(problem), problem.workload, problem.costs)
        return ServingSchedule(pricing, problem.cluster, decision).build()

    def ranks(
        self, problem: Problem[ServingWorkload], decision: ServingDecision
    ) -> tuple[int, ...]:
        """Cluster rank of each device of each stage."""
        return decision.ranks

    def real(
        self, problem: Problem[ServingWorkload], decision: ServingDecision
    ) -> tuple[Schedule, tuple[int, ...]]:
        """As simulated; of a stage of several devices with every sum as an action of its own."""
        if all(stage.degree == 1 for stage in decision.stages):
            return super().real(problem, decision)
        check_decision(serving_model(problem), problem.cluster, problem.workload, decision)
        pricing = Pricing(serving_model(problem), problem.workload, problem.costs)
        schedule = ServingSchedule(pricing, problem.cluster, decision).pieces()
        return schedule, decision.ranks

    def processes(self, problem: Problem[ServingWorkload], decision: ServingDecision) -> int:
        """One a device; the schedule of a real run is not made for that."""
        return len(decision.ranks)

    def memory(
        self, problem: Problem[ServingWorkload], decision: ServingDecision
    ) -> tuple[MemoryLedger, ...]:
        """Weights, caches, embedding, head and workspace of each stage."""
        model, w = serving_model(problem), with_cache(problem, decision.kv_bits).workload
        sizes = MicroBatches(decision.prefill_microbatch, decision.decode_microbatch)
        capacity = [rank.capacity for rank in problem.cluster.ranks()]
        ledgers = []
        every = problem.cluster.ranks()
        for stage in decision.stages:
            held = stage_items(model, w, stage, sizes, every[stage.rank])
            ledgers += [MemoryLedger(every[r].label, capacity[r], held) for r in stage.ranks]
        return tuple(ledgers)

    def check(
        self, model: Model | None, cluster: Cluster, workload: ServingWorkload,
        decision: ServingDecision,
    ) -> None:  # fmt: skip
        """See `check_decision`."""
        if model is not None:
            check_decision(model, cluster, workload, decision)

    def metrics(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, timeline: Timeline
    ) -> dict[str, float]:
        """Throughput, time to first token, time per output token, bits and omega."""
        w = problem.workload
        total = timeline.makespan_s
        first = timeline.schedule.step == 0
        ttft = float(timeline.end_s[first].max(initial=0.0))
        figures = {
            "throughput_tokens_per_s": w.batch * w.new_tokens / total,
            "time_to_first_token_s": ttft,
            "average_bits": decision.average_bits,
            "omega": decision.omega,
        }
        settled = with_cache(problem, decision.kv_bits).workload
        quality = plan_quality(serving_model(problem), settled, problem.seed)
        increase = quality.perplexity_increase(decision.omega)
        if increase is not None:
            figures["perplexity_increase"] = increase
        if w.new_tokens > 1:
            figures["time_per_output_token_s"] = (total - ttft) / (w.new_tokens - 1)
        figures["concurrent_requests"] = self._concurrent(problem, decision)
        return figures

    def _concurrent(self, problem: Problem[ServingWorkload], decision: ServingDecision) -> float:
        """Requests whose caches fit at these micro-batches: the least of the stages."""
        w = problem.workload
        moving = 2 * (w.prompt_tokens + 1) * serving_model(problem).hidden  # a request's states
        most = math.inf
        for ledger in self.memory(problem, decision):
            each = ledger.items.get("kv_cache", 0) / w.batch + moving
            most = min(most, w.batch + (ledger.free_bytes or 0) // each)
        return most

    # ------------------------------------------------------------------------------- real runs

    def kernels(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, rank: int, *, mode: str
    ) -> Kernels:
        """The decoder stage of ``rank``, or its part of one; imports torch."""
        from foreplan.planner.serving.kernels import stage_kernels_of

        return stage_kernels_of(
            serving_model(problem), problem.workload, decision, rank, mode, problem.seed
        )

    def live(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, rank: int, *, mode: str
    ) -> Live:
        """A stage that requests go through as they come; imports torch."""
        from foreplan.planner.serving.live_stage import LiveStage

        return LiveStage.of(problem, [(decision, problem.workload.batch)], rank, mode)

    def alone(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Tokens of each request by itself."""
        from foreplan.planner.serving.live_stage import tokens_alone

        return tokens_alone(problem, [(decision, problem.workload.batch)], given)

    def reference(
        self, problem: Problem[ServingWorkload], decision: ServingDecision, *, mode: str
    ) -> dict[str, Any] | None:
        """Tokens of the same quantised model in one process, or its perplexity; see `judges`."""
        if mode == "quality":
            from foreplan.planner.serving.perplexity import held_out_perplexity

            model = serving_model(problem)
            return held_out_perplexity(model, problem.workload, decision, problem.seed)
        from foreplan.planner.serving.kernels import single_process_tokens

        return single_process_tokens(
            serving_model(problem), problem.cluster, problem.workload, decision, mode, problem.seed
        )

    def judges(self, problem: Problem[ServingWorkload]) -> bool:
        """Perplexity on held-out text, where weights are trained and the workload names a text."""
        w, model = problem.workload, serving_model(problem)
        return model.weights == "trained" and (w.text is not None or w.quality is not None)

    def agree(self, result: dict[str, Any], reference: dict[str, Any], *, mode: str) -> Agreement:
        """Equal tokens; under teacher forcing at least 98 % of the top-1 choices."""
        from foreplan.planner.serving.kernels import compare_tokens

        return compare_tokens(result, reference, mode)


def serving_model(problem: Problem[Any]) -> Model:
    """The model to serve.

    Raises:
        SpecError: there is none, or its cache cannot have the workload's bits.
    """
    if problem.model is None:
        raise SpecError("model", got=None, expected="a language model to serve")
    if problem.model.latent is not None and problem.workload.kv_bits == 8:
        raise SpecError(
            "workload.kv_bits", got=8,
            expected=f"16 or auto: the latents that {problem.model.name} caches are not quantised",
        )  # fmt: skip
    return problem.model
