from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from placewright.errors import LearningError
from placewright.learning.config import PolicyConfig
from placewright.learning.features import features
from placewright.learning.policy import Inputs, Policy, _AdditiveScores, _Lstm
from placewright.problem import Problem, ProblemConfig, make_problem
from placewright.testing import gpu_boards, layered_graph, random_problem

PAPER = PolicyConfig(
    hidden=16, bidirectional=False, adjacency="list", logarithms=False, costs=False, aligned=False,
    running=False, device_features=False,
)  # fmt: skip
MODERN = PolicyConfig(hidden=16)


def _policy(config: PolicyConfig, problem: Problem) -> tuple[Policy, Inputs]:
    torch.manual_seed(0)
    policy = Policy.for_problems(config, [problem])
    with torch.no_grad():  # an untrained policy is too even to show a difference
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy, policy.inputs(features(problem, policy.types))


@pytest.mark.parametrize("config", [PAPER, MODERN, PolicyConfig(hidden=16, running=False)])
@pytest.mark.parametrize("seed", range(3))
def test_sampling_and_scoring_give_the_same_log_probabilities(
    config: PolicyConfig, seed: int
) -> None:
    problem = random_problem(seed)
    policy, x = _policy(config, problem)
    actions, sampled = policy.sample(x, 7, torch.Generator().manual_seed(1))
    scored, entropy = policy.score(x, actions.clone())
    torch.testing.assert_close(scored, sampled.clone(), rtol=1e-4, atol=1e-5)
    assert (entropy >= -1e-6).all()


def test_forbidden_devices_are_never_chosen_and_have_no_probability() -> None:
    free = make_problem(layered_graph(40, 6), gpu_boards(4), ProblemConfig(groups=10))
    forbidden = np.zeros((free.num_groups, free.num_devices), dtype=np.bool_)
    forbidden[::2, 0] = True
    problem = dataclasses.replace(free, forbidden=forbidden)
    policy, x = _policy(MODERN, problem)
    actions, _ = policy.sample(x, 50, torch.Generator().manual_seed(0), noise=10.0)
    allowed = ~x.forbidden_GD
    chosen = allowed[torch.arange(actions.shape[1]), actions]
    assert chosen.all()
    # Summed over all devices of one group, the probabilities of the allowed ones are 1.
    group = int((~problem.allowed[policy_order(problem)]).any(axis=1).argmax())
    total = torch.zeros(())
    for device in range(problem.num_devices):
        if allowed[group, device]:
            changed = actions[:1].clone()
            changed[:, group] = device
            total = total + policy.score(x, changed)[0][0, group].exp()
    assert total.item() == pytest.approx(1.0, abs=1e-5)


def policy_order(problem: Problem) -> np.ndarray:
    return features(problem, []).order


def test_samples_follow_the_scored_probabilities() -> None:
    problem = random_problem(3)
    policy, x = _policy(MODERN, problem)
    actions, _ = policy.sample(x, 4000, torch.Generator().manual_seed(0))
    first = torch.bincount(actions[:, 0], minlength=problem.num_devices) / len(actions)
    for device in range(problem.num_devices):
        placement = actions[:1].clone()
        placement[:, 0] = device
        if x.forbidden_GD[0, device]:
            assert first[device] == 0
        else:
            expected = policy.score(x, placement)[0][0, 0].exp().item()
            assert float(first[device]) == pytest.approx(expected, abs=0.04)


def test_noise_makes_samples_more_random_and_greedy_takes_the_likeliest() -> None:
    problem = make_problem(layered_graph(40, 6), gpu_boards(4), ProblemConfig(groups=10))
    policy, x = _policy(MODERN, problem)
    mean = {}
    for noise in (0.0, 20.0):
        _, logp = policy.sample(x, 200, torch.Generator().manual_seed(0), noise=noise)
        mean[noise] = logp.sum(dim=1).mean().item()
    assert mean[20.0] < mean[0.0] - 1  # the policy holds what it sampled for less likely
    greedy, logp = policy.sample(x, 1, torch.Generator().manual_seed(0), greedy=True)
    again, _ = policy.sample(x, 1, torch.Generator().manual_seed(5), greedy=True)
    assert (greedy == again).all()
    for device in torch.nonzero(~x.forbidden_GD[0]).flatten().tolist():
        other = greedy.clone()
        other[:, 0] = device
        assert policy.score(x, other)[0][0, 0] <= logp[0, 0] + 1e-5


