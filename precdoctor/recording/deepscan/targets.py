"""What a tensor that outlives a step is to the training: found by its memory when a scan ends."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Names
from precdoctor.recording.ops.dispatched_ops import storage_key


class Targets:
    """Weights, gradients and buffers of the models that the recorder knows, by storage; read once, when first asked."""

    def __init__(self, names: Names | None = None) -> None:
        self._names = names
        self._known: dict[int, dict[str, Any]] | None = None

    def of(self, key: int) -> dict[str, Any]:
        """``target`` (weight, average, gradient, buffer, state) and, where it has one, its ``name``."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(key, {"target": "state"})

    def zero_gradients(self) -> list[str]:
        """Names of trained weights whose gradient is there, and exactly zero."""
        found = []
        for root, name, parameter in self._parameters():
            grad = parameter.grad if parameter.is_leaf else None
            if root.trained and isinstance(grad, Tensor) and storage_key(grad) is not None and not bool(grad.any()):
                found.append(name)
        return found

    def _parameters(self) -> list[tuple[Any, str, Tensor]]:
        found = []
        names = self._names
        for root in names.roots.values() if names is not None else ():
            module = root.module()
            for parameter in static.parameters(module) if module is not None else ():
                known = names.parameter(parameter) if names is not None else None
                if known is not None:
                    found.append((root, ".".join(p for p in (known[0].module, known[1]) if p), parameter))
        return found

    def _read(self) -> dict[int, dict[str, Any]]:
        known: dict[int, dict[str, Any]] = {}
        for root, name, parameter in self._parameters():
            trained = root.trained and parameter.requires_grad
            _add(known, parameter, "weight" if trained else "average", name)
            if parameter.is_leaf:
                _add(known, parameter.grad, "gradient", name)
        return known


def _add(known: dict[int, dict[str, Any]], x: Any, target: str, name: str) -> None:
    key = storage_key(x) if isinstance(x, Tensor) else None
    if key is not None:
        known[key] = {"target": target, "name": name}
