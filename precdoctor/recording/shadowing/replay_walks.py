"""Three walks through one root call: as the script made it, wide from the beginning, and wide piece by piece.

Hooks on all modules cut the call into pieces. A module without children is one piece; the code of a module that calls
others is one piece before each of them and one after the last. In the third walk each piece is given the inputs that it
had in the first, so that an error in its results arose in that piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.ops.dispatched_ops import take_gradients
from precdoctor.recording.shadowing.relative_errors import Layer, ratio, relative_l2

#: FQN of a module, and the number of its call in this root call.
Key = tuple[str, int]
#: Gradients as autograd returns them; None for unused inputs.
Gradients = tuple[Tensor | None, ...]
_in_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1: not in a backward pass


class Walk:
    """Module hooks for one forward pass, on all modules of a tree."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._names = {id(module): name for name, module in modules.items()}
        self._calls: dict[str, int] = {}
        #: The module calls in progress.
        self.stack: list[Key] = []

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Hook all modules inside the context."""
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
        """Hook before a module's forward; may replace its arguments."""
        if _in_backward() != -1:
            return None  # a custom autograd function recomputes the module
        name = self._names[id(module)]
        key = (name, self._calls.get(name, 0))
        self._calls[name] = key[1] + 1
        self.stack.append(key)
        given = {**dict(enumerate(args)), **kwargs}
        changed = self.entering(key, list(tensor_leaves.tensors(given)))
        return None if not changed else (_replaced(args, changed), _replaced(kwargs, changed))

    def _leave(self, _module: nn.Module, _args: Any, result: Any) -> Any:
        """Hook after a module's forward; may replace its results."""
        if _in_backward() != -1:
            return None
        key = self.stack[-1]
        changed = self.leaving(key, list(tensor_leaves.tensors(result)))
        self.stack.pop()
        return None if not changed else _replaced(result, changed)

    @property
    def above(self) -> Key | None:
        """The call from which the innermost one is made; None at the root."""
        return self.stack[-2] if len(self.stack) > 1 else None

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Handle a module's arguments; return their replacements by ``id``."""
        raise NotImplementedError

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Handle a module's results; return their replacements by ``id``."""
        raise NotImplementedError


def _replaced(value: Any, changed: Mapping[int, Tensor]) -> Any:
    """Return a nest of containers with some tensors replaced, by ``id``."""
    return tensor_leaves.mapped(value, lambda x: changed.get(id(x), x))


def _hooked(hook: Callable[..., Any], hooks: dict[int, Any], with_kwargs: dict[int, bool] | None = None) -> Any:
    """Add a hook to a module's dictionary without calling the module, and return its handle."""
    handle = RemovableHandle(hooks, extra_dict=with_kwargs)
    hooks[handle.id] = hook
    if with_kwargs is not None:
        with_kwargs[handle.id] = True
    return handle


class NotedTensors:
    """Values noted for tensor objects, valid as long as nothing writes to the tensors."""

    def __init__(self) -> None:
        self._seen: static.ByIdentity[Tensor, tuple[int, Any]] = static.ByIdentity()

    def add(self, x: Tensor, what: Any = True) -> None:
        self._seen.put(x, (tensor_leaves.version(x), what))

    def get(self, x: Tensor) -> Any:
        """Return the value noted for this very object; None if there is none, or the tensor was written to since."""
        found = self._seen.get(x)
        return found[1] if found is not None and found[0] == tensor_leaves.version(x) else None


