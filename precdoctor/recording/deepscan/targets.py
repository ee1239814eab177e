"""Names tensors that outlive a step (weights, gradients, averages, optimizer states) by their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Names
from precdoctor.recording.model.optimizer_contents import state_of
from precdoctor.recording.ops.dispatched_ops import storage_key
from precdoctor.recording.process.threads import Threads


class Targets:
    """Weights and gradients of the known models, and optimizer states, by storage; read once, at the first question.

    Args:
        optimizers: those that have stepped in the window.
        threads: while other threads use models nothing is read: autograd may be writing to their gradients.
    """

    def __init__(
        self,
        names: Names | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        threads: Threads | None = None,
    ) -> None:
        self._names, self._optimizers, self._threads = Names() if names is None else names, list(optimizers), threads
        self._by_storage: dict[int, dict[str, Any]] | None = None

    def of(self, key: int) -> dict[str, Any]:
        """Return ``target`` (weight, average, gradient, state) and, if known, ``name`` and ``owner`` of the parameter.

        ``owner`` is root and module; ``state`` is the optimizer's name of a state. Unknown memory counts as a state.
        """
        if self._by_storage is None:
            self._by_storage = self._read()
        return self._by_storage.get(key, {"target": "state"})

    def zero_gradients(self) -> list[str]:
        """Return the names of trained weights whose gradient is exactly zero."""
        return [name for _, _, name, _, grad in self._trained() if not bool(grad.any())]

    def gradient_storages(self) -> set[int]:
        """Return the storages of the gradients of all weights of known models."""
        grads = [parameter.grad for _, _, _, parameter in self._parameters() if parameter.is_leaf]
        return {key for grad in grads if grad is not None and (key := storage_key(grad)) is not None}

    def gradients(self, most: int) -> list[tuple[str, str, Tensor, Tensor]]:
        """Return root, module, weight and gradient of up to ``most`` trained weights that have a gradient."""
        return [(root, module, weight, grad) for root, module, _, weight, grad in islice(self._trained(), most)]

    def _trained(self) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
        """Yield root, module, name, weight and gradient of trained weights that have a gradient."""
        for root, module, name, parameter in self._parameters():
            grad = parameter.grad if parameter.is_leaf else None
            if root.trained and grad is not None and storage_key(grad) is not None:
                yield root.name, module, name, parameter, grad

    def _parameters(self) -> list[tuple[Any, str, str, Tensor]]:
        """Return root, module, name and tensor of all parameters of known models."""
        names = self._names
        if self._threads is not None and self._threads.others:
            return []
        all_of_them = ((root, p) for root, module in names.models() for p in static.parameters(module))
        known = ((root, names.parameter(p), p) for root, p in all_of_them)
        return [(root, at[0].module, names.full_name(p) or "", p) for root, at, p in known if at is not None]

    def _read(self) -> dict[int, dict[str, Any]]:
        """Return what each storage is to the training."""
        known: dict[int, dict[str, Any]] = {}
        for root, module, name, parameter in self._parameters():
            trained = root.trained and parameter.requires_grad
            about = {"name": name, "owner": [root.name, module]}
            _add(known, parameter, "weight" if trained else "average", about)
            if parameter.is_leaf:
                _add(known, parameter.grad, "gradient", about)
            for optimizer in self._optimizers:
                for state, x in state_of(optimizer, parameter).items():
                    _add(known, x, "state", {**about, "state": state})
        return known


def _add(known: dict[int, dict[str, Any]], x: Any, target: str, about: dict[str, Any]) -> None:
    """Note what a tensor's storage is, if it has one."""
    key = storage_key(x) if issubclass(type(x), Tensor) else None
    if key is not None:
        known[key] = {"target": target, **about}
