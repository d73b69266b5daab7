from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_format_in_the_docs_is_read(tmp_path: Path) -> None:
    from placewright import Cluster, Graph

    graphs = re.findall(
        r"```json\n(\{.*?)```", (ROOT / "docs/graph-format.md").read_text(), re.DOTALL
    )
    (tmp_path / "g.json").write_text(graphs[0])
    assert Graph.load(tmp_path / "g.json").num_ops == 4
    clusters = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), re.DOTALL)
    (tmp_path / "c.yaml").write_text(clusters[0])
    assert Cluster.load(tmp_path / "c.yaml").num_devices == 3
