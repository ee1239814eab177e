"""Three walks through one root call: as the script ran it, in the wide format all the way, and piece by piece.

Hooks on every module cut the call into pieces: a module without children is one; the code of a module that calls others
is one in front of each of them, and one behind the last. In the third walk each piece is fed what it was fed in the
first one, so that what differs behind it, it has made itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.dispatched_ops import take_gradients
from precdoctor.recording.shadowing.relative_errors import Layer, ratio, relative_l2

#: A module (FQN) and which call of it in this root call.
Key = tuple[str, int]
#: What autograd gives where it is allowed to give nothing.
Gradients = tuple[Tensor | None, ...]
_in_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside


class Walk:
    """Hooks on all modules of a tree while one forward pass runs."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self._calls: dict[str, int] = {}
        #: The module calls in progress.
        self.stack: list[Key] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, hooks report the calls of modules."""
        handles = []
        try:
            for module in self._modules.values():
                own = static.module_dict(module)
                handles.append(_hooked(self._enter, own["_forward_pre_hooks"], own["_forward_pre_hooks_with_kwargs"]))
                handles.append(_hooked(self._leave, own["_forward_hooks"]))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _in_backward() != -1:
            return None  # recomputed by a custom autograd function
        name = self._names[id(module)]
        key = (name, self._calls.get(name, 0))
        self._calls[name] = key[1] + 1
        self.stack.append(key)
        given = {**dict(enumerate(args)), **kwargs}
        changed = self.entering(key, list(tensor_leaves.tensors(given)))
        return None if not changed else (_replaced(args, changed), _replaced(kwargs, changed))

    def _leave(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        if _in_backward() != -1:
            return None
        key = self.stack[-1]
        changed = self.leaving(key, list(tensor_leaves.tensors(result)))
        self.stack.pop()
        return None if not changed else _replaced(result, changed)

    @property
    def above(self) -> Key | None:
        """The call that the innermost one is made from."""
        return self.stack[-2] if len(self.stack) > 1 else None

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """A module is called with these; what it is to be called with instead, by ``id``."""
        raise NotImplementedError

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """A module returns these; what it is to return instead, by ``id``."""
        raise NotImplementedError


def _replaced(value: Any, changed: Mapping[int, Tensor]) -> Any:
    """The same nest with some tensors replaced, in whatever containers ``leaves`` finds tensors."""
    return tensor_leaves.mapped(value, lambda x: changed.get(id(x), x))


def _hooked(hook: Callable[..., Any], hooks: dict[int, Any], with_kwargs: dict[int, bool] | None = None) -> Any:
    """What a module's own ``register_forward_hook`` does, and gives, without asking the module."""
    handle = RemovableHandle(hooks, extra_dict=with_kwargs)
    hooks[handle.id] = hook
    if with_kwargs is not None:
        with_kwargs[handle.id] = True
    return handle


class Known:
    """Tensor objects a walk has seen come out of a module or handed to one, as they were then."""

    def __init__(self) -> None:
        self._seen: static.ByIdentity[Tensor, tuple[int, Any]] = static.ByIdentity()

    def add(self, x: Tensor, what: Any = True) -> None:
        """Note one, and what is to be remembered with it."""
        self._seen.put(x, (tensor_leaves.version(x), what))

    def get(self, x: Tensor) -> Any:
        """What was noted with this very object; None when it is new, or was written to since."""
        found = self._seen.get(x)
        return found[1] if found is not None and found[0] == tensor_leaves.version(x) else None


