"""Which module is running, by global hooks: root class, FQN below it, and the parameters seen so far."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import UninitializedParameter

_WRAPPERS = ("_orig_mod", "module", "_forward_module")


def _lasting(parameter: torch.Tensor) -> bool:
    """Not a tensor that torch.func has put in a parameter's place for one call."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(parameter)


def _clean(name: str) -> str:
    parts = name.split(".") if name else []
    return ".".join(p for i, p in enumerate(parts) if p != "_orig_mod" and not (i == 0 and p == "module"))


class ModuleStack:
    """The running modules, outermost first."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        #: A model has run since the last backward pass.
        self.ran = False
        self.parameters: dict[int, torch.Tensor] = {}
        self._roots: dict[int, tuple[nn.Module, str, dict[int, str]]] = {}
        self._counts: Counter[str] = Counter()
        self._owners: dict[int, tuple[str, str]] = {}
        self._handles: list[Any] = []

    def install(self, on_root: Any) -> None:
        """Begin watching; ``on_root(module, inputs)`` is called before a root runs."""

        def before(module: nn.Module, args: Any, kwargs: Any = None) -> None:  # noqa: ARG001
            if not self.stack:
                self._enter_root(module)
                on_root(module)
            self.stack.append(module)

        def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if module in self.stack:
                del self.stack[len(self.stack) - 1 - self.stack[::-1].index(module) :]
            if not self.stack and any(True for _ in module.parameters()):
                self.ran = True

        self._handles = [
            hooks.register_module_forward_pre_hook(before),
            hooks.register_module_forward_hook(after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_root(self, module: nn.Module) -> None:
        if id(module) in self._roots:
            return
        inner: Any = module
        while hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        kind = type(inner).__name__
        names = {id(m): _clean(n) for n, m in module.named_modules(remove_duplicate=False)}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            owner = _clean(name.rpartition(".")[0])
            if _lasting(parameter):
                self._owners.setdefault(id(parameter), (f"{kind}#{self._counts[kind]}", owner))
        self._roots[id(module)] = (module, f"{kind}#{self._counts[kind]}", names)
        self._counts[kind] += 1
        known = (p for p in module.parameters() if not isinstance(p, UninitializedParameter) and _lasting(p))
        self.parameters.update({id(p): p for p in known})

    def where(self) -> tuple[str, str] | None:
        """Root and FQN of the innermost running module."""
        if not self.stack:
            return None
        _, root, names = self._roots.get(id(self.stack[0]), (None, "?", {}))
        for module in reversed(self.stack):
            if id(module) in names:
                return root, names[id(module)]
        return root, ""

    def owner(self, parameter: torch.Tensor) -> tuple[str, str] | None:
        """Root and FQN of the module a parameter belongs to."""
        return self._owners.get(id(parameter))

    def is_criterion(self) -> bool:
        """The running root is a loss: it comes after a model and has nothing to learn, or is named so."""
        root = self.stack[0]
        return self.ran and (type(root).__name__.endswith("Loss") or not any(True for _ in root.parameters()))

    def parameter_storages(self) -> set[int]:
        return {p.untyped_storage()._cdata for p in self.parameters.values()}
