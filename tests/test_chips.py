"""Devices that are streams or partitions of one GPU, and how machines with them are described."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from placewright import chips
from placewright.cluster import Cluster, chosen, from_document, to_document
from placewright.errors import ClusterError
from tests.test_discovery import Nvml

STREAMS = "h200-streams4"
PARTS = "h200-parts4"


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200 and an A100."""
    nvml = Nvml(2)
    nvml.names = ["NVIDIA H200", "NVIDIA A100-SXM4-40GB"]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


@pytest.mark.parametrize(
    ("written", "called"),
    [
        ("cuda", "gpu:0"),
        ("cuda:1", "gpu:1"),
        ("cuda:0/stream:2", "gpu:0/stream:2"),
        ("cuda/part:2", "gpu:0/part:2"),
        ("cpu", "cpu:0"),
        ("/job:worker/device:GPU:0", "/job:worker/device:GPU:0"),
    ],
)
def test_torchs_names_are_taken(written: str, called: str) -> None:
    assert chips.canonical(written) == called


def test_a_name_says_which_chip_it_is_on() -> None:
    assert chips.parse("gpu:3/part:1") == ("gpu:3", "part", 1)
    assert chips.parse("gpu:3") == ("gpu:3", "", 0)
    assert chips.expanded(["cuda:0/part:1-3", "cpu"]) == [
        "gpu:0/part:1", "gpu:0/part:2", "gpu:0/part:3", "cpu:0",
    ]  # fmt: skip
    with pytest.raises(ClusterError, match="counts up"):
        chips.expanded(["cuda:0/part:3-1"])


def test_streams_have_one_memory_and_partitions_their_own() -> None:
    streams, parts = Cluster.load(STREAMS), Cluster.load(PARTS)
    assert streams.pool_of_device.tolist() == [0, 0, 0, 0]
    assert parts.pool_of_device.tolist() == [0, 1, 2, 3, 4]
    assert streams.chip_of_device.tolist() == [0, 0, 0, 0]
    assert parts.chip_of_device.tolist() == [-1, 0, 0, 0, 0]
    assert Cluster.load("h100x8").chip_of_device.tolist() == [-1] * 9
    assert set(streams.pool_bytes.tolist()) == {141_000_000_000}


def test_what_goes_through_the_host_is_relayed_there() -> None:
    parts = Cluster.load(PARTS)
    routes = parts.routes
    assert not parts.direct(1, 2)
    assert routes.relayed[1, 2]
    assert routes.relay[1, 2] == routes.relay[1, 0] == routes.relay[1, 3]  # sent there once
    assert routes.latency_seconds[1, 0] == pytest.approx(40e-6)  # the CPU has to notice
    # Two copies, one after the other.
    assert routes.latency_seconds[1, 2] == pytest.approx(20e-6)
    assert routes.seconds_per_byte[1, 2] == pytest.approx(2 / 55e9)
    assert Cluster.load(STREAMS).direct(0, 3)


@pytest.mark.parametrize("preset", [STREAMS, PARTS, "h200-parts4x8"])
def test_descriptions_survive_a_file(preset: str, tmp_path: Path) -> None:
    cluster = Cluster.load(preset)
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    assert cluster.devices[-1].kind.sms in (8, 32, 132)


def test_a_file_may_use_torchs_names() -> None:
    document = to_document(Cluster.load(PARTS))
    text = json.dumps(document).replace("gpu:0", "cuda:0")
    cluster = from_document(json.loads(text), where="test")
    assert cluster == Cluster.load(PARTS)
    assert cluster.device_number("cuda:0/part:1") == 2


@pytest.mark.usefixtures("h200")
def test_partitions_of_this_machine() -> None:
    cluster = Cluster.load("local:cuda:0/part:0-3,cpu,via-host,issue=none")
    assert cluster.device_names == (
        "gpu:0/part:0", "gpu:0/part:1", "gpu:0/part:2", "gpu:0/part:3", "cpu:0",
    )  # fmt: skip
    part = cluster.devices[0]
    assert (part.kind.name, part.kind.sms) == ("h200-141gb-32sm", 32)
    assert part.memory_bytes == 150754820096 // 4
    assert cluster.issue == "none"
    assert not cluster.direct(0, 1)
    # One port for all of the GPU's transfers, in each direction.
    routes = cluster.routes
    first = [int(routes.channels[routes.offsets[p * 5 + 4]]) for p in range(4)]
    assert len(set(first)) == 1


