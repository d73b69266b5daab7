"""`placewright place`, `compare` and `methods`: the main job."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from placewright.backends.base import LoadOptions
from placewright.cli import common
from placewright.cli.offload import Setting, place_offloaded
from placewright.cli.options import Only, UsageError, add_command, complete_methods
from placewright.cli.real import FeedsOption, RealRuns, feeds_from, run_config
from placewright.cli.report import write_beside
from placewright.cluster import Cluster
from placewright.distributed.config import TeamConfig
from placewright.errors import SearchError, WorkerError
from placewright.problem import Problem, ProblemConfig
from placewright.session.config import SearchConfig
from placewright.session.directory import RUN_FILES, is_begun, new_directory, writing
from placewright.stopping import Stopped, patiently
from placewright.units import format_seconds

if TYPE_CHECKING:
    from placewright.budget import Budget
    from placewright.measurement import Trial
    from placewright.session.result import Result
    from placewright.session.search import Progress as SearchProgress

LearnerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--learner",
        metavar="NAME=VALUE",
        help="A setting of the learned methods (docs/learning.md); repeatable.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the result goes, and how."""

    directory: str | None = None
    """Where to put the result."""
    resume: str | None = None
    """Continue the run in this directory."""
    report: bool = True
    """Also write report.html."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        own, resume = self.directory, self.resume
        if resume is None:
            self._check_new()
            return
        if own is not None and Path(own) != Path(resume):
            raise SearchError("--resume continues in its own directory; leave out --output")
        if not is_begun(resume):
            raise SearchError(f"{resume}: holds no run to continue (no run.json)")

    def _check_new(self) -> None:
        own = self.directory
        if own is None:
            return
        if not own or (Path(own).exists() and not Path(own).is_dir()):
            raise SearchError(f"{own or repr(own)}: not a directory")
        name = next((name for name in RUN_FILES if (Path(own) / name).exists()), None)
        if name is not None:
            begun = is_begun(own)
            raise SearchError(
                f"{own}: already holds {f'a run ({name})' if begun else name}; "
                + (f"continue it with --resume {own}, or " if begun else "")
                + "choose another directory"
            )

    @contextmanager
    def opened(self, model: str, cluster: str) -> Iterator[str]:
        """The directory that was asked for, or a new one; nobody else writes there meanwhile."""
        name = self.resume or self.directory
        made = name is None
        if name is None:
            stem = Path(model.removesuffix(".gz")).stem
            name = new_directory(f"placewright-{stem}-{Path(cluster).stem}")
        with writing(name, made=made):
            if self.resume is None:  # another process may have been quicker
                self._check_new()
            yield name


def add_to(app: typer.Typer) -> None:
    add_command(app, place)
    add_command(app, compare)
    add_command(app, methods)


def place(
    model: common.ModelArgument,
    *,
    setting: Setting,
    search: Annotated[
        SearchConfig,
        Only("method", "budget", "trials", "seed", "policy", "evaluate", "simulate_first"),
    ],
    learner: LearnerOption = None,
    output: Output,
    problem: ProblemConfig,
    feeds: FeedsOption = None,
    real: RealRuns,
    team: Annotated[TeamConfig | None, Only(needs=("workers", "controllers"))],
    load: LoadOptions,
) -> None:
    """Find a fast placement of a model on a cluster, and leave it in a directory.

    Example: placewright place inception_v3 --cluster k80x4 --budget 1m -o result
    """
    from placewright.distributed.config import check_installed
    from placewright.learning.config import configured_presets
    from placewright.session.config import Machine
    from placewright.session.driver import Session, needs_program

    if setting.workload is not None:
        others = {"learner": learner, "problem": problem, "feeds": feeds, "real": real,
                  "team": team, "load": load}  # fmt: skip
        place_offloaded(model, setting, search, output, others)
        return
    config = replace(search, learner=configured_presets(search.chosen.names, learner or ()))
    if team is not None:
        check_installed("`controllers`" if team.controllers else "`workers`")
    # What can be wrong with the request is said before the model is read, which takes a while.
    described = setting.described()
    run = run_config(model, load, real)
    machine = None
    if needs_program(
        model, described, config, run=run, team=team, directory=output.resume, backend=load.backend
    ):
        program = common.load_program(model, load)
        graph = program.graph
        machine = Machine(program, run, feeds_from(feeds))
    else:
        if feeds is not None:
            raise UsageError("--feeds means nothing in the simulator")
        graph = common.load_graph(model, load)
    posed = common.load_problem(graph, described, problem)
    with output.opened(model, setting.cluster) as directory, stop_on_interrupt() as stopped:

        def stop() -> bool:
            return bool(stopped)

        with _progress(config.limits) as display:
            session = Session(
                posed, config, machine=machine, team=team, directory=directory,
                observe=lambda progress: display(progress, session.status()), stop=stop,
            )  # fmt: skip
            result = session.run()
        _finish(result, directory, output, stop)


def _finish(result: Result, directory: str, output: Output, stop: Callable[[], bool]) -> None:
    """Saves and prints a result, and ends with the exit code that it stands for. Whoever stopped it
    waits: what takes long to draw then can be made afterwards."""
    command = shlex.join(["placewright", *sys.argv[1:]])
    nothing = result.interrupted and not result.trials
    traced = False
    if not nothing or is_begun(directory):
        traced = result.save(directory, command=command, stop=stop)
    if nothing and not output.json:
        go_on = f"; {_how_to_go_on(directory)}" if is_begun(directory) else ""
        common.console.print(f"stopped before anything was tried{go_on}")
        raise typer.Exit(130)
    if output.json:
        common.print_json(result.summary(command))
    else:
        _print_table(result.problem, result.table, _single_seconds(result))
        _print_answer(result, directory, traced=traced)
    page = None
    if output.report and (traced or result.best is None):
        # After the answer, which nobody should have to wait for.
        with suppress(Stopped):
            page = patiently(partial(write_beside, directory, result), stop, grace_seconds=1.0)
    if not output.json:
        say = common.console.print
        if page is not None:
            say(page)
        elif output.report:
            missing = "no report" if traced else "no trace and no report"
            report = f"placewright report {common.escaped(directory)}"
            say(f"stopped: {missing}; {report} makes the report")
        elif not traced and result.best is not None:
            say("stopped: no trace")
    if result.fault:
        # What was found is saved; the error is still one.
        raise WorkerError(f"the search ended early: {result.fault}")
    if result.interrupted or stop():
        raise typer.Exit(130)
    if result.best is None:
        raise typer.Exit(1)


def compare(
    model: common.ModelArgument,
    *,
    cluster: common.ClusterOption = "local",
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="NAME[,NAME...]",
            help="Names from 'placewright methods', or 'all'.",
            autocompletion=complete_methods,
        ),
    ] = "all",
    search: Annotated[
        SearchConfig,
        Only(
            budget="For each method that searches: 20s, 5m.",
            trials="The same, as a number of placements.",
            seed="The same seed gives the same simulated result.",
            policy="A trained policy that the learned methods go on from.",
        ),
    ],
    learner: LearnerOption = None,
    problem: ProblemConfig,
    load: LoadOptions,
    as_json: common.JsonOption = False,
) -> None:
    """Compare methods on a model and a cluster, each on its own.

    Example: placewright compare rnnlm --cluster k80x2 --methods single,expert,scotch
    """
    from placewright import methods as registry
    from placewright.learning.config import PRESETS, configured_presets
    from placewright.session.driver import Session

    names = ["auto", *registry.METHODS] if method == "all" else method.split(",")
    everyone = list(dict.fromkeys(n for name in names for n in registry.parse(name).names))
    learners = configured_presets(everyone, learner or ())
    registry.check_learner(everyone, learners, search.policy)
    if search.budget is None and search.trials is None:
        search = replace(search, budget="20s")
    configs = {}
    for name in names:
        learns = any(n in PRESETS for n in registry.parse(name).names)
        configs[name] = replace(
            search, method=name, evaluate="simulate", learner=learners if learns else None,
            policy=search.policy if learns else None,
        )  # fmt: skip
    machine = Cluster.load(cluster)
    posed = common.load_problem(common.load_graph(model, load), machine, problem)
    table: list[dict[str, Any]] = []
    bounds: dict[str, float] = {}
    single_seconds = None
    with stop_on_interrupt() as stopped:
        for name, config in configs.items():
            if stopped:
                break
            with common.status(f"running {name} ..."):
                result = Session(posed, config, stop=lambda: bool(stopped)).run()
            table.append(_as_one_row(name, result))
            bounds[name] = result.lower_bound_seconds
            if name == "single":
                single_seconds = _single_seconds(result)
    # Op by op there are more placements than by groups, so that less is proven of all of them.
    by_ops = (
        {} if posed.refined is posed else {n: b for n, b in bounds.items() if configs[n].places_ops}
    )
    bound = max((by_ops or bounds).values(), default=0.0)
    if as_json:
        common.print_json({"methods": table, "lower_bound_seconds": bound})
    else:
        _print_table(posed, table, single_seconds)
        by_groups = not by_ops and posed.refined is not posed
        which = _which_placement(posed, by_groups=by_groups)
        common.console.print(f"{which} can be faster than {format_seconds(bound)}")
    if stopped:
        raise typer.Exit(130)


def methods(as_json: common.JsonOption = False) -> None:
    """List the methods of finding a placement.

    Example: placewright methods
    """
    from placewright import methods as registry

    described = {"auto": registry.AUTO_SUMMARY} | {
        name: method.summary for name, method in registry.METHODS.items()
    }
    if as_json:
        common.print_json([{"name": n, "summary": s} for n, s in described.items()])
        return
    table = Table.grid(padding=(0, 2))
    for name, summary in described.items():
        table.add_row(name, summary)
    common.console.print(table)


@contextmanager
def stop_on_interrupt() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C or SIGTERM; the second Ctrl-C is the usual one."""
    signals: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        common.errors.print("stopping after this batch; the best so far is kept")

    # Batch systems end a job with SIGTERM; its result is worth as much as after Ctrl-C.
    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(
    limits: Budget,
) -> Iterator[Callable[[SearchProgress, Mapping[str, float]], None]]:
    """Shows, on a terminal, how far the search is, what each method has found, and how the workers
    are busy, where there are any."""
    with (
        Live("starting ...", console=common.errors, transient=True, refresh_per_second=4)
        if common.errors.is_terminal and common.verbosity is not common.Verbosity.QUIET
        else nullcontext() as display
    ):

        def show(progress: SearchProgress, workers: Mapping[str, float]) -> None:
            if display is not None:
                view = _progress_view(progress, limits)
                if workers:
                    view.add_row("", _workers(workers))
                display.update(view)

        yield show


