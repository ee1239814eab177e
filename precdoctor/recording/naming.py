"""Which module is which: roots, fully qualified names without wrapper prefixes, and the owners of parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

#: Wrappers whose child is the model: the attribute it lives under, by class name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
_PREFIXES = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
#: A scan for parents walks every live object; a script that makes modules in its loop must not pay for it each time.
_MAX_PARENT_SCANS = 16


@dataclass(frozen=True)
class Place:
    """Where a module stands: its root's name (``GPT#0``), its FQN below it, its class."""

    root: str
    module: str
    module_class: str
    is_wrapper: bool = False


@dataclass
class Root:
    """A top-level module seen in training.

    ``trained`` turns true when a backward pass went through it, which tells its evaluation passes from a teacher.
    """

    name: str
    module: weakref.ref[nn.Module]
    trained: bool = False
    modules: list[tuple[str, str]] = field(default_factory=list)


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, FSDP, ``torch.compile`` and their like."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        inner = getattr(module, attribute, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def class_name(module: nn.Module) -> str:
    """The class as the user wrote it: FSDP2 renames ``Linear`` to ``FSDPLinear``."""
    kind = type(module)
    if (
        kind.__name__.startswith("FSDP")
        and len(kind.__mro__) > 1
        and any("FSDPModule" == c.__name__ for c in kind.__mro__)
    ):
        bases = [c for c in kind.__mro__[1:] if c.__name__ != "FSDPModule"]
        return bases[0].__name__
    return kind.__name__


class Names:
    """Names of every module and parameter met so far."""

    def __init__(self) -> None:
        self.roots: dict[str, Root] = {}
        self._places: dict[int, tuple[weakref.ref[nn.Module], Place]] = {}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Place, str]] = {}
        self._scans = 0
        #: Bumped whenever a root is added, so that facts are rewritten.
        self.version = 0

    def find(self, module: nn.Module) -> Place | None:
        """The place of a known module."""
        found = self._places.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def place(self, module: nn.Module, parent: Place | None) -> Place:
        """The place of any module: known, below a new root, or kept by ``parent`` outside its module tree."""
        found = self.find(module)
        if found is not None:
            return found
        if parent is not None:
            name = f"{parent.module}.{class_name(module)}" if parent.module else class_name(module)
            place = Place(parent.root, name, class_name(module))
            self._places[id(module)] = (weakref.ref(module), place)
            return place
        self._add_root(self._top(module))
        found = self.find(module)
        if found is None:  # the top found does not list it after all
            self._add_root(module)
            found = self.find(module)
        assert found is not None
        return found

    def parameter(self, parameter: torch.Tensor) -> tuple[Place, str] | None:
        """The module that owns a parameter or buffer, and its name there; null when no root has it."""
        found = self._parameters.get(id(parameter))
        return found[1:] if found is not None and found[0]() is parameter else None

    def _top(self, module: nn.Module) -> nn.Module:
        """The outermost module that contains ``module``: scripts call ``model.encoder(x)`` directly, too."""
        if self._scans >= _MAX_PARENT_SCANS or (not module._modules and not module._parameters):
            return module
        self._scans += 1
        # issubclass on the type, because isinstance asks lazy modules' __class__ and that can import or warn.
        live = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
        parents: dict[int, nn.Module] = {}
        for candidate in live:
            for child in candidate.__dict__.get("_modules", {}).values():
                if child is not None:
                    parents.setdefault(id(child), candidate)
        top, seen = module, {id(module)}
        while (above := parents.get(id(top))) is not None and id(above) not in seen:
            seen.add(id(above))
            top = above
        return top

    def _add_root(self, outer: nn.Module) -> None:
        inner = unwrap(outer)
        known = self.find(inner)
        if known is not None and known.module == "":  # wrapped after its first use
            root = self.roots[known.root]
        else:
            root = Root(self._free_name(class_name(inner)), weakref.ref(inner))
            self.roots[root.name] = root
        root.modules.clear()
        for raw, module in outer.named_modules():
            self._add(root, raw, module, outer)
        self.version += 1

    def _add(self, root: Root, raw: str, module: nn.Module, outer: nn.Module) -> None:
        name = ".".join(_without_wrappers(raw, outer))
        place = Place(root.name, name, class_name(module), type(module).__name__ in _WRAPPERS)
        self._places[id(module)] = (weakref.ref(module), place)
        if not place.is_wrapper:
            root.modules.append((name, place.module_class))
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._parameters.setdefault(id(tensor), (weakref.ref(tensor), place, own))
                if self._parameters[id(tensor)][0]() is not tensor:  # an address used again
                    self._parameters[id(tensor)] = (weakref.ref(tensor), place, own)

    def refresh(self, root: Root) -> None:
        """Register parameters that were replaced since (``.to()``, weight tying, LoRA) and new modules."""
        module = root.module()
        if module is not None:
            root.modules.clear()
            for raw, child in module.named_modules():
                self._add(root, raw, child, module)

    def _free_name(self, kind: str) -> str:
        """``Kind#n`` with the lowest n not held by a living root: loss modules made anew each step share a name."""
        n = 0
        while (holder := self.roots.get(f"{kind}#{n}")) is not None and holder.module() is not None:
            n += 1
        return f"{kind}#{n}"


def _without_wrappers(raw: str, outer: nn.Module) -> Iterator[str]:
    """The parts of a dotted name, less those that only wrappers add."""
    module: nn.Module | None = outer
    for part in raw.split(".") if raw else ():
        wrapped = module is not None and _WRAPPERS.get(type(module).__name__) == part
        if not wrapped and part not in _PREFIXES:
            yield part
        module = module._modules.get(part) if module is not None else None
