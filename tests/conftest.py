"""What holds for every test."""

import gc
import importlib.util
import os
import signal
from pathlib import Path

# A shell's background jobs ignore Ctrl-C, and so would every script that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Children start in half the time; `QUICK_TORCH= make test` starts them as they start anywhere else.
os.environ.setdefault("QUICK_TORCH", str(Path(__file__).parent / "support" / "quick"))

# No test asserts wall time, and neither does Hypothesis for one; `make gpu` runs where that is not installed.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_collection_finish():
    """Six thousand tests stay where they are: no later search for garbage is to go through them again."""
    gc.collect()
    gc.freeze()
