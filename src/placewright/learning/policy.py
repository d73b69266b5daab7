"""The policy: a sequence-to-sequence network that reads groups and chooses their devices.

An LSTM encoder reads the groups in topological order; an LSTM decoder with additive attention over
the encoder's states chooses one device after another, each choice fed into the next step
(Mirhoseini et al. 2017, section 3). Attention comes after the decoder's LSTM and is not fed back
into it: that is what lets `score` run all steps of all samples at once, given the choices.

Letters in names: K samples, G groups, D devices, H hidden, A attention, F running features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from placewright.errors import LearningError
from placewright.learning import features as columns
from placewright.learning.config import PolicyConfig
from placewright.learning.features import Features, vocabulary
from placewright.learning.tensors import read_tensors, write_tensors
from placewright.problem import Problem

FORMAT = "placewright-policy/1"

RUNNING = 5
"""Running features of a step: see `_running`."""


class Inputs(NamedTuple):
    """`Features` as tensors on the policy's device; only what its config lets it see."""

    types_GV: Tensor
    shapes_GS: Tensor
    feeds_GG: Tensor
    sends_GG: Tensor
    receives_GG: Tensor
    traffic_GG: Tensor
    """Share of each group's traffic with groups that are placed before it."""
    extras_GX: Tensor
    devices_DF: Tensor
    work_GD: Tensor
    slower_GD: Tensor
    memory_GD: Tensor
    forbidden_GD: Tensor


class Encoded(NamedTuple):
    """The problem as the decoder sees it."""

    states_GH: Tensor
    keys_GA: Tensor
    last_H: Tensor
    cell_H: Tensor
    projected_G4H: Tensor
    """What each group's state adds to the gates of its step; zero unless aligned."""
    projected_D4H: Tensor
    """What the device chosen last adds to them; the row after the last device is 'go'."""
    chosen_DH: Tensor
    """The logits' weights of each device."""