class Reduced(Walk):
    """The first walk: the call as the script made it. Keeps inputs and outputs of all modules, and gradients of both.

    Attributes:
        inputs, outputs: copies of the tensors of each call, by leaf name; outputs without those of its children.
        fresh: names of inputs that no module returned: the caller's own code made them.
        input_gradients: of the loss with respect to a call's inputs, only by way of *this* call.
        output_gradients: with respect to its outputs, from all consumers.
        in_place: modules that write to their inputs. No gradient arrives at an alias that was written to, so the walk
            must be repeated with these modules counted as their callers' code.
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
        self._known = NotedTensors()
        self._aliases: dict[Key, list[tuple[Tensor, int]]] = {}

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Copy the inputs; replace those that need gradients by an alias, which receives only this call's gradient."""
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
        """Copy new outputs; replace those that need gradients by a copy, which gets the gradients of all consumers."""
        if any(tensor_leaves.version(x) != before for x, before in self._aliases.pop(key, ())):
            self.in_place.add(key[0])
        kept, copies = self.outputs.setdefault(key, {}), dict[int, Tensor]()
        for name, x in made:
            if self._known.get(x) is not None:
                continue  # the output of a child, or one of its inputs
            kept[name] = x.detach().clone()
            self._known.add(x, kept[name])
            if x.requires_grad and id(x) not in copies:
                copies[id(x)] = copied = x.clone()
                copied.register_hook(self._keeping(self.output_gradients.setdefault(key, {}), name))
                self._known.add(copied, kept[name])
        return copies

    @staticmethod
    def _keeping(place: dict[str, Tensor], name: str) -> Callable[[Tensor | None], None]:
        """Return a tensor hook that keeps the gradient in ``place``."""

        def keep(grad: Tensor | None) -> None:
            if grad is not None:
                place[name] = grad.detach().clone()

        return keep


