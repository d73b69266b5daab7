"""The documentation holds: its code runs, its links lead somewhere, its site builds.

The blocks of a page marked `python` and `console` are run in order, in one empty directory, as a
reader would: what one block makes, the next may use. Of a `console` block the lines that begin with
`$ placewright` are run; a last line `[exit 2]` says that it ends with that code.

A comment above a block changes that, and gives the reason:

    <!-- no test: installs packages -->
    <!-- test with: --scale small --trials 200 -->
    <!-- file: machine.yaml -->

The second adds these options to the commands of the block that have them. The third writes the
block, of any language, to a file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

NOT_RUN = {
    "README.md": ["installs packages"],
    "docs/cli.md": ["changes the reader's shell"],
    "docs/guides/offload.md": ["needs transformers"],
    "docs/guides/pytorch.md": ["needs transformers"],
    "docs/guides/streams.md": ["needs a GPU"] * 3,
    "docs/distributed.md": [
        "takes minutes and a machine of one's own",
        "needs several machines",
    ],
    "docs/measuring.md": ["takes minutes and a machine of one's own"],
    "docs/paper.md": ["needs a GPU", "needs a GPU", "takes half an hour"],
    "docs/tutorial.md": ["installs packages"],
}
"""Every block that is not run, by its reason. A new one has to be added here, too."""

_FENCE = re.compile(
    r"(?:<!-- (?P<marker>no test|test with|file): (?P<text>[^>]*?) -->\n+)?"
    r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    marker: str
    text: str

    @property
    def runs(self) -> bool:
        if self.marker == "file":
            return True
        return self.language in ("python", "console") and self.marker != "no test"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=(found["info"].split() or [""])[0],
            code=found["code"],
            line=text.count("\n", 0, found.start("code")) + 1,
            marker=found["marker"] or "",
            text=found["text"] or "",
        )
        for found in _FENCE.finditer(text)
    ]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong on each page."""
    for needed in ("tensorflow", "torch", "plotly"):
        pytest.importorskip(needed)
    sessions = [
        {
            "page": name(page),
            "steps": [
                {"language": b.language, "code": b.code, "line": b.line, b.marker: b.text}
                for b in blocks(page)
                if b.runs
            ],
        }
        for page in RUN
    ]
    folder = tmp_path_factory.mktemp("docs")
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("docs_session.py"))],
        input=json.dumps(sessions),
        cwd=folder,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    found: dict[str, str] = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("page", RUN, ids=name)
def test_code_runs(page: Path, faults: dict[str, str]) -> None:
    assert not faults[name(page)], faults[name(page)]


def test_blocks_that_are_not_run_are_known() -> None:
    found = {
        name(page): [block.text for block in blocks(page) if block.marker == "no test"]
        for page in PAGES
    }
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_stand_in_blocks_that_run(page: Path) -> None:
    for block in blocks(page):
        if block.language in ("sh", "bash", "shell", "text", ""):
            assert not re.search(r"^(\$ |placewright )", block.code, re.MULTILINE), (
                f"{name(page)}, line {block.line}: a command in a block that is not run"
            )


_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name
)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """On GitHub; the site's own links are checked where it is built."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in _LINK.finditer(text):
        path, _, anchor = found["target"].partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), f"{name(page)}: {found['target']} leads nowhere"
        if anchor:
            assert anchor in _anchors(target), f"{name(page)}: no heading {found['target']}"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_site_builds(tmp_path: Path) -> None:
    for needed in ("sphinx", "myst_parser", "furo", "torch"):
        pytest.importorskip(needed)
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "trees"),
         str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    site = tmp_path / "site"
    commands = (site / "cli.html").read_text(encoding="utf-8")
    assert 'id="placewright-place-model"' in commands
    assert "--budget" in commands
    settings = (site / "learning.html").read_text(encoding="utf-8")
    assert "tanh_constant" in settings
    assert "imitation_steps" in settings
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?:[^"]*)"',
            page.read_text(encoding="utf-8"),
        )
        assert not loaded, f"{page.name} loads {loaded}"


def test_every_public_name_is_in_the_reference() -> None:
    import placewright

    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: placewright\.(\w+)$", text, re.MULTILINE))
    assert named == set(placewright.__all__) - {"__version__"}


def test_every_module_has_its_place() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100, "architecture.md is longer than two pages"
    named = {name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w./]+)`", text)}
    entries = {path.stem for path in (ROOT / "src/placewright").iterdir()}
    entries -= {"__init__", "__main__", "__pycache__", "_version", "py"}
    assert entries <= named, f"not in architecture.md: {sorted(entries - named)}"


def test_every_metric_is_explained() -> None:
    pytest.importorskip("torch")
    from placewright.learning.config import PPO
    from placewright.learning.learner import Learner
    from placewright.measurement import Measurement, Outcome, Trial
    from placewright.testing import tiny_problems

    learner = Learner(tiny_problems()[1].problem, PPO, name="ppo")
    metrics: list[dict[str, float]] = []
    while not metrics:
        learner.tell(
            [
                Trial(
                    placement=placement,
                    measurement=Measurement(outcome=Outcome.OK, step_seconds=(1.0,)),
                    placer="ppo",
                )
                for placement in learner.ask(64)
            ]
        )
        metrics = learner.notes.metrics
    text = (ROOT / "docs/learning.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert explained == {*metrics[0], "placer", "trials", "seconds"}


def test_every_setting_has_a_meaning() -> None:
    for needed in ("sphinx", "torch"):
        pytest.importorskip(needed)
    from placewright.backends import RunConfig
    from placewright.learning.config import LearnerConfig, PolicyConfig

    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for config in (LearnerConfig, PolicyConfig, RunConfig):
        assert all(reference.field_docs(config).values())