class Policy(nn.Module):
    """Proposes devices for groups. No clocks, files or workers inside."""

    def __init__(
        self, config: PolicyConfig, types: Sequence[str], groups: int | None = None
    ) -> None:
        """`types` is the vocabulary of op types; `groups` is needed for `adjacency='list'`."""
        super().__init__()
        if config.adjacency == "list" and groups is None:
            raise LearningError("policy: adjacency 'list' needs the number of groups")
        self.config = config
        self.types = tuple(types)
        self.groups = groups if config.adjacency == "list" else None
        hidden = config.hidden
        self.type_table = nn.Linear(
            len(self.types) + columns.TYPE_BUCKETS, config.type_embedding, bias=False
        )
        width = config.type_embedding + columns.SHAPES * columns.DIMS
        if config.costs:
            width += columns.EXTRAS
        if config.adjacency == "list":
            width += 2 * (groups or 0)
        self.embed = nn.Linear(width, hidden)
        if config.adjacency == "neighbours":
            self.rounds = nn.ModuleList(nn.Linear(3 * hidden, hidden) for _ in range(2))
        directions = 2 if config.bidirectional else 1
        self.encoder = nn.LSTM(
            hidden, hidden // directions, bidirectional=config.bidirectional, batch_first=True
        )
        # The decoder's LSTM. Its input is projected apart by where it comes from: there are only D
        # devices and G states to project, however many samples there are.
        self.from_given = nn.Linear(hidden, 4 * hidden)
        if config.aligned:
            self.from_state = nn.Linear(hidden, 4 * hidden, bias=False)
        self.from_last = nn.Linear(hidden, 4 * hidden, bias=False)
        self.given = nn.Embedding(config.max_devices + 1, hidden)
        self.chosen = nn.Embedding(config.max_devices, hidden)
        if config.device_features:
            self.describe = nn.Linear(columns.DEVICE_COLUMNS, 2 * hidden)
        self.key = nn.Linear(hidden, config.attention, bias=False)
        self.query = nn.Linear(hidden, config.attention)
        self.attend = nn.Linear(config.attention, 1, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden)
        if config.running:
            self.weigh = nn.Linear(hidden, RUNNING)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
            # Gates are in the order input, forget, cell, output.
            if "bias_ih" in name or name == "from_given.bias":
                size = parameter.shape[0] // 4
                with torch.no_grad():
                    parameter[size : 2 * size] = self.config.forget_bias
        # What the logits are made of starts small: an untrained policy tries everything.
        with torch.no_grad():
            for module in (self.chosen, *(getattr(self, n, None) for n in ("describe", "weigh"))):
                if module is not None:
                    module.weight *= 0.1

    @staticmethod
    def for_problems(config: PolicyConfig, problems: Sequence[Problem]) -> Policy:
        """A new policy with room for these problems' devices and with their op types."""
        devices = max(problem.num_devices for problem in problems)
        config = replace(config, max_devices=max(config.max_devices, devices))
        if config.adjacency == "list" and len({problem.num_groups for problem in problems}) > 1:
            raise LearningError(
                "a policy for several graphs needs policy.adjacency=neighbours: a list of "
                "neighbours is tied to the size of one graph"
            )
        return Policy(config, vocabulary(problems), problems[0].num_groups)

    def inputs(self, seen: Features) -> Inputs:
        """The features as tensors, where the parameters are."""
        groups, devices = seen.allowed_GD.shape
        if self.groups is not None and groups != self.groups:
            raise LearningError(
                f"the policy was made for {self.groups} groups, the problem has {groups}; only "
                "policies with adjacency 'neighbours' (ppo's) can move to another graph"
            )
        if devices > self.config.max_devices:
            raise LearningError(
                f"the policy has room for {self.config.max_devices} devices, the cluster has "
                f"{devices}; make one with a larger max_devices"
            )
        where, logarithms = self.given.weight.device, self.config.logarithms

        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(where)

        return Inputs(
            types_GV=tensor(seen.log_types_GV if logarithms else seen.types_GV),
            shapes_GS=tensor(seen.log_shapes_GS if logarithms else seen.shapes_GS),
            feeds_GG=tensor(seen.feeds_GG),
            sends_GG=tensor(seen.sends_GG),
            receives_GG=tensor(seen.receives_GG),
            traffic_GG=tensor(np.tril(seen.traffic_GG, -1)),
            extras_GX=tensor(seen.extras_GX),
            devices_DF=tensor(seen.devices_DF),
            work_GD=tensor(seen.work_GD),
            slower_GD=tensor(seen.slower_GD),
            memory_GD=tensor(seen.memory_GD),
            forbidden_GD=tensor(~seen.allowed_GD),
        )

    def encode(self, x: Inputs) -> Encoded:
        parts = [self.type_table(x.types_GV), x.shapes_GS]
        if self.config.costs:
            parts.append(x.extras_GX)
        if self.config.adjacency == "list":
            parts += [x.feeds_GG, x.feeds_GG.T]
        items_GH = torch.tanh(self.embed(torch.cat(parts, dim=1)))
        if self.config.adjacency == "neighbours":
            for layer in self.rounds:
                around = [items_GH, x.sends_GG @ items_GH, x.receives_GG @ items_GH]
                items_GH = items_GH + torch.tanh(layer(torch.cat(around, dim=1)))
        states_1GH, (last, cell) = self.encoder(items_GH[None])
        count = x.devices_DF.shape[0]
        given_DH, chosen_DH = self.given.weight[:count], self.chosen.weight[:count]
        if self.config.device_features:
            more_given, more_chosen = self.describe(x.devices_DF).chunk(2, dim=1)
            given_DH, chosen_DH = given_DH + more_given, chosen_DH + more_chosen
        if self.config.aligned:
            projected_G4H = self.from_state(states_1GH[0])
        else:
            projected_G4H = states_1GH.new_zeros((states_1GH.shape[1], 4 * self.config.hidden))
        return Encoded(
            states_GH=states_1GH[0],
            keys_GA=self.key(states_1GH[0]),
            last_H=last.reshape(-1),
            cell_H=cell.reshape(-1),
            projected_G4H=projected_G4H,
            projected_D4H=self.from_given(torch.cat([given_DH, self.given.weight[-1:]])),
            chosen_DH=chosen_DH,
        )

    def score(self, x: Inputs, actions_KG: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [K, G] of choices that were made, and the entropy [K, G] of each
        choice, with gradients, all steps at once."""
        e = self.encode(x)
        samples, groups = actions_KG.shape
        go = torch.full_like(actions_KG[:, :1], x.forbidden_GD.shape[1])
        given_KG = torch.cat([go, actions_KG[:, :-1]], dim=1)
        hidden_KGH = _apply(
            _Lstm, e.projected_G4H, e.projected_D4H, self.from_last.weight, e.last_H, e.cell_H,
            given_KG,
        )  # fmt: skip
        query_RA = self.query(hidden_KGH).reshape(samples * groups, -1)
        scores_RG = _apply(_AdditiveScores, query_RA, e.keys_GA, self.attend.weight[0])
        scores_KGG = scores_RG.view(samples, groups, groups)
        context_KGH = torch.softmax(scores_KGG, dim=2) @ e.states_GH
        out_KGH = torch.tanh(self.combine(torch.cat([hidden_KGH, context_KGH], dim=2)))
        logits_KGD = out_KGH @ e.chosen_DH.T
        if self.config.running:
            running_KGDF = _running_of(x, actions_KG)
            weights_KGF1 = self.weigh(out_KGH)[..., None]
            logits_KGD = logits_KGD + (running_KGDF @ weights_KGF1)[..., 0]
        logits_KGD = self._squash(logits_KGD).masked_fill(x.forbidden_GD, -torch.inf)
        logp_KGD = torch.log_softmax(logits_KGD, dim=2)
        chosen = logp_KGD.gather(2, actions_KG[..., None])[..., 0]
        # 0 * log 0 of a forbidden device is 0, not NaN; so is its gradient.
        safe_KGD = logp_KGD.masked_fill(x.forbidden_GD, 0.0)
        entropy_KG = -(safe_KGD.exp() * safe_KGD).masked_fill(x.forbidden_GD, 0.0).sum(dim=2)
        return chosen, entropy_KG

    def _squash(self, logits: Tensor) -> Tensor:
        return self.config.tanh_constant * torch.tanh(logits / self.config.temperature)

    @torch.inference_mode()
    def sample(
        self,
        x: Inputs,
        count: int,
        generator: torch.Generator,
        *,
        noise: float = 0.0,
        greedy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Choices [K, G] and their log-probabilities [K, G], one step after another, no gradients.

        `noise` is the standard deviation of a normal number added to each logit; the
        log-probabilities are those without it. `greedy` takes the likeliest device each time.
        """
        e = self.encode(x)
        groups, devices = x.forbidden_GD.shape
        where = e.states_GH.device
        # Drawn on the CPU and all at once, so that a GPU samples the same placements.
        uniform = torch.rand((groups, count, devices), generator=generator)
        gumbel_GKD = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
        if greedy:
            gumbel_GKD.zero_()
        if noise:
            gumbel_GKD += noise * torch.randn(gumbel_GKD.shape, generator=generator)
        gumbel_GKD = gumbel_GKD.to(e.states_GH)

        # All that does not depend on the choices is computed once.
        w_last = self.from_last.weight.T
        w_hidden, w_context = self.combine.weight.chunk(2, dim=1)
        w_hidden, context_GH = w_hidden.T, e.states_GH @ w_context.T
        w_query, w_attend = self.query.weight.T, self.attend.weight[0]
        e_key_1GA = _exp2x(e.keys_GA)[None]
        w_chosen = e.chosen_DH.T
        if self.config.running:
            w_weigh = self.weigh.weight.T
            running = _Running(x, count)

        h = e.last_H.expand(count, -1)
        c = e.cell_H.expand(count, -1)
        last = torch.full((count,), devices, device=where)
        actions, all_logits = [], []
        for g in range(groups):
            gates = torch.addmm(e.projected_D4H[last], h, w_last).add_(e.projected_G4H[g])
            h, c, _, _ = _lstm_cell(gates, c)
            e_query = _exp2x(torch.addmm(self.query.bias, h, w_query))
            # tanh is 1 - 2r; the constant changes nothing in a softmax.
            scores_KG = -2 * _reciprocal(e_query[:, None], e_key_1GA) @ w_attend
            attended = torch.softmax(scores_KG, dim=1) @ context_GH
            out = torch.tanh(attended + torch.addmm(self.combine.bias, h, w_hidden))
            logits = out @ w_chosen
            if self.config.running:
                weights = torch.addmm(self.weigh.bias, out, w_weigh)
                logits = logits + (running.features(g) @ weights[..., None])[..., 0]
            logits = self._squash(logits).masked_fill(x.forbidden_GD[g], -torch.inf)
            last = (logits + gumbel_GKD[g]).argmax(dim=1)
            if self.config.running:
                running.place(g, last)
            actions.append(last)
            all_logits.append(logits)
        actions_KG = torch.stack(actions, dim=1)
        logp_KGD = torch.log_softmax(torch.stack(all_logits, dim=1), dim=2)
        return actions_KG, logp_KGD.gather(2, actions_KG[..., None])[..., 0]

    # --- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the weights and what is needed to make the same policy again; no pickle."""
        write_tensors(path, FORMAT, {"policy": self.description()}, dict(self.state_dict()))

    def description(self) -> dict[str, Any]:
        return {"config": asdict(self.config), "types": self.types, "groups": self.groups}

    @staticmethod
    def from_description(described: Any, where: str | Path) -> Policy:
        try:
            known = {field.name for field in fields(PolicyConfig)}
            unknown = set(described["config"]) - known
            if unknown:
                raise LearningError(
                    f"{where}: a policy of another architecture ({', '.join(sorted(unknown))}); "
                    "was it made by another version?"
                )
            config = PolicyConfig(**described["config"])
            return Policy(config, [str(t) for t in described["types"]], described["groups"])
        except (KeyError, TypeError, ValueError) as fault:
            raise LearningError(f"{where}: malformed description of a policy: {fault!r}") from None

    @staticmethod
    def load(path: str | Path) -> Policy:
        described, tensors = read_tensors(path, FORMAT)
        policy = Policy.from_description(described.get("policy"), path)
        policy.take(tensors, path)
        return policy

    def take(self, tensors: dict[str, Tensor], where: str | Path) -> None:
        """Takes weights over; they must be those of the same architecture."""
        own = self.state_dict()
        for name, value in own.items():
            if name not in tensors or tensors[name].shape != value.shape:
                have = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise LearningError(
                    f"{where}: weights of another architecture: {name} is {have}, "
                    f"expected {tuple(value.shape)}"
                )
        self.load_state_dict({name: tensors[name] for name in own})


def _apply(function: Any, *inputs: Tensor) -> Tensor:
    result: Tensor = function.apply(*inputs)
    return result


def _lstm_cell(gates_K4H: Tensor, cell_KH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and cell state of a step; the activated gates and tanh of the cell for `_Lstm`."""
    hidden = cell_KH.shape[1]
    gates_K4H[:, : 2 * hidden].sigmoid_()
    gates_K4H[:, 2 * hidden : 3 * hidden].tanh_()
    gates_K4H[:, 3 * hidden :].sigmoid_()
    i, f, n, o = gates_K4H.chunk(4, dim=1)
    cell = torch.addcmul(i * n, f, cell_KH)
    squashed = torch.tanh(cell)
    return o * squashed, cell, gates_K4H, squashed


class _Lstm(torch.autograd.Function):
    """An LSTM over inputs that are projected already: [G, 4H] by step plus [D, 4H] by choice.

    torch's own would project the K x G inputs one by one, three times the work here. Returns
    [K, G, H].
    """

    @staticmethod
    def forward(
        ctx: Any,
        step_G4H: Tensor,
        choice_D4H: Tensor,
        weight_4HH: Tensor,
        start_H: Tensor,
        cell_H: Tensor,
        given_KG: Tensor,
    ) -> Tensor:
        samples, groups = given_KG.shape
        h, c = start_H.expand(samples, -1), cell_H.expand(samples, -1)
        outputs, cells, gates, squashed = [h], [c], [], []
        transposed = weight_4HH.T
        for g in range(groups):
            inputs = torch.addmm(choice_D4H[given_KG[:, g]], h, transposed).add_(step_G4H[g])
            h, c, activated, tanh_c = _lstm_cell(inputs, c)
            outputs.append(h)
            cells.append(c)
            gates.append(activated)
            squashed.append(tanh_c)
        hidden_GKH = torch.stack(outputs)
        ctx.save_for_backward(
            hidden_GKH, torch.stack(cells), torch.stack(gates), torch.stack(squashed),
            weight_4HH, given_KG,
        )  # fmt: skip
        ctx.choices = choice_D4H.shape[0]
        return hidden_GKH[1:].transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_GKH, cells_GKH, gates_GK4H, squashed_GKH, weight_4HH, given_KG = ctx.saved_tensors
        grad_GKH = grads[0].transpose(0, 1)
        i, f, n, o = gates_GK4H.chunk(4, dim=2)
        # Derivatives of the gates that do not depend on what flows back, for all steps at once.
        by_cell_GKH = o * (1 - squashed_GKH * squashed_GKH)
        by_output_GKH = squashed_GKH * o * (1 - o)
        by_input_GK3H = torch.cat(
            [n * i * (1 - i), cells_GKH[:-1] * f * (1 - f), i * (1 - n * n)], dim=2
        )
        d_gates_GK4H = torch.empty_like(gates_GK4H)
        hidden = hidden_GKH.shape[2]
        dh_next = torch.zeros_like(hidden_GKH[0])
        dc = torch.zeros_like(dh_next)
        for g in range(grad_GKH.shape[0] - 1, -1, -1):
            dh = grad_GKH[g] + dh_next
            dc = torch.addcmul(dc, dh, by_cell_GKH[g])
            d_gates = d_gates_GK4H[g]
            torch.mul(by_input_GK3H[g], dc.repeat(1, 3), out=d_gates[:, : 3 * hidden])
            torch.mul(dh, by_output_GKH[g], out=d_gates[:, 3 * hidden :])
            dh_next = d_gates @ weight_4HH
            dc = dc * f[g]
        flat = d_gates_GK4H.reshape(-1, 4 * hidden)
        d_weight = flat.T @ hidden_GKH[:-1].reshape(-1, hidden)
        chosen = torch.nn.functional.one_hot(given_KG.T.reshape(-1), ctx.choices).to(flat.dtype)
        return (
            d_gates_GK4H.sum(dim=1), chosen.T @ flat, d_weight, dh_next.sum(dim=0), dc.sum(dim=0),
            None,
        )  # fmt: skip


def _exp2x(values: Tensor) -> Tensor:
    # Beyond +-20 tanh is +-1 in 32 bits, and the product of two stays finite.
    return torch.exp(2 * values.clamp(-20, 20))


def _reciprocal(e_query: Tensor, e_key: Tensor) -> Tensor:
    """r = 1 / (1 + exp(2(query + key))), so that tanh(query + key) = 1 - 2r.

    The exponential of a sum is a product: one division an entry instead of a tanh."""
    return torch.mul(e_query, e_key).add_(1).reciprocal_()


class _AdditiveScores(torch.autograd.Function):
    """score[r, j] = sum_a attend[a] * tanh(query[r, a] + key[j, a]), but for a constant.

    The tanh has rows x groups x A entries, hundreds of megabytes for a large graph. It is made in
    blocks that stay in the cache, and made again in the backward pass instead of being kept.
    """

    @staticmethod
    def forward(ctx: Any, query_RA: Tensor, key_GA: Tensor, attend_A: Tensor) -> Tensor:
        ctx.save_for_backward(query_RA, key_GA, attend_A)
        e_query, e_key = _exp2x(query_RA), _exp2x(key_GA)
        scores = query_RA.new_empty((len(query_RA), len(key_GA)))
        for rows in _AdditiveScores._blocks(query_RA, key_GA):
            r = _reciprocal(e_query[rows, None], e_key)
            torch.matmul(r, attend_A, out=scores[rows])
        return scores.mul_(-2)

    @staticmethod
    def _blocks(query_RA: Tensor, key_GA: Tensor) -> list[slice]:
        # A CPU's cache holds little; a GPU wants few and large steps.
        entries = 1 << 24 if key_GA.is_cuda else 1 << 17
        rows = max(1, entries // key_GA.numel())
        return [slice(at, at + rows) for at in range(0, len(query_RA), rows)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_RA, key_GA, attend_A = ctx.saved_tensors
        (grad_RG,) = grads
        e_query, e_key = _exp2x(query_RA), _exp2x(key_GA)
        d_query = torch.empty_like(query_RA)
        d_key, d_attend = torch.zeros_like(key_GA), torch.zeros_like(attend_A)
        for rows in _AdditiveScores._blocks(query_RA, key_GA):
            grad = grad_RG[rows]
            r = _reciprocal(e_query[rows, None], e_key)
            d_attend += torch.mv(r.view(-1, r.shape[2]).T, grad.reshape(-1))
            # Derivative of tanh = 1 - 2r is 4r(1 - r).
            inner = torch.addcmul(r, r, r, value=-1).mul_(grad[..., None])
            torch.sum(inner, dim=1, out=d_query[rows])
            d_key += inner.sum(dim=0)
        return d_query * (4 * attend_A), d_key * (4 * attend_A), d_attend * -2


def _running_of(x: Inputs, actions_KG: Tensor) -> Tensor:
    """[K, G, D, F] the running features before each step, given all choices.

    For each device: its work and memory so far, the share of this group's traffic that is with
    groups there, and how much longer the group takes and how full it makes the device.
    """
    chosen_KGD = torch.nn.functional.one_hot(actions_KG, x.work_GD.shape[1]).to(x.work_GD.dtype)

    def before(amount_GD: Tensor) -> Tensor:
        return (chosen_KGD * amount_GD).cumsum(dim=1) - chosen_KGD * amount_GD

    return _stack_running(
        x, before(x.work_GD), before(x.memory_GD), x.traffic_GG @ chosen_KGD, slice(None)
    )


def _stack_running(x: Inputs, work: Tensor, memory: Tensor, near: Tensor, step: Any) -> Tensor:
    parts = [
        # Against the mean of all devices: what counts is who is behind.
        work - work.mean(dim=-1, keepdim=True),
        memory,
        near,
        -x.slower_GD[step].expand_as(work),
        torch.relu(memory + x.memory_GD[step] - 0.9),
    ]
    return torch.stack(parts, dim=-1)


class _Running:
    """The same, step by step while sampling."""

    def __init__(self, x: Inputs, count: int) -> None:
        groups, devices = x.work_GD.shape
        self._x = x
        self._work = x.work_GD.new_zeros((count, devices))
        self._memory = torch.zeros_like(self._work)
        self._chosen = x.work_GD.new_zeros((count, groups, devices))
        self._samples = torch.arange(count, device=x.work_GD.device)

    def features(self, g: int) -> Tensor:
        near = self._x.traffic_GG[g] @ self._chosen
        return _stack_running(self._x, self._work, self._memory, near, g)

    def place(self, g: int, actions_K: Tensor) -> None:
        self._work[self._samples, actions_K] += self._x.work_GD[g, actions_K]
        self._memory[self._samples, actions_K] += self._x.memory_GD[g, actions_K]
        self._chosen[self._samples, g, actions_K] = 1.0
