"""A machine of one's own, as a file; and what would change if its links were faster.

    python examples/5_own_cluster.py

docs/clusters.md explains every field of the file.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import placewright
from placewright import Cluster
from placewright.testing import layered_graph

WORKSTATION = """\
format: placewright-cluster/1
name: workstation
devices:
  - {name: "cpu:0", kind: server-cpu-64, memory: 256 GB}
  - {name: "gpu:0", kind: a100-40gb}
  - {name: "gpu:1", kind: a100-40gb}
switches: [pcie]
links:
  - {name: host, latency: 5us, bandwidth: 20 GB/s, pairs: [["cpu:0", pcie]]}
  - {name: slot0, latency: 3us, bandwidth: 20 GB/s, pairs: [["gpu:0", pcie]]}
  - {name: slot1, latency: 3us, bandwidth: 20 GB/s, pairs: [["gpu:1", pcie]]}
"""

graph = layered_graph(200, 8)
with TemporaryDirectory() as folder:
    for bandwidth in ("20 GB/s", "200 GB/s"):
        path = Path(folder) / "workstation.yaml"
        path.write_text(WORKSTATION.replace("20 GB/s", bandwidth))
        cluster = Cluster.load(str(path))
        result = placewright.place(graph, cluster, method="single,heft,local-search", trials=500)
        step = f"{1e6 * result.step_seconds:.0f} µs a step"
        print(f"links of {bandwidth}: {step}, {result.speed_up:.2f} times one device")
