"""Updates that do not stick, and updates nobody misses."""

from tests.support.samples import Sample
from tests.support.training import FACTS, NUMEL, Training


def weights(dtype: str, unchanged: int, zero: int, rel_lo: int, rel_hist: list[int], **options: object) -> Training:
    """All update rows alike."""
    run = Training(weight_dtype=dtype, **options)  # type: ignore[arg-type]
    columns = {"unchanged": unchanged, "zero": zero, "rel_lo": rel_lo, "rel_hist": rel_hist}
    return run.change(lambda r: r.update(columns), kind="update")


def pure_bfloat16() -> Training:
    """AdamW at 1e-4 on weights of a half: 98 % lost."""
    return weights("bfloat16", 4014, 4014, -13, [NUMEL])


def a_third() -> Training:
    return weights("bfloat16", NUMEL // 3, NUMEL // 3, -9, [NUMEL // 3, NUMEL - NUMEL // 3])


def optimizer_of_ones_own(classname: str = "StochasticAdamW") -> Training:
    """What it means to do to a weight is not known, nor how it rounds."""
    run = pure_bfloat16()
    group = {"lr": 1e-3, "parameters": 8}
    optimizer = {"name": f"{classname}#0", "class": classname, "intended_update": "gradient", "groups": [group]}
    run.facts = {**FACTS, "optimizers": [optimizer]}
    return run


def norm_gains_stand_still() -> Training:
    run = weights("bfloat16", 0, 0, -6, [NUMEL])
    gain = {"unchanged": 64, "zero": 64, "numel": 64, "rel_lo": -10, "rel_hist": [64]}
    return run.change(lambda r: r.update(gain), kind="update", module="norm")


def master_weights() -> Training:
    return weights("float32", 0, 0, -13, [NUMEL])


def late_in_fp32() -> Training:
    """FP32 at the end of a schedule: even 24 bits do not take it, and it does not matter."""
    return weights("float32", 3000, 3000, -26, [NUMEL])


def unused_embedding_rows() -> Training:
    """Adam's moments of rows nobody used decay for hundreds of steps; FP32 would lose those updates too."""
    return weights("bfloat16", 3500, 3500, -60, [3500, *[0] * 53, 596])


def frozen_half() -> Training:
    """No update intended: zero, and not unchanged."""
    return weights("bfloat16", 20, 2000, -6, [2096])


def warm_up() -> Training:
    """The first steps' learning rate is next to nothing."""
    run = weights("bfloat16", 0, 0, -6, [NUMEL])
    for step in range(3):
        run.step_rows[step]["lr"] = 1e-3 * step / 50
        for row in run.tensors[step]:
            if row["kind"] == "update":
                row.update(unchanged=4000, zero=4000, rel_lo=-14, rel_hist=[NUMEL])
    return run


def learning_rate_zero() -> Training:
    run = weights("bfloat16", 0, NUMEL, -6, [0])
    for row in run.step_rows.values():
        row["lr"] = 0.0
    return run


FIRING = {
    "pure_bfloat16": Sample(
        pure_bfloat16,
        kind="update",
        says=("98 %", "limit 25 %", "8 significant bits", "0.001"),
        evidence={"limit": 0.25},
    ),
    "optimizer_of_ones_own": Sample(optimizer_of_ones_own, severity="info", says=("98 %", "StochasticAdamW rounds")),
    "torch_rmsprop": Sample(lambda: optimizer_of_ones_own("RMSprop"), says=("98 %", "FP32 weights would")),
    "a_third": Sample(a_third, severity="warning", says=("33 %",)),
    "norm_gains_stand_still": Sample(norm_gains_stand_still, module="norm", severity="info", says=("stand still",)),
}
HEALTHY = {
    f.__name__: f
    for f in (
        master_weights, late_in_fp32, unused_embedding_rows, frozen_half, warm_up, learning_rate_zero,
    )
}  # fmt: skip
