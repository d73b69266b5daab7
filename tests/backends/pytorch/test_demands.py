"""What calls take of a GPU, with a timer that knows the answer; and links that are told apart by
routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from placewright.backends.links import routes_to_time, solved  # noqa: E402
from placewright.backends.pytorch.demands import find_demands  # noqa: E402
from placewright.backends.pytorch.steps import Call, Ref, Source, Step  # noqa: E402
from placewright.backends.pytorch.works import works_of  # noqa: E402
from placewright.cluster import Cluster  # noqa: E402


class KnownTimer:
    """Every call takes so many elements of a device that has 100 for all streams."""

    def __init__(self) -> None:
        self.timed: list[int] = []

    def seconds(self, call: Callable[[], Any], streams: int) -> float | None:
        elements = int(call().numel())
        if elements == 7:
            return None
        if streams == 1:
            self.timed.append(elements)
        return 1e-6 * elements * max(1.0, streams * elements / 100)


def a_step(sizes: list[int]) -> Step:
    """Each input is squared twice, in ops of two calls."""
    sources = tuple(
        Source(value=i, kind="input", name=str(i), shape=(n,), dtype="float32", op=i)
        for i, n in enumerate(sizes)
    )
    count = len(sizes)
    calls = []
    for i in range(count):
        for j in range(2):
            read = i if j == 0 else count + 2 * i
            calls.append(
                Call(
                    value=count + 2 * i + j, target="aten.mul.Tensor", args=(Ref(read), Ref(read)),
                    kwargs={}, op=count + i,
                )
            )  # fmt: skip
    return Step(num_values=3 * count, sources=sources, calls=tuple(calls), results=())


def test_shares_of_a_gpu() -> None:
    step, timer = a_step([100, 50, 10, 50, 7]), KnownTimer()
    sources = {s.value: torch.ones(s.shape) for s in step.sources}
    found = find_demands(works_of(step), step.num_values, sources, torch.device("cpu"), timer, 4)
    # Of four at once: all of it, half of it, and no more than a fourth can be told. 7 failed.
    assert found == pytest.approx({5: 1.0, 6: 0.5, 7: 0.25, 8: 0.5})
    assert timer.timed == [100, 50, 10]  # equal calls once
    assert all(torch.equal(t, torch.ones(t.shape)) for t in sources.values())


def test_no_time_left() -> None:
    step, timer = a_step([100]), KnownTimer()
    sources = {s.value: torch.ones(s.shape) for s in step.sources}
    found = find_demands(
        works_of(step), step.num_values, sources, torch.device("cpu"), timer, 4, limit_seconds=0.0
    )
    assert found == {}


def test_links_to_the_hosts_memory_are_told_from_routes() -> None:
    cluster = Cluster.load("h200-parts4")
    routes = routes_to_time(cluster)
    names = [[cluster.links[link].name for link in links] for _, links in routes]
    assert sorted(names) == [["pcie0", "host"], ["pcie0", "pcie0"]]
    sizes = (4096, 1 << 20)
    port, host = np.array([8e-6, 30e-6]), np.array([50e-6, 90e-6])
    seconds = [(2 * port if len(set(n)) == 1 else port + host).tolist() for n in names]
    found = solved(cluster, routes, seconds, sizes)
    assert found["pcie0"] == pytest.approx(port, rel=0.02)
    assert found["host"] == pytest.approx(host, rel=0.02)


def test_one_route_over_two_links_is_shared_as_described() -> None:
    cluster = Cluster.load("h200-parts4")
    ((pair, links),) = [r for r in routes_to_time(cluster) if len(set(r[1])) == 2]
    found = solved(cluster, [(pair, links)], [[80e-6]], [0])
    assert found["pcie0"][0] + found["host"][0] == pytest.approx(80e-6, rel=0.01)
    assert found["host"][0] == pytest.approx(3 * found["pcie0"][0], rel=0.05)