class AllTheWay(Walk):
    """The second walk: the call in the wide format from beginning to end, compared with the first one on the way."""

    def __init__(self, modules: Mapping[str, nn.Module], reduced: Reduced) -> None:
        super().__init__(modules)
        self._reduced = reduced
        #: For each call in progress: the largest error among the tensors that its next piece may read.
        self._errors_before: list[float] = []
        self._errors = NotedTensors()

    def _error(self, x: Tensor, reduced: Tensor | None) -> float:
        """Return the accumulated error of a tensor, computed once; 0 if there is nothing to compare it with."""
        error: float | None = self._errors.get(x)
        if error is None:
            error = relative_l2(reduced, x) if reduced is not None and _counts(x) else 0.0
            self._errors.add(x, error)
        return error

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compare the inputs that the caller's code made."""
        reduced, worst = self._reduced.inputs.get(key, {}), 0.0
        fresh = self._reduced.fresh.get(key, set())
        layer = self._reduced.layers.get(key[0])
        for name, x in given:
            error = self._error(x, reduced.get(name))
            worst = max(worst, error)
            if name in fresh and layer is not None and _counts(x):
                before = self._errors_before[-1] if self._errors_before else 0.0
                layer.point("input").add_accumulated(error, before, name, reduced[name])
        self._errors_before.append(worst)
        return {}

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compare the outputs, and hook them to compare their gradients."""
        given, worst, copies = self._errors_before.pop(), 0.0, dict[int, Tensor]()
        reduced = self._reduced.outputs.get(key, {})
        layer = self._reduced.layers.get(key[0])
        for name, x in made:
            error = self._error(x, reduced.get(name))
            worst = max(worst, error)
            if name not in reduced or not _counts(x) or layer is None:
                continue
            layer.point("output").add_accumulated(error, given, name, reduced[name])
            grad = self._reduced.output_gradients.get(key, {}).get(name)
            if x.requires_grad and grad is not None and id(x) not in copies:
                copies[id(x)] = copied = x.clone()
                copied.register_hook(_comparing(layer, grad, name))
                self._errors.add(copied, error)
        if self._errors_before:
            self._errors_before[-1] = max(self._errors_before[-1], worst)
        return copies


def _comparing(layer: Layer, reduced: Tensor, name: str) -> Callable[[Tensor | None], None]:
    """Return a tensor hook that compares the gradient with that of the reduced replay."""

    def compare(grad: Tensor | None) -> None:
        if grad is not None:
            layer.point("grad_output").add_accumulated(relative_l2(reduced, grad), None, name, reduced)

    return compare


class PieceByPiece(Walk):
    """The third walk: each piece in the wide format, given the inputs that it had in the reduced replay.

    Attributes:
        ends: results of pieces, with the gradients that they had in the reduced replay.
        starts: inputs given to pieces, with the gradient to compare theirs with, its layer, kind and name.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reduced: Reduced, wide: torch.dtype) -> None:
        super().__init__(modules)
        self._reduced = reduced
        self._wide = wide
        self._handed = NotedTensors()
        self.ends: list[tuple[Tensor, Tensor]] = []
        self.starts: list[tuple[Tensor, Tensor | None, Layer, str, str]] = []

    def entering(self, key: Key, given: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compare the inputs that the caller's code made; give the module those of the reduced replay."""
        compared = self._reduced.fresh.get(key, set())
        kept, gradients = self._reduced.inputs.get(key, {}), self._reduced.input_gradients.get(key, {})
        return self._passed(key, "input", given, compared, kept, gradients)

    def leaving(self, key: Key, made: list[tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Compare the outputs; give the caller those of the reduced replay."""
        new = [(name, x) for name, x in made if self._handed.get(x) is None]
        kept, gradients = self._reduced.outputs.get(key, {}), self._reduced.output_gradients.get(key, {})
        return self._passed(key, "output", new, kept, kept, gradients)

    def _passed(self, key: Key, kind: str, tensors: list[tuple[str, Tensor]], compared: Container[str],
                kept: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[int, Tensor]:  # fmt: skip
        """Compare tensors that pass from one piece to the next, of the names ``compared``; return replacements."""
        layer, changed = self._reduced.layers.get(key[0]), dict[int, Tensor]()
        for name, x in tensors:
            if layer is None or name not in kept or id(x) in changed or kept[name].shape != x.shape:
                continue
            if name in compared and _counts(x) and self._handed.get(x) is None:
                layer.point(kind).add_local(relative_l2(kept[name], x), name, kept[name])
            grad = gradients.get(name)
            if grad is not None and x.requires_grad:
                self.ends.append((x, grad))
            if kind == "input" or len(self.stack) > 1:  # no piece follows the root's outputs
                changed[id(x)] = self._feed(kept[name], grad, x.requires_grad, (layer, f"grad_{kind}", name))
        return changed

    def _feed(self, value: Tensor, grad: Tensor | None, requires_grad: bool, who: tuple[Layer, str, str]) -> Tensor:
        """Return a widened copy of a tensor of the reduced replay, to be given to a piece, which may write to it."""
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
        """Add root outputs that a module inside has returned: their gradients come from outside the root call."""
        for name, x in returned:
            if x.requires_grad and name in gradients and self._handed.get(x) is not None:
                self.ends.append((x, gradients[name]))

    def compare_gradients(self, weights: Mapping[str, tuple[Tensor, Tensor, Layer, str]]) -> None:
        """Run one backward pass through all pieces at once, which are not connected, and compare the gradients.

        A gradient that nearly cancels (of a bias before a normalisation: exactly) consists of rounding errors in any
        format. A second pass, with some signs of the incoming gradients flipped, shows how much larger it would be
        without cancellation; its error is divided by that factor.

        Args:
            weights: parameter, its gradient in the reduced replay, its layer, and its name there.
        """
        inputs = [x for x, *_ in self.starts] + [p for p, *_ in weights.values()]
        if not self.ends or not inputs:
            return
        ends = [x for x, _ in self.ends]
        brought = [g.to(x.dtype) for x, g in self.ends]
        found: Gradients = take_gradients(ends, inputs, brought, allow_unused=True, retain_graph=True)
        flipped: Gradients = take_gradients(ends, inputs, [_flipped(g) for g in brought], allow_unused=True)
        compared = [(reduced, layer, kind, name) for _, reduced, layer, kind, name in self.starts]
        compared += [(reduced, layer, "weight_grad", name) for _, reduced, layer, name in weights.values()]
        for (reduced, layer, kind, name), grad, other in zip(compared, found, flipped, strict=True):
            if reduced is not None and grad is not None and other is not None:
                layer.point(kind).add_local(relative_l2(reduced, grad) / max(1.0, ratio(other, grad)), name, reduced)


def _flipped(x: Tensor) -> Tensor:
    """Flip about half of the signs, chosen by a multiplicative hash of the index, so that no generator is used."""
    index = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    return torch.where((index * 0x1E3779B1 >> 15) & 1 == 0, x, -x)


def wider(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """Return the dtype to which a tensor of ``dtype`` is widened; complex numbers stay complex."""
    return torch.promote_types(dtype, wide) if dtype.is_complex or dtype.itemsize > 1 else wide


def _counts(x: Tensor) -> bool:
    """Return whether a tensor can be compared: floating-point or complex, and dense."""
    return (x.is_floating_point() or x.is_complex()) and tensor_leaves.is_strided(x)
