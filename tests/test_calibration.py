from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placewright.backends import Run, Trace
from placewright.calibration import (
    Calibration,
    Correction,
    Fidelity,
    Timed,
    check,
    corrected,
    fidelity,
    fit,
    op_table,
    rank_correlation,
    varied_placements,
    why_distrusted,
)
from placewright.cluster import Cluster
from placewright.costs import Costs, Source, calibrated_cluster
from placewright.errors import CostsError
from placewright.measurement import Measurement, Outcome
from placewright.placement import Placement, everything_on
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.simulator import Simulator
from placewright.testing import layered_graph


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(layered_graph(300, 8), Cluster.load("cpu2"), ProblemConfig(groups=40))


def judged(problem: Problem, placements: list[Placement], seconds: Sequence[float]) -> Fidelity:
    """Against times that are the same in both passes."""
    steps = {
        placement: Timed(steps=[float(each)], factor=1.0)
        for placement, each in zip(placements, seconds, strict=True)
    }
    return fidelity(problem, [steps, steps])[1]


@pytest.mark.parametrize(
    "truth",
    [
        Correction(ops=1.7, latency=0.8, bandwidth=0.5, overhead=0.5, overhead_bytes=0.7),
        Correction(ops=1.7, latency=2.0, bandwidth=0.5, gap=0.2, overhead=0.5),
        Correction(ops=1.4, gap=0.2, overhead=0.3, contention=0.6),
    ],
    ids=["overhead", "gap", "contention"],
)
def test_a_correction_is_found_again(problem: Problem, truth: Correction) -> None:
    placements = varied_placements(problem, 16)
    rows = np.stack([placement.devices for placement in placements])
    seconds = Simulator(truth.apply(problem)).run(rows).step_seconds.tolist()
    found, _ = fit(problem, placements, seconds)
    fresh = varied_placements(problem, 12, seed=5)
    result = judged(
        found.apply(problem),
        fresh,
        Simulator(truth.apply(problem))
        .run(np.stack([p.devices for p in fresh]))
        .step_seconds.tolist(),
    )
    assert result.error < 0.03
    assert result.spearman > 0.97
    assert found.contention == pytest.approx(truth.contention, abs=0.1)
    before = judged(problem, fresh, result.measured)
    assert before.error > 0.2


def test_what_a_processor_beside_accelerators_takes_is_found_again() -> None:
    """A processor that waits for accelerators is slower than alone, and so are its links; what
    accelerators take and send each other is as it was measured."""
    problem = make_problem(
        layered_graph(300, 8), Cluster.load("h200-parts4"), ProblemConfig(groups=40)
    )
    truth = Correction(cpu_ops=1.4, cpu_latency=2.0, cpu_wait=60e-6)
    placements = varied_placements(problem, 24)
    rows = np.stack([placement.devices for placement in placements])
    seconds = Simulator(truth.apply(problem)).run(rows).step_seconds
    found, _ = fit(problem, placements, seconds.tolist())
    fresh = np.stack([p.devices for p in varied_placements(problem, 24, seed=5)])
    wanted = Simulator(truth.apply(problem)).run(fresh).step_seconds
    got = Simulator(found.apply(problem)).run(fresh).step_seconds
    as_measured = Simulator(problem).run(fresh).step_seconds
    assert np.mean(np.abs(got / wanted - 1)) < 0.05
    assert np.mean(np.abs(as_measured / wanted - 1)) > 0.2
    assert found.ops == pytest.approx(1.0, rel=0.05)
    # Processors alone are beside nobody.
    alone = make_problem(problem.graph, Cluster.load("cpu2"))
    costs = Correction(cpu_ops=3.0, cpu_wait=1.0).apply(alone).costs.op_seconds
    np.testing.assert_array_equal(costs, Correction().apply(alone).costs.op_seconds)


