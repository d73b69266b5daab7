"""Plans for modules that do not fit, decided by running them: by a clock of the test's own, so
that nothing depends on how busy the machine is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from placewright.backends.pytorch.offload.links import SlowLink
from placewright.backends.pytorch.offload.measuring import Caller, Contest, Refinement
from placewright.backends.pytorch.offload.planner import Choice, Planner
from placewright.torch import generation, plan_offload
from tests.backends.pytorch.test_offload import WORKLOAD, Stack, planner_of

Clock = Callable[[Choice, str], float]


def choice(home: str, many: str, one: str) -> Choice:
    return Choice(frozenset(home), {"many": frozenset(many), "one": frozenset(one)}, 10)


def held(
    clock: Clock,
    choices: Sequence[Choice],
    *,
    turns: int = 3,
    goes_on: Callable[[], bool] = lambda: True,
    fits: Callable[[Choice], bool] = lambda choice: True,
) -> tuple[Choice, Mapping[str, float], list[tuple[int, tuple[str, ...]]]]:
    """The best, what it took, and which plans were run for which calls."""
    ran: list[tuple[int, tuple[str, ...]]] = []

    def measure(choice: Choice, calls: Sequence[str]) -> Mapping[str, float]:
        ran.append((choices.index(choice), tuple(calls)))
        return {call: clock(choice, call) for call in calls}

    contest = Contest({"many": 1.0, "one": 8.0}, fits, measure)
    return *contest.run(choices, turns, goes_on), ran


def test_each_call_has_its_best_way_among_plans_with_the_same_homes() -> None:
    plans = [choice("ab", "c", "cd"), choice("ab", "cd", ""), choice("a", "", "")]
    took = {("c", "many"): 3.0, ("cd", "many"): 9.0, ("cd", "one"): 2.0, ("", "one"): 1.0}

    def clock(plan: Choice, call: str) -> float:
        return 4.0 if len(plan.at_home) < 2 else took["".join(sorted(plan.by_host[call])), call]

    best, seconds, _ = held(clock, plans)
    assert best == choice("ab", "c", "")
    assert seconds == {"many": 3.0, "one": 1.0}


def test_ways_that_have_no_room_together_are_not_put_together() -> None:
    plans = [choice("ab", "c", "cd"), choice("ab", "cd", "")]

    def clock(plan: Choice, call: str) -> float:
        return float(len(plan.by_host[call]))

    best, _, _ = held(clock, plans, fits=lambda plan: plan in plans)
    assert best == plans[1]


def test_one_lucky_run_does_not_decide() -> None:
    """The second is the quicker one, but for its first turn, in which something else was going on;
    the third is too slow to be run again, and so is the fourth after two turns."""
    plans = [choice(home, "", "") for home in "abcd"]
    times = {
        ("a", "many"): [1.0, 1.0, 1.0], ("a", "one"): [1.0, 1.0, 1.0],
        ("b", "many"): [1.0, 1.0, 1.0], ("b", "one"): [1.4, 0.9, 0.9],
        ("c", "many"): [1.0], ("c", "one"): [1.8],
        ("d", "many"): [1.0, 1.0], ("d", "one"): [1.3, 1.3],
    }  # fmt: skip

    def clock(plan: Choice, call: str) -> float:
        return times[min(plan.at_home), call].pop(0)

    best, seconds, ran = held(clock, plans)
    assert best == plans[1]
    assert seconds["one"] == 0.9
    assert [number for number, _ in ran] == [0, 1, 2, 3, 0, 1, 3, 0, 1]


def test_without_time_the_first_plan_is_run_at_least() -> None:
    plans = [choice("a", "", ""), choice("b", "", "")]
    best, _, ran = held(lambda plan, call: 1.0, plans, goes_on=lambda: False)
    assert best == plans[0]
    assert ran == [(0, ("many", "one"))]


# --- the whole of it, on two memories ------------------------------------------------------------


def refined(planner: Planner, clock: Clock) -> tuple[Choice, Choice, list[Choice], Any]:
    """What is chosen; the plan without measurements; all that was run; and the module."""
    planner.limits = replace(planner.limits, device="cpu:1")
    plan = planner.search(20)
    first = planner.choice_of(plan)
    placed = plan.apply(Stack(12), link=SlowLink(1e9))
    ran: list[Choice] = []

    def passes(self: Refinement, caller: Any, call: str) -> float:
        ran.append(planner.choice_of(self.placed.offload.plan))
        return clock(ran[-1], call)

    with (
        mock.patch.object(Refinement, "_passes", passes),
        mock.patch.object(Refinement, "_costs", return_value=planner.costs),
    ):
        chosen = Refinement(placed, planner, WORKLOAD).run()
    assert placed.offload.plan == chosen
    return planner.choice_of(chosen), first, ran, placed


def pure(planner: Planner, by_host: bool) -> Choice:
    ways = [c for c in planner.one_way(by_host=by_host) if planner.fits(c)]
    return min(ways, key=planner.total)


@pytest.mark.parametrize("truth", ["travel", "host", "unmeasured"])
def test_what_is_chosen_is_no_slower_than_pure_plans_or_the_unmeasured_one(truth: str) -> None:
    """Costs say that a mix is best, and the clock that it is not."""
    planner = planner_of(Stack(12), 0.5, link=1.0, host=1.0)
    of = planner.costs.of["one"]  # as if the host took no longer for many rows
    planner.costs = replace(planner.costs, of={"many": of, "one": of})
    known = {
        "travel": pure(planner, by_host=False),
        "host": pure(planner, by_host=True),
        "unmeasured": planner.choice_of(planner.search(20)),
    }
    assert len({plan.by_host["one"] for plan in known.values()}) == 3

    def clock(plan: Choice, call: str) -> float:
        return 1.0 if plan == known[truth] else 1.2

    chosen, first, ran, placed = refined(planner, clock)
    assert first == known["unmeasured"]
    assert all(plan in ran for plan in known.values())
    assert chosen == known[truth]
    assert {shape.seconds for shape in placed.offload.plan.shapes} == {1.0}
    # It goes on with that, and its limits hold.
    assert planner.fits(chosen)
    with torch.no_grad():
        assert placed(torch.zeros(2, 16)).shape == (2, 4)


def test_the_way_of_one_call_is_not_left_out_for_another_s_sake() -> None:
    """The host is hopeless for many rows; for one row all by the host is best all the same."""
    planner = planner_of(Stack(12), 0.5, link=1.0, host=1.0)

    def clock(plan: Choice, call: str) -> float:
        return 1.0 if call == "many" else 20.0 - len(plan.by_host["one"])

    chosen, _, _, _ = refined(planner, clock)
    assert chosen.by_host["one"].issuperset(planner.away(chosen))
    assert not chosen.by_host["many"].issuperset(planner.away(chosen))


@pytest.mark.parametrize("static", [True, False])
def test_prompts_are_read_anew_only_for_caches_that_have_grown(static: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=3, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    workload = generation(prompt=8, new=4, static_cache=static)
    placed = plan_offload(model, workload, memory={"cpu:1": "1GB"}).apply(model)
    caller = Caller(placed, workload)
    rows: list[int] = []
    placed.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(3):
        caller("decode", 2)
        caller.another_plan()
    assert rows == ([8, 1, 1, 1, 1, 1, 1] if static else 3 * [8, 1, 1])


def test_plans_that_are_too_slow_beyond_doubt_are_not_run() -> None:
    planner = planner_of(Stack(12), 0.5, link=0.01, host=100.0)
    _, _, ran, _ = refined(planner, planner.seconds)
    assert pure(planner, by_host=True) not in ran
    assert pure(planner, by_host=False) in ran
