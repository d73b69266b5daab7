"""`placewright train`: one policy for many graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from placewright.cli import common
from placewright.cli.place import LearnerOption, SeedOption, stop_on_interrupt
from placewright.cluster import Cluster
from placewright.errors import SearchError

if TYPE_CHECKING:
    from placewright.learning.train import Training


def add_to(app: typer.Typer) -> None:
    app.command()(train)


def train(
    models: Annotated[
        str, typer.Option(metavar="MODEL[,MODEL...]", help="Names or files to train on.")
    ],
    clusters: Annotated[
        str, typer.Option(metavar="CLUSTER[,CLUSTER...]", help="Each is used with each model.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to put the policy.")
    ],
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", metavar="TIME", help="How long: 10m, 1h.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="How many placements in all.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="FILE", help="A trained policy to go on training.")
    ] = None,
    learner: LearnerOption = None,
    seed: SeedOption = 0,
    scale: common.ScaleOption = "paper",
    as_json: common.JsonOption = False,
) -> None:
    """Train one policy on several models and clusters, to start from on others.

    Example: placewright train --models rnnlm,nmt --clusters k80x4 -b 10m -o policy.st
    """
    from pathlib import Path

    from placewright import methods
    from placewright.budget import Budget
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.problem import make_problem
    from placewright.units import parse_duration

    if budget is None and trials is None:
        budget = "10m"
    limits = Budget(seconds=None if budget is None else parse_duration(budget), trials=trials)
    if Path(output).exists():
        raise SearchError(f"{output}: is there already; choose another file")
    if not Path(output).absolute().parent.is_dir():
        raise SearchError(f"{output}: its directory does not exist")
    methods.check_learning("train")
    from placewright.learning.config import PPO, configured
    from placewright.learning.policy import Policy
    from placewright.learning.train import Lesson
    from placewright.learning.train import train as train_policy

    config = configured(PPO, learner or ())
    start = None if policy is None else Policy.load(policy)
    machines = [Cluster.load(cluster) for cluster in clusters.split(",")]
    graphs = [
        common.load_graph(model, scale, None, None, None, None) for model in models.split(",")
    ]
    lessons = []
    for graph in graphs:
        for machine in machines:
            problem = make_problem(graph, machine)
            evaluator = SimulatedEvaluator(problem)
            lessons.append(
                Lesson(evaluator=evaluator, teachers=methods.teachers(problem, seed=seed))
            )
    names = [
        f"{lesson.evaluator.problem.graph.name} on {lesson.evaluator.problem.cluster.name}"
        for lesson in lessons
    ]
    state: list[Training] = []
    with stop_on_interrupt() as stopped, common.errors.status("training ...") as status:

        def observe(training: Training) -> None:
            state[:] = [training]
            best = ", ".join(
                f"{name} {common.format_seconds(trial.measurement.mean_seconds)}"
                for name, trial in zip(names, training.best, strict=True)
                if trial is not None and trial.measurement.ok
            )
            status.update(
                f"update {max(training.updates)}, {training.trials:,} trials, "
                f"{training.seconds:.0f} s: "
                f"{common.escaped(best)}"
            )

        trained = train_policy(
            lessons, config, limits, seed=seed, policy=start, observe=observe,
            stop=lambda: bool(stopped),
        )  # fmt: skip
    trained.cpu().save(output)
    (training,) = state
    if as_json:
        updates = dict(zip(names, training.updates, strict=True))
        common.print_json({"policy": output, "trials": training.trials, "updates": updates})
    else:
        problems = "1 problem" if len(lessons) == 1 else f"{len(lessons)} problems"
        common.console.print(
            f"{common.escaped(output)}: trained on {problems}, "
            f"{sum(training.updates):,} updates, {training.trials:,} trials; "
            "use it with placewright place --policy"
        )
    if stopped:
        raise typer.Exit(130)