def test_what_placements_do_not_say_stays_as_it_is(problem: Problem) -> None:
    """One device at a time says nothing about several at the same time."""
    cluster = dataclasses.replace(problem.cluster, contention=0.4)
    problem = dataclasses.replace(problem, cluster=cluster)
    singles = [everything_on(problem, device) for device in range(problem.num_devices)]
    rows = np.stack([single.devices for single in singles])
    found, error = fit(problem, singles, Simulator(problem).run(rows).step_seconds.tolist())
    assert found.contention == 0.4
    assert error == pytest.approx(0.0)


def test_ops_that_were_traced_on_a_slower_machine_do_not_hide_what_sending_costs(
    problem: Problem,
) -> None:
    truth = Correction(overhead=0.3, overhead_bytes=0.3, contention=0.4)
    singles = [everything_on(problem, device) for device in range(problem.num_devices)]
    placements = [*singles, *varied_placements(problem, 16)]
    rows = np.stack([placement.devices for placement in placements])
    noise = np.exp(0.02 * np.random.default_rng(0).standard_normal(len(rows)))
    seconds = (noise * Simulator(truth.apply(problem)).run(rows).step_seconds).tolist()
    for slower in (1.0, 1.08, 1.2):
        found, _ = fit(Correction(ops=slower).apply(problem), placements, seconds)
        assert found.ops * slower == pytest.approx(1.0, rel=0.03)


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[Correction]:
    """What is tried from now on."""
    tried: list[Correction] = []
    apply = Correction.apply

    def watched(correction: Correction, problem: Problem) -> Problem:
        tried.append(correction)
        return apply(correction, problem)

    monkeypatch.setattr(Correction, "apply", watched)
    return tried


