"""`placewright place`, `compare` and `methods`: the main job."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from placewright.cli import common, distribution, evaluation
from placewright.cli.evaluation import FeedsOption
from placewright.cli.report import write_beside
from placewright.cluster import Cluster
from placewright.errors import SearchError, WorkerError

if TYPE_CHECKING:
    from placewright.api import Result
    from placewright.distributed.team import Team
    from placewright.measurement import Trial
    from placewright.problem import Problem
    from placewright.search import Budget
    from placewright.search import Progress as SearchProgress

RESULT_FILES = (
    "costs.json", "journal.jsonl", "metrics.jsonl", "placement.json", "problem.json.gz",
    "report.html", "run.json", "summary.json", "trace.json",
)  # fmt: skip

MethodOption = Annotated[
    str,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME[,NAME...]",
        help="'auto' (baselines, then improve on the best) or names from 'placewright methods'.",
        autocompletion=common.complete_methods,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="TIME", help="How long to search: 90s, 5m, 1h."),
]
TrialsOption = Annotated[
    int | None, typer.Option("--trials", metavar="N", help="How many placements to try.")
]
LearnerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--learner",
        metavar="NAME=VALUE",
        help="A setting of the learned methods (docs/learning.md); may be given several times.",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="A trained policy that the learned methods go on from."),
]
SeedOption = Annotated[int, typer.Option(help="The same seed gives the same simulated result.")]


def add_to(app: typer.Typer) -> None:
    app.command()(place)
    app.command()(compare)
    app.command()(methods)


def place(
    model: common.ModelArgument,
    cluster: common.ClusterOption = "local",
    method: MethodOption = "auto",
    budget: BudgetOption = None,
    trials: TrialsOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Where to put the result.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Continue the run in this directory."),
    ] = None,
    seed: SeedOption = 0,
    learner: LearnerOption = None,
    policy: PolicyOption = None,
    html: Annotated[
        bool, typer.Option("--report/--no-report", help="Also write report.html.")
    ] = True,
    pin: common.PinOption = None,
    forbid: common.ForbidOption = None,
    together: common.TogetherOption = None,
    group_by: common.GroupByOption = None,
    groups: common.GroupsOption = None,
    costs: common.CostsOption = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="'simulate', 'measure' (every trial is a real run) or 'simulate+measure' (search "
            "in the simulator, run the best); the latter where the cluster is this machine.",
            show_default=False,
        ),
    ] = None,
    feeds: FeedsOption = None,
    time_limit: evaluation.TimeLimitOption = 120.0,
    limit_memory: evaluation.LimitMemoryOption = False,
    address: evaluation.AddressOption = None,
    open_servers: evaluation.OpenServersOption = False,
    controllers: distribution.ControllersOption = None,
    workers: distribution.WorkersOption = None,
    ray_address: distribution.RayAddressOption = None,
    worker_resource: distribution.WorkerResourceOption = None,
    trial_timeout: distribution.TrialTimeoutOption = "5m",
    max_staleness: distribution.MaxStalenessOption = None,
    scale: common.ScaleOption = "paper",
    batch: common.BatchOption = None,
    dim: common.DimOption = None,
    signature: common.SignatureOption = None,
    fetch: common.FetchOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Find a fast placement of a model on a cluster, and leave it in a directory.

    Example: placewright place inception_v3 --cluster k80x4 --budget 1m -o result
    """
    from placewright import methods as registry

    chosen = registry.parse(method)
    registry.check_learner(chosen, learner or (), policy)
    limits = _budget(budget, trials, "1m")
    team_config = distribution.configured(
        controllers, workers, ray_address, worker_resource, trial_timeout, max_staleness
    )
    # What can be wrong with the request is said before the model is read, which takes a while.
    directory = _output_directory(output, resume, model, cluster)
    machine = Cluster.load(cluster)
    real = evaluation.run_config(
        model, address, time_limit, limit_memory, open_servers=open_servers
    )
    how = distribution.choose(team_config, evaluate, model, machine, resume, limits, real)
    program = None
    if how == evaluation.SIMULATE:
        graph = common.load_graph(model, scale, batch, dim, signature, fetch)
    else:
        program = common.load_program(model, scale, batch, dim, signature, fetch)
        graph = program.graph
    problem = common.load_problem(
        graph, machine, group_by=group_by, groups=groups, pin=pin, forbid=forbid,
        together=together, costs=costs,
    )  # fmt: skip
    if evaluate is None and resume is None and how != evaluation.SIMULATE:
        how = evaluation.affordable(how, problem, limits)
    with (
        # Workers have devices of their own.
        evaluation.devices(
            how if team_config is None else evaluation.SIMULATE, program, machine, real, feeds
        ) as runner,
        stop_on_interrupt() as stopped,
        distribution.team(team_config, problem, program, real, feeds) as team,
        _progress(limits, team) as observe,
    ):
        result = evaluation.run(
            how, problem, runner, chosen, limits, seed=seed, directory=directory, observe=observe,
            stop=lambda: bool(stopped), learner=learner or (), policy=policy, team=team,
        )  # fmt: skip
    command = shlex.join(["placewright", *sys.argv[1:]])
    result.save(directory, command=command)
    if result.interrupted and not result.trials and not as_json:
        common.console.print(f"stopped before anything was tried; {_how_to_go_on(directory)}")
        raise typer.Exit(130)
    if as_json:
        common.print_json(result.summary(command))
    else:
        _print_table(problem, result.table, result.best_single)
        _print_answer(result, directory)
    if html:
        # After the answer, which nobody should have to wait for.
        page = write_beside(directory, result)
        if not as_json:
            common.console.print(page)
    if result.fault:
        # What was found is saved; the error is still one.
        raise WorkerError(f"the search ended early: {result.fault}")
    if result.interrupted:
        raise typer.Exit(130)
    if result.best is None:
        raise typer.Exit(1)


