"""A module that does not fit, run as planned: weights that stay, that travel, or that the host
computes with.

The module's own code runs; only its units do something before and after. Parameters are the user's
own and keep their names. While nobody computes with them their values are at home, so that
`state_dict` and saving see them as always.
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from placewright.backends.pytorch.modules import unit_of
from placewright.backends.pytorch.offload.activations import (
    Exchange,
    cache_addresses,
    cache_layers,
    layer_numbers,
    move_caches,
)
from placewright.backends.pytorch.offload.graphs import Graphs
from placewright.backends.pytorch.offload.homes import Blocks, Home
from placewright.backends.pytorch.offload.links import Link, open_link
from placewright.backends.pytorch.offload.plan import HOST, OffloadPlan, UnitPlan
from placewright.backends.pytorch.offload.products import HostProducts
from placewright.backends.pytorch.offload.values import tensors_in, version_of
from placewright.backends.pytorch.offload.window import Route, Window, arrange
from placewright.errors import PlacementError

_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Unit:
    """A module that is moved whole, while the placed module lives."""

    path: str
    module: torch.nn.Module | None
    """None for a tensor that is kept by a module that is taken apart."""
    home: Home
    layers: tuple[int, ...]
    """Of a cache, those it works with."""
    buffers: tuple[torch.Tensor, ...]
    plan: UnitPlan
    inner: tuple[torch.nn.Module, ...] = ()
    """The modules that it is made of."""
    served: bool = False
    """Whether its products may be `products`' when the host computes it."""
    checked: set[str] = field(default_factory=set)
    """Ways of computing it that were seen to leave its weights alone."""


@dataclass(eq=False)
class Timings:
    """Seconds of each unit in each call, as they were seen."""

    unit_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    pass_seconds: list[float] = field(default_factory=list)


