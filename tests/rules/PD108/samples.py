"""Steps that were run again, and what came of it."""

import json
from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, Training

WHY = "output of the call was not finite in the run and is when run again"


def run_again(outcome: str, dtype: str = "float32", ranks: int = 1, **data: Any) -> Training:
    """Step 7 has a NaN in the head's output, and was examined."""
    run = Training(dtype=dtype, ranks=ranks).poison(7, "output", "head", nan=3, then=False)
    found = {"outcome": outcome, "phase": "forward", "why": WHY, "reproduced": outcome, "loss_is_bad": True, **data}
    run.events.append({"event": "incident", "id": "0-i0", "step": 7, "root": "GPT#0", "data": json.dumps(found)})
    return run


def on(run: Training, device: str, **flags: bool) -> Training:
    """The same on a device, with switches of torch."""
    run.facts = {**FACTS, "device": {"type": device}, "flags": flags}
    return run


def near_the_end() -> Training:
    """FP16, and a binade from its end one step before: that is a matter of range."""
    run = run_again("not-reproduced", "float16")
    return run.change(lambda r: r.update(amax=4e4), kind="output", module="blocks.0.mlp.down", step=6)


def nothing_went_wrong() -> Training:
    return Training()


def another_mask() -> Training:
    """Masked positions are no reason to run anything again."""
    return Training().change(lambda r: r.update(neg_inf=9), kind="input", module="blocks.0.attn.proj")


FIRING = {
    "came_and_went": Sample(
        lambda: run_again("not-reproduced"), step=7, module="head", kind="output", last_finite=6, bare=True,
        says=("limit 4)", "Its replay", "the device of rank 0 as a suspect"),
        evidence={"suspected_device_of_rank": 0, "suspected_device_confidence": 0.3},
    ),
    "kernels_may_differ": Sample(
        lambda: on(run_again("not-reproduced"), "cuda"), step=7, module="head", kind="output", bare=True,
        says=("may give other bits each time",), evidence={"suspected_device_of_rank": None},
    ),
    "deterministic_kernels": Sample(
        lambda: on(run_again("not-reproduced"), "cuda", deterministic_algorithms=True), step=7, module="head",
        kind="output", says=("No kernel of this run",), evidence={"suspected_device_of_rank": 0}, bare=True,
    ),
}  # fmt: skip
#: Findings of other rules, but not of this one.
OTHERS = (near_the_end, lambda: run_again("origin"), lambda: run_again("not-reproduced", changed_arguments=["x"]))
HEALTHY = {f.__name__: f for f in (nothing_went_wrong, another_mask)}