@pytest.mark.usefixtures("h200")
def test_partitions_may_copy_within_the_gpu() -> None:
    cluster = chosen(["cuda:0/part:0", "cuda:0/part:1", "cuda:1"], sms=8)
    assert cluster.direct(0, 1)
    assert cluster.devices[0].kind.sms == 8
    assert cluster.routes.latency_seconds[0, 1] < cluster.routes.latency_seconds[0, 2]
    assert cluster.switches == ("host memory",)
    assert cluster.routes.relayed[0, 2]


@pytest.mark.usefixtures("h200")
def test_streams_of_this_machine() -> None:
    cluster = chosen(["cuda:0/stream:0", "cuda:0/stream:1", "cpu"])
    assert cluster.pool_of_device.tolist() == [0, 0, 2]
    assert cluster.devices[0].kind.name == "h200-141gb"
    assert cluster.routes.gap_seconds[0, 1] == 0.0
    assert cluster.routes.latency_seconds[0, 1] == pytest.approx(1.5e-6)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("names", "issue", "in_order", "of_pytorch"),
    [
        (["cuda:0", "cuda:1"], None, False, "host"),  # as eager PyTorch runs it
        (["cuda:0", "cpu"], None, False, "host"),
        (["cpu:0", "cpu:1"], None, False, "device"),
        (["cuda:0/stream:0-3"], "none", True, "none"),  # within a captured graph, as in the presets
        (["cuda:0/part:0-3", "cpu"], "none", True, "none"),
        (["cuda:0/part:0-3", "issue=host"], "host", True, "host"),
        (["cuda:0", "issue=device"], "device", False, "device"),
    ],
)
def test_who_issues_the_work_of_listed_devices(
    names: list[str], issue: str | None, in_order: bool, of_pytorch: str
) -> None:
    cluster = chosen(names)
    assert (cluster.issue, cluster.in_order) == (issue, in_order)
    assert cluster.issued_by("host") == of_pytorch


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["cuda:0", "cuda:0/stream:0"], "gpu:0 is there as 'gpu:0' and as 'gpu:0/stream:0'"),
        (["cuda:0/part:0", "cuda:0/stream:0"], "gpu:0 is there as"),
        (["cuda:0/part:0-4", "sms=32"], "5 partitions of 32 multiprocessors are more than the 132"),
        (["cuda:7/part:0"], "this machine has no gpu:7/part:0; it has cpu:0, gpu:0, gpu:1"),
        (["cuda:0", "cuda:0"], "must be different"),
        ([], "must be different, at least one"),
        (["cuda:0", "sms=many"], "sms=many is no number"),
        (["cuda:0", "issue=me"], "'issue' is 'me'"),
    ],
)
def test_what_cannot_be_had_is_refused(names: list[str], complaint: str) -> None:
    with pytest.raises(ClusterError, match=complaint):
        chosen(names)


def test_cpus_share_the_cores() -> None:
    one, two = chosen(["cpu"]), chosen(["cpu:0", "cpu:1"])
    assert two.devices[0].kind.peak_flops * 2 == one.devices[0].kind.peak_flops
    assert one.devices[0].kind.slots == 1
    assert np.all(two.routes.latency_seconds[~np.eye(2, dtype=bool)] > 0)


def test_there_are_no_more_shares_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placewright.discovery.usable_cores", lambda: 4)
    assert chosen(["cpu:0-3"]).num_devices == 4
    for names in (["cpu:0", "cpu:7"], ["cpu:4"], ["cpu:0", "cpu:x"]):
        with pytest.raises(ClusterError, match=f"no {names[-1]}: .* its 4 usable cores, cpu:0 to"):
            Cluster.load(f"local:{','.join(names)}")


@pytest.mark.usefixtures("h200")
def test_devices_lists_what_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    from placewright.cli import main

    with pytest.raises(SystemExit):
        main(["devices", "--json"])
    facts = json.loads(capsys.readouterr().out)
    cpu, gpu, _ = facts["devices"]
    assert cpu["parts"] == {}
    assert gpu["parts"] == {"stream": "gpu:0/stream:K", "part": "gpu:0/part:K"}
    assert (gpu["sms"], gpu["most_partitions"]) == (132, 16)