class Offloaded:
    """What a placed module does besides its own code. It is `placed.offload`."""

    def __init__(self, model: torch.nn.Module, plan: OffloadPlan, link: Link) -> None:
        """Moves the weights of `model` to their homes, one unit after another."""
        if type(model).__name__ != plan.model:
            raise PlacementError(
                f"the plan is for a {plan.model}, and this is a {type(model).__name__}"
            )
        self.link = link
        self.plan = plan
        self.model = model
        self.graphs = Graphs(link)
        self.captures = True
        """Whether units are captured as graphs."""
        self.products = HostProducts()
        self._exchange = Exchange(link)
        self._blocks = Blocks(link)
        self.units = _units(model, plan)
        self._shape = plan.shapes[0].name
        self._come_back: dict[str, tuple[str, ...]] = {}
        """Shape -> the units whose weights travel once more in the backward pass, where these are
        not all that travel."""
        self._coming_back: list[str] = []
        """Those of the pass that is being made."""
        self._followed_by: dict[str, str] = {}
        """Shape -> the one that was called after it the last time."""
        self._timings: Timings | None = None
        self._restored = False
        self.empty_buffers = {name for name, buffer in model.named_buffers() if buffer.is_meta}
        """Buffers that had no values."""
        self._move()
        self.window = Window(link, plan.window_bytes, {u.path: u.home for u in self._travellers()})
        self._routes = self._make_routes()

    # --- where weights are -----------------------------------------------------------------------

    def use(self, plan: OffloadPlan) -> None:
        """Goes on with another plan for the same module."""
        paths = {unit.path for unit in plan.units}
        if paths != set(self.units):
            raise PlacementError("the plan is for a module with other units; plan this one")
        self.link.finish()
        for unit in plan.units:
            self.units[unit.path].plan = unit
            self.units[unit.path].checked.clear()
        self.plan = plan
        self.graphs.forget()
        # Before weights move in, those that leave have to be gone, and so has the old buffer.
        self._close_window()
        self._move()
        self.window = Window(
            self.link, plan.window_bytes, {u.path: u.home for u in self._travellers()}
        )
        self._routes = self._make_routes()
        self._shape = plan.shapes[0].name
        self._followed_by.clear()
        self._come_back.clear()

    def restore(self, device: torch.device | str | None = None) -> torch.nn.Module:
        """All weights back in ordinary tensors on one device, the host's memory by default; the
        model that was placed works again as before. The placed one does not."""
        self.link.finish()
        target = torch.device(device or _CPU)
        self.graphs.forget()
        self._close_window()
        for unit in self.units.values():
            unit.home.to_device(target, self._blocks)
        self._blocks = Blocks(self.link)
        self._restored = True
        return self.model

    def _close_window(self) -> None:
        self.window = Window(self.link, 0, {})
        for unit in self.units.values():
            unit.home.forget_views()

    def changed(self) -> None:
        """To be called when weights were written to in a way that torch does not count."""
        self.window.forget()

    def _move(self) -> None:
        ordered = sorted(self.units.values(), key=lambda unit: unit.plan.home != HOST)
        for unit in ordered:
            if unit.plan.home == HOST:
                unit.home.to_host(self._blocks)
            else:
                unit.home.to_device(self.link.device, self._blocks)

    def _travellers(self) -> list[_Unit]:
        return [unit for unit in self.units.values() if unit.plan.home == HOST]

    def _make_routes(self) -> dict[str, Route]:
        routes = {}
        for shape in self.plan.shapes:
            sizes = {u.path: u.size for u in self.plan.travelling(shape.name)}
            sizes = {path: self.units[path].home.size() for path in sizes}
            starts = arrange(sizes, self.plan.window_bytes)
            routes[shape.name] = Route(order=tuple(sizes), starts=starts)
        return routes

    # --- a pass ----------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """The module itself is called."""
        if self._restored:
            raise PlacementError("this module was restored; call the one that restore() returned")
        self._begin(self._shape_of(args, kwargs))
        begun = time.perf_counter()
        args, kwargs = self._exchange.arrive((args, kwargs))
        result = forward(*args, **kwargs)
        if self._timings is not None:
            self.link.finish()
            self._timings.pass_seconds.append(time.perf_counter() - begun)
        if torch.is_grad_enabled():  # the way back comes next
            self._come_back[self._shape] = tuple(self._coming_back)
        else:
            self._expect(self._followed_by.get(self._shape, self._shape))
        return result

    def _begin(self, shape: str) -> None:
        self._followed_by[self._shape] = shape
        self._shape = shape
        self._coming_back.clear()
        self.graphs.new_pass()
        self._expect(shape)

    def _expect(self, shape: str) -> None:
        route = self._routes[shape]
        if torch.is_grad_enabled():
            back = self._come_back.get(shape, route.order)
            route = Route(order=route.order + back[::-1], starts=route.starts)
        self.window.follow(route)

    def _shape_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        rows = max(1, rows_of(args, kwargs))
        nearest = min(
            self.plan.shapes,
            key=lambda shape: max(rows, shape.rows, 1) / max(1, min(rows, shape.rows)),
        )
        return nearest.name

    # --- a unit ----------------------------------------------------------------------------------

    def call(
        self, unit: _Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A unit is called."""
        by_host = unit.plan.computed_on[self._shape] == HOST
        if torch.is_grad_enabled() and _wants_gradient(unit, args, kwargs):
            from placewright.backends.pytorch.offload import training

            return training.call(self, unit, by_host, forward, args, kwargs)
        if by_host:
            return self._call_on_host(unit, forward, args, kwargs)
        args, kwargs = self._exchange.arrive((args, kwargs))
        if unit.layers:
            move_caches((args, kwargs), unit.layers, self.link.device)
        if not self.device_holds(unit):
            with self.on_device(unit) as address:
                return self._compute(unit, address, forward, args, kwargs)
        return self._compute(unit, 0, forward, args, kwargs)

    def will_come_back(self, unit: _Unit) -> None:
        """Its weights are wanted in the backward pass of this call, too."""
        self._coming_back.append(unit.path)

    def device_holds(self, unit: _Unit) -> bool:
        """Whether its weights need not travel to be computed with on the device."""
        return unit.plan.home != HOST or not unit.home.size()

    @contextmanager
    def on_device(self, unit: _Unit) -> Iterator[int]:
        """The weights of a unit are on the device within; where."""
        region = self.window.take(unit.path)
        views = unit.home.views(region)
        unit.home.lend(views)
        versions = [buffer._version for buffer in unit.buffers]
        try:
            yield region.data_ptr()
        finally:
            try:
                self._check(unit, views, versions)
            finally:
                unit.home.at_home()
                self.window.give_back(unit.path)

    def _compute(
        self, unit: _Unit, address: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        with self._time(unit):
            if not self.captures or _has_hooks(unit.inner):
                return forward(*args, **kwargs)
            addresses = (address, *cache_addresses((args, kwargs), unit.layers))
            return self.graphs.run(unit.path, addresses, forward, args, kwargs)

    def _call_on_host(
        self, unit: _Unit, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        asked = args, kwargs
        args, kwargs = self._exchange.to_host(asked)
        if unit.layers:
            move_caches((args, kwargs), unit.layers, _CPU)
        begun = time.perf_counter()
        given = args, kwargs
        pairs = list(zip(tensors_in(asked), tensors_in(given), strict=True))
        versions = [version_of(own) for _, own in pairs]
        active = (
            self.products.active(rows_of(*given), self._cached(unit, given))
            if unit.served
            else nullcontext()
        )
        with active:
            result = forward(*args, **kwargs)
        if self._timings is not None:
            self._timings.unit_seconds[unit.path].append(time.perf_counter() - begun)
        for (theirs, own), before in zip(pairs, versions, strict=True):
            if theirs is not own and version_of(own) != before:
                theirs.copy_(own)  # the unit wrote to what it was called with
        if "host" not in unit.checked:
            self._check(unit, {n: unit.home.value(n) for n in unit.home.tensors}, None)
            unit.checked.add("host")
        return self._exchange.to_device(result)

    def _cached(self, unit: _Unit, given: Any) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in cache_layers(given, unit.layers)
            for tensor in vars(layer).values()
            if isinstance(tensor, torch.Tensor)
        )

    def _check(
        self, unit: _Unit, views: Mapping[str, torch.Tensor], versions: list[int] | None
    ) -> None:
        """Raises where the unit did something to its weights that a plan cannot allow."""
        if versions is not None:
            for buffer, before in zip(unit.buffers, versions, strict=True):
                if buffer._version != before:
                    name = next(n for n, t in unit.home.tensors.items() if t is buffer)
                    raise PlacementError(
                        f"{unit.path} writes to its buffer {name} while it runs, on a copy that is "
                        f"overwritten; keep it on the device with keep=[{unit.path!r}]"
                    )
        way = "device"
        if versions is not None and way in unit.checked:
            return
        for name, view in views.items():
            if unit.home.tensors[name].data_ptr() != view.data_ptr():
                raise PlacementError(
                    f"{unit.path} moved its own weights while it ran ({name} is elsewhere now); "
                    f"keep it on the device with keep=[{unit.path!r}], or take that out of it"
                )
        if versions is not None:
            unit.checked.add(way)

    # --- times -----------------------------------------------------------------------------------

    @contextmanager
    def timing(self) -> Iterator[Timings]:
        """Takes the time of each unit and each pass within. Each pass waits for its end."""
        self.link.finish()
        self._timings = timings = Timings()
        try:
            yield timings
        finally:
            self.link.finish()
            self._timings = None

    @contextmanager
    def _time(self, unit: _Unit) -> Iterator[None]:
        if self._timings is None:
            yield
            return
        with self.link.timed(self._timings.unit_seconds[unit.path].append):
            yield


def rows_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the first tensor that a module is called with: how many numbers, or vectors of them."""
    tensor = next(tensors_in((args, kwargs)), None)
    if tensor is None:
        return 1
    if not tensor.is_floating_point() or tensor.dim() == 0:
        return tensor.numel()
    return tensor.numel() // max(1, tensor.shape[-1])


def _has_hooks(modules: tuple[torch.nn.Module, ...]) -> bool:
    """Whether calling some modules does what a captured graph would not do again."""
    return torch.nn.modules.module._has_any_global_hook() or any(
        module._forward_hooks or module._forward_pre_hooks for module in modules
    )


def _wants_gradient(unit: _Unit, args: Any, kwargs: Any) -> bool:
    return any(t.requires_grad for t in tensors_in((args, kwargs))) or any(
        tensor.requires_grad for tensor in unit.home.tensors.values()
    )


# --- putting it on a module ----------------------------------------------------------------------


def offload(model: torch.nn.Module, plan: OffloadPlan, link: Link | None = None) -> Any:
    """A module that runs as planned. It has the code and the parameters of `model`, which move to
    their homes; `model` itself cannot be called until `placed.restore()`."""
    link = link or open_link(plan.device)
    offloaded = Offloaded(model, plan, link)
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    placed = copy.deepcopy(model, dict(shared))
    modules = dict(placed.named_modules())
    for unit in offloaded.units.values():
        if unit.module is not None:
            unit.module = modules[unit.path]
            unit.inner = tuple(m for m in unit.module.modules() if m is not unit.module)
            unit.served = offloaded.products.serve(unit.module)
            _wrap(unit.module, functools.partial(offloaded.call, unit))
    _wrap(placed, offloaded.run)
    kind: Any = type(placed)
    placed.__class__ = _class_of(kind)
    placed.__dict__["offload"] = offloaded
    # What transformers looks at before it compiles a model for generation, which it must not here.
    if hasattr(placed, "generation_config"):
        placed.__dict__["hf_device_map"] = {
            unit.path: HOST if unit.plan.home == HOST else plan.device
            for unit in offloaded.units.values()
        }
    return placed


def _wrap(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(original, args, kwargs)

    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward


class OffloadedModule(torch.nn.Module):
    """What a placed module can do besides what it could before."""

    offload: Offloaded

    def restore(self, device: torch.device | str | None = None) -> torch.nn.Module:
        """See `Offloaded.restore`."""
        return self.offload.restore(device)

    @property
    def device(self) -> torch.device:
        """Where its inputs are best put and its outputs are."""
        return self.offload.link.device

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        raise PlacementError(
            f"this {type(self).__name__} is placed with its weights in several memories, and "
            ".to(), .cuda(), .half() and the like would move them; call restore() first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlacementError(
            "a placed module cannot be pickled; save its state_dict, and its plan with "
            "placed.offload.plan.save()"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise PlacementError("a placed module cannot be copied; call restore() and copy that")


@functools.cache
def _class_of(kind: Any) -> Any:
    made = type(kind.__name__, (OffloadedModule, kind), {"__module__": kind.__module__})
    made.__qualname__ = kind.__qualname__
    return made


def _units(model: torch.nn.Module, plan: OffloadPlan) -> dict[str, _Unit]:
    """The units of a plan in a module; all tensors are in one of them."""
    modules = dict(model.named_modules())
    known = {unit.path: unit for unit in plan.units}
    tensors: dict[str, dict[str, torch.Tensor]] = {path: {} for path in known}
    owner: dict[int, tuple[str, str]] = {}
    tied: dict[str, dict[str, str]] = defaultdict(dict)
    buffers = {id(buffer) for buffer in model.buffers()}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        path = unit_of(name, known)
        if path is None:
            raise PlacementError(
                f"the plan was made for another module: it has no place for {name!r}; plan this one"
            )
        if any(tensor is other for other in tensors[path].values()):
            continue
        if id(tensor) in owner:
            tied[path][name] = owner[id(tensor)][0]
        else:
            owner[id(tensor)] = path, name
        tensors[path][name] = tensor
    result: dict[str, _Unit] = {}
    for path, unit in known.items():
        for name, first in tied[path].items():
            if known[first].home != unit.home:
                raise PlacementError(
                    f"{name} is tied to a weight of {first}, and the plan has it in two homes: "
                    f"{known[first].home} and {unit.home}; give {path} and {first} the same"
                )
    for path in sorted(known, key=lambda path: bool(tied[path])):
        module = modules.get(path)
        if path and module is None and len(tensors[path]) == 0:
            raise PlacementError(f"the plan has a unit {path!r}, and the module has none; plan it")
        borrowed = {name: result[first].home for name, first in tied[path].items()}
        result[path] = _Unit(
            path=path,
            module=module,
            home=Home(path, tensors[path], borrowed),
            layers=layer_numbers(module) if module is not None else (),
            buffers=tuple(t for t in tensors[path].values() if id(t) in buffers),
            plan=known[path],
        )
    return {path: result[path] for path in known}
