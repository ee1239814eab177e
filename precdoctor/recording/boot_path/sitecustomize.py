"""Second leg of the attachment: found first on ``PYTHONPATH``, starts the boot module, then runs the user's own sitecustomize.

It lies in a directory of its own, so that nothing else of precdoctor becomes importable by accident.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    """Start the boot module of the precdoctor this interpreter has, or of the source tree this file lies in."""
    if importlib.util.find_spec("precdoctor") is None:
        tree = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
        if os.path.basename(tree) in ("site-packages", "dist-packages"):
            return  # another interpreter's packages: what is compiled for that one must not be grafted onto this one
        sys.path.append(tree)
    from precdoctor import _boot

    _boot.start()


def _run_the_users_own() -> None:
    """Execute the sitecustomize that would have been found without this one."""
    for entry in sys.path:
        if os.path.abspath(entry or os.curdir) == _HERE:
            continue
        candidate = os.path.join(entry, "sitecustomize.py")
        if os.path.isfile(candidate):
            spec = importlib.util.spec_from_file_location("sitecustomize", candidate)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                sys.modules["sitecustomize"] = module
                spec.loader.exec_module(module)
            return


if os.environ.get("PRECDOCTOR_RUN"):
    try:
        _start()
    except Exception:  # the interpreter must start
        pass
_run_the_users_own()
