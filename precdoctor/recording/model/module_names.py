"""Names of modules and parameters: roots, fully qualified names without wrapper prefixes, owners of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from precdoctor.recording.model import live_objects, static
from precdoctor.runlog.caps import shortened

#: Wrapper classes, and the attribute that holds the wrapped model.
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
#: Class that stands for a compiled function in replays; it must not count as the parent of the modules it uses.
_STAND_IN = "CompiledFunction"
#: Most searches for an unknown module. Each walks all live objects, or a whole tree of modules; a script that makes
#: modules in its loop must not pay for it each time.
_MAX_SEARCHES = 16
#: Most characters of a name; longer names are cut.
LONGEST_NAME = 1000


class Place(NamedTuple):
    """The place of a module: name of its root (``GPT#0``), FQN below the root, and class."""

    # A tuple, like a site: dictionaries hash it for every tensor, and a tuple's hash is not computed in Python.
    root: str
    module: str
    module_class: str
    is_wrapper: bool = False


@dataclass
class Root:
    """A top-level module that was called, in training or not.

    Attributes:
        trained: whether a backward pass went through it; this separates its evaluation passes from a teacher's.
        parametric: False for loss modules and the like.
        modules: FQN and class of each module.
    """

    name: str
    module: weakref.ref[nn.Module]
    trained: bool = False
    parametric: bool = True
    modules: list[tuple[str, str]] = field(default_factory=list)
    #: The wrapper around the module, if it has one.
    outer: weakref.ref[nn.Module] | None = None
    #: Whether a call of it has torch's own frame in the thread's stack; a call of a compiled model may not.
    is_visible: bool = False

    def called(self) -> nn.Module | None:
        """Return the module as the script calls it: its wrapper if it has one; None if it is gone."""
        outer = self.outer() if self.outer is not None else None
        return self.module() if outer is None else outer


def unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, FSDP, ``torch.compile`` and the like."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None:
        inner: nn.Module | None = static.held(module, "_modules").get(attribute)
        if inner is None:
            break
        module = inner
    return module


def class_name(module: nn.Module) -> str:
    """Return the class name as the user wrote it: FSDP2 renames ``Linear`` to ``FSDPLinear``."""
    kind = type(module)
    names = [c.__name__ for c in kind.__mro__]
    if kind.__name__.startswith("FSDP") and "FSDPModule" in names:
        return shortened(next(name for name in names[1:] if name != "FSDPModule"), LONGEST_NAME)
    return shortened(kind.__name__, LONGEST_NAME)


class Names:
    """Names of every module and parameter met so far.

    Attributes:
        version: increases whenever a module tree is added or changes, so that facts are written again.
    """

    def __init__(self) -> None:
        self.roots: dict[str, Root] = {}
        self._places: dict[int, tuple[weakref.ref[nn.Module], Place]] = {}
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], Place, str]] = {}
        self._searches = 0
        self.version = 0

    def models(self) -> list[tuple[Root, nn.Module]]:
        """Return the roots whose modules are alive, with these."""
        return [(root, module) for root in self.roots.values() if (module := root.module()) is not None]

    def find(self, module: nn.Module) -> Place | None:
        """Return the place of a known module; None if it is unknown."""
        found = self._places.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def place(self, module: nn.Module, parent: Place | None, caller: nn.Module | None = None) -> Place:
        """Return the place of a module; name it if it is unknown.

        Args:
            module: the module that is called.
            parent: the place of the module whose forward calls it; None at the top.
            caller: that module.

        Returns:
            Its place if known. At the top, a place in a root found or made for it. Else, for a module outside the tree
            of ``caller`` (made anew in each forward, say), a place below ``parent`` named after its class.
        """
        found = self.find(module)
        if found is not None:
            return found
        if parent is None:
            self._add_root(self._top(module))
            if self.find(module) is None:  # the top does not list it after all
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
        """Return the place of a module added to a known tree after it was read: adapters, replaced heads."""
        is_child = caller is not None and any(child is module for child in static.held(caller, "_modules").values())
        root = self.roots.get(parent.root)
        if root is None or not (is_child or _holds_any(module)) or self._searched_enough():
            return None
        self._read(root)
        return self.find(module)

    def parameter(self, parameter: torch.Tensor) -> tuple[Place, str] | None:
        """Return the place of a parameter's or buffer's owner, and its name there; None if no root has it."""
        found = self._parameters.get(id(parameter))
        return found[1:] if found is not None and found[0]() is parameter else None

    def full_name(self, parameter: torch.Tensor) -> str | None:
        """Return the FQN of a parameter or buffer below its root; None if no root has it."""
        found = self.parameter(parameter)
        return None if found is None else ".".join(filter(None, (found[0].module, found[1])))

    def name_alike(self, parameter: torch.Tensor, other: torch.Tensor) -> None:
        """Give another tensor the place and name of a parameter: a whole weight gets those of its shard."""
        if self.parameter(other) is None and (found := self.parameter(parameter)) is not None:
            self._parameters[id(other)] = (weakref.ref(other), *found)

    def trained_weights(self) -> list[torch.Tensor]:
        """Return the leaf parameters of every root that a backward pass went through."""
        models = [module for root in self.roots.values() if root.trained and (module := root.module()) is not None]
        return list({id(p): p for module in models for p in static.parameters(module) if p.is_leaf}.values())

    def search_parameter(self, parameter: torch.Tensor) -> tuple[Place, str] | None:
        """Like :meth:`parameter`, but read the trees again for a tensor added since (``.to()``, adapters)."""
        found = self.parameter(parameter)
        if found is None and not self._searched_enough():
            for root in self.roots.values():
                self._read(root)
            found = self.parameter(parameter)
        return found

    def _searched_enough(self) -> bool:
        """Count a search; return True if there were too many to start another."""
        self._searches += 1
        return self._searches > _MAX_SEARCHES

    def _top(self, module: nn.Module) -> nn.Module:
        """Return the outermost module that contains ``module``: scripts also call ``model.encoder(x)`` directly."""
        if not _holds_any(module) or self._searched_enough():
            return module
        parents: dict[int, nn.Module] = {}
        for candidate in live_objects.instances(nn.Module):
            if type(candidate).__name__ == _STAND_IN:
                continue
            for child in list(static.held(candidate, "_modules").values()):  # another thread may be changing it
                if child is not None:
                    parents.setdefault(id(child), candidate)
        top, seen = module, {id(module)}
        while (above := parents.get(id(top))) is not None and id(above) not in seen:
            seen.add(id(above))
            top = above
        return top

    def _add_root(self, outer: nn.Module) -> None:
        """Register a top-level module and all modules in it."""
        inner = unwrap(outer)
        known = self.find(inner)
        if known is not None and known.module == "":  # it was wrapped after its first use
            root = self.roots[known.root]
        else:
            name = self._free_name(class_name(inner))
            root = Root(name, weakref.ref(inner), parametric=any(True for _ in static.parameters(inner)))
            if (gone := self.roots.get(name)) is not None:  # a loss module made anew in each step
                root.trained, root.modules = gone.trained, gone.modules
            self.roots[name] = root
        if outer is not inner and (root.outer is None or root.outer() is not outer):
            root.outer = weakref.ref(outer)
            self.version += 1
        self._read(root, outer)

    def _read(self, root: Root, outer: nn.Module | None = None) -> None:
        """Register all modules of a root, their parameters and buffers, under their current names."""
        if outer is None:  # "or" would call the module's __len__
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
            for own, tensor in (*static.held(module, "_parameters").items(), *static.held(module, "_buffers").items()):
                if tensor is not None and self.parameter(tensor) is None:  # the first of several owners names it
                    self._parameters[id(tensor)] = (weakref.ref(tensor), place, shortened(own, LONGEST_NAME))
        if modules != root.modules:
            root.modules = modules
            self.version += 1

    def _let_go_of_root_at(self, module: nn.Module, root: Root) -> None:
        """Unregister the parameters of a module that was a root and is now part of another root."""
        known = self.find(module)
        if known is not None and known.module == "" and known.root != root.name:
            mine = [key for key, (_, place, _) in self._parameters.items() if place.root == known.root]
            for key in mine:
                del self._parameters[key]

    def _free_name(self, kind: str) -> str:
        """Return ``Kind#n`` with the lowest n that no living root has: loss modules made anew each step share it."""
        n = 0
        while (holder := self.roots.get(f"{kind}#{n}")) is not None and holder.module() is not None:
            n += 1
        return f"{kind}#{n}"


def _without_wrappers(raw: str, outer: nn.Module) -> Iterator[str]:
    """Iterate over the parts of a dotted name, without those that wrappers add."""
    module: nn.Module | None = outer
    for part in raw.split(".") if raw else ():
        wrapped = module is not None and _WRAPPERS.get(type(module).__name__) == part
        if not wrapped and part not in _PREFIXES:
            yield part
        module = static.held(module, "_modules").get(part) if module is not None else None


def _holds_any(module: nn.Module) -> bool:
    return bool(static.held(module, "_modules") or static.held(module, "_parameters"))
