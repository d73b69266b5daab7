"""PyTorch modules as graphs, and placed modules that compute what the modules do."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

import placewright.torch as pt
from placewright.backends import load
from placewright.backends.pytorch import models
from placewright.backends.pytorch.exporting import Task, export
from placewright.backends.pytorch.outputs import opened
from placewright.backends.pytorch.placed import PlacedModule
from placewright.backends.pytorch.program import TorchModel, TorchProgram, read_program
from placewright.cluster import with_memory
from placewright.errors import ClusterError, ModelError, PlacementError, SearchError
from placewright.graph import Work

DEVICES = ("cpu:0", "cpu:1")


class Net(nn.Module):
    """Branches, tied weights, batch norm, dropout, writes in place, a literal, a no_grad part."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, ids: Any, *, labels: Any = None) -> Any:
        h = self.norm(self.embedding(ids).mean(1))
        with torch.no_grad():
            shift = self.scale * 0.5
        h = F.relu_(self.left(h)) + torch.tanh(self.right(h)) + shift
        h = self.drop(h)
        h[:, 0] = 1.0
        logits = self.head(h)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"ids": torch.randint(0, 10, (4, 5)), "labels": torch.randint(0, 10, (4,))}


def program_of(module: Any, example: object, **task: Any) -> TorchProgram:
    return read_program(TorchModel(module, pt.Inputs.of(example), Task(**task)))


def random_plan(program: TorchProgram, level: str = "op", seed: int = 0) -> pt.Plan:
    problem = pt.problem_of(program, pt.cluster_of(DEVICES), level)
    drawn = np.random.default_rng(seed).integers(0, 2, problem.num_groups)
    of_op = {
        op: DEVICES[drawn[g]]
        for op, g in zip(problem.graph.op_names, problem.grouping.group_of.tolist(), strict=True)
    }
    return program.plan(of_op, {name: name for name in DEVICES})


# --- capture -------------------------------------------------------------------------------------


def test_a_training_step_has_every_parameter_its_update_and_its_state() -> None:
    graph = program_of(Net(), inputs(), train=True, optimizer=torch.optim.Adam).graph
    parameters = sum(p.numel() for p in Net().parameters())  # tied ones once
    buffers = sum(b.numel() * b.element_size() for b in Net().buffers())
    assert graph.param_bytes.sum() == 4 * parameters + buffers
    assert graph.slot_bytes.sum() == 8 * parameters
    updates = [name for name in graph.op_names if name.endswith("/update")]
    assert len(updates) == len(list(Net().parameters()))
    assert (graph.gradient_of >= 0).any()


def test_an_update_waits_for_all_gradients_as_optimizer_step_does() -> None:
    graph = program_of(Net(), inputs(), train=True, optimizer=torch.optim.SGD).graph
    begin = graph.op_index["optimizer/begin"]
    updates = {i for name, i in graph.op_index.items() if name.endswith("/update")}
    assert set(graph.edge_dst[graph.edge_src == begin].tolist()) == updates
    assert graph.slot_bytes.sum() == 0


def test_the_flops_of_a_linear_layer_and_its_gradients() -> None:
    layer = nn.Linear(64, 32, bias=False)
    x = torch.zeros(16, 64, requires_grad=True)
    forward = program_of(layer, x).graph
    train = program_of(layer, x, train=True, loss_fn=torch.sum).graph
    product = 2 * 16 * 64 * 32
    assert forward.flops[forward.work == Work.MATMUL].sum() == product
    assert train.flops[train.work == Work.MATMUL].sum() == 3 * product


def test_views_cost_nothing_and_share_memory() -> None:
    class Views(nn.Module):
        def forward(self, x: Any) -> Any:
            a, b = x.exp().view(2, 8).transpose(0, 1).chunk(2, 0)
            return a + b

    graph = program_of(Views(), torch.zeros(16)).graph
    views = [i for i, t in enumerate(graph.op_types) if t in ("view", "transpose", "split")]
    assert len(views) == 3
    assert (graph.work[views] == Work.NONE).all()
    assert (graph.owned_bytes[views] == 0).all()
    assert (graph.flops[views] == 0).all()


