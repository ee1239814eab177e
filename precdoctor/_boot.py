"""Runs at interpreter start in every Python process below ``precdoctor record``, so it must be tiny and must not fail.

It only waits for ``torch`` to be imported. Two files start it: the ``.pth`` file of an installed package, and a
``sitecustomize`` on ``PYTHONPATH`` (source trees). The second call does nothing.

It imports only modules that every interpreter has loaded: a build may start ten thousand interpreters.
"""

from __future__ import annotations

import os
import sys

from precdoctor._attach_file import note

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_started = False


def start() -> None:
    """Wait for the import of torch; do nothing in a second call, without ``PRECDOCTOR_RUN``, or on Windows."""
    global _started  # noqa: PLW0603 - once per process
    run = os.environ.get("PRECDOCTOR_RUN")
    if _started or not run or os.name != "posix":
        return
    _started = True
    note(run, "boot")
    if "torch" in sys.modules:
        _torch_is_here()
    else:
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder:
    """Lets the other finders find torch, and wraps its loader; finds nothing itself.

    It stays until torch is executed, because libraries also search for torch to check for it
    (``importlib.util.find_spec("torch")``).
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment] # a loader by its methods
                return spec
        return None


class _Loader:
    """Torch's own loader, which installs the recorder after it has executed torch."""

    def __init__(self, inner: Any, finder: _TorchFinder) -> None:
        self._inner = inner
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            _torch_is_here()


def _torch_is_here() -> None:
    """Install the recorder, unless there is too little memory; note in the attach file what happened."""
    try:
        from precdoctor.recording.process import memory_shortage

        why = memory_shortage.shortage()
        if why is not None and '"apply": []' in os.environ.get("PRECDOCTOR_OPTIONS", ""):  # else --apply needs us
            from precdoctor.recording.process import attach

            note(os.environ.get("PRECDOCTOR_RUN", ""), "error", why)
            attach.say(f"{why}; training goes on unrecorded")
            return
        from precdoctor.recording.process.deferral import HeldSignals

        with HeldSignals(later=True):
            from precdoctor.recording import installation

            installation.install()
        note(os.environ.get("PRECDOCTOR_RUN", ""), "torch")
    except Exception as error:  # noqa: BLE001 - the user's import of torch must succeed
        note(os.environ.get("PRECDOCTOR_RUN", ""), "error", f"{type(error).__name__}: {error}")
