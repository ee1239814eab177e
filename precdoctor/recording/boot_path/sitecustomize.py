"""The second way into a process: first on ``PYTHONPATH``, starts the boot module, then the user's own sitecustomize.

It lies alone in its directory, so that nothing else of precdoctor becomes importable by accident. It runs at every
interpreter start, so it imports little.
"""

# ruff: noqa: INP001, PTH100, PTH118, PTH119, PTH120 - no package, and without pathlib, for the reasons above

import importlib.machinery
import importlib.util
import os
import sys


def _start() -> None:
    """Start the boot module of the precdoctor that this interpreter has installed, or of this file's source tree."""
    if "precdoctor" not in sys.modules and importlib.util.find_spec("precdoctor") is None:
        package = os.path.dirname(os.path.dirname(_HERE))
        if os.path.basename(os.path.dirname(package)) in {"site-packages", "dist-packages"}:
            return  # the package of another interpreter: its compiled parts do not fit this one
        # Load the package alone: other directories of the source tree must not become importable.
        spec = importlib.util.spec_from_file_location("precdoctor", os.path.join(package, "__init__.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["precdoctor"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from precdoctor import _boot

    _boot.start()


def _run_the_users_own() -> None:
    """Execute the sitecustomize, of any kind of module, that would be found without this one."""
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is None or spec.loader is None:
        return
    module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_HERE = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("PRECDOCTOR_RUN"):
    try:  # noqa: SIM105 - contextlib takes longer to import than everything here
        _start()
    except Exception:  # noqa: BLE001, S110 - the interpreter must start
        pass
_run_the_users_own()