def test_a_model_on_meta_has_the_graph_of_the_model_and_its_gradients() -> None:
    settings: dict[str, Any] = {"train": True, "optimizer": torch.optim.Adam}
    real = program_of(Net(), inputs(), **settings).graph
    with torch.device("meta"):
        module = Net()
    assert program_of(module, inputs(), **settings).graph == real


def test_calls_of_one_module_are_steps_of_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.cell(self.cell(x))

    names = program_of(Twice(), torch.zeros(2, 4)).graph.op_names
    assert {"cell/step_0", "cell/step_1"} <= {name.rpartition("/")[0] for name in names}
    assert "cell/weight" in names


@pytest.mark.parametrize("name", models.NAMES)
def test_the_papers_models_are_those_of_tensorflow(name: str) -> None:
    pytest.importorskip("tensorflow")
    ours = load(name, backend="pytorch", scale="small")
    theirs = load(name, backend="tensorflow", scale="small")
    assert ours.param_bytes.sum() == theirs.param_bytes.sum()
    # TensorFlow's Adam has two numbers of its own besides.
    assert ours.slot_bytes.sum() == pytest.approx(theirs.slot_bytes.sum(), abs=8)
    assert ours.flops.sum() == pytest.approx(np.nansum(theirs.flops), rel=0.02)


# --- placed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_placed_module_trains_exactly_as_the_module_does(seed: int, tmp_path: Path) -> None:
    example = inputs()
    program = program_of(Net(), example, train=True, optimizer=torch.optim.Adam)
    random_plan(program, seed=seed).save(tmp_path / "plan.json")
    module = Net()
    original = copy.deepcopy(module)
    placed: Any = pt.load(tmp_path / "plan.json").apply(module)
    assert list(placed.state_dict()) == list(original.state_dict())
    assert placed.head.weight is placed.embedding.weight
    assert placed.transfers
    losses = []
    for model in (original, placed):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**example)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    for key, value in original.state_dict().items():
        assert torch.equal(value, placed.state_dict()[key]), key


def test_what_crosses_devices_is_copied_and_nothing_else() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    program = program_of(module, torch.zeros(2, 4))
    device_of = dict.fromkeys(program.graph.op_names, "cpu:0")
    one: Any = program.plan(device_of, {"cpu:0": "cpu"}).apply(copy.deepcopy(module))
    assert one.transfers == ()
    for name in program.graph.op_names:
        if name.startswith("1/"):
            device_of[name] = "cpu:1"
    two: Any = program.plan(device_of, {n: n for n in DEVICES}).apply(module)
    (transfer,) = two.transfers
    assert (transfer.source, transfer.target, transfer.bytes) == ("cpu:0", "cpu:1", 32)


def test_other_shapes_and_other_modes_are_one_line() -> None:
    module = Net().eval()
    placed = random_plan(program_of(module, {"ids": torch.zeros(4, 5, dtype=torch.int64)})).apply(
        module
    )
    with pytest.raises(PlacementError, match=r"is int64 \[2, 5\]; the plan was made for int64 \[4"):
        placed(ids=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(PlacementError, match=r"planned in eval mode .* after its train\(\)"):
        placed.train()
    with pytest.raises(PlacementError, match="plan is for a Net, and this is a Linear"):
        random_plan(program_of(module, {"ids": torch.zeros(4, 5, dtype=torch.int64)})).apply(
            nn.Linear(2, 2)
        )


def test_a_module_without_values_cannot_be_placed() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 4)
    with pytest.raises(PlacementError, match="meta device and has no values; load the weights"):
        random_plan(program_of(module, torch.zeros(2, 4))).apply(module)


# --- module by module ----------------------------------------------------------------------------


def chain() -> Any:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def test_a_plan_by_module_is_a_device_map_a_pipeline_and_runs_other_shapes() -> None:
    module = chain()
    program = program_of(module, torch.zeros(2, 4))
    device_of = {op: "cpu:1" if op[0] in "23" else "cpu:0" for op in program.graph.op_names}
    plan = program.plan(device_of, {"cpu:0": "cuda:0", "cpu:1": "cuda:1"})
    assert plan.device_map() == {"0.0": "cuda:0", "1.0": "cuda:0", "2.0": "cuda:1", "3.0": "cuda:1"}
    assert list(plan.split_points()) == ["2.0"]
    placed = program.plan(device_of, {n: n for n in DEVICES}).apply(module, level="module")
    x = torch.randn(7, 4)
    assert torch.equal(placed(x), module(x))


