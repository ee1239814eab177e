"""Which module is which: roots, fully qualified names without wrapper prefixes, and the owners of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from precdoctor.recording.model import live_objects, static
from precdoctor.runlog.caps import shortened

#: Wrappers whose child is the model: the attribute it lives under, by class name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "DeepSpeedEngine": "module",
    "PipelineEngine": "module",
    "Float16Module": "module",
    "_FabricModule": "_forward_module",
}
_PREFIXES = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
#: What stands for a compiled function in replays: the modules it uses are roots, not its own.
_STAND_IN = "CompiledFunction"
#: A search for an unknown module walks every live object, or a whole tree of modules; a script that makes modules in
#: its loop must not pay for it each time.
_MAX_SEARCHES = 16
#: Characters of a name; longer ones are cut.
LONGEST_NAME = 1000


class Place(NamedTuple):
    """Where a module stands: its root's name (``GPT#0``), its FQN below it, its class."""

    # A tuple, like a site: dictionaries ask for its hash at every tensor, and this one is not computed in Python.
    root: str
    module: str
    module_class: str
    is_wrapper: bool = False


@dataclass
class Root:
    """A top-level module seen in training.

    ``trained`` turns true when a backward pass went through it, which separates its evaluation passes from a teacher.
    ``parametric`` is false for loss modules and their like.
    """

    name: str
    module: weakref.ref[nn.Module]
    trained: bool = False
    parametric: bool = True
    modules: list[tuple[str, str]] = field(default_factory=list)
    #: What it is wrapped in.
    outer: weakref.ref[nn.Module] | None = None
    #: Torch's own frame of a call of it is among those of the thread, which a compiled one's may not be.
    is_visible: bool = False

    def called(self) -> nn.Module | None:
        """The module as it is called: the wrapper if there is one; null when it is gone."""
        outer = self.outer() if self.outer is not None else None
        return self.module() if outer is None else outer


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, FSDP, ``torch.compile`` and their like."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        inner: nn.Module | None = static.held(module, "_modules").get(attribute)
        if inner is None:
            break
        module = inner
    return module


def class_name(module: nn.Module) -> str:
    """The class as the user wrote it: FSDP2 renames ``Linear`` to ``FSDPLinear``."""
    kind = type(module)
    names = [c.__name__ for c in kind.__mro__]
    if kind.__name__.startswith("FSDP") and "FSDPModule" in names:
        return shortened(next(name for name in names[1:] if name != "FSDPModule"), LONGEST_NAME)
    return shortened(kind.__name__, LONGEST_NAME)


