"""States that are written to and stay as they are."""

from typing import Any

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import Training


def stalled(**changes: Any) -> dict[str, Any]:
    """What an average in BF16 looks like under a decay of 0.999."""
    measured = {"dtype": "bfloat16", "moved": 1000, "stalled": 990, "of": 1000, "tensors": 4, "bits_missing": 2.5}
    where = {"phase": "script", "target": "state", "value": 0.06, "move": 3e-5}
    found = fact("stalled", "lerp_.Scalar", **(told := {**measured, **where, **changes}))
    return {**found, "root": "", "module": "", "data": {**found["data"], "dtype": told["dtype"]}}


def moves_mostly() -> Training:
    return scanned(stalled(stalled=550))


def one_step() -> Training:
    """Before the student has moved, its teacher has nothing to follow."""
    return with_scans(scanned(stalled(), steps=(1,)), 2, 3)


def moves_later() -> Training:
    return with_scans(scanned(stalled(), steps=(1, 2)), 3, 4, 5)


def weights_of_an_optimizer() -> Training:
    return scanned(stalled(target="weight", name="blocks.0.attn.weight"))


def decay(move: float) -> Training:
    """BF16 weights that decoupled weight decay multiplies by slightly less than one, over 64 steps."""
    found = stalled(target="weight", name="blocks.0.attn.weight", value=0.3, move=move, phase="optimizer")
    run = Training(steps=64)
    run.events = scanned({**found, "op": "aten.mul_.Tensor"}).events
    return run


def small_decay() -> Training:
    return decay(3e-7)


def adams_own() -> Training:
    return scanned({**stalled(phase="optimizer"), "code": "optimizer.step()"})


FIRING = {
    "average": Sample(
        lambda: scanned(stalled()), 0, severity="warning",
        says=("99 % of the elements of a state", "limit 60 %", "2.5 bits", "code between two steps"),
    ),
    "count": Sample(
        lambda: scanned({**stalled(moved=1, stalled=1, of=1, tensors=1, bits_missing=0.0, value=256.0, move=1.0),
                         "op": "aten.add_.Tensor"}),
        0, severity="warning", says=("add changes nothing", "values of 256 by 1"),
    ),
    "decay": Sample(
        lambda: decay(1e-3), 0, severity="warning", says=("mul changes nothing", "weights (`blocks.0.attn.weight`)"),
    ),
    "refilled_masters": Sample(
        lambda: scanned({**stalled(target="weight", name="blocks.0.attn.weight"), "op": "aten.copy_.default"}), 0,
        severity="warning", says=("copy changes nothing", "weights (`blocks.0.attn.weight`)", "on every step"),
    ),
    "teacher_in_a_module": Sample(
        lambda: scanned(stalled(target="average", name="teacher.weight")), 0, severity="warning",
        says=("an average of weights (`teacher.weight`)",),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f for f in (moves_mostly, one_step, moves_later, weights_of_an_optimizer, small_decay, adams_own)
}
