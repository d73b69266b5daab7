"""What ops take of a real GPU that several devices share, and how long its links take."""

from __future__ import annotations

import pytest

import placewright.backends as backends
from placewright import calibration
from placewright.backends.base import LoadOptions
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.program import TorchProgram
from placewright.backends.pytorch.runner import TorchRunner
from placewright.cluster import chosen
from placewright.placement import everything_on
from placewright.problem import make_problem
from placewright.simulator import Simulator

pytestmark = pytest.mark.gpu

CONFIG = TorchRunConfig(steps=6, max_steps=10, time_limit_seconds=60.0)


@pytest.fixture(scope="module")
def rnnlm() -> TorchProgram:
    program = backends.get("pytorch").load("rnnlm", LoadOptions(scale="small"))
    assert isinstance(program, TorchProgram)
    return program


@pytest.mark.parametrize("names", ["cuda:0/stream:0-3", "cuda:0/part:0-3"])
def test_demands_of_a_model(rnnlm: TorchProgram, names: str) -> None:
    cluster = chosen([names], through_host=True, issue="none")
    with TorchRunner(rnnlm, cluster, CONFIG) as runner:
        found = runner.demands()
    assert set(found) == {0}
    shares = list(found[0].values())
    assert len(shares) > rnnlm.graph.num_ops / 4
    assert all(0 <= share <= 1 for share in shares)
    assert max(shares) > min(shares)


def test_links_of_partitions(rnnlm: TorchProgram) -> None:
    cluster = chosen(["cuda:0/part:0-3", "cpu"], through_host=True, issue="none")
    sizes = [1 << 12, 1 << 24]
    with TorchRunner(rnnlm, cluster, CONFIG) as runner:
        links = runner.time_links(sizes)
    assert set(links) == {"pcie0", "host"}
    small, large = links["pcie0"]
    assert 1e-6 < small < 200e-6
    assert 5e9 < sizes[1] / large < 200e9


def test_a_calibration_on_streams(rnnlm: TorchProgram) -> None:
    cluster = chosen(["cuda:0/stream:0-3"], issue="none")
    problem = make_problem(rnnlm.graph, cluster)
    with TorchRunner(rnnlm, cluster, CONFIG) as runner:
        varied = calibration.varied_placements(problem, 4)
        found = calibration.calibrate(problem, runner, varied, traces=3, forced=True)
    # How long anything takes is no test: others may use the GPU meanwhile.
    under = found.problem(problem)
    single = everything_on(problem, 0)
    assert 1e-5 < Simulator(under).run(single.devices[None]).step_seconds[0] < 10.0
    assert under.costs.demand.max() > under.costs.demand.min()
    assert found.fitted_to