class Names:
    """Names of every module and parameter met so far."""

    def __init__(self) -> None:
        self.roots: dict[str, Root] = {}
        self._places: dict[int, tuple[weakref.ref[nn.Module], Place]] = {}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Place, str]] = {}
        self._searches = 0
        #: Bumped whenever a module tree is added or has changed, so that facts are rewritten.
        self.version = 0

    def find(self, module: nn.Module) -> Place | None:
        """The place of a known module."""
        found = self._places.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def place(self, module: nn.Module, parent: Place | None, caller: nn.Module | None = None) -> Place:
        """The place of any module.

        Args:
            module: the module that is called.
            parent: the place of the module whose forward calls it; null at the top.
            caller: that module.

        Returns:
            Its place when known; below a root found or made for it at the top; else, for a module that stands outside
            the tree of ``caller`` (made anew in each forward, say), a place named after its class below ``parent``.
        """
        found = self.find(module)
        if found is not None:
            return found
        if parent is None:
            self._add_root(self._top(module))
            if self.find(module) is None:  # the top found does not list it after all
                self._add_root(module)
            found = self.find(module)
        else:
            found = self._added_since(module, parent, caller)
        if found is None:
            assert parent is not None
            name = f"{parent.module}.{class_name(module)}" if parent.module else class_name(module)
            found = Place(parent.root, name, class_name(module))
            self._places[id(module)] = (weakref.ref(module), found)
        return found

    def _added_since(self, module: nn.Module, parent: Place, caller: nn.Module | None) -> Place | None:
        """The place of a module put into a known tree after that was read: adapters, replaced heads."""
        is_child = caller is not None and any(child is module for child in static.held(caller, "_modules").values())
        root = self.roots.get(parent.root)
        if root is None or not (is_child or _holds_any(module)) or self._searched_enough():
            return None
        self._read(root)
        return self.find(module)

    def parameter(self, parameter: torch.Tensor) -> tuple[Place, str] | None:
        """The module that owns a parameter or buffer, and its name there; null when no root has it."""
        found = self._parameters.get(id(parameter))
        return found[1:] if found is not None and found[0]() is parameter else None

    def name_alike(self, parameter: torch.Tensor, other: torch.Tensor) -> None:
        """Give another tensor the place and the name of a parameter: the whole of a shard."""
        if self.parameter(other) is None and (found := self.parameter(parameter)) is not None:
            self._parameters[id(other)] = (weakref.ref(other), *found)

    def trained_weights(self) -> list[torch.Tensor]:
        """The parameters of every root that a backward pass went through, but for those an inner loop has computed."""
        models = [module for root in self.roots.values() if root.trained and (module := root.module()) is not None]
        return list({id(p): p for module in models for p in static.parameters(module) if p.is_leaf}.values())

    def search_parameter(self, parameter: torch.Tensor) -> tuple[Place, str] | None:
        """Like :meth:`parameter`; reads the trees again for one put there since (``.to()``, weight tying, adapters)."""
        found = self.parameter(parameter)
        if found is None and not self._searched_enough():
            for root in self.roots.values():
                self._read(root)
            found = self.parameter(parameter)
        return found

    def _searched_enough(self) -> bool:
        self._searches += 1
        return self._searches > _MAX_SEARCHES

    def _top(self, module: nn.Module) -> nn.Module:
        """The outermost module that contains ``module``: scripts also call ``model.encoder(x)`` directly."""
        if not _holds_any(module) or self._searched_enough():
            return module
        parents: dict[int, nn.Module] = {}
        for candidate in live_objects.instances(nn.Module):
            if type(candidate).__name__ == _STAND_IN:
                continue
            for child in list(static.held(candidate, "_modules").values()):  # another thread may be making it
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
            name = self._free_name(class_name(inner))
            root = Root(name, weakref.ref(inner), parametric=any(True for _ in static.parameters(inner)))
            if (gone := self.roots.get(name)) is not None:  # a loss module made anew each step
                root.trained, root.modules = gone.trained, gone.modules
            self.roots[name] = root
        if outer is not inner and (root.outer is None or root.outer() is not outer):
            root.outer = weakref.ref(outer)
            self.version += 1
        self._read(root, outer)

    def _read(self, root: Root, outer: nn.Module | None = None) -> None:
        """Register every module of a root, its parameters and its buffers, under their present names."""
        if outer is None:  # a module's truth value is its length, so no "or" here
            outer = root.module()
        if outer is None:
            return
        modules = []
        for raw, module in static.named_modules(outer):
            self._let_go_of_root_at(module, root)
            name = shortened(".".join(_without_wrappers(raw, outer)), LONGEST_NAME)
            is_wrapper = type(module).__name__ in _WRAPPERS
            place = Place(root.name, name, class_name(unwrap(module)), is_wrapper)
            self._places[id(module)] = (weakref.ref(module), place)
            if not is_wrapper:
                modules.append((name, place.module_class))
            for own, tensor in (
                *static.held(module, "_parameters").items(),
                *static.held(module, "_buffers").items(),
            ):
                if tensor is not None and self.parameter(tensor) is None:  # of several owners the first names it
                    self._parameters[id(tensor)] = (weakref.ref(tensor), place, shortened(own, LONGEST_NAME))
        if modules != root.modules:
            root.modules = modules
            self.version += 1

    def _let_go_of_root_at(self, module: nn.Module, root: Root) -> None:
        """A module that was a root by itself has become part of another one: its parameters also take new names."""
        known = self.find(module)
        if known is not None and known.module == "" and known.root != root.name:
            mine = [key for key, (_, place, _) in self._parameters.items() if place.root == known.root]
            for key in mine:
                del self._parameters[key]

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
        module = static.held(module, "_modules").get(part) if module is not None else None


def _holds_any(module: nn.Module) -> bool:
    return bool(static.held(module, "_modules") or static.held(module, "_parameters"))
