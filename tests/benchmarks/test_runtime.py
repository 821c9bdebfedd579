"""What the runtime itself costs: actions whose kernels do nothing, on one rank."""

from foreplan.cost_models.costs import HostLaunch
from foreplan.cost_models.schedule_builder import ScheduleBuilder
from foreplan.planner.verify.clock import HostClock
from foreplan.planner.verify.rank_program import rank_programs
from foreplan.planner.verify.runtime import Runtime

ACTIONS = 20_000


class Idle:
    """Kernels and channels without work or transfers."""

    def reset(self):
        pass

    def run(self, action):
        pass

    def payload(self, action):
        return None

    buffer = payload

    def prepare(self, sends, buffers, collectives):
        pass

    def post(self, place, step, tensor):
        pass

    def wait(self, place):
        pass


def test_actions(benchmark) -> None:
    builder = ScheduleBuilder(["cpu"])
    for batch in range(ACTIONS):
        builder.add("F", 0, HostLaunch(0), microbatch=batch)
    program = rank_programs(builder.build())[0]
    runtime = Runtime(program, Idle(), Idle(), HostClock(len(program.steps)))
    benchmark.pedantic(runtime.execute, rounds=10, warmup_rounds=1)
    if benchmark.stats is not None:  # the plain test run times nothing
        benchmark.extra_info["us_an_action"] = benchmark.stats.stats.median / ACTIONS * 1e6