def _progress_view(progress: SearchProgress, limits: Budget) -> Table:
    elapsed = progress.elapsed_seconds
    shares, left = [], []
    if limits.seconds is not None:
        shares.append(elapsed / limits.seconds)
        left.append(f"{max(0.0, limits.seconds - elapsed):.0f} s left")
    if limits.trials is not None:
        shares.append(progress.trials / limits.trials)
        left.append(f"{max(0, limits.trials - progress.trials):,} trials left")
    rate = (progress.trials - progress.resumed) / elapsed if elapsed else 0.0
    best = _found(progress.best)
    view = Table.grid(padding=(0, 2))
    view.add_row(
        ProgressBar(total=1.0, completed=min(1.0, max(shares)), width=30),
        f"best {best}, {progress.trials:,} trials, {rate:,.0f}/s, {', '.join(left)}",
    )
    for name in progress.trials_of:
        if name in progress.best_of or name == progress.placer:
            mark = "> " if name == progress.placer else "  "
            found = _found(progress.best_of.get(name))
            view.add_row(f"{mark}{name}", found + _learning(progress.metrics_of.get(name)))
    return view


def _workers(status: Mapping[str, float]) -> str:
    """A line for the progress display."""
    busy, count = int(status["workers_busy"]), int(status["workers"])
    line = f"{busy} of {count} workers busy, {count - busy} idle"
    if status["workers_replaced"]:
        line += f", {status['workers_replaced']:.0f} replaced"
    if "controllers" in status:
        line = (
            f"{status['controllers']:.0f} controllers, {line}, "
            f"{status['trials_per_second']:,.1f} trials/s, staleness {status['staleness']:.1f}"
        )
    return line


