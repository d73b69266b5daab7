from __future__ import annotations

import re
from pathlib import Path

import pytest

from placewright.cluster import Cluster, builtin_kinds, preset_names
from placewright.errors import ClusterError

KIND = "kinds: {k: {type: gpu, peak_flops: 1 TFLOPS, memory_bandwidth: 100 GB/s, memory: 1 GB}}\n"
TWO = KIND + "devices: [{name: a, kind: k}, {name: b, kind: k}]\n"
LINK = "{name: l, latency: 1us, bandwidth: 1 GB/s, pairs: [[a, b]]}"


def load(text: str, tmp_path: Path) -> Cluster:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return Cluster.load(path)


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_round_trip(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    cluster.save(tmp_path / "c.yaml")
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    assert Cluster.load(name) == cluster


def test_the_papers_machine() -> None:
    cluster = Cluster.load("k80x4")
    assert cluster.device_names == ("cpu:0", "gpu:0", "gpu:1", "gpu:2", "gpu:3")
    assert [device.type for device in cluster.devices] == ["cpu"] + ["gpu"] * 4
    assert {device.memory_bytes for device in cluster.devices[1:]} == {12_000_000_000}
    routes = cluster.routes

    def way(src: str, dst: str) -> list[str]:
        pair = cluster.device_number(src) * 5 + cluster.device_number(dst)
        channels = routes.channels[routes.offsets[pair] : routes.offsets[pair + 1]]
        return [routes.channel_names[c] for c in channels]

    assert way("gpu:0", "cpu:0") == ["board0-pcie >"]
    assert way("cpu:0", "gpu:3") == ["board1-pcie <"]
    # Through the host, over both boards' wires; two GPUs of a board share theirs.
    assert way("gpu:1", "gpu:2") == ["board0-pcie >", "board1-pcie <"]
    assert way("gpu:0", "gpu:1") == ["board0-pcie >", "board0-pcie <"]
    assert routes.latency_seconds[1, 3] == pytest.approx(80e-6)
    assert routes.seconds_per_byte[1, 3] == pytest.approx(1e-10)


def test_nvlink_is_preferred_to_the_host() -> None:
    cluster = Cluster.load("a100x4")
    pair = 1 * 5 + 4
    routes = cluster.routes
    channels = routes.channels[routes.offsets[pair] : routes.offsets[pair + 1]]
    assert [routes.channel_names[c] for c in channels] == ["nvlink03 >"]


def test_a_half_duplex_wire_is_one_channel(tmp_path: Path) -> None:
    text = TWO + "links: [" + LINK.replace("pairs", "duplex: false, pairs") + "]"
    cluster = load(text, tmp_path)
    assert cluster.routes.channel_names == ("l",)
    assert cluster.routes.channels.tolist() == [0, 0]


def test_the_gap_of_a_link(tmp_path: Path) -> None:
    plain = load(TWO + f"links: [{LINK}]", tmp_path)
    assert plain.routes.gap_seconds[0, 1] == plain.routes.latency_seconds[0, 1] > 0
    cluster = load(TWO + f"links: [{LINK.replace('pairs', 'gap: 0.25us, pairs')}]", tmp_path)
    assert cluster.routes.gap_seconds[0, 1] == pytest.approx(0.25e-6)
    assert cluster.routes.latency_seconds[0, 1] == plain.routes.latency_seconds[0, 1]
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster != plain


def test_the_overhead_of_a_link(tmp_path: Path) -> None:
    link = LINK.replace("pairs", "overhead: 80us, overhead_bandwidth: 2 GB/s, pairs")
    cluster = load(TWO + f"links: [{link}]", tmp_path)
    assert cluster.routes.overhead_seconds[0, 1] == pytest.approx(80e-6)
    assert cluster.routes.overhead_seconds_per_byte[1, 0] == pytest.approx(0.5e-9)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster
    # One without stays what it was before there was such a thing.
    plain = load(TWO + f"links: [{LINK}]", tmp_path)
    plain.save(tmp_path / "plain.yaml")
    assert "overhead" not in (tmp_path / "plain.yaml").read_text()


def test_contention(tmp_path: Path) -> None:
    plain = load(TWO + f"links: [{LINK}]", tmp_path)
    cluster = load(TWO + f"links: [{LINK}]\ncontention: 0.25", tmp_path)
    assert (plain.contention, cluster.contention) == (0.0, 0.25)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster != plain
    plain.save(tmp_path / "plain.yaml")
    assert "contention" not in (tmp_path / "plain.yaml").read_text()


def test_local_describes_this_machine_the_same_way_twice() -> None:
    cluster = Cluster.load("local")
    assert cluster.devices[0].type == "cpu"
    assert cluster.devices[0].memory_bytes > 1e8
    assert Cluster.load("local").fingerprint == cluster.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the cluster file is empty"),
        ("{", "not valid YAML"),
        ("[]", "the cluster must be a mapping"),
        ("devices: []", "has no devices"),
        ("devices: 3", "'devices' must be a list"),
        ("device: []", "unknown key 'device'"),
        ("devices: [{name: a, kind: z}]", "device 'a' is of kind 'z', which is not described"),
        (KIND + "devices: [{name: a, kind: k, memory: -1 GB}]", "memory of device 'a' must be pos"),
        (KIND + "devices: [{name: a, kind: k, memory: 5 apples}]", "with a unit of B, kB, MB"),
        (KIND + "devices: [{name: a, kind: k, memory: .inf}]", "memory of 'a' must be a size"),
        (KIND + "devices: [{name: a, kind: k}, {name: a, kind: k}]", "two devices named 'a'"),
        (TWO, "no link leads from 'a' to 'b'"),
        (TWO + f"links: [{LINK.replace('[a, b]', '[a, z]')}]", "link 'l' leads to 'z', which"),
        (TWO + f"links: [{LINK.replace('[a, b]', '[a, a]')}]", "link 'l' joins 'a' with itself"),
        (TWO + f"links: [{LINK.replace('[a, b]', '[a]')}]", "a pair has two ends, not 1"),
        (TWO + f"links: [{LINK.replace('1 GB/s', '0')}]", "bandwidth of link 'l' must be positive"),
        (TWO + f"links: [{LINK.replace('1us', '-1us')}]", "latency of link 'l' must not be neg"),
        (TWO + f"links: [{LINK.replace('1us', '.nan')}]", "latency of link 'l' must not be neg"),
        (
            TWO + f"links: [{LINK.replace('pairs', 'gap: 1s, pairs')}]",
            "gap of link 'l' must be between 0 and its latency",
        ),
        (
            TWO + f"links: [{LINK.replace('pairs', 'overhead: -1us, pairs')}]",
            "overhead of link 'l' must not be negative",
        ),
        (
            TWO + f"links: [{LINK.replace('pairs', 'overhead_bandwidth: 0, pairs')}]",
            "overhead_bandwidth of link 'l' must be positive",
        ),
        (TWO + f"links: [{LINK}, {LINK}]", "two links named 'l'"),
        (TWO + f"links: [{LINK}]\ncontention: -0.1", "contention of cluster 'c' must not be neg"),
        (TWO + f"links: [{LINK}]\ncontention: much", "contention must be a number with no unit"),
        (KIND.replace("1 TFLOPS", "0") + "devices: [{name: a, kind: k}]", "peak_flops of device"),
        (
            KIND.replace("type: gpu", "type: gpu, efficiency: {conv: 2}")
            + "devices: [{name: a, kind: k}]",
            "efficiency conv must be in (0, 1], not 2",
        ),
        (
            KIND.replace("type: gpu", "type: gpu, slots: 0") + "devices: [{name: a, kind: k}]",
            "slots of device kind 'k' must be at least 1",
        ),
    ],
)  # fmt: skip
def test_bad_files_get_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)) as caught:
        load(text, tmp_path)
    assert "c.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_presets_and_devices() -> None:
    with pytest.raises(ClusterError, match=r"unknown cluster 'k81x4': .*k80x2, k80x4"):
        Cluster.load("k81x4")
    with pytest.raises(ClusterError, match="no device 'gpu:9'; it has cpu:0, gpu:0, gpu:1"):
        Cluster.load("k80x2").device_number("gpu:9")


