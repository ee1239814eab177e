"""Runs at interpreter start in every Python process below ``precdoctor record``, so it must be tiny and must not fail.

All it does is to wait for ``torch`` to be imported. Two legs lead here: the ``.pth`` file of an installed package, and
a ``sitecustomize`` on ``PYTHONPATH`` (source trees). Whichever is first wins; the second call does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType

#: One line per process that was offered recording, and how far it got; lies in the run directory.
ATTACH_FILE = "attach.jsonl"
#: A build that starts ten thousand interpreters should not fill the disk with notes.
_MAX_NOTES = 1 << 20

_started = False


def start() -> None:
    """Begin to wait for torch; does nothing a second time, or without ``PRECDOCTOR_RUN``."""
    global _started  # noqa: PLW0603 -- once per process
    run = os.environ.get("PRECDOCTOR_RUN")
    if _started or not run or os.name != "posix":
        return
    _started = True
    note(run, "boot")
    if "torch" in sys.modules:
        _torch_is_here()
    else:
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the next finder find torch and wraps the loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """torch's own loader, with one thing done after it."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _torch_is_here()


def _torch_is_here() -> None:
    run = os.environ.get("PRECDOCTOR_RUN", "")
    try:
        from precdoctor.recording import hooks

        hooks.install()
        note(run, "torch")
    except Exception as error:  # noqa: BLE001 -- the user's import of torch must succeed whatever happens here
        note(run, "error", f"{type(error).__name__}: {error}")


def note(run: str, event: str, message: str | None = None) -> None:
    """Add a line to the run's attach file. Never raises.

    Args:
        run: the run directory.
        event: ``boot``, ``torch``, ``armed`` or ``error``.
        message: what went wrong, for ``error``.
    """
    line = json.dumps({"pid": os.getpid(), "executable": sys.executable, "event": event, "message": message}) + "\n"
    try:
        descriptor = os.open(os.path.join(run, ATTACH_FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size < _MAX_NOTES:
                os.write(descriptor, line.encode())  # one write, so lines of many processes do not interleave
        finally:
            os.close(descriptor)
    except OSError:
        pass  # the run directory may be gone or full; there is nobody to tell yet