def compare(
    model: common.ModelArgument,
    cluster: common.ClusterOption = "local",
    method: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="NAME[,NAME...]",
            help="Names from 'placewright methods', or 'all'.",
            autocompletion=common.complete_methods,
        ),
    ] = "all",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", "-b", metavar="TIME", help="For each method that searches: 20s, 5m."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", metavar="N", help="The same, as a number of placements."),
    ] = None,
    seed: SeedOption = 0,
    learner: LearnerOption = None,
    policy: PolicyOption = None,
    pin: common.PinOption = None,
    forbid: common.ForbidOption = None,
    together: common.TogetherOption = None,
    group_by: common.GroupByOption = None,
    groups: common.GroupsOption = None,
    costs: common.CostsOption = None,
    scale: common.ScaleOption = "paper",
    batch: common.BatchOption = None,
    dim: common.DimOption = None,
    signature: common.SignatureOption = None,
    fetch: common.FetchOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Compare methods on a model and a cluster, each on its own.

    Example: placewright compare rnnlm --cluster k80x2 --methods single,expert,scotch
    """
    from placewright import api
    from placewright import methods as registry

    names = ["auto", *registry.METHODS] if method == "all" else method.split(",")
    runs = [(name, registry.parse(name)) for name in names]
    everyone = [method for _, chosen in runs for method in chosen]
    registry.check_learner(list(dict.fromkeys(everyone)), learner or (), policy)
    limits = _budget(budget, trials, "20s")
    machine = Cluster.load(cluster)
    graph = common.load_graph(model, scale, batch, dim, signature, fetch)
    problem = common.load_problem(
        graph, machine, group_by=group_by, groups=groups, pin=pin, forbid=forbid,
        together=together, costs=costs,
    )  # fmt: skip
    table: list[dict[str, Any]] = []
    bound = 0.0
    single = None
    with stop_on_interrupt() as stopped:
        for name, chosen in runs:
            if stopped:
                break
            with common.status(f"running {name} ..."):
                result = api.run(
                    problem, chosen, limits, seed=seed, stop=lambda: bool(stopped),
                    learner=learner or (), policy=policy,
                )  # fmt: skip
            table.append(_as_one_row(name, result))
            bound = max(bound, result.lower_bound_seconds)
            if name == "single":
                single = result.best_single
    if as_json:
        common.print_json({"methods": table, "lower_bound_seconds": bound})
    else:
        _print_table(problem, table, single)
        common.console.print(f"no placement can be faster than {common.format_seconds(bound)}")
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


def _budget(budget: str | None, trials: int | None, default: str) -> Budget:
    from placewright.search import Budget, parse_duration

    if budget is None and trials is None:
        budget = default
    seconds = None if budget is None else parse_duration(budget)
    return Budget(seconds=seconds, trials=trials)


def _output_directory(output: str | None, resume: str | None, model: str, cluster: str) -> str:
    if resume is not None:
        if output is not None and Path(output) != Path(resume):
            raise SearchError("--resume continues in its own directory; leave out --output")
        if not (Path(resume) / "journal.jsonl").is_file():
            raise SearchError(f"{resume}: holds no run to continue (no journal.jsonl)")
        return resume
    if output is not None:
        if not output or (Path(output).exists() and not Path(output).is_dir()):
            raise SearchError(f"{output or repr(output)}: not a directory")
        for name in RESULT_FILES:
            if (Path(output) / name).exists():
                raise SearchError(
                    f"{output}: already holds a run ({name}); continue it with --resume {output}, "
                    "or choose another directory"
                )
        return output
    base = f"placewright-{Path(model.removesuffix('.gz')).stem}-{Path(cluster).stem}"
    number = 1
    while Path(name := base if number == 1 else f"{base}-{number}").exists():
        number += 1
    return name


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
    limits: Budget, team: Team | None = None
) -> Iterator[Callable[[SearchProgress], None]]:
    """Shows, on a terminal, how far the search is and what each method has found."""
    with (
        Live(
            "compiling the simulator ...",
            console=common.errors,
            transient=True,
            refresh_per_second=4,
        )
        if common.errors.is_terminal and common.verbosity is not common.Verbosity.QUIET
        else nullcontext() as display
    ):

        def observe(progress: SearchProgress) -> None:
            if display is not None:
                view = _progress_view(progress, limits)
                if team is not None:
                    view.add_row("", distribution.described(team))
                display.update(view)

        yield observe


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


def _learning(metrics: dict[str, float] | None) -> str:
    """How the last update of a method that learns went."""
    if metrics is None:
        return ""
    return (
        f", update {metrics['update']:,.0f}: mean "
        f"{common.format_seconds(metrics['step_seconds_mean'])}, entropy {metrics['entropy']:.2f}, "
        f"{metrics['failure_share']:.0%} failed"
    )


def _found(trial: Trial | None) -> str:
    if trial is None:
        return "..."
    measurement = trial.measurement
    return (
        common.format_seconds(measurement.mean_seconds)
        if measurement.ok
        else measurement.outcome.value
    )


def _as_one_row(name: str, result: Result) -> dict[str, Any]:
    """A run of several methods (auto) or of one, as one row of the comparison."""
    from placewright.api import row
    from placewright.search import MethodResult

    failed = next((r.best for r in result.methods if r.best is not None), None)
    return row(
        MethodResult(
            method=name, best=result.best or failed, trials=result.trials, seconds=result.seconds
        )
    )


def _print_table(problem: Problem, rows: list[dict[str, Any]], single: Any) -> None:
    devices = problem.cluster.devices
    # A column for each device where the terminal is wide enough, otherwise the fullest alone.
    each = common.console.width >= 49 + 6 * len(devices)
    largest = max((max(r["peak_bytes"]) for r in rows if r["peak_bytes"]), default=0)
    unit, scale = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("method", no_wrap=True)
    table.add_column("step time", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
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
        if seconds is not None and single is not None:
            ratio = f"{single.measurement.mean_seconds / seconds:.2f}x"
        peaks = list(zip(entry["peak_bytes"], (d.memory_bytes for d in devices), strict=False))
        if not each:
            peaks = [max(peaks, key=lambda pair: pair[0] / pair[1])]
        table.add_row(
            entry["method"],
            common.format_seconds(seconds) if seconds is not None else entry["outcome"],
            ratio,
            *(
                f"[red]{peak / scale:.1f}[/red]" if peak > limit else f"{peak / scale:.1f}"
                for peak, limit in peaks
            ),
            f"{entry['trials']:,}",
            f"{entry['search_seconds']:.1f}",
            style="bold" if seconds is not None and seconds == fastest else None,
        )
    common.console.print(table)
    for entry in rows:
        if entry["peak_bytes"] is None:
            reason = entry["reason"] or "nothing new to propose within the budget"
            common.console.print(f"[dim]{entry['method']}: {common.escaped(reason)}[/dim]")


def _how_to_go_on(directory: str) -> str:
    return f"the same command with --resume {common.escaped(directory)} instead of -o goes on"


def _print_answer(result: Result, directory: str) -> None:
    say = common.console.print
    if result.best is None:
        say(f"[red]no placement found:[/red] {common.escaped(result.why_none())}")
        return
    folder = common.escaped(directory)
    devices = result.problem.cluster.device_names
    used = sorted(set(result.placement.devices.tolist()))
    on = ", ".join(common.escaped(devices[d]) for d in used)
    step = common.format_seconds(result.step_seconds)
    how = "simulated"
    if result.measured:
        half_width = result.best.measurement.half_width_seconds
        how = "measured once"
        if half_width is not None:
            how = f"measured, 95% within ± {common.format_seconds(half_width)}"
    say(f"[bold]{step}[/bold] a step on {on} ({how}), found by {result.best.placer}")
    single = result.best_single
    if single is not None:
        if result.speed_up is not None and result.speed_up > 1.0005:
            say(f"{result.speed_up:.2f} times as fast as the best single device")
        elif any(entry.best and entry.method != "single" for entry in result.methods):
            say("one device is already best: nothing found is faster than not splitting at all")
    elif any(entry.method == "single" for entry in result.methods):
        say("no single device can hold the model")
    for other in result.comparisons:
        spread = "" if other.half_width is None else f" ± {other.half_width:.3f}"
        say(f"in turns with {other.method}: {other.ratio:.3f}{spread} times as fast")
    bound = common.format_seconds(result.lower_bound_seconds)
    if result.measured:
        pass  # what is proven of the simulator is not of the machine
    elif result.gap < 1e-6:
        say("that is proven to be optimal (in the simulator)")
    else:
        say(f"no placement can be faster than {bound}: at most {result.gap:.1%} is left to gain")
    if result.interrupted:
        say(f"stopped early; {_how_to_go_on(directory)}")
    say(f"the placement is in {folder}/placement.json, its timeline in {folder}/trace.json")
