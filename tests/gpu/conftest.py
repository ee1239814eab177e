"""Everything in this folder needs a CUDA device and is skipped where there is none.

``DEVICE=cpu`` tries what trains with the CPU in the device's place, to see that it runs.
"""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    on_cpu = os.environ.get("DEVICE") == "cpu"
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:Synchronization debug mode is:UserWarning"))
            if not torch.cuda.is_available() and not (on_cpu and item.get_closest_marker("any_device")):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
