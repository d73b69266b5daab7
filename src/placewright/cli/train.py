"""`placewright train`: one policy for many graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from placewright.backends.base import LoadOptions
from placewright.cli import common
from placewright.cli.options import Only, add_command
from placewright.cli.outputs import check_output
from placewright.cli.place import LearnerOption, stop_on_interrupt
from placewright.cluster import Cluster
from placewright.session.config import SearchConfig
from placewright.units import format_seconds

if TYPE_CHECKING:
    from placewright.learning.train import Training


def add_to(app: typer.Typer) -> None:
    add_command(app, train)


def train(
    *,
    models: Annotated[
        str, typer.Option(metavar="MODEL[,MODEL...]", help="Names or files to train on.")
    ],
    clusters: Annotated[
        str, typer.Option(metavar="CLUSTER[,CLUSTER...]", help="Each is used with each model.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to put the policy.")
    ],
    search: Annotated[
        SearchConfig,
        Only(
            budget="How long: 10m, 1h.",
            trials="How many placements in all.",
            policy="A trained policy to go on training.",
            seed="The same seed gives the same simulated result.",
        ),
    ],
    learner: LearnerOption = None,
    load: Annotated[LoadOptions, Only("scale")],
    as_json: common.JsonOption = False,
) -> None:
    """Train one policy on several models and clusters, to start from on others.

    Example: placewright train --models rnnlm,nmt --clusters k80x4 -b 10m -o policy.st
    """
    from placewright import methods
    from placewright.evaluators.simulated import SimulatedEvaluator
    from placewright.problem import make_problem

    if search.budget is None and search.trials is None:
        search = replace(search, budget="10m")
    check_output(output)
    methods.check_learning("train")
    from placewright.learning.config import PPO, configured
    from placewright.learning.policy import Policy
    from placewright.learning.train import Lesson
    from placewright.learning.train import train as train_policy

    config = configured(PPO, learner or ())
    start = None if search.policy is None else Policy.load(search.policy)
    machines = [Cluster.load(cluster) for cluster in clusters.split(",")]
    graphs = [common.load_graph(model, load) for model in models.split(",")]
    lessons = []
    for graph in graphs:
        for machine in machines:
            problem = make_problem(graph, machine)
            evaluator = SimulatedEvaluator(problem)
            lessons.append(
                Lesson(evaluator=evaluator, teachers=methods.teachers(problem, seed=search.seed))
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
                f"{name} {format_seconds(trial.measurement.mean_seconds)}"
                for name, trial in zip(names, training.best, strict=True)
                if trial is not None and trial.measurement.ok
            )
            status.update(
                f"update {max(training.updates)}, {training.trials:,} trials, "
                f"{training.seconds:.0f} s: "
                f"{common.escaped(best)}"
            )

        trained = train_policy(
            lessons, config, search.limits, seed=search.seed, policy=start, observe=observe,
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
