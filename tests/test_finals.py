from __future__ import annotations

import statistics

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement
from placewright.problem import ProblemConfig, make_problem
from placewright.session.finals import Comparison, in_rounds
from placewright.testing import layered_graph

PROBLEM = make_problem(layered_graph(20, 4), Cluster.load("cpu2"), ProblemConfig(groups=4))
A, B, C = (
    Placement.of(PROBLEM, np.array([n % 2, n // 2] + [0] * (PROBLEM.num_groups - 2), np.int32))
    for n in range(3)
)


def ok(*steps: float) -> Measurement:
    return Measurement(outcome=Outcome.OK, step_seconds=steps)


def test_rounds_count_alike_however_many_steps_they_have() -> None:
    answers = iter([ok(1.0), ok(3.0, 3.0, 3.0), ok(1.0), ok(3.0)])
    finals = in_rounds([A], lambda placement: next(answers), 4)
    assert finals.means == {A: [1.0, 3.0, 1.0, 3.0]}
    measurement = finals.measurement(A)
    assert measurement.mean_seconds == 2.0
    # Of four rounds, not of six steps: t = 3.18 with three degrees of freedom.
    width = 3.18 * statistics.stdev([1.0, 3.0, 1.0, 3.0]) / 2
    assert measurement.half_width_seconds == pytest.approx(width)


def test_the_machine_getting_slower_does_not_move_the_ratio() -> None:
    speed = {A: 1.0, B: 2.0}
    turn = 0

    def measure(placement: Placement) -> Measurement:
        nonlocal turn
        turn += 1
        return ok(speed[placement] * 1.5 ** ((turn - 1) // 2))  # slower every round

    finals = in_rounds([A, B], measure, 4)
    compared = finals.compare(A, B, "b")
    assert compared.method == "b"
    assert compared.ratio == pytest.approx(2.0)
    assert compared.half_width == pytest.approx(0.0)
    width = finals.measurement(A).half_width_seconds
    assert width is not None
    assert width > 0.5  # while the times themselves are far apart


def test_nobody_keeps_his_place_in_the_order() -> None:
    seen: list[Placement] = []

    def measure(placement: Placement) -> Measurement:
        seen.append(placement)
        return ok(1.0)

    in_rounds([A, B, C], measure, 4)
    rounds = [seen[i : i + 3] for i in range(0, 12, 3)]
    assert all(set(each) == {A, B, C} for each in rounds)
    assert rounds[1] == rounds[0][::-1]
    assert rounds[3] == rounds[2][::-1]


def test_one_that_fails_drops_out_and_the_others_go_on() -> None:
    count = 0

    def measure(placement: Placement) -> Measurement:
        nonlocal count
        count += placement == B
        if placement == B and count == 2:
            return Measurement(outcome=Outcome.FAILED, reason="broke")
        return ok(1.0)

    finals = in_rounds([A, B, C], measure, 4)
    assert {p: len(means) for p, means in finals.means.items()} == {A: 4, C: 4}
    assert finals.measurement(B).reason == "broke"
    assert count == 2


def test_a_round_cut_short_does_not_count() -> None:
    left = 7

    def measure(placement: Placement) -> Measurement | None:
        nonlocal left
        left -= 1
        return ok(1.0) if left >= 0 else None

    finals = in_rounds([A, B, C], measure, 4)
    assert {p: len(means) for p, means in finals.means.items()} == {A: 2, B: 2, C: 2}


@pytest.mark.parametrize(
    ("ratio", "half_width", "open_question"),
    [(1.28, 0.97, True), (1.28, 0.1, False), (0.99, 0.02, True), (1.5, None, False)],
)
def test_a_gain_within_the_noise_is_no_gain(
    ratio: float, half_width: float | None, open_question: bool
) -> None:
    found = Comparison(method="single", ratio=ratio, half_width=half_width)
    assert found.within_noise == open_question
