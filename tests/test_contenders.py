from __future__ import annotations

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.graph import Op, Tensor
from placewright.measurement import Measurement, Outcome, Trial
from placewright.placement import Placement
from placewright.problem import Problem, ProblemConfig
from placewright.problem import make_problem as pose
from placewright.session.config import SearchConfig
from placewright.session.contenders import MOST_TRIALS, Contenders
from placewright.session.driver import Session
from placewright.simulator import over_orders
from placewright.testing import layered_graph, make_problem, uniform_cluster


def trials(seconds: list[float | None]) -> list[Trial]:
    ops = [Op(name=f"op{i}", type="Op", seconds={"dev": 1.0}) for i in range(12)]
    problem = make_problem(ops, [], uniform_cluster(2))
    made = []
    for number, time in enumerate(seconds):
        measurement = Measurement(outcome=Outcome.FAILED, reason="it broke")
        if time is not None:
            measurement = Measurement(outcome=Outcome.OK, step_seconds=(time,))
        devices = [number >> bit & 1 for bit in range(12)]
        placement = Placement.of(problem, devices)
        made.append(Trial(placement=placement, measurement=measurement, placer="test"))
    return made


def test_those_near_the_best_are_kept_from_the_whole_search() -> None:
    contenders = Contenders()
    some = trials([2.0, None, 1.0, 1.01, 1.5, 1.005])
    contenders.add_all(some)
    assert contenders.near_the_best() == [some[2], some[3], some[5]]
    # Of thousands, some of every stretch.
    every = trials(list(np.linspace(1.0, 0.999, 4000)))
    contenders = Contenders()
    contenders.add_all(every)
    kept = [every.index(trial) for trial in contenders.near_the_best()]
    assert MOST_TRIALS / 2 <= len(kept) <= MOST_TRIALS
    assert max(np.diff(kept)) <= 4 * 4000 / MOST_TRIALS
    again = Contenders()
    again.add_all(every)
    assert again.near_the_best() == contenders.near_the_best()


def branches() -> Problem:
    """Many ops of the same length that are ready at once, so that their order decides much."""
    rng = np.random.default_rng(0)
    ops, edges = [], []
    for branch in range(40):  # too many ops for `exact`, which would solve for long
        for step in range(4):
            ops.append(
                Op(
                    name=f"b{branch}/op{step}", type="Op", outputs=(Tensor(1000),),
                    seconds={"dev": float(rng.choice([1.0, 2.0, 4.0]))},
                )
            )  # fmt: skip
            if step:
                edges.append((f"b{branch}/op{step - 1}", f"b{branch}/op{step}"))
    return make_problem(ops, edges, uniform_cluster(3, bandwidth=1000.0))


@pytest.mark.parametrize("method", ["single,heft,m-etf,local-search", "auto"])
def test_the_answer_is_the_best_by_the_mean_of_all_methods(method: str) -> None:
    problem = branches()
    result = Session(problem, SearchConfig(method=method, trials=2000, seed=4)).run()
    assert result.best is not None
    rows = {row["method"]: row["step_seconds"] for row in result.table}
    # Every figure is of the same kind: the answer's is its method's, and the least of all.
    assert result.step_seconds == rows[result.best.placer]
    assert result.step_seconds == min(seconds for seconds in rows.values() if seconds is not None)
    (found,) = over_orders(result.placed, [result.placement], seed=4)
    assert result.step_seconds == found.mean_seconds
    assert result.summary()["step_orders"] == found.orders == 8
    assert result.gap == pytest.approx(1 - result.lower_bound_seconds / result.step_seconds)
    single = result.best_single
    assert single is not None
    assert result.speed_up == result.seconds_of(single) / result.step_seconds
    assert result.makeup is not None
    assert result.makeup.speed_up == pytest.approx(result.speed_up)
    # Methods' own bests in the order that they tried would have been worse, or as good.
    bests = [m.best for m in result.methods if m.best is not None]
    assert result.step_seconds <= min(result.seconds_of(trial) for trial in bests)
    assert all(sum(parts) > 0 for parts in result.parts.values())


def test_a_bound_that_holds_for_the_groups_only_says_so() -> None:
    graph = layered_graph(400, 8)
    problem = pose(graph, Cluster.load("k80x2"), ProblemConfig(groups=20))
    assert problem.refined is not problem
    by_groups = Session(problem, SearchConfig(method="single", trials=10)).run()
    assert by_groups.bound_by_groups
    by_ops = Session(problem, SearchConfig(method="single", trials=10, op_level=True)).run()
    assert not by_ops.bound_by_groups
    assert by_ops.summary()["lower_bound_by"] == "op"