def test_a_fit_that_may_not_try_much_is_better_than_none(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = Correction(ops=1.3, latency=2.0, bandwidth=0.6, contention=0.2)
    placements = varied_placements(problem, 16)
    rows = np.stack([placement.devices for placement in placements])
    seconds = Simulator(truth.apply(problem)).run(rows).step_seconds.tolist()
    tried = _watched(monkeypatch)
    _, before = fit(problem, placements, seconds, most_tries=0)
    tried.clear()
    fit(problem, placements, seconds)
    unlimited = len(tried)
    tried.clear()
    _, error = fit(problem, placements, seconds, most_tries=200)
    assert len(tried) <= 200 < unlimited
    assert error < before / 2


def test_what_nobody_packs_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between partitions of a GPU streams copy; the links say so, and not the step times."""
    problem = make_problem(layered_graph(40, 4), Cluster.load("h200-parts4x8"))
    placements = varied_placements(problem, 6)
    rows = np.stack([placement.devices for placement in placements])
    seconds = (1.1 * Simulator(problem).run(rows).step_seconds).tolist()
    tried = _watched(monkeypatch)
    _, error = fit(problem, placements, seconds)
    assert {(one.overhead, one.overhead_bytes) for one in tried} == {(0.0, 0.0)}
    assert error < 0.05


def test_one_wrong_measurement_does_not_spoil_the_fit(problem: Problem) -> None:
    truth = Correction(ops=2.0)
    placements = varied_placements(problem, 12)
    rows = np.stack([placement.devices for placement in placements])
    seconds = Simulator(truth.apply(problem)).run(rows).step_seconds.tolist()
    seconds[3] *= 5
    found, _ = fit(problem, placements, seconds)
    assert found.ops == pytest.approx(2.0, rel=0.1)


def run(problem: Problem, seconds: float, share: float, device: int = 0) -> Run:
    """A run whose trace has `share` of its time in its ops, all on one device."""
    names = problem.graph.op_names
    return Run(
        measurement=Measurement(outcome=Outcome.OK, step_seconds=(seconds, seconds)),
        trace=Trace(
            op_seconds=dict.fromkeys(names, share * seconds / problem.graph.num_ops),
            device_of=dict.fromkeys(names, device),
        ),
    )


def without(run: Run, missing: Sequence[str]) -> Run:
    """The same run, whose trace lacks some ops."""
    assert run.trace is not None
    trace = Trace(
        op_seconds={n: s for n, s in run.trace.op_seconds.items() if n not in missing},
        device_of={n: d for n, d in run.trace.device_of.items() if n not in missing},
    )
    return dataclasses.replace(run, trace=trace)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_ops_add_up_to_the_step(problem: Problem, share: float) -> None:
    table = op_table(problem, {0: run(problem, 0.3, share)})
    assert table.op_seconds.sum() == pytest.approx(0.3)
    assert np.all(table.source == Source.TABLE)


def test_devices_of_a_kind_are_averaged(problem: Problem) -> None:
    # The first device's trace lacks one op, which must not be taken for the whole second step.
    first, second = run(problem, 0.3, 0.5), run(problem, 0.5, 0.5, device=1)
    missing = problem.graph.op_names[7]
    first = without(first, [missing])
    count = problem.graph.num_ops
    (seconds,) = op_table(problem, {0: first, 1: second}).op_seconds
    assert seconds[7] == pytest.approx(0.5 / count)
    assert np.delete(seconds, 7) == pytest.approx((0.3 / (count - 1) + 0.5 / count) / 2)


def test_what_ran_elsewhere_is_the_cost_of_that_device() -> None:
    problem = make_problem(layered_graph(40, 4), Cluster.load("k80x2"), ProblemConfig(groups=8))
    gpu, cpu = problem.cluster.device_number("gpu:0"), problem.cluster.device_number("cpu:0")
    traced = run(problem, 0.3, 0.5, device=gpu)
    assert traced.trace is not None
    name = problem.graph.op_names[7]
    trace = dataclasses.replace(traced.trace, device_of={**traced.trace.device_of, name: cpu})
    traced = dataclasses.replace(traced, trace=trace)
    table = op_table(problem, {gpu: traced})
    on_cpu = table.kinds.index(problem.cluster.devices[cpu].kind.name)
    on_gpu = table.kinds.index(problem.cluster.devices[gpu].kind.name)
    assert np.flatnonzero(table.source[on_cpu] == Source.TABLE).tolist() == [7]
    assert table.source[on_gpu, 7] == Source.ROOFLINE
    assert np.sum(table.source[on_gpu] == Source.TABLE) == problem.graph.num_ops - 1


def test_a_calibration_is_a_costs_file(
    problem: Problem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = op_table(problem, {0: run(problem, 0.3, 1.0)})
    link = dataclasses.replace(
        problem.cluster.links[0], latency_seconds=1e-4, overhead_seconds=3e-5
    )
    cluster = dataclasses.replace(problem.cluster, links=(link,))
    found = Calibration(table=table, cluster=cluster)
    path = tmp_path / "costs.json"
    found.save(path, problem.graph)
    assert np.allclose(Costs.load(path, problem.graph).op_seconds, table.op_seconds)
    assert calibrated_cluster(path, problem.cluster) == cluster
    # Of no use for another machine.
    other = Cluster.load("k80x2")
    assert calibrated_cluster(path, other) == other
    assert f"links were measured on cluster {cluster.name!r}" in caplog.text
    with pytest.raises(CostsError, match="no such costs file"):
        calibrated_cluster(tmp_path / "none.json", other)
    # What a run left behind is of that run's problem and no other.
    assert Calibration.load(path, problem).cluster == cluster
    with pytest.raises(CostsError, match="costs of cluster 'cpu2', not of 'k80x2'"):
        Calibration.load(path, make_problem(problem.graph, other, ProblemConfig(groups=40)))
    with pytest.raises(CostsError, match="costs of another graph"):
        Calibration.load(path, make_problem(layered_graph(20, 4), problem.cluster))
    path.write_text("{}")
    with pytest.raises(CostsError, match="no costs that a calibration wrote"):
        Calibration.load(path, problem)
    path.write_text('{"format": "pla')
    with pytest.raises(CostsError, match=r"costs\.json"):
        Calibration.load(path, problem)


def test_corrected_keeps_what_it_learnt(problem: Problem) -> None:
    base = Calibration(
        table=op_table(problem, {0: run(problem, 0.3, 1.0)}), cluster=problem.cluster
    )
    placements = varied_placements(problem, 10)
    under = Correction(ops=1.5, overhead=0.4).apply(base.problem(problem))
    rows = np.stack([placement.devices for placement in placements])
    seconds = Simulator(under).run(rows).step_seconds.tolist()
    better = corrected(problem, base, placements, seconds)
    assert judged(better.problem(problem), placements, seconds).error < 0.03
    assert judged(base.problem(problem), placements, seconds).error > 0.2


def test_what_was_fitted_is_what_is_predicted(problem: Problem, tmp_path: Path) -> None:
    # A trace that knows only every second op: the others are estimated.
    traced = without(run(problem, 0.3, 1.0), problem.graph.op_names[::2])
    base = Calibration(table=op_table(problem, {0: traced}), cluster=problem.cluster)
    under = base.problem(problem)
    placements = varied_placements(problem, 10)
    rows = np.stack([placement.devices for placement in placements])
    truth = Correction(ops=1.8, latency=1.3, bandwidth=0.4, overhead=0.4)
    seconds = Simulator(truth.apply(under)).run(rows).step_seconds.tolist()
    correction, _ = fit(under, placements, seconds)
    assert correction.ops > 1.2
    promised = Simulator(correction.apply(under)).run(rows).step_seconds
    found = corrected(problem, base, placements, seconds)
    assert np.array_equal(Simulator(found.problem(problem)).run(rows).step_seconds, promised)
    # Also by way of a file.
    found.save(tmp_path / "costs.json", problem.graph)
    again = Calibration(
        table=Costs.load(tmp_path / "costs.json", problem.graph),
        cluster=calibrated_cluster(tmp_path / "costs.json", problem.cluster),
    )
    assert np.allclose(Simulator(again.problem(problem)).run(rows).step_seconds, promised)


def test_varied_placements_are_distinct_and_allowed(problem: Problem) -> None:
    placements = varied_placements(problem, 20, seed=1)
    assert len(set(placements)) == 20
    assert placements == varied_placements(problem, 20, seed=1)
    assert placements != varied_placements(problem, 20, seed=2)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [3, 3, 9]) == pytest.approx(1.0)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    assert math.isnan(rank_correlation([1], [1]))


def test_the_noise_is_that_between_two_passes(problem: Problem) -> None:
    placements = varied_placements(problem, 6)
    group_of = problem.grouping.group_of
    calls: list[bytes] = []

    def measure(devices: Any) -> Run:
        # Every run has steps that are all alike, but no two runs of a placement are.
        calls.append(devices.tobytes())
        number = [p.devices[group_of].tobytes() for p in placements].index(calls[-1])
        seconds = 1.0 + (number if len(calls) <= 9 else 5 - number)
        return Run(measurement=Measurement(outcome=Outcome.OK, step_seconds=(seconds,) * 4))

    ran, result = check(problem, SimpleNamespace(measure=measure), placements)
    assert ran == placements
    assert len(calls) == 18  # twice six, with three references between each
    assert len(result.fastest_half.predicted) == 3
    assert result.repeated < 0.0
    assert len(result.raw) == 6


def test_fresh_placements_are_none_that_were_fitted(problem: Problem) -> None:
    under = Correction(ops=2.0).apply(problem)
    fitted = varied_placements(problem, 12)
    fresh = varied_placements(under, 12, without=fitted)  # of the same seed
    assert len(fresh) == 12
    assert not {p.devices.tobytes() for p in fresh} & {p.devices.tobytes() for p in fitted}


def test_a_calibration_that_cannot_be_trusted_says_why() -> None:
    measured = [1.0 + 0.1 * number for number in range(16)]
    assert why_distrusted(measured, measured, 0.0) == ""
    assert "other processes took 60% of the cores" in why_distrusted(measured, measured, 0.6)
    # The best are predicted in the opposite order; the others do not help.
    wrong = [*measured[:8][::-1], *measured[8:]]
    assert "rank correlation of only -1.00" in why_distrusted(wrong, measured, 0.0)
    # Where placements are equally fast, or few, their order is chance.
    equal = [1.0 + 0.001 * number for number in range(16)]
    assert why_distrusted(equal[::-1], equal, 0.0) == ""
    assert why_distrusted(measured[:4][::-1], measured[:4], 0.0) == ""