def _learning(metrics: dict[str, float] | None) -> str:
    """How the last update of a method that learns went."""
    if metrics is None:
        return ""
    return (
        f", update {metrics['update']:,.0f}: mean "
        f"{format_seconds(metrics['step_seconds_mean'])}, entropy {metrics['entropy']:.2f}, "
        f"{metrics['failure_share']:.0%} failed"
    )


def _found(trial: Trial | None) -> str:
    if trial is None:
        return "..."
    measurement = trial.measurement
    return format_seconds(measurement.mean_seconds) if measurement.ok else measurement.outcome.value


def _as_one_row(name: str, result: Result) -> dict[str, Any]:
    """A run of several methods (auto) or of one, as one row of the comparison."""
    from placewright.session.search import MethodResult

    failed = next((r.best for r in result.methods if r.best is not None), None)
    return result.row(
        MethodResult(
            method=name, best=result.best or failed, trials=result.trials, seconds=result.seconds
        )
    )


def _single_seconds(result: Result) -> float | None:
    single = result.best_single
    return None if single is None else result.seconds_of(single)


_PARTS = {"compute": "comp.", "overhead": "over.", "waiting": "wait", "idle": "idle"}
"""What devices do in a step, and the columns of that."""


def _print_table(
    problem: Problem, rows: list[dict[str, Any]], single_seconds: float | None
) -> None:
    devices = problem.cluster.devices
    made_of = any(entry["parts"] for entry in rows)
    # A column for each device where the terminal is wide enough, otherwise the fullest alone.
    taken = 49 + 6 * len(_PARTS) * made_of
    each = common.console.width >= taken + 6 * len(devices)
    largest = max((max(r["peak_bytes"]) for r in rows if r["peak_bytes"]), default=0)
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    for heading in _PARTS.values() if made_of else ():
        table.add_column(f"{heading}\n[dim]%[/dim]", justify="right", no_wrap=True)
    for heading in [device.name for device in devices] if each else ["fullest"]:
        table.add_column(
            f"{common.escaped(heading)}\n[dim]{unit}[/dim]", justify="right", no_wrap=True
        )
    table.add_column("trials", justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    fastest = min((r["step_seconds"] for r in rows if r["step_seconds"] is not None), default=None)
    for entry in rows:
        if entry["peak_bytes"] is None:
            table.add_row(entry["method"], "-", style="dim")
            continue
        seconds = entry["step_seconds"]
        ratio = ""
        if seconds and single_seconds is not None:
            ratio = f"{single_seconds / seconds:.2f}x"
        peaks = list(zip(entry["peak_bytes"], (d.memory_bytes for d in devices), strict=False))
        if not each:
            peaks = [max(peaks, key=lambda pair: pair[0] / pair[1])]
        table.add_row(
            entry["method"],
            format_seconds(seconds) if seconds is not None else entry["outcome"],
            ratio,
            *(_shares(entry["parts"]) if made_of else ()),
            *(
                f"[red]{peak / scale:.1f}[/red]" if peak > limit else f"{peak / scale:.1f}"
                for peak, limit in peaks
            ),
            f"{entry['trials']:,}",
            f"{entry['search_seconds']:.1f}",
            style="bold" if seconds is not None and seconds == fastest else None,
        )
    common.console.print(table)
    if made_of:
        common.console.print(
            "[dim]comp., over., wait, idle: shares of the time of the devices in use that go into "
            "computing, overhead, waiting for transfers, and nothing[/dim]"
        )
    for entry in rows:
        if entry["peak_bytes"] is None:
            reason = entry["reason"] or "nothing new to propose within the budget"
            common.console.print(f"[dim]{entry['method']}: {common.escaped(reason)}[/dim]")


def _shares(parts: dict[str, float] | None) -> list[str]:
    total = sum(parts.values()) if parts else 0.0
    return [f"{100 * parts[name] / total:.0f}" if parts and total else "" for name in _PARTS]


def _which_placement(problem: Problem, *, by_groups: bool) -> str:
    """Of which placements none can be faster than a bound."""
    return f"no placement by these {problem.num_groups:,} groups" if by_groups else "no placement"


def _how_to_go_on(directory: str) -> str:
    return f"the same command with --resume {common.escaped(directory)} instead of -o goes on"


def _print_answer(result: Result, directory: str, *, traced: bool) -> None:
    say = common.console.print
    if result.best is None:
        say(f"[red]no placement found:[/red] {common.escaped(result.why_none())}")
        return
    folder = common.escaped(directory)
    devices = result.problem.cluster.device_names
    used = sorted(set(result.placement.devices.tolist()))
    on = ", ".join(common.escaped(devices[d]) for d in used)
    step = format_seconds(result.step_seconds)
    how = "simulated"
    if result.step_range is not None:
        how = f"simulated, mean over {result.step_range.orders} orders of ties"
    if result.measured:
        half_width = result.best.measurement.half_width_seconds
        how = "measured once"
        if half_width is not None:
            how = f"measured, 95% within ± {format_seconds(half_width)}"
    say(f"[bold]{step}[/bold] a step on {on} ({how}), found by {result.best.placer}")
    single = result.best_single
    if single is not None:
        if result.speed_up is not None and result.speed_up > 1.0005:
            instead = f", but {result.simple_answer}" if result.simple_answer else ""
            unsure = any(t.method == "single" and t.within_noise for t in result.comparisons)
            noise = ", which may be noise alone" if unsure else ""
            say(f"{result.speed_up:.2f} times as fast as the best single device{noise}{instead}")
        elif result.proven or any(
            entry.best and entry.method != "single" for entry in result.methods
        ):
            say("one device is already best: nothing found is faster than not splitting at all")
    elif any(entry.method == "single" for entry in result.methods):
        say("no single device can hold the model")
    for line in result.notes():
        say(line)
    if result.gain_over_groups is not None and result.gain_over_groups > 1.02:
        say(
            f"placing op by op is {result.gain_over_groups:.2f} times as fast as the best by "
            f"groups ({result.problem.num_groups:,} of them)"
        )
    for other in result.references:
        if other.measurement.ok and result.seconds_of(other) < result.step_seconds:
            seconds = format_seconds(result.seconds_of(other))
            say(f"{other.placer}, tried besides, is faster: {seconds}")
    for turns in result.comparisons:
        spread = "" if turns.half_width is None else f" ± {turns.half_width:.3f}"
        say(f"in turns with {turns.method}: {turns.ratio:.3f}{spread} times as fast")
    bound = format_seconds(result.lower_bound_seconds)
    if result.measured:
        pass  # what is proven of the simulator is not of the machine
    elif result.proven or result.gap < 1e-6:
        say("that is proven to be optimal (in the simulator)")
    else:
        which = _which_placement(result.problem, by_groups=result.bound_by_groups)
        say(f"{which} can be faster than {bound}: at most {result.gap:.1%} is left to gain")
    if result.interrupted:
        say(f"stopped early; {_how_to_go_on(directory)}")
    drawn = f", its timeline in {folder}/trace.json" if traced else ""
    say(f"the placement is in {folder}/placement.json{drawn}")
