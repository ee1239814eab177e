"""Finds out why a training run went wrong numerically.

>>> import precdoctor
>>> run = precdoctor.open_run("precdoctor-runs/train-...")   # pandas frames: run.tensors(), run.steps(), run.events()
>>> precdoctor.diagnose(run).findings

Names are loaded on first use: every process started under ``precdoctor record`` imports this module at start-up.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING without importing typing
if TYPE_CHECKING:
    from precdoctor._version import __version__
    from precdoctor.comparison.compare import compare
    from precdoctor.diagnosis import diagnose
    from precdoctor.numerics import Format
    from precdoctor.recording.session import record
    from precdoctor.runlog import open_run

__all__ = ["Format", "__version__", "compare", "diagnose", "open_run", "record"]

_HOME = {
    "Format": "precdoctor.numerics",
    "__version__": "precdoctor._version",
    "compare": "precdoctor.comparison.compare",
    "diagnose": "precdoctor.diagnosis",
    "open_run": "precdoctor.runlog",
    "record": "precdoctor.recording.session",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'precdoctor' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
