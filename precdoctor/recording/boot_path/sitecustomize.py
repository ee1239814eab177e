"""Second leg of the attachment: first on ``PYTHONPATH``, starts the boot module, then the user's own sitecustomize.

It lies in a directory of its own, so that nothing else of precdoctor becomes importable by accident, and runs at every
interpreter start, so it imports little.
"""

# ruff: noqa: INP001, PTH100, PTH118, PTH119, PTH120 - no package, and without pathlib, for the reasons above

import importlib.machinery
import importlib.util
import os
import sys


def _start() -> None:
    """Start the boot module of the precdoctor this interpreter has, or of the source tree this file lies in."""
    if "precdoctor" not in sys.modules and importlib.util.find_spec("precdoctor") is None:
        package = os.path.dirname(os.path.dirname(_HERE))
        if os.path.basename(os.path.dirname(package)) in {"site-packages", "dist-packages"}:
            return  # another interpreter's packages: what is compiled for that one must not be grafted onto this one
        # The package alone: the tree's other directories stay as unimportable as they were.
        spec = importlib.util.spec_from_file_location("precdoctor", os.path.join(package, "__init__.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["precdoctor"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from precdoctor import _boot

    _boot.start()


def _run_the_users_own() -> None:
    """Execute the sitecustomize that would have been found without this one, whatever kind of module it is."""
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