class Reduced(Walk):
    """The call as the script made it: everything that goes into modules, comes out of them, and the same of gradients.

    Attributes:
        inputs, outputs: copies of the tensors of each call, by leaf name.
        fresh: of the inputs those that no module returned: the code of the caller made them.
        input_gradients: of the loss with respect to what *this* call was given: one consumer's share.
        output_gradients: with respect to what it returned, of all consumers; not by way of what it made of it itself.
        in_place: modules that write to what they are given. No gradient arrives at an alias that was written to: the
            walk is worth nothing, and has to be done again with these counted as code of their callers.
        layers: by FQN, in order of their first call.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules)
        self.inputs: dict[Key, dict[str, Tensor]] = {}
        self.outputs: dict[Key, dict[str, Tensor]] = {}
        self.fresh: dict[Key, set[str]] = {}
        self.input_gradients: dict[Key, dict[str, Tensor]] = {}
        self.output_gradients: dict[Key, dict[str, Tensor]] = {}
        self.layers: dict[str, Layer] = {}
        self.in_place: set[str] = set()
        self._known = Known()
        self._aliases: dict[Key, list[tuple[Tensor, int]]] = {}

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Keeps copies; gives tensors that need gradients an alias, at which this call's share of it arrives."""
        above = self.above
        layer = self.layers.get(key[0])
        if layer is None:
            module = self._modules[key[0]]
            layer = self.layers[key[0]] = Layer(
                key[0], type(module).__name__, above[0] if above is not None else None, len(self.layers), leaf=True
            )
        layer.calls += 1
        if above is not None:
            self.layers[above[0]].leaf = False
        kept, aliases = self.inputs.setdefault(key, {}), dict[int, Tensor]()
        for name, x in given:
            known = self._known.get(x)
            kept[name] = known if known is not None else x.detach().clone()
            if known is None and above is not None:
                self.fresh.setdefault(key, set()).add(name)
            if known is None:
                self._known.add(x, kept[name])
            if x.requires_grad and id(x) not in aliases:
                aliases[id(x)] = alias = x.view_as(x)
                alias.register_hook(self._keeping(self.input_gradients.setdefault(key, {}), name))
                self._known.add(alias, kept[name])
        self._aliases[key] = [(x, tensor_leaves.version(x)) for x in aliases.values()]
        return aliases

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Keeps copies of what is new; what needs gradients goes on as a copy, too, at which those of others arrive."""
        if any(tensor_leaves.version(x) != before for x, before in self._aliases.pop(key, ())):
            self.in_place.add(key[0])
        kept, copies = self.outputs.setdefault(key, {}), dict[int, Tensor]()
        for name, x in made:
            if self._known.get(x) is not None:
                continue  # its child's output, or what it was given
            kept[name] = x.detach().clone()
            self._known.add(x, kept[name])
            if x.requires_grad and id(x) not in copies:
                copies[id(x)] = copied = x.clone()
                copied.register_hook(self._keeping(self.output_gradients.setdefault(key, {}), name))
                self._known.add(copied, kept[name])
        return copies

    @staticmethod
    def _keeping(place: dict[str, Tensor], name: str) -> Callable[[Tensor | None], None]:
        def keep(grad: Tensor | None) -> None:
            if grad is not None:
                place[name] = grad.detach().clone()

        return keep


class AllTheWay(Walk):
    """The same call in the wide format from beginning to end, compared with the reduced one as it goes."""

    def __init__(self, modules: Mapping[str, nn.Module], reduced: Reduced) -> None:
        super().__init__(modules)
        self._reduced = reduced
        #: The largest error in front of the next piece of each call's own code.
        self._given: list[float] = []
        self._errors = Known()

    def _error(self, x: Tensor, mine: Tensor | None) -> float:
        """The error of a tensor; 0 where there is nothing to compare it with."""
        error: float | None = self._errors.get(x)
        if error is None:
            error = relative_l2(mine, x) if mine is not None and _counts(x) else 0.0
            self._errors.add(x, error)
        return error

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compares what the caller's code made."""
        mine, worst = self._reduced.inputs.get(key, {}), 0.0
        fresh = self._reduced.fresh.get(key, set())
        layer = self._reduced.layers.get(key[0])
        for name, x in given:
            error = self._error(x, mine.get(name))
            worst = max(worst, error)
            if name in fresh and layer is not None and _counts(x):
                before = self._given[-1] if self._given else 0.0
                layer.point("input").add_accumulated(error, before, name, mine[name])
        self._given.append(worst)
        return {}

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compares the result, and later its gradient."""
        given, worst, copies = self._given.pop(), 0.0, dict[int, Tensor]()
        mine = self._reduced.outputs.get(key, {})
        layer = self._reduced.layers.get(key[0])
        for name, x in made:
            error = self._error(x, mine.get(name))
            worst = max(worst, error)
            if name not in mine or not _counts(x) or layer is None:
                continue
            layer.point("output").add_accumulated(error, given, name, mine[name])
            grad = self._reduced.output_gradients.get(key, {}).get(name)
            if x.requires_grad and grad is not None and id(x) not in copies:
                copies[id(x)] = copied = x.clone()
                copied.register_hook(_comparing(layer, grad, name))
                self._errors.add(copied, error)
        if self._given:
            self._given[-1] = max(self._given[-1], worst)
        return copies


def _comparing(layer: Layer, mine: Tensor, name: str) -> Callable[[Tensor | None], None]:
    def compare(grad: Tensor | None) -> None:
        if grad is not None:
            layer.point("grad_output").add_accumulated(relative_l2(mine, grad), None, name, mine)

    return compare


class PieceByPiece(Walk):
    """Every piece in the wide format, fed with what it was fed in the reduced run.

    Attributes:
        ends: what pieces made and the gradient the reduced run brought to it.
        starts: what was fed in its place, what to compare its gradient with, and whom that speaks of.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reduced: Reduced, wide: torch.dtype) -> None:
        super().__init__(modules)
        self._reduced = reduced
        self._wide = wide
        self._handed = Known()
        self.ends: list[tuple[Tensor, Tensor]] = []
        self.starts: list[tuple[Tensor, Tensor | None, Layer, str, str]] = []

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compares what the caller's code made, and feeds what the reduced run's made."""
        mine, gradients = self._reduced.inputs.get(key, {}), self._reduced.input_gradients.get(key, {})
        fresh, changed = self._reduced.fresh.get(key, set()), dict[int, Tensor]()
        layer = self._reduced.layers.get(key[0])
        for name, x in given:
            if layer is None or name not in mine or id(x) in changed or mine[name].shape != x.shape:
                continue
            if name in fresh and _counts(x) and self._handed.get(x) is None:
                layer.point("input").add_local(relative_l2(mine[name], x), name, mine[name])
            grad = gradients.get(name)
            if grad is not None and x.requires_grad:
                self.ends.append((x, grad))
            changed[id(x)] = self._fed(mine[name], grad, x.requires_grad, (layer, "grad_input", name))
        return changed

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compares the result, and has the caller go on with that of the reduced run."""
        mine, gradients = self._reduced.outputs.get(key, {}), self._reduced.output_gradients.get(key, {})
        layer, changed = self._reduced.layers.get(key[0]), dict[int, Tensor]()
        for name, x in made:
            if layer is None or name not in mine or self._handed.get(x) is not None or id(x) in changed:
                continue
            if mine[name].shape != x.shape:
                continue
            if _counts(x):
                layer.point("output").add_local(relative_l2(mine[name], x), name, mine[name])
            grad = gradients.get(name)
            if grad is not None and x.requires_grad:
                self.ends.append((x, grad))
            if len(self.stack) > 1:  # what the root returns, nobody goes on with
                changed[id(x)] = self._fed(mine[name], grad, x.requires_grad, (layer, "grad_output", name))
        return changed

    def _fed(self, value: Tensor, grad: Tensor | None, requires_grad: bool, who: tuple[Layer, str, str]) -> Tensor:
        """A copy of the reduced run's tensor, widened; pieces may write to it."""
        fed = value.to(wider(value.dtype, self._wide)) if _counts(value) else value
        if not (requires_grad and (fed.is_floating_point() or fed.is_complex())):
            fed = fed.clone()
        else:
            leaf = fed.detach().requires_grad_()
            self.starts.append((leaf, grad, *who))
            fed = leaf.clone()
        self._handed.add(fed)
        return fed

    def end_at(self, returned: list[tuple[str, Tensor]], gradients: Mapping[str, Tensor]) -> None:
        """What the root returns and a module in it had made: the gradient comes from outside."""
        for name, x in returned:
            if x.requires_grad and name in gradients and self._handed.get(x) is not None:
                self.ends.append((x, gradients[name]))

    def compare_gradients(self, weights: Mapping[str, tuple[Tensor, Tensor, Layer, str]]) -> None:
        """One backward pass through all pieces at once: none of them is connected with another.

        A gradient that nearly cancels (of a bias in front of a normalisation: exactly) is nothing but the rounding of
        what came in, in any format. A second pass, with some signs of what comes in turned round, tells how much
        larger it would be if it did not cancel, and its error is divided by that.

        Args:
            weights: parameter, its gradient in the reduced run, its layer and its name there.
        """
        inputs = [x for x, *_ in self.starts] + [p for p, *_ in weights.values()]
        if not self.ends or not inputs:
            return
        ends = [x for x, _ in self.ends]
        brought = [g.to(x.dtype) for x, g in self.ends]
        found: Gradients = take_gradients(ends, inputs, brought, allow_unused=True, retain_graph=True)
        flipped: Gradients = take_gradients(ends, inputs, [_flipped(g) for g in brought], allow_unused=True)
        told = [(mine, layer, kind, name) for _, mine, layer, kind, name in self.starts]
        told += [(mine, layer, "weight_grad", name) for _, mine, layer, name in weights.values()]
        for (mine, layer, kind, name), grad, other in zip(told, found, flipped, strict=True):
            if mine is not None and grad is not None and other is not None:
                layer.point(kind).add_local(relative_l2(mine, grad) / max(1.0, ratio(other, grad)), name, mine)


def _flipped(x: Tensor) -> Tensor:
    """About half of the signs turned round, by a multiplicative hash of the index: no generator is drawn from."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    return torch.where((index * 0x1E3779B1 >> 15) & 1 == 0, x, -x)


def wider(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """What a tensor of ``dtype`` is widened to: complex numbers stay complex."""
    return torch.promote_types(dtype, wide) if dtype.is_complex or dtype.itemsize > 1 else wide


def _counts(x: Tensor) -> bool:
    return (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided and not tensor_leaves.is_wrapped(x)
