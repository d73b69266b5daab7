"""The policy: a sequence-to-sequence network that reads groups and chooses their devices.

An LSTM encoder reads the groups in topological order; an LSTM decoder with additive attention over
the encoder's states chooses one device after another, each choice fed into the next step
(Mirhoseini et al. 2017, section 3). Attention comes after the decoder's LSTM and is not fed back
into it: that is what lets `score` run all steps of all samples at once, given the choices.

Letters in names: K samples, G groups, D devices, H hidden, A attention, F running features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from placewright.errors import LearningError
from placewright.learning import features as columns
from placewright.learning.features import Features, vocabulary
from placewright.learning.tensors import read_tensors, write_tensors
from placewright.problem import Problem

FORMAT = "placewright-policy/1"

RUNNING = 5
"""Running features of a step: see `_running`."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The shape of the network. Where the paper gives no number, that of its authors' later
    controller (Hierarchical Planner, 2018) is named."""

    hidden: int = 128
    """Units of the LSTMs. The later controller has 512; a quarter of it learns as well here and
    several times faster on a CPU."""
    bidirectional: bool = True
    """Whether the encoder also reads backwards, each direction with half the units (as in the later
    controller)."""
    type_embedding: int = 32
    """Width of the embedding of op types."""
    attention: int = 32
    """Width of the additive attention. Its tanh over samples x groups x groups is most of the cost
    of an update on a CPU."""
    adjacency: Literal["list", "neighbours"] = "neighbours"
    """How a group's neighbours are seen. `list`: which groups feed it and which it feeds, a column
    for each group (the paper's), which ties the policy to graphs of one size. `neighbours`: the mean
    of the neighbours' own features, weighted by traffic, two rounds."""
    log_shapes: bool = True
    """Output shapes as logarithms instead of plain numbers."""
    costs: bool = True
    """Whether work, memory, traffic and position of a group are seen."""
    aligned: bool = True
    """Whether the decoder's step for a group also gets the encoder's state of that group; in the
    paper only attention leads there."""
    running: bool = True
    """Whether the decoder sees what it did so far: each device's load and memory, and where the
    group's neighbours went."""
    device_features: bool = True
    """Whether a device's embedding is also made from what the device is (speed, memory, CPU or
    not), which lets a policy move to another cluster."""
    max_devices: int = 16
    """Rows of the table of device embeddings."""
    tanh_constant: float = 5.0
    """Logits are squashed into +- this, which keeps the policy from being certain too soon. The
    later controller has the same mechanism."""
    temperature: float = 1.0
    """Logits are divided by it before they are squashed."""
    forget_bias: float = 1.0
    """Added to the LSTMs' forget gates at the start (the later controller's)."""

    def __post_init__(self) -> None:
        for name in ("hidden", "type_embedding", "attention", "max_devices"):
            if getattr(self, name) < 1:
                raise LearningError(f"policy: {name} must be at least 1, not {getattr(self, name)}")
        if self.bidirectional and self.hidden % 2:
            raise LearningError(
                f"policy: hidden must be even for a bidirectional encoder, not {self.hidden}"
            )
        if self.adjacency not in ("list", "neighbours"):
            raise LearningError(
                f"policy: adjacency is 'list' or 'neighbours', not {self.adjacency!r}"
            )
        for name in ("tanh_constant", "temperature"):
            if not getattr(self, name) > 0:
                raise LearningError(f"policy: {name} must be positive, not {getattr(self, name)}")


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
    given_DH: Tensor
    """Embedding of each device as the last choice; the row after the last is 'go'."""
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
        self.decoder = nn.LSTM(hidden * (1 + config.aligned), hidden, batch_first=True)
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
            if "bias_ih" in name:  # gates are in the order input, forget, cell, output
                size = parameter.shape[0] // 4
                with torch.no_grad():
                    parameter[size : 2 * size] = self.config.forget_bias
        # What the logits are made of starts small: an untrained policy tries everything.
        with torch.no_grad():
            for module in (self.chosen, *(getattr(self, n, None) for n in ("describe", "weigh"))):
                if module is not None:
                    module.weight *= 0.1

    @staticmethod
    def for_problem(config: PolicyConfig, problem: Problem) -> Policy:
        return Policy(config, vocabulary([problem]), problem.num_groups)

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
        where = self.given.weight.device

        def tensor(array: Any) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(where)

        return Inputs(
            types_GV=tensor(seen.types_GV),
            shapes_GS=tensor(seen.log_shapes_GS if self.config.log_shapes else seen.shapes_GS),
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
        return Encoded(
            states_GH=states_1GH[0],
            keys_GA=self.key(states_1GH[0]),
            last_H=last.reshape(-1),
            cell_H=cell.reshape(-1),
            given_DH=torch.cat([given_DH, self.given.weight[-1:]]),
            chosen_DH=chosen_DH,
        )

    def score(self, x: Inputs, actions_KG: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [K, G] of choices that were made, and the entropy [K, G] of each
        choice, with gradients, all steps at once."""
        e = self.encode(x)
        samples, groups = actions_KG.shape
        devices = x.forbidden_GD.shape[1]
        go = torch.full((samples, 1), devices, dtype=actions_KG.dtype, device=actions_KG.device)
        inputs_KGH = e.given_DH[torch.cat([go, actions_KG[:, :-1]], dim=1)]
        if self.config.aligned:
            aligned = e.states_GH.expand(samples, -1, -1)
            inputs_KGH = torch.cat([aligned, inputs_KGH], dim=2)
        start = (e.last_H.expand(1, samples, -1).contiguous(), e.cell_H.expand(1, samples, -1))
        hidden_KGH, _ = self.decoder(inputs_KGH, (start[0], start[1].contiguous()))
        scores_KGG = _AdditiveScores.apply(
            self.query(hidden_KGH).reshape(samples * groups, -1), e.keys_GA, self.attend.weight[0]
        ).view(samples, groups, groups)
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
        constant = self.config.tanh_constant
        return constant * torch.tanh(logits / (self.config.temperature * constant))

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
        gumbel_GKD = gumbel_GKD.to(where)

        # All that does not depend on the choices is computed once: input projections of encoder
        # states and device embeddings, attention keys, the context's share of `combine`.
        split = self.config.hidden if self.config.aligned else 0
        w_in, w_back = self.decoder.weight_ih_l0, self.decoder.weight_hh_l0.T
        bias = self.decoder.bias_ih_l0 + self.decoder.bias_hh_l0
        from_device = e.given_DH @ w_in[:, split:].T + bias
        from_state = e.states_GH @ w_in[:, :split].T if split else None
        w_hidden, w_context = self.combine.weight.split(self.config.hidden, dim=1)
        w_hidden, context_GH = w_hidden.T, e.states_GH @ w_context.T
        w_query, w_attend = self.query.weight.T, self.attend.weight[0]
        keys_1GA = e.keys_GA[None] + self.query.bias
        w_chosen = e.chosen_DH.T
        if self.config.running:
            w_weigh = self.weigh.weight.T
            running = _Running(x, count)

        h = e.last_H.expand(count, -1)
        c = e.cell_H.expand(count, -1)
        last = torch.full((count,), devices, device=where)
        actions, logps = [], []
        for g in range(groups):
            gates = torch.addmm(from_device[last], h, w_back)
            if from_state is not None:
                gates = gates + from_state[g]
            i, f, n, o = gates.chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
            h = torch.sigmoid(o) * torch.tanh(c)
            scores_KG = torch.tanh((h @ w_query)[:, None] + keys_1GA) @ w_attend
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
            logps.append(torch.log_softmax(logits, dim=1).gather(1, last[:, None])[:, 0])
        return torch.stack(actions, dim=1), torch.stack(logps, dim=1)

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


class _AdditiveScores(torch.autograd.Function):
    """score[r, j] = sum_a attend[a] * tanh(query[r, a] + key[j, a]).

    The tanh has rows x groups x A entries, hundreds of megabytes for a large graph. It is made in
    blocks that stay in the cache, and made again in the backward pass instead of being kept.
    """

    BLOCK = 1 << 20

    @staticmethod
    def forward(ctx: Any, query_RA: Tensor, key_GA: Tensor, attend_A: Tensor) -> Tensor:
        ctx.save_for_backward(query_RA, key_GA, attend_A)
        blocks = [
            torch.tanh(block[:, None] + key_GA) @ attend_A
            for block in query_RA.split(_AdditiveScores._rows(key_GA))
        ]
        return torch.cat(blocks)

    @staticmethod
    def _rows(key_GA: Tensor) -> int:
        return max(1, _AdditiveScores.BLOCK // key_GA.numel())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_RA, key_GA, attend_A = ctx.saved_tensors
        (grad_RG,) = grads
        d_query, d_key, d_attend = [], torch.zeros_like(key_GA), torch.zeros_like(attend_A)
        rows = _AdditiveScores._rows(key_GA)
        for block, grad in zip(query_RA.split(rows), grad_RG.split(rows), strict=True):
            t = torch.tanh(block[:, None] + key_GA)
            d_attend += torch.mv(t.reshape(-1, t.shape[2]).T, grad.reshape(-1))
            inner = torch.addcmul(grad[..., None], t * t, grad[..., None], value=-1)
            d_query.append(inner.sum(dim=1) * attend_A)
            d_key += inner.sum(dim=0) * attend_A
        return torch.cat(d_query), d_key, d_attend


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
        self._work = torch.zeros((count, devices), device=x.work_GD.device)
        self._memory = torch.zeros_like(self._work)
        self._chosen = torch.zeros((count, groups, devices), device=x.work_GD.device)
        self._samples = torch.arange(count, device=x.work_GD.device)

    def features(self, g: int) -> Tensor:
        near = self._x.traffic_GG[g] @ self._chosen
        return _stack_running(self._x, self._work, self._memory, near, g)

    def place(self, g: int, actions_K: Tensor) -> None:
        self._work[self._samples, actions_K] += self._x.work_GD[g, actions_K]
        self._memory[self._samples, actions_K] += self._x.memory_GD[g, actions_K]
        self._chosen[self._samples, g, actions_K] = 1.0