@pytest.mark.parametrize("config", [PAPER, MODERN])
def test_the_gradient_is_that_of_the_log_probability(config: PolicyConfig) -> None:
    """Against finite differences, in double precision: the LSTM and the attention have backward
    passes of their own."""
    problem = random_problem(2)
    policy, x = _policy(config, problem)
    policy = policy.double()
    x = Inputs(*(t.double() if t.is_floating_point() else t for t in x))
    actions, _ = policy.sample(x, 3, torch.Generator().manual_seed(0))
    actions = actions.clone()

    def loss() -> torch.Tensor:
        logp, entropy = policy.score(x, actions)
        return logp.sum() + entropy.sum()

    parameters = dict(policy.named_parameters())
    gradients = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            parameter.add_(step * direction)
            above = loss()
            parameter.sub_(2 * step * direction)
            below = loss()
            parameter.add_(step * direction)
        expected = ((above - below) / (2 * step)).item()
        found = 0.0 if gradient is None else (gradient * direction).sum().item()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def test_lstm_and_attention_are_what_they_say() -> None:
    torch.manual_seed(0)
    samples, groups, devices, hidden = 3, 5, 4, 6
    reference = torch.nn.LSTM(2, hidden, batch_first=True)
    weights: dict[str, torch.Tensor] = dict(reference.named_parameters())
    step, choice = torch.randn(groups, 4 * hidden), torch.randn(devices, 4 * hidden)
    given = torch.randint(devices, (samples, groups))
    with torch.no_grad():  # its own input does nothing: everything comes in through the bias
        weights["weight_ih_l0"].zero_()
        weights["bias_hh_l0"].zero_()
        start, cell = torch.randn(hidden), torch.randn(hidden)
        expected = []
        for sample in range(samples):
            h, c = start.view(1, 1, -1), cell.view(1, 1, -1)
            for g in range(groups):
                weights["bias_ih_l0"].copy_(step[g] + choice[given[sample, g]])
                out, (h, c) = reference(torch.zeros(1, 1, 2), (h, c))
                expected.append(out.flatten())
    found = _Lstm.apply(step, choice, weights["weight_hh_l0"], start, cell, given)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.reshape(-1, hidden), torch.stack(expected))

    query, key, attend = torch.randn(9, 3), torch.randn(5, 3), torch.randn(3)
    scores = _AdditiveScores.apply(query, key, attend)  # type: ignore[no-untyped-call]
    exact = torch.tanh(query[:, None] + key[None]) @ attend
    torch.testing.assert_close(torch.softmax(scores, dim=1), torch.softmax(exact, dim=1))


def test_a_saved_policy_is_the_same_policy_also_on_another_graph(tmp_path: Path) -> None:
    problem, other = random_problem(0), random_problem(7)
    policy, x = _policy(MODERN, problem)
    policy.save(tmp_path / "policy.st")
    loaded = Policy.load(tmp_path / "policy.st")
    actions, logp = policy.sample(x, 2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        loaded.score(x, actions.clone())[0], logp.clone(), atol=1e-5, rtol=1e-4
    )
    elsewhere = loaded.inputs(features(other, loaded.types))
    placed, _ = loaded.sample(elsewhere, 2, torch.Generator().manual_seed(0))
    assert placed.shape == (2, other.num_groups)


def test_the_papers_adjacency_is_tied_to_one_size_of_graph() -> None:
    problem = random_problem(0)
    other = next(p for p in map(random_problem, range(50)) if p.num_groups != problem.num_groups)
    policy, _ = _policy(PAPER, problem)
    with pytest.raises(LearningError, match=f"made for {problem.num_groups} groups"):
        policy.inputs(features(other, policy.types))


def test_files_that_are_no_policy_or_another_one(tmp_path: Path) -> None:
    problem = random_problem(0)
    policy, _ = _policy(MODERN, problem)
    path = tmp_path / "policy.st"
    policy.save(path)
    whole = path.read_bytes()
    with pytest.raises(LearningError, match="no such file"):
        Policy.load(tmp_path / "nothing")
    for damaged in (b"", b"hello", whole[: len(whole) // 2], whole[:100], b"\xff" * 200):
        path.write_bytes(damaged)
        with pytest.raises(LearningError, match=r"policy\.st: "):
            Policy.load(path)
    path.write_bytes(whole.replace(b'\\"hidden\\":', b'\\"hiddex\\":'))
    with pytest.raises(LearningError, match="another architecture"):
        Policy.load(path)
    path.write_bytes(whole.replace(b'\\"hidden\\": 16', b'\\"hidden\\": 18'))
    with pytest.raises(LearningError, match="weights of another architecture"):
        Policy.load(path)


def test_room_for_devices() -> None:
    problem = make_problem(layered_graph(40, 6), gpu_boards(4), ProblemConfig(groups=10))
    policy, x = _policy(PolicyConfig(hidden=16, max_devices=1), problem)  # grows with the problem
    assert policy.sample(x, 1, torch.Generator().manual_seed(0))[0].max() < 4
    larger = make_problem(layered_graph(40, 6), gpu_boards(6), ProblemConfig(groups=10))
    with pytest.raises(LearningError, match="room for 4 devices, the cluster has 6"):
        policy.inputs(features(larger, policy.types))
