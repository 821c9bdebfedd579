"""Contract tests for planners, cost models and exporters of other packages.

Each function calls an implementation as the toolkit would and raises `ContractError`, an
`AssertionError`, where a promise of its base class does not hold; call it from a test of any
framework. Foreplan's own implementations pass the same functions.

    def test_my_planner_keeps_the_contract():
        check_planner(MyPlanner(), Problem(model=None, cluster=..., workload=..., costs=...))
"""

from foreplan.testing.contract import ContractError as ContractError
from foreplan.testing.cost_sources import check_cost_source as check_cost_source
from foreplan.testing.exporters import check_exporter as check_exporter
from foreplan.testing.planners import check_planner as check_planner

__all__ = ["ContractError", "check_cost_source", "check_exporter", "check_planner"]
