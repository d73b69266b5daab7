"""Links that cannot be timed alone, as a switch is at one end: told from routes over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from placewright.cluster import Cluster

Pair = tuple[int, int]

_AS_DESCRIBED = 0.03
"""Weight of what the description says, where routes leave it open how links share a time."""


def routes_to_time(cluster: Cluster) -> list[tuple[Pair, tuple[int, ...]]]:
    """Two devices, and the numbers of the links between them: one route for each set of links."""
    link_of: list[int] = []
    for number, link in enumerate(cluster.links):
        link_of += [number, number] if link.duplex else [number]
    routes = cluster.routes
    found: dict[tuple[int, ...], Pair] = {}
    for source in range(cluster.num_devices):
        for target in range(source + 1, cluster.num_devices):
            route = source * cluster.num_devices + target
            channels = routes.channels[routes.offsets[route] : routes.offsets[route + 1]]
            found.setdefault(tuple(sorted(link_of[c] for c in channels)), (source, target))
    return [(pair, links) for links, pair in found.items()]


def solved(
    cluster: Cluster,
    routes: Sequence[tuple[Pair, tuple[int, ...]]],
    seconds: Sequence[Sequence[float]],
    sizes: Sequence[int],
) -> Mapping[str, Sequence[float]]:
    """Name of each link on these routes -> seconds that a tensor of each size takes over it, which
    add up to what each route takes."""
    if not routes:
        return {}
    used = sorted({link for _, links in routes for link in links})
    result: dict[str, list[float]] = {cluster.links[link].name: [] for link in used}
    for column, size in enumerate(sizes):
        said = np.array(
            [
                cluster.links[link].latency_seconds + size / cluster.links[link].bandwidth
                for link in used
            ]
        )
        said = np.maximum(said, 1e-9)
        truth = np.maximum(np.array([times[column] for times in seconds]), 1e-9)
        parts = np.array([[links.count(link) for link in used] for _, links in routes]) * said
        # Factors on what is said, all in shares of what was measured.
        usual = float(np.median(truth / np.maximum(parts.sum(axis=1), 1e-12)))
        matrix = np.vstack([parts / truth[:, np.newaxis], _AS_DESCRIBED * np.eye(len(used))])
        wanted = np.concatenate([np.ones(len(truth)), np.full(len(used), _AS_DESCRIBED * usual)])
        factors = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
        for link, value in zip(used, said * np.maximum(factors, 0.02), strict=True):
            result[cluster.links[link].name].append(float(value))
    return result
