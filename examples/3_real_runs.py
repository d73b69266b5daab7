"""Measure placements for real, on two CPU devices of this machine.

    python examples/3_real_runs.py

What is simulated and what is measured differ, as costs are estimated: `placewright calibrate` and
`--evaluate simulate+measure` bring them together.
"""

import tensorflow as tf

from placewright import Cluster, SimulatedEvaluator, backends, make_problem
from placewright.evaluators.measured import MeasuredEvaluator
from placewright.placement import everything_on
from placewright.placers.heft import heft

with tf.Graph().as_default() as graph:
    x = tf.random.normal([64, 256], seed=1, name="x")
    towers = []
    for tower in ("left", "right"):
        with tf.name_scope(tower):
            weights = tf.random.normal([256, 256], seed=2, name="weights")
            y = x
            for _ in range(4):
                y = tf.tanh(tf.matmul(y, weights))
            towers.append(tf.reduce_mean(y))
    tf.add_n(towers, name="answer")

program = backends.load_program(graph, fetches=["answer"])
cluster = Cluster.load("cpu2")
problem = make_problem(program.graph, cluster)
placements = {
    "all on cpu:0": everything_on(problem, 0),
    "all on cpu:1": everything_on(problem, 1),
    "heft": heft(problem)[0],
}
simulated = SimulatedEvaluator(problem).evaluate(list(placements.values()))
with backends.runner(program, cluster) as runner:
    measured = MeasuredEvaluator(problem, runner).evaluate(list(placements.values()))
for name, guess, real in zip(placements, simulated, measured, strict=True):
    times = (
        f"simulated {1e3 * guess.mean_seconds:.2f} ms, measured {1e3 * real.mean_seconds:.2f} ms"
    )
    print(f"{name:14} {times}" if real.ok else f"{name:14} {real.outcome.value}: {real.reason}")
