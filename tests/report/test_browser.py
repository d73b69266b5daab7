"""The page in a real browser. Needs Debian's Chromium: apt-get install chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from placewright import Cluster, Problem, ProblemConfig, make_problem, place
from placewright.budget import Budget
from placewright.report import write_report
from placewright.testing import layered_graph
from tests.report.conftest import EVIL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
SHORT = Budget(trials=50)

if CHROMIUM is None:
    pytest.skip(
        "no browser: install Chromium (apt-get install chromium) to test the report in one",
        allow_module_level=True,
    )
playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'placewright[dev]'")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A page, and everything it complained about."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=true]", state="attached")

    def check_quiet(self) -> None:
        assert self.complaints == []
        assert [
            url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))
        ] == []


@pytest.fixture(scope="module")
def report(run_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run_directory, tmp_path_factory.mktemp("page") / "r.html", what_if=SHORT)


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    opened = Opened(browser, report)
    yield opened
    opened.page.close()


PANELS = (
    "answer", "methods", "search", "learning", "graph", "timeline", "memory", "load", "next", "why",
    "origin",
)  # fmt: skip


def test_every_panel_is_there_and_nothing_is_complained_about(opened: Opened) -> None:
    for panel in PANELS:
        assert opened.page.locator(f"#{panel}").count() == 1, panel
    for panel in PANELS[1:-2]:
        drawn = opened.page.locator(f"#{panel} .js-plotly-plot .main-svg")
        assert drawn.count() > 0, panel
    assert "per step" in opened.page.locator("h1").inner_text()
    opened.check_quiet()


def test_nothing_offers_to_send_the_data_away(opened: Opened) -> None:
    titles = opened.page.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map(button => button.dataset.title)"
    )
    assert "Zoom in" in titles
    known = {"Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
    assert set(titles) <= known
    assert opened.page.locator("a:not([href^='#'])").count() == 0


def test_names_are_text(opened: Opened) -> None:
    assert opened.page.title() == "two branches on k80x2 - Placewright"
    assert opened.page.locator("img").count() == 0
    opened.page.fill("#search-ops", "onerror")
    hits = opened.page.locator("#op-list li.hit")
    hits.first.wait_for()
    assert EVIL in hits.first.inner_text()
    # Hovering over the group shows the name as it is, too.
    group = _group_of(opened, "onerror")
    opened.page.evaluate(
        "([k]) => { const box = document.getElementById('graph-0');"
        " const curve = box.data.findIndex(t => t.meta === 'groups');"
        " Plotly.Fx.hover(box, [{curveNumber: curve, pointNumber: k}]); }",
        [group],
    )
    label = opened.page.locator("#graph-0 .hoverlayer .hovertext").first
    label.wait_for(state="attached")
    assert "<script>" in (label.text_content() or "")
    opened.check_quiet()


def _group_of(opened: Opened, text: str) -> int:
    return int(
        opened.page.evaluate(
            "text => { const D = JSON.parse(document.getElementById('data').textContent);"
            " return D.runs[0].graph.names.findIndex(name => name.includes(text)); }",
            text,
        )
    )


def _centre(opened: Opened, group: int) -> tuple[float, float]:
    """Where on the screen a group is drawn."""
    opened.page.locator("#graph-0").scroll_into_view_if_needed()
    x, y = opened.page.evaluate(
        "k => { const box = document.getElementById('graph-0'), f = box._fullLayout;"
        " const t = box.data.find(t => t.meta === 'groups'), r = box.getBoundingClientRect();"
        " return [r.left + f._size.l + f.xaxis.d2p(t.x[k]),"
        "         r.top + f._size.t + f.yaxis.d2p(t.y[k])]; }",
        group,
    )
    return float(x), float(y)


def test_hover_and_click_on_a_group(opened: Opened) -> None:
    x, y = _centre(opened, 0)
    opened.page.mouse.move(x, y)
    label = opened.page.locator("#graph-0 .hoverlayer .hovertext")
    label.first.wait_for()
    name = opened.page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).runs[0].graph.names[0]"
    )
    assert name in (label.first.text_content() or "")
    opened.page.mouse.click(x, y)
    detail = opened.page.locator("#group-detail h3")
    detail.wait_for()
    assert detail.inner_text() == name
    assert opened.page.locator("#op-list li").count() > 0
    opened.check_quiet()


def test_search_dims_what_does_not_match(opened: Opened) -> None:
    shown = (
        "() => { const t = document.getElementById('graph-0').data.find(t => t.meta === 'groups');"
        " return t.marker.opacity; }"
    )
    assert set(opened.page.evaluate(shown)) == {1}
    opened.page.fill("#search-ops", "BRANCH0/")
    opened.page.wait_for_function("() => document.querySelectorAll('#op-list li.hit').length === 3")
    assert "3 ops" in opened.page.locator("#search-count").inner_text()
    after = opened.page.evaluate(shown)
    assert 1 in after
    assert min(after) < 1
    opened.page.locator("#op-list li.hit").first.click()
    assert "branch0" in opened.page.locator("#group-detail h3").inner_text()
    opened.page.fill("#search-ops", "")
    opened.page.wait_for_function(f"() => Math.min(...({shown})()) === 1")
    opened.check_quiet()


def test_switches_zoom_and_theme(opened: Opened) -> None:
    opened.page.get_by_role("button", name="by seconds").click()
    ticks = "[...document.querySelectorAll('#progress-chart .ytick')].map(t => t.textContent)"
    labels = opened.page.evaluate(ticks)
    assert len(set(labels)) == len(labels) > 1  # also where steps take microseconds
    title = "() => document.getElementById('progress-chart').layout.xaxis.title.text"
    opened.page.wait_for_function(f"() => ({title})() === 'seconds of search'")
    opened.page.get_by_role("button", name="by device").click()
    opened.page.wait_for_function(
        "() => document.getElementById('graph-0').layout.yaxis.ticktext?.includes('gpu:1')"
    )
    # Zooming the timeline zooms the memory with it.
    opened.page.evaluate(
        "Plotly.relayout(document.getElementById('gantt-0'), {'xaxis.range': [1, 2]})"
    )
    opened.page.wait_for_function(
        "() => document.getElementById('memory-0').layout.xaxis.range[1] === 2"
    )
    background = "getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(background)
    opened.page.click("#theme")
    assert opened.page.evaluate(background) != light
    opened.check_quiet()


def test_dark_for_those_who_prefer_it(browser: Any, report: Path) -> None:
    opened = Opened(browser, report, color_scheme="dark")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    opened.check_quiet()
    opened.page.close()


def test_two_runs_side_by_side(
    browser: Any, run_directory: Path, problem: Problem, tmp_path: Path
) -> None:
    other = make_problem(problem.graph, Cluster.load("k80x4"))
    place(other, method="single,expert,mincut", directory=tmp_path / "other")
    path = write_report([run_directory, tmp_path / "other"], tmp_path / "two.html", what_if=None)
    opened = Opened(browser, path)
    assert opened.page.locator("#compare table tr").count() > 5
    assert opened.page.locator("h1").count() == 2
    for chart in ("graph-0", "graph-1", "gantt-0", "gantt-1", "memory-0", "memory-1"):
        assert opened.page.locator(f"#{chart} .main-svg").count() > 0, chart
    assert opened.page.locator("#next").count() == 0
    opened.check_quiet()
    opened.page.close()


@pytest.mark.parametrize("with_a_good_one", [False, True])
def test_a_run_in_which_nothing_ran(
    browser: Any, failed_run: Path, run_directory: Path, tmp_path: Path, with_a_good_one: bool
) -> None:
    runs = [failed_run, run_directory] if with_a_good_one else [failed_run]
    opened = Opened(browser, write_report(runs, tmp_path / "r.html", what_if=SHORT))
    assert opened.page.locator("h1").first.inner_text() == "Nothing ran"
    assert "out of memory" in opened.page.locator("#methods").inner_text()
    assert opened.page.locator("#graph-0 .main-svg").count() > 0  # of the placement that failed
    assert opened.page.locator("#memory-0 .main-svg").count() > 0
    opened.check_quiet()
    opened.page.close()


def test_a_large_run_stays_small_and_works(browser: Any, tmp_path: Path) -> None:
    graph = layered_graph(30_000, 60)
    problem = make_problem(graph, Cluster.load("k80x4"), ProblemConfig(groups=300))
    place(problem, method="single,expert", directory=tmp_path / "large")
    path = write_report(tmp_path / "large", what_if=None)
    assert path.stat().st_size < 6_000_000
    opened = Opened(browser, path)
    bars = opened.page.evaluate(
        "document.getElementById('gantt-0').data.reduce((n, t) => n + t.x.length, 0)"
    )
    assert bars < 20_000
    opened.page.fill("#search-ops", graph.op_names[12_345])
    opened.page.locator("#op-list li.hit").first.wait_for()
    opened.check_quiet()
    opened.page.close()
