"""Spares the children of tests the half of torch's start that they have no use for.

The first optimizer of a process imports ``torch._dynamo``, only to keep the compiler out of its methods: 2.4 s, as much
as torch itself, in each of hundreds of scripts that compile nothing. Here a stand-in answers the two calls that
optimizers make. Whatever else anybody asks of it brings the true module, and from then on all is as torch made it.

A line of a ``.pth`` file (``Makefile``) imports this where ``QUICK_TORCH`` names this folder, which
``tests/conftest.py`` sees to. Without either, tests pass as well, but slower.
"""

import importlib.machinery  # importlib.abc would take every interpreter 50 ms
import sys
import types

NAME = "torch._dynamo"


class StandIn(types.ModuleType):
    """``torch._dynamo`` until somebody needs it."""

    def __init__(self, name):
        super().__init__(name)
        self._undecided = []

    def disable(self, fn=None, recursive=True, **more):
        """What optimizers call at the first call of a method; they keep the answer in ``fn.__dynamo_disable``."""
        if more.get("wrapping", True):  # a decorator of somebody's, or an older torch, which does not say
            return self.give_way().disable(fn, recursive, **more)
        self._undecided.append(fn)
        return fn

    def graph_break(self, msg=""):
        """Nothing is compiled."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.give_way(), name)

    def give_way(self):
        """The true module, in this one's place."""
        if sys.modules.get(NAME) is self:
            sys.meta_path.remove(FINDER)
            del sys.modules[NAME]
            for function in self._undecided:
                function.__dict__.pop("__dynamo_disable", None)
        return importlib.import_module(NAME)


class Finder:
    """Puts the stand-in in its place, and takes it away before any module within ``torch._dynamo`` is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # it is the loader, too
        if not name.startswith(NAME + "."):
            return None
        package = sys.modules[NAME].give_way()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, Imported(sys.modules[name]))
        return importlib.machinery.PathFinder.find_spec(name, package.__path__)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


class Imported:
    """A module that the true ``torch._dynamo`` has imported meanwhile."""

    def __init__(self, module):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        module.__spec__ = self._spec


FINDER = Finder()
sys.meta_path.insert(0, FINDER)
