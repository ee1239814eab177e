"""Gradients along a stack of layers."""

from tests.support.samples import Sample
from tests.support.training import NUMEL, Training, normal, tensor


def stack(binades: float, layers: int = 8, *, weak: int | None = None, steps: int = 12) -> Training:
    """Output gradients of ``layers.0`` to the last, each so many binades below the one after it."""
    run = Training(steps=steps)
    for step, rows in run.tensors.items():
        for k in reversed(range(layers)):
            lost = binades * (layers - 1 - k) if weak is None else 20.0 * (k <= weak)
            columns = normal(2.0**-lost) | {"module_class": "Linear"}
            rows.append(tensor(step, "grad_output", f"layers.{k}", len(rows), **columns))
    return run


def numbered_inside_the_name() -> Training:
    """``body.conv0``, ``body.act0``, ``body.conv1`` and so on: activations lose as much as the layers."""
    run = Training()
    for step, rows in run.tensors.items():
        rows.append(tensor(step, "weight", "body.conv0", len(rows), **normal(0.1) | {"name": "weight"}))
        for k in reversed(range(24)):
            for name, kind in ((f"body.act{k}", "LeakyReLU"), (f"body.conv{k}", "Conv2d")):
                columns = normal(2.0 ** -(3.0 * (23 - k))) | {"module_class": kind}
                rows.append(tensor(step, "grad_output", name, len(rows), **columns))
    return run


def end_to_end(binades: float, *, side_by_side: bool = False) -> Training:
    """``encoder.0`` to ``encoder.5``, then ``decoder.0`` to ``decoder.5``; or each beside the other."""
    run = Training()
    names = [f"{half}.{k}" for half in ("encoder", "decoder") for k in range(6)]
    if side_by_side:
        names.sort(key=lambda n: n[-1])
    for step, rows in run.tensors.items():
        for lost, module in enumerate(reversed(names)):
            columns = normal(2.0 ** (-binades * lost)) | {"module_class": "Linear"}
            rows.append(tensor(step, "grad_output", module, len(rows), **columns))
    return run


def a_little() -> Training:
    return stack(1.0)


def growing_backwards() -> Training:
    return stack(-3.0)


def short_chain() -> Training:
    return stack(9.0, layers=3)


def one_weak_layer() -> Training:
    """Everything is lost at one place: that is not depth."""
    return stack(0.0, weak=3)


def sigmoids(fallen: float, steps: int = 72) -> Training:
    """Six layers that lose 12 binades, and a loss that falls by this share."""
    run = stack(2.4, 6, steps=steps)
    for step, row in run.step_rows.items():
        row["loss"] = 0.69 * (1.0 - fallen * step / steps)
    return run


def cell(binades: float, *, loss: float = 1.0, calls: int = 16) -> Training:
    """A recurrent cell whose calls each get so many binades less than the next; the last row takes 45 together.

    Args:
        binades: lost per call.
        loss: at the end, as a share of that at the beginning.
        calls: rows of a step.
    """
    run = Training()
    for step, rows in run.tensors.items():
        run.step_rows[step]["loss"] = 2.5 * (1.0 - (1.0 - loss) * step / (len(run.tensors) - 1))
        for k in reversed(range(calls)):
            columns = normal(2.0 ** (-binades * (calls - 1 - k))) | {"module_class": "LSTMCell", "call": k}
            columns |= {"numel": 45 * NUMEL} if k == 15 else {}
            rows.append(tensor(step, "grad_output", "cell", len(rows), **columns))
    return run


FIRING = {
    "calls_of_a_cell": Sample(
        lambda: cell(2.0), module="cell", kind="grad_output", severity="warning",
        says=("call 15 and later", "2^30.0", "limit 2^24", "fallen by 0 %", "limit 10 %"),
    ),
    "numbered_inside_the_name": Sample(
        numbered_inside_the_name, module="body.conv0", kind="grad_output", severity="warning", says=("`body.conv*`",)
    ),
    "three_binades_each": Sample(
        lambda: stack(3.0), module="layers.0", kind="grad_output", severity="warning",
        says=("2^21.0", "limit 2^16", "a factor of 8 per layer"),
    ),
    "an_encoder_and_its_decoder": Sample(
        lambda: end_to_end(2.5), module="encoder.0", kind="grad_output", severity="warning",
        says=("12 layers", "(`encoder.*`, `decoder.*`)", "2^27.5"),
    ),
    "nothing_is_learnt": Sample(
        lambda: sigmoids(0.05), module="layers.0", kind="grad_output", severity="warning",
        says=("2^12.0", "limit 2^8", "the loss has fallen by 3.8 % (limit 10 %)"),
    ),
    "deep": Sample(lambda: stack(1.0, 24), module="layers.0", severity="warning", says=("24 layers",)),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (a_little, growing_backwards, short_chain, one_weak_layer)} | {
    "an_encoder_and_its_decoder_lose_little": lambda: end_to_end(1.0),
    "side_by_side": lambda: end_to_end(1.5, side_by_side=True),
    "forgotten_and_not_missed": lambda: cell(2.0, loss=0.5),
    "forgets_slowly": lambda: cell(1.0),
    "learns_all_the_same": lambda: sigmoids(0.5),
    "too_short_to_tell": lambda: sigmoids(0.05, steps=40),
    "few_calls": lambda: cell(6.0, calls=6),
}
