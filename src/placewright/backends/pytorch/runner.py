"""Runs PyTorch steps under placements: which process there is, and what it is told."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from placewright.backends.links import Pair, routes_to_time, solved
from placewright.backends.process_runner import ProcessRunner
from placewright.backends.processes import Child
from placewright.backends.pytorch import TorchRunConfig
from placewright.backends.pytorch.places import places_of
from placewright.backends.pytorch.program import TorchProgram
from placewright.errors import WorkerError

_LINK_SECONDS = 0.2
"""What timing a link with one size of tensor takes, about."""


class TorchRunner(ProcessRunner):
    """Measures placements of one program on one cluster, in one process with all its devices."""

    program_type = TorchProgram
    run_config = TorchRunConfig
    program: TorchProgram
    config: TorchRunConfig
    memory_bytes: Sequence[int] | None = None
    """What each device has in the runs to come, where that is not what the cluster says: for seeing
    whether a placement still runs with less."""

    def _begin(self) -> None:
        program = self.program
        if program.step is None:
            raise WorkerError(f"{program.model} cannot be measured: {program.why_no_step}")
        self.places = places_of(self.cluster)
        gpus = {place.device for place in self.places if place.on_gpu}
        if self._captures and len(gpus) > 1:
            # torch keeps memory for a graph on the GPU that is captured on; what its work takes on
            # the others could be given out again while the graph is still used.
            raise WorkerError(
                f"a step on {len(gpus)} GPUs cannot be captured as one CUDA graph; measure it as "
                "the host issues it: TorchRunConfig(capture=False), or `issue: host` in the cluster"
            )

    @property
    def _captures(self) -> bool:
        """Whether GPU work is captured as one graph: unless told, as it is simulated."""
        if self.config.capture is not None:
            return self.config.capture
        return self.cluster.issued_by(self.program.graph.issue) != "host"

    def time_links(self, sizes: Sequence[int]) -> Mapping[str, Sequence[float]]:
        """With chains of real tensors that go to and fro; of links to switches, such as the memory
        of the host, from what routes over them take."""
        joined, routes = self._links_to_time()
        pairs = [*joined.values(), *(pair for pair, _ in routes)]
        answer = self._asked({"pairs": pairs, "sizes": list(sizes)}, "links", "links")
        result = dict(solved(self.cluster, routes, answer[len(joined) :], sizes))
        result.update(zip(joined, answer, strict=False))
        return result

    def seconds_for_links(self, sizes: int) -> float:
        joined, routes = self._links_to_time()
        return (len(joined) + len(routes)) * sizes * _LINK_SECONDS

    def _links_to_time(self) -> tuple[dict[str, Pair], Sequence[tuple[Pair, tuple[int, ...]]]]:
        """Links between two devices and their ends; and where there are links to switches, routes
        over them."""
        devices = self.cluster.device_names
        joined = {}
        for link in self.cluster.links:
            one, other = link.pairs[0]
            if one in devices and other in devices:
                joined[link.name] = (devices.index(one), devices.index(other))
        routes = routes_to_time(self.cluster) if len(joined) < len(self.cluster.links) else ()
        return joined, routes

    def _answer(self, request: Mapping[str, Any], limit: float) -> dict[str, Any]:
        if "devices" in request and self.memory_bytes is not None:
            request = {**request, "memory_bytes": [int(size) for size in self.memory_bytes]}
        return super()._answer(request, limit)

    def demands(self) -> Mapping[int, Mapping[str, float]]:
        """From replays of each op alone and on all devices of the chip at once."""
        chips: dict[int, list[int]] = {}
        for number, chip in enumerate(self.cluster.chip_of_device.tolist()):
            if chip >= 0 and self.places[number].on_gpu:
                chips.setdefault(chip, []).append(number)
        if not chips:
            return {}
        request = {"chips": list(chips.values())}
        answer = self._asked(request, "demands", "what ops take of the GPU")
        return {numbers[0]: shares for numbers, shares in zip(chips.values(), answer, strict=True)}

    def _asked(self, request: dict[str, Any], key: str, what: str) -> Any:
        """Something about the machine, for which it has as long as for a start."""
        self.start()
        answer = self._answer(request, self.config.start_seconds)
        if key not in answer:
            self._replace()
            raise WorkerError(f"{what} cannot be timed: {answer.get('reason', 'no answer')}")
        if answer.get("broken"):
            self._replace()
        return answer[key]

    def _start_client(self, deadline: float) -> Child:
        from safetensors.torch import save

        step = self.program.step
        assert step is not None
        feeds = io.BytesIO()
        np.savez(feeds, **{  # type: ignore[arg-type]
            str(number): self._feeds[entry.name]
            for number, entry in enumerate(self.program.inputs)
        })  # fmt: skip
        weights = {name: tensor.contiguous() for name, tensor in self.program.weights().items()}
        settings: dict[str, Any] = {
            name: getattr(self.config, name)
            for name in ("tf32", "cudnn_benchmark", "tolerance", "seed")
        }
        settings["capture"] = self._captures
        devices = range(self.cluster.num_devices)
        return Child(
            "placewright.backends.pytorch.client",
            {
                "places": [asdict(place) for place in self.places],
                "direct": [[self.cluster.direct(a, b) for b in devices] for a in devices],
                "ops": list(self.program.graph.op_names),
                "resident_bytes": self.program.graph.resident_bytes.tolist(),
                "settings": settings,
            },
            seconds=deadline - time.monotonic(),
            files={
                "step": json.dumps(step.to_json()).encode(),
                "weights": save(weights) if weights else b"",
                "feeds": feeds.getvalue(),
            },
            prefix=self._prefix,
        )