def test_builtin_kinds_are_complete() -> None:
    for kind in builtin_kinds().values():
        assert {"conv", "matmul", "memory", "tiny"} <= set(kind.efficiency)


def test_who_issues_work(tmp_path: Path) -> None:
    plain = load(TWO + f"links: [{LINK}]\n", tmp_path)
    assert plain.issue is None  # whoever does so in the model's framework
    captured = load(TWO + f"links: [{LINK}]\nissue: none\n", tmp_path)
    assert captured != plain
    assert not captured.issued_apart("none").any()
    captured.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == captured
    with pytest.raises(ClusterError, match="'issue' is 'nobody', can be device, host, none"):
        load(TWO + f"links: [{LINK}]\nissue: nobody\n", tmp_path)


def test_an_executor_shares_the_cores_of_a_cpu() -> None:
    cluster = Cluster.load("k80x2")
    assert cluster.issued_apart("device").tolist() == [False, True, True]
    # One thread issues ops for all of them.
    assert cluster.issued_apart("host").all()


def test_links_that_share_nothing_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = (
        "devices: [{name: c, kind: cpu-core}, {name: a, kind: k}, {name: b, kind: k}]\n"
        "links: [{name: l, latency: 1us, bandwidth: 1 GB/s, pairs: [[a, c]]}, "
        "{name: m, latency: 1us, bandwidth: 1 GB/s, pairs: [[b, c]]}]\n"
    )
    load(KIND + devices, tmp_path)
    assert "2 devices share the host 'c', but no two transfers share a link" in caplog.text
    caplog.clear()
    shared = devices.replace("pairs: [[a, c]]", "pairs: [[a, c], [b, c]]")
    load(KIND + shared, tmp_path)
    for name in preset_names():
        Cluster.load(name)
    assert not caplog.text


def test_a_cache_is_part_of_a_kind(tmp_path: Path) -> None:
    kind = Cluster.load("cpu2").kinds[0]
    assert kind.cache_bytes == 8_000_000
    assert kind.cache_bandwidth > kind.memory_bandwidth
    path = tmp_path / "c.yaml"
    Cluster.load("cpu2").save(path)
    assert Cluster.load(path) == Cluster.load("cpu2")
    # Without a share of its own, what ops move or compute counts as memory-bound work does.
    assert kind.share("gather") == kind.share("memory")
    assert kind.share("elementwise") == kind.efficiency["elementwise"]
