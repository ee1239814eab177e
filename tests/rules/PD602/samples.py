"""Activations that grow, and activations that stop growing."""

import json
from collections.abc import Callable

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import ROOT, Training, normal


def amax(of_step: Callable[[int], float], *, steps: int = 24, dtype: str = "float16", kind: str = "output") -> Training:
    """The head's output reaches ``of_step(step)``."""
    run = Training(steps=steps, dtype=dtype, scale=64.0)
    largest = normal(1.0)["amax"]
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == kind and row["module"] == "head":
                row.update(normal(of_step(step) / largest))
    return run


def levels_off() -> Training:
    return amax(lambda s: 8_000.0 * (1.0 - 0.5**s) + s)


def small() -> Training:
    """A hundredfold, and still nowhere near the limit."""
    return amax(lambda s: 1.0 * 2.0 ** (s / 4))


def wobbles() -> Training:
    return amax(lambda s: 9_000.0 + 2_500.0 * ((s * 7) % 5 - 2) / 2)


def jumps_once() -> Training:
    """Other data from step 16 on: four binades at once, and level before and after."""
    return amax(lambda s: (2_000.0 if s < 16 else 32_000.0) * (1.0 + 0.02 * ((s * 7) % 5 - 2)))


def far_ahead() -> Training:
    """A binade in a hundred steps seen for 24."""
    return amax(lambda s: 4_000.0 * 2.0 ** (s / 100))


def logits(of_step: Callable[[int], float], op: str = "aten._log_softmax_backward_data.default") -> Training:
    """The head's output in BF16, and an op on as many elements in the loss code."""
    run = amax(of_step, dtype="bfloat16")
    numel = next(r["numel"] for r in run.tensors[0] if r["kind"] == "output" and r["module"] == "head")
    seen = {"op": op, "phase": "backward", "inputs": "float32", "outputs": "float32", "calls": 1, "numel": numel}
    data = json.dumps({"kind": "coverage", "ops": [seen]})
    run.events.append({"event": "scan", "step": 0, "root": "", "module": "", "data": data})
    return run


def growing(step: int) -> float:
    return 10.0 * 1.2**step


def large_from_the_start() -> Training:
    """A temperature somebody chose."""
    return logits(lambda s: 500.0 + s)


def no_softmax_reads_it() -> Training:
    """A regression's output may be as large as its targets."""
    return logits(growing, op="aten.mse_loss_backward.default")


def below_a_nat() -> Training:
    return logits(lambda s: 10.0 * 1.1**s)


def in_bf16() -> Training:
    return amax(lambda s: 2_000.0 * 2.0 ** (s / 8), dtype="bfloat16")


def multiplied(factor: float, steps: tuple[int, ...] = (0, 1)) -> Training:
    """Weight decay with the wrong sign, over 64 steps."""
    found = fact("amplified", "add_.Tensor", factor=factor, target="weight", name="head.weight", owner=[ROOT, "head"])
    run = Training(steps=64)
    run.events = scanned({**found, "root": "", "module": ""}, steps=steps).events
    return with_scans(run, 2)


def multiplied_a_little() -> Training:
    return multiplied(1.005)


def multiplied_once() -> Training:
    return multiplied(1.05, steps=(0,))


FIRING = {
    "multiplied": Sample(
        lambda: multiplied(1.05), 0, module="head", severity="warning",
        says=("add multiplies weights (`head.weight`) by 1.05", "22.7 times over 64 steps", "limit 2"),
    ),
    "doubles_every_eight": Sample(
        lambda: amax(lambda s: 2_000.0 * 2.0 ** (s / 8)), 23, module="head", kind="output", severity="warning",
        says=("overflows in 17 steps", "step 40", "limit"),
    ),
    "with_noise": Sample(
        lambda: amax(lambda s: 2_000.0 * 2.0 ** (s / 8 + 0.2 * ((s * 7) % 5 - 2))), module="head", severity="warning",
    ),
    "logits": Sample(
        lambda: logits(growing), 23, module="head", kind="output", severity="warning", bare=True,
        says=("bfloat16 are 2 nats apart", "limit 2", "2.7 times"),
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        levels_off, small, wobbles, jumps_once, far_ahead, in_bf16, large_from_the_start, no_softmax_reads_it,
        below_a_nat, multiplied_a_little, multiplied_once,
    )
}  # fmt: skip