def test_what_a_device_map_cannot_say_is_said() -> None:
    program = program_of(chain(), torch.zeros(2, 4))
    back = {op: "cpu:1" if op[0] in "13" else "cpu:0" for op in program.graph.op_names}
    with pytest.raises(PlacementError, match="a pipeline goes through each device once"):
        program.plan(back, {n: n for n in DEVICES}).split_points()
    tied = program_of(Net().eval(), {"ids": torch.zeros(4, 5, dtype=torch.int64)})
    device_of = {op: DEVICES["embedding" in op] for op in tied.graph.op_names}
    with pytest.raises(PlacementError, match="share a parameter"):
        tied.plan(device_of, {n: n for n in DEVICES}).device_map()
    for seed in range(5):  # whatever is drawn, a plan by module can be expressed
        random_plan(tied, "module", seed).device_map()


STAGE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, pipeline
import placewright.torch

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
module.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))
x, wanted = torch.load(f"{folder}/values", weights_only=True)
split = placewright.torch.load(f"{folder}/plan.json").split_points()
stage = pipeline(module, (x[:2],), split_spec=split).build_stage(rank, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
if rank == 0:
    schedule.step(x)
else:
    found = schedule.step(target=torch.zeros_like(wanted))
    assert torch.allclose(found, wanted, atol=1e-6), (found, wanted)
assert all(p.grad is not None for p in stage.submod.parameters())
print(*sorted(stage.submod.state_dict()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_pipeline_runs_the_split(tmp_path: Path) -> None:
    module, x = chain(), torch.randn(8, 4)
    planned = pt.plan(module, x[:2], devices=DEVICES, level="module", method="expert", budget=1)
    planned.save(tmp_path / "plan.json")
    torch.save(module.state_dict(), tmp_path / "weights")
    torch.save((x, module(x).detach()), tmp_path / "values")
    stages = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", STAGE, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [stage.communicate(timeout=120) for stage in stages]
    assert [stage.returncode for stage in stages] == [0, 0], said
    keys = " ".join(out for out, _ in said).split()
    assert keys == sorted(module.state_dict())


class Exit(nn.Module):
    """Values decide what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.mean() > 10:
                break
        return x


def test_what_has_no_graph_is_placed_by_module_with_one_line(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A command that ran in this process before keeps its log to itself.
    monkeypatch.setattr(logging.getLogger("placewright"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("placewright"), "handlers", [])
    module = Exit()
    program = program_of(module, torch.randn(2, 4), train=True, loss_fn=torch.sum)
    (record,) = [r for r in caplog.records if r.name.startswith("placewright")]
    assert "is placed module by module" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert capfd.readouterr().err == ""
    assert set(program.ops_of_unit) == {"layers.0", "layers.1", "layers.2"}
    assert not np.isnan(program.graph.measured_seconds["cpu"]).all()
    placed = random_plan(program, "module").apply(module)
    x = torch.randn(3, 4)
    assert torch.equal(placed(x), module(x))
    with pytest.raises(PlacementError, match="cannot run op by op"):
        random_plan(program, "module").apply(module, level="op")


class Two(nn.Module):
    """Modules that meet, with much that could be placed apart in each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.LSTMCell(64, 64)) for _ in range(2))
        self.head = nn.Linear(128, 4)

    def forward(self, x: Any, y: Any) -> Any:
        return self.head(torch.cat([self.left(x)[0], self.right(y)[0]], 1))


# --- the calls people make -----------------------------------------------------------------------


def test_plan_moves_nothing_and_place_gives_a_module() -> None:
    module = chain()
    x = torch.randn(2, 4)
    planned = pt.plan(module, x, devices=DEVICES, budget=1, method="single,expert")
    assert "one device is best" in planned.verdict  # a chain of tiny products
    assert planned.device_map() in ({"": "cpu:0"}, {"": "cpu:1"})
    assert torch.equal(planned.apply(module)(x), module(x))
    placed = pt.place(module, x, devices=DEVICES, budget=1, method="expert", level="module")
    assert torch.equal(placed(x), module(x))


class Cache:
    """What torch's trees do not know: an object with tensors, and others, below it."""

    def __init__(self, keys: torch.Tensor, of: str) -> None:
        self.layers: list[dict[str, Any]] = [{"keys": keys, "of": of}]
        self.device = keys.device
        self.used: list[int] = []


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        keys = self.first(x)
        return self.second(keys), Cache(keys, "first")


@pytest.mark.parametrize("train", [False, True])
def test_objects_among_the_outputs_are_made_anew(train: bool) -> None:
    """Language models return a cache of keys and values unless they are told not to."""
    module, x = WithCache(), torch.randn(2, 4)
    task: dict[str, Any] = {"train": True, "loss_fn": lambda o: o[0].sum()} if train else {}
    planned = pt.plan(module, x, devices=DEVICES, budget=1, method="expert", **task)
    placed = planned.apply(module)
    assert isinstance(placed, PlacedModule)  # not module by module
    (y, cache), (again, other) = placed(x), placed(x)
    wanted, kept = module(x)
    assert torch.equal(y, wanted)
    assert torch.equal(again, wanted)
    assert type(cache) is Cache
    assert torch.equal(cache.layers[0]["keys"], kept.layers[0]["keys"])
    assert cache.layers[0]["of"] == "first"
    assert cache.device == x.device
    cache.used.append(1)
    assert other.used == []


def test_objects_that_know_each_other_are_looked_into_once() -> None:
    class Friend:
        friends: list[Any]

    everybody = [Friend() for _ in range(20)]
    for one in everybody:
        one.friends = everybody
    assert opened(everybody[0]) is everybody[0]  # there is no tensor; it would take years to see


class Assigns(nn.Module):
    """Has buffers that it assigns anew in each call, two of which change places."""

    mean: torch.Tensor
    one: torch.Tensor
    other: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        for number, name in enumerate(("mean", "one", "other")):
            self.register_buffer(name, torch.full((3,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + self.linear(x).mean(0)
        y: torch.Tensor = self.linear(x) * self.mean + self.one
        self.one, self.other = self.other, self.one
        self.mean = self.mean.detach()
        return y


@pytest.mark.parametrize("train", [False, True])
def test_buffers_that_are_assigned_anew_are_what_they_become(train: bool) -> None:
    module = nn.Sequential(Assigns(), nn.Linear(3, 2)).train(train)
    x = torch.randn(2, 3)
    task: dict[str, Any] = {"train": True, "loss_fn": torch.sum} if train else {}
    program = program_of(module, x, **task)
    assert program.step is not None
    assert len(program.step.writes) == 3
    other = copy.deepcopy(module)
    placed = random_plan(program).apply(module)
    for _ in range(3):
        assert torch.equal(placed(x), other(x))
        for name, buffer in other.named_buffers():
            assert torch.equal(placed.get_buffer(name), buffer)


class Grows(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum(0) + x


def test_a_buffer_that_becomes_another_form_is_no_graph() -> None:
    with pytest.raises(ModelError, match="a buffer, seen, becomes a tensor of another shape"):
        export(Grows(), pt.Inputs.of(torch.ones(2, 3)), Task())


def test_a_language_model_of_transformers_is_a_graph_with_its_cache() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, 6))
    placed = pt.place(module, {"input_ids": ids}, devices=DEVICES, budget=1, method="expert")
    assert isinstance(placed, PlacedModule)  # not module by module
    with torch.no_grad():
        cache = placed(input_ids=ids).past_key_values
        next_ = torch.tensor([[7]])
        went_on = module(next_, past_key_values=cache).logits
        wanted = module(torch.cat([ids, next_], 1)).logits[:, -1:]
    assert torch.allclose(went_on, wanted, atol=1e-5)


def test_a_plan_by_module_takes_no_module_apart() -> None:
    example = {"x": torch.randn(64, 64), "y": torch.randn(64, 64)}
    planned = pt.plan(Two(), example, devices="a100x4", level="module", budget=3)
    assert planned.device_map()  # which raises where a module is split


def test_too_little_memory_names_what_is_large() -> None:
    with pytest.raises(
        SearchError, match=r"does not fit: .*0/0/weight.* on devices with"
    ) as caught:
        pt.plan(
            chain(),
            torch.zeros(2, 4),
            devices=DEVICES,
            max_memory={"cpu:0": 100, "cpu:1": 100},
            budget=1,
        )
    assert "\n" not in str(caught.value)


def test_other_errors_of_a_search_say_what_they_are() -> None:
    with pytest.raises(SearchError, match="unknown method 'magic'"):
        pt.plan(chain(), torch.zeros(2, 4), devices=DEVICES, method="magic")


def test_devices_that_are_not_there() -> None:
    with pytest.raises(ClusterError, match="this machine has no gpu:77; it has cpu:0"):
        pt.cluster_of(["cuda:77"])
    with pytest.raises(ClusterError, match="give bytes or a text such as '10GiB'"):
        with_memory(pt.cluster_of(DEVICES), {"cpu:0": "much"})


def test_an_op_without_a_kernel_says_where_it_can_run() -> None:
    @torch.library.custom_op("placewright_test::double", mutates_args=(), device_types="cuda")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Doubled(nn.Module):
        def forward(self, x: Any) -> Any:
            return double(x)

    with pytest.raises(PlacementError, match=r"op 'double' \(double\) has no cpu kernel"):
        pt.plan(Doubled(), torch.zeros(2), devices=DEVICES, budget=1)


def test_a_function_is_no_module() -> None:
    with pytest.raises(ModelError, match=r"is a function, expected a torch\.nn\.Module"):
        pt.plan(lambda x: x, torch.zeros(2), devices=DEVICES, budget=1)  # type: ignore[arg-type]


def test_wrong_examples_are_one_line() -> None:
    with pytest.raises(ModelError, match="does not run with these example inputs: mat1"):
        program_of(chain(), torch.zeros(2, 5))
    with pytest.raises(ModelError, match="the module returns no loss; give labels"):
        program_of(chain(), torch.zeros(2, 4), train=True)
    frozen = chain().requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter requires a gradient"):
        program_of(frozen, torch.zeros(2, 4), train=True, loss_fn=torch.sum)
    with pytest.raises(ModelError, match="does not say what it is called with"):
        load(chain())


# --- files ---------------------------------------------------------------------------------------


def test_functions_and_exported_programs_are_models(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 2), torch.zeros(3, 4)\n"
        "def step():\n"
        "    return *make(), {'train': True, 'loss_fn': torch.sum}\n"
        "def broken():\n"
        "    return 3\n"
    )
    assert "weight" in load(f"{file}:make").op_names
    assert any("grad" in name for name in load(f"{file}:step").op_names)
    with pytest.raises(ModelError, match=r"returns a int; it returns \(module, inputs\)"):
        load(f"{file}:broken")
    with pytest.raises(ModelError, match="has no function 'none'; it has make, step, broken"):
        load(f"{file}:none")
    program = torch.export.export(chain(), (torch.zeros(2, 4),))
    torch.export.save(program, tmp_path / "chain.pt2")
    graph = load(tmp_path / "chain.pt2")
    assert graph.param_bytes.sum() == 4 * 4 * (16 + 4)


def test_a_pickled_checkpoint_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelError, match="holds weights, not what is computed"):
        load(path)


# --- transformers --------------------------------------------------------------------------------


def test_the_blocks_of_transformers_stay_whole_and_accelerate_runs_the_map(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    ids = {"input_ids": torch.randint(0, 50, (1, 6))}
    planned = pt.plan(module, ids, devices=DEVICES, level="module", method="expert", budget=1)
    table = planned.device_map()
    assert {f"model.layers.{i}" for i in range(4)} <= set(table)
    assert set(table.values()) == set(DEVICES)
    with torch.no_grad():
        wanted = module(**ids).logits
        names = {"cpu:0": "cpu", "cpu:1": "disk"}
        dispatched = accelerate.dispatch_model(
            module, {k: names[v] for k, v in table.items()}, main_device="cpu",
            offload_dir=str(tmp_path),
        )  # fmt: skip
        assert torch.allclose(dispatched(**ids).logits, wanted, atol=1e-5)


def test_sums_of_gradients_belong_to_their_parameter() -> None:
    """A weight that is used in several steps: autograd adds up its gradients one after another."""

    class Steps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.tanh(self.cell(x)) + x
            return x

    graph = program_of(Steps(), torch.randn(2, 4), train=True, loss_fn=torch.sum).graph
    sums = [name for name in graph.op_names if name.startswith("cell/weight/grad/add")]
    assert len(sums) == 3
    ops = [graph.op_names.index(name) for name in sums]
    assert {graph.op_types[op] for op in ops} == {"add"}
    of_bias = [name for name in graph.op_names if name.startswith("cell/bias/grad/add")]
    assert len(of_bias) == 3


def test_a_plan_imports_nothing_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('was_here').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program = program_of(torch.nn.Linear(4, 4), torch.zeros(2, 4))
    random_plan(program).save("plan.json")
    whole = json.loads(Path("plan.json").read_text())
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    enum = {"__enum__": True, "fqn": "evil:Some", "name": "x"}
    factory = {"default_factory_module": "evil", "default_factory_name": "x", "dict_context": []}
    for kind, context in (
        ("collections.deque", json.dumps(enum)),
        ("builtins.tuple", json.dumps(enum)),
        ("builtins.dict", json.dumps([enum])),
        ("collections.defaultdict", factory),
    ):
        tree = [1, {"type": kind, "context": context, "children_spec": [leaf]}]
        plan = whole | {"inputs": whole["inputs"] | {"tree": tree}}
        Path("plan.json").write_text(json.dumps(plan))
        with pytest.raises(PlacementError, match=r"plan\.json: malformed plan: inputs in a"):
            pt.load("plan.json")
        assert not Path("was_here").exists()


LIMIT = {"cuda:0": "1GiB"}


@pytest.mark.parametrize(
    ("function", "settings", "complaint"),
    [
        (pt.plan, {"bugdet": 2}, r"plan\(\) has no argument 'bugdet'; did you mean budget\?"),
        (pt.plan, {"op_level": True}, r"plan\(\) has no argument 'op_level'; did you mean level"),
        (pt.plan, {"trian": True}, r"plan\(\) has no argument 'trian'; did you mean train"),
        (
            pt.place,
            {"device": ["cpu"]},
            r"place\(\) has no argument 'device'; did you mean devices",
        ),
        (pt.offload, {"memory": LIMIT, "sed": 1}, r"offload\(\) .* did you mean seed\?"),
        (pt.accelerate, {"stream": 2}, r"accelerate\(\) .*'stream'; did you mean streams\?"),
        (pt.accelerate_step, {"loss": 1}, r"accelerate_step\(\) .* did you mean loss_fn\?"),
        (pt.accelerate_step, {"copy_outputs": 1}, r"accelerate_step\(\) has no argument"),
        (pt.accelerate, {"xyzzy": 2}, "'xyzzy'; it has candidates, config, copy_outputs"),
    ],
)
def test_a_misspelled_keyword_is_told(
    function: Any, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(SearchError, match=complaint):
        function(nn.Linear(2, 2), torch.ones(1, 2), **settings)


@pytest.mark.parametrize(
    ("function", "settings"),
    [(pt.accelerate, {}), (pt.accelerate_step, {}), (pt.plan_offload, {"memory": LIMIT}),
     (pt.offload, {"memory": LIMIT}), (pt.plan, {}), (pt.place, {})],
)  # fmt: skip
def test_what_is_no_module_is_told(function: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"a torch\.nn\.Module"):
        function(3, torch.ones(1, 2), **settings)


def test_a_limit_that_is_no_size_is_told_with_its_argument() -> None:
    with pytest.raises(ClusterError, match=r"max_memory={'cpu': 'much'}: give bytes"):
        pt.plan(nn.Linear(2, 2), torch.ones(1, 2), max_memory={"cpu": "much"})
