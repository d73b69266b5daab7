"""What a workload asks of each unit of a module: its order, its work, and the memory it needs.

The module runs on fake tensors: nothing is computed or allocated, so it may be on `meta`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from placewright.backends.pytorch.exporting import Inputs, fake_copy, first_line, quiet
from placewright.backends.pytorch.modules import unit_of, units_of
from placewright.backends.pytorch.offload.activations import cached_bytes, layer_numbers
from placewright.backends.pytorch.offload.homes import Layout
from placewright.backends.pytorch.offload.runtime import rows_of
from placewright.backends.pytorch.offload.shapes import Call, Workload
from placewright.backends.pytorch.offload.values import tensors_in
from placewright.backends.pytorch.optimizers import state_of
from placewright.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call asks of a unit."""

    flops: float
    ops: int
    """Kernels, about."""
    read_bytes: float
    """Of its weights that it looks at: a product with one row reads each of its weights once, a
    layer of experts those of the experts that were chosen."""
    moved_bytes: float
    """Of activations that are read and written."""
    peak_bytes: int
    """Of activations that it holds at once."""
    input_bytes: int
    output_bytes: int
    kept_bytes: int = 0
    """Of activations, besides what it returns, that its backward pass will need."""
    passes: float = 1.0
    """All that is computed in a training step, in times of the call itself: gradients of what it is
    called with take as long as that, and so do those of its weights."""


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """A unit, and what each call of a workload asks of it."""

    path: str
    size: int
    """Bytes of its weights, each once, as they lie in a block."""
    own_size: int
    """Without those that live with a unit before it."""
    can_move: bool
    """Whether its weights may live elsewhere: it is called, and as a module."""
    kind: str
    """Units of one kind do the same: same class, same shapes."""
    tied_to: tuple[str, ...]
    """Units that share a weight with it, which must have the same home."""
    of: Mapping[str, Work]
    """By call; not there where it is not called."""
    cache_bytes: int = 0
    """What it caches at the end of the workload."""
    gradient_bytes: int = 0
    """Of the weights of `own_size` that are trained."""
    state_bytes: int = 0
    """What the optimizer keeps for these."""

    @property
    def home_bytes(self) -> int:
        """Of all that lives where its weights do."""
        return self.own_size + self.gradient_bytes + self.state_bytes

    @property
    def kept_bytes(self) -> int:
        """The most that any call's backward pass will need."""
        return max((work.kept_bytes for work in self.of.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A module's units in the order of calls, and the rest after them."""

    model: str
    units: tuple[UnitWork, ...]
    rows: Mapping[str, int]
    """By call: as in `Shape`."""
    between_bytes: Mapping[str, int]
    """By call: the most that is held at once, over all units and what is between them."""
    train: bool = False


class _Watch(TorchDispatchMode):
    """Counts ops and live bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self.moved = 0
        self.live = 0
        self.peak = 0
        self.own: set[int] = set()
        """Weights, which do not count."""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _called(func, args, kwargs or {})
        computes = False
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage._cdata
            if key in self._known or key in self.own:
                continue
            computes = True
            size = storage.nbytes()
            self._known.add(key)
            self.live += size
            self.moved += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, size)
        if computes:
            self.ops += 1
            self.moved += sum(
                leaf.numel() * leaf.element_size()
                for leaf in pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.own
            )
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass
class _Seen:
    """One unit in one call, while it runs."""

    flops: float
    ops: int
    moved: int
    input_bytes: int
    live: int


@dataclass
class _Recorder:
    watch: _Watch
    counter: FlopCounterMode
    order: dict[str, None] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)

    def before(self, given: Any) -> _Seen:
        self.watch.peak = self.watch.live
        return _Seen(
            float(self.counter.get_total_flops()), self.watch.ops, self.watch.moved,
            _bytes(given), self.watch.live,
        )  # fmt: skip

    def after(self, path: str, seen: _Seen, result: Any, weights: list[torch.Tensor]) -> None:
        flops = self.counter.get_total_flops() - seen.flops
        size = sum(t.numel() * t.element_size() for t in weights)
        item = max((t.element_size() for t in weights), default=4)
        before = self.work.get(path)
        returned = [t for t in tensors_in(result) if t.requires_grad]
        trained = any(t.requires_grad for t in weights)
        kept = self.watch.live - seen.live - _bytes(result) if returned else 0
        made = Work(
            flops=flops, ops=self.watch.ops - seen.ops,
            # Half of the operations are products, each with one weight at least.
            read_bytes=float(min(size, flops / 2 * item + _bytes(result))),
            moved_bytes=float(self.watch.moved - seen.moved),
            peak_bytes=self.watch.peak - seen.live,
            input_bytes=seen.input_bytes, output_bytes=_bytes(result),
            kept_bytes=max(0, kept), passes=1.0 + bool(returned) * (1.0 + trained),
        )  # fmt: skip
        self.order.setdefault(path)
        self.work[path] = made if before is None else _both(before, made)


def _both(one: Work, other: Work) -> Work:
    """A unit that is called twice in a pass."""
    return Work(
        flops=one.flops + other.flops, ops=one.ops + other.ops,
        read_bytes=one.read_bytes + other.read_bytes,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        peak_bytes=max(one.peak_bytes, other.peak_bytes),
        input_bytes=one.input_bytes + other.input_bytes,
        output_bytes=one.output_bytes + other.output_bytes,
        kept_bytes=one.kept_bytes + other.kept_bytes, passes=max(one.passes, other.passes),
    )  # fmt: skip


def record(model: torch.nn.Module, workload: Workload, whole: Collection[str] = ()) -> Recorded:
    """Raises `ModelError` where the module cannot be called so. `whole`: see `units_of`."""
    classes = {type(module).__name__ for module in model.modules()}
    if strange := [name for name in whole if name not in classes]:
        raise ModelError(
            f"{type(model).__name__} has no module of class {strange[0]!r}; it has "
            f"{', '.join(sorted(classes))}"
        )
    continues = any(call.continues is not None for call in workload.calls.values())
    if continues and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} has an encoder and a decoder; what `generate` calls of these "
            "is not known here: give the calls themselves, as {name: (inputs, weight)}"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    paths = list(units_of(model, None, whole).order)
    modules = dict(fake.named_modules())
    by_call: dict[str, dict[str, Work]] = {}
    order: dict[str, None] = {}
    between: dict[str, int] = {}
    results: dict[str, Any] = {}
    caches: dict[int, int] = {}
    for name, call in workload.calls.items():
        args, kwargs = _fake_inputs(call, mode, results)
        watch, counter = _Watch(), FlopCounterMode(display=False, custom_mapping=_FLOPS)
        watch.own = {t.untyped_storage()._cdata for t in [*fake.parameters(), *fake.buffers()]}
        recorder = _Recorder(watch, counter)
        gradients = torch.set_grad_enabled(workload.train)
        with _watched(paths, modules, recorder), gradients, quiet(), mode, counter, watch:
            try:
                results[name] = fake(*args, **kwargs)
            except Exception as fault:
                raise ModelError(
                    f"{type(model).__name__} does not run with the inputs of {name!r} on tensors "
                    f"without values: {first_line(fault)}"
                ) from None
        by_call[name], between[name] = recorder.work, _most(recorder.work, watch)
        order.update(recorder.order)
        grown = _grown(workload, name)
        for layer, size in cached_bytes(getattr(results[name], "past_key_values", None)).items():
            caches[layer] = max(caches.get(layer, 0), math.ceil(size * grown))
    every = [*order, *(path for path in paths if path not in order)]
    units = _unit_works(model, every, by_call, caches, workload)
    rows = {name: rows_of(*call.inputs) for name, call in workload.calls.items()}
    return Recorded(
        model=type(model).__name__, units=tuple(units), rows=rows, between_bytes=between,
        train=workload.train,
    )  # fmt: skip


def _most(work: Mapping[str, Work], watch: _Watch) -> int:
    """Nothing but the peak of the last unit is left in `watch`; what is live at the end is results
    and caches."""
    return max([watch.peak, *(w.peak_bytes + w.input_bytes for w in work.values())])


def _grown(workload: Workload, name: str) -> float:
    """How much larger a cache is in the end than after a call, by the calls that continue it."""
    rows = sum(t.shape[1] for t in tensors_in(workload.calls[name].inputs) if t.dim() > 1)
    new = max(
        (c.weight for c in workload.calls.values() if c.continues == name), default=0.0
    )  # fmt: skip
    return (rows + new) / rows if rows else 1.0


def _fake_inputs(call: Call, mode: FakeTensorMode, results: Mapping[str, Any]) -> Inputs:
    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")

    args = tuple(pytree.tree_map(fake, arg) for arg in call.inputs.args)
    kwargs = {key: pytree.tree_map(fake, value) for key, value in call.inputs.kwargs.items()}
    if call.continues is not None:
        cache = getattr(results[call.continues], "past_key_values", None)
        if cache is None:
            raise ModelError(
                f"a call continues {call.continues!r}, which returns no past_key_values; does the "
                "module use a cache?"
            )
        kwargs["past_key_values"] = cache
    return Inputs(args, kwargs)


@contextmanager
def _watched(
    paths: list[str], modules: Mapping[str, torch.nn.Module], recorder: _Recorder
) -> Iterator[None]:
    """Units tell when they are called."""
    wrapped = []

    def wrap(path: str, module: torch.nn.Module) -> None:
        original: Callable[..., Any] = module.forward
        weights = list({id(t): t for t in [*module.parameters(), *module.buffers()]}.values())

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen = recorder.before((args, kwargs))
            result = original(*args, **kwargs)
            recorder.after(path, seen, result, weights)
            return result

        module.__dict__["forward"] = forward
        wrapped.append(module)

    try:
        for path in paths:
            if path in modules:
                wrap(path, modules[path])
        yield
    finally:
        for module in wrapped:
            del module.__dict__["forward"]


def _unit_works(
    model: torch.nn.Module,
    order: list[str],
    by_call: Mapping[str, Mapping[str, Work]],
    caches: Mapping[int, int],
    workload: Workload,
) -> Iterator[UnitWork]:
    modules = dict(model.named_modules())
    known = dict.fromkeys(order)
    tensors: dict[str, dict[str, torch.Tensor]] = {path: {} for path in order}
    holders: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        path = unit_of(name, known)
        assert path is not None, name
        if path not in holders.setdefault(id(tensor), []):
            holders[id(tensor)].append(path)
            tensors[path][name] = tensor
    for path in order:
        module, own = modules.get(path), tensors[path]
        tied = {other for t in own.values() for other in holders[id(t)]} - {path}
        first = {n: t for n, t in own.items() if holders[id(t)][0] == path}
        of = {name: work[path] for name, work in by_call.items() if path in work}
        layers = layer_numbers(module) if module is not None else ()
        trained = [t for t in first.values() if workload.train and t.requires_grad]
        yield UnitWork(
            path=path, size=Layout.of(own).size, own_size=Layout.of(first).size,
            can_move=bool(of) and module is not None, kind=_kind(module, own, path),
            tied_to=tuple(sorted(tied)), of=of,
            cache_bytes=sum(caches.get(layer, 0) for layer in layers) if len(layers) < 3 else 0,
            gradient_bytes=_bytes(trained), state_bytes=_state_bytes(trained, workload.optimizer),
        )  # fmt: skip


def _kind(module: Any, tensors: Mapping[str, torch.Tensor], path: str) -> str:
    shapes = [f"{name.removeprefix(path)}{list(t.shape)}{t.dtype}" for name, t in tensors.items()]
    return f"{type(module).__name__}({'; '.join(shapes)})" if shapes else path


def _state_bytes(trained: list[torch.Tensor], optimizer: Any) -> int:
    if optimizer is None:
        return 0
    each = {dtype: sum(state_of(optimizer, dtype).values()) for dtype in {t.dtype for t in trained}}
    return sum(each[tensor.dtype] * tensor.numel() for tensor in trained)


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """torch's products of a layer of experts know one type on tensors without values, and compute
    with any."""
    if getattr(func, "overloadpacket", None) in _FLOPS and args[0].dtype != torch.bfloat16:
        matrices = [matrix.to(torch.bfloat16) for matrix in args[:2]]
        return func(*matrices, *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _grouped_product(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Of a layer of experts: each row of `a` with one of the matrices of `b`."""
    rows, inner, outer = (a[-2], a[-1], b[-1]) if len(a) == 2 else (a[-2] * a[0], a[-1], b[-1])
    return int(2 * rows * inner * outer)


_FLOPS = {
    getattr(torch.ops.aten, name): _grouped_product
    for name in ("_grouped_mm",)
    if hasattr(torch.ops.aten, name)
}
