"""A scan finds the same where a script moves numbers to another device as it casts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from precdoctor.recording.deepscan.scan_mode import ScanMode
from tests.support.two_devices import TwoDevices

Cast = Callable[[Tensor, torch.dtype], Tensor]


class Script:
    """What is older than the scan, and the code that it looks at."""

    def __init__(self) -> None:
        self.times = torch.arange(1000.0, 1064.0) + 0.3
        self.tiny = torch.full((64,), 1e-9)
        self.weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
        self.state, self.wide = torch.ones(64, dtype=torch.bfloat16), torch.ones(64)

    def angles(self, cast: Cast) -> Any:
        return torch.sin(cast(self.times, torch.bfloat16))

    def underflow(self, cast: Cast) -> Any:
        return cast(self.tiny, torch.float16).float()  # a copy that nothing reads is no fact

    def float8(self, cast: Cast) -> Any:
        return cast(self.weights.clamp(-448.0, 448.0), torch.float8_e4m3fn).float()

    def wrapped(self, cast: Cast) -> Any:
        return cast(torch.arange(64) * 7, torch.int8).float()

    def equal(self, cast: Cast) -> Any:
        return cast(torch.arange(3000), torch.float16)

    def replaced(self, cast: Cast) -> Any:
        self.state = (cast(self.state, torch.float32) * 0.9999 + 0.00005).bfloat16()
        return self.state

    def served(self, _: Cast) -> Any:
        self.wide.mul_(0.9999)
        self.state.copy_(self.wide)
        self.wide.copy_(self.state)

    def masters(self, _: Cast) -> Any:
        self.wide.copy_(self.state)
        self.wide.mul_(0.9999)
        self.state.copy_(self.wide)


SCRIPTS = [name for name in vars(Script) if not name.startswith("_")]


def facts(script: Script, name: str, cast: Cast) -> list[dict[str, Any]]:
    mode = ScanMode(64 << 20, values=True)
    mode.stage = "script"
    with mode:
        kept = getattr(script, name)(cast)
    assert mode.failure is None
    found = [event["data"] for event in mode.facts()]
    del kept
    return found


@pytest.mark.parametrize("moves", ["nothing", "state", "wide"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_move_to_another_device_changes_no_fact(name, moves):
    script = Script()
    expected = facts(script, name, Tensor.to)
    assert expected
    script = Script()
    with TwoDevices() as devices:
        if moves != "nothing":
            devices.put(getattr(script, moves))
        assert facts(script, name, devices.cast) == expected
