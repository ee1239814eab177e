"""Updates that do not stick, and updates nobody misses."""

from collections.abc import Callable

import numpy as np

from tests.support.samples import Sample
from tests.support.training import FACTS, NUMEL, Training, histogram, tensor


def weights(dtype: str, unchanged: int, zero: int, rel_lo: int, rel_hist: list[int], **options: object) -> Training:
    """All update rows alike."""
    run = Training(weight_dtype=dtype, **options)  # type: ignore[arg-type]
    columns = {"unchanged": unchanged, "zero": zero, "rel_lo": rel_lo, "rel_hist": rel_hist}
    return run.change(lambda r: r.update(columns), kind="update")


def pure_bfloat16() -> Training:
    """AdamW at 1e-4 on weights of a half: 98 % lost."""
    return weights("bfloat16", 4014, 4014, -13, [NUMEL])


def trained_before_at_a_higher_rate() -> Training:
    """Another optimizer made the first half of the steps, in FP32 and at a hundred times the rate."""
    run = pure_bfloat16()
    for step, row in run.step_rows.items():
        if step < len(run.step_rows) // 2:
            row.update(optimizer="Adam#1", lr=100.0 * row["lr"])
            for tensor_row in run.tensors[step]:
                if tensor_row["kind"] == "update":
                    tensor_row["dtype"] = "float32"
    return run


def bare_parameter() -> Training:
    """A prompt that the script made itself: no module owns it, and it is recorded under its optimizer."""
    run = Training()
    for step, rows in run.tensors.items():
        more = {"unchanged": 4014, "zero": 4014, "rel_lo": -13, "rel_hist": [NUMEL], "dtype": "bfloat16"}
        place = {"root": "AdamW#0", "module_class": "AdamW", "name": "0.3"}
        rows.append(tensor(step, "update", "", len(rows), **more, **place))
    return run


def a_third() -> Training:
    return weights("bfloat16", NUMEL // 3, NUMEL // 3, -9, [NUMEL // 3, NUMEL - NUMEL // 3])


def optimizer_of_ones_own(run: Training, classname: str = "SignSGD", package: str = "") -> Training:
    """What it means to do to a weight is not known, nor how it rounds; old logs lack the package of its class."""
    group = {"lr": 1e-3, "parameters": 8}
    optimizer = {"name": f"{classname}#0", "class": classname, "intended_update": "gradient", "groups": [group]}
    run.facts = {**FACTS, "optimizers": [optimizer | ({"package": package} if package else {})]}
    return run


def keeps_a_remainder() -> Training:
    """By its name; what moved in the few steps tells nothing."""
    run = optimizer_of_ones_own(pure_bfloat16(), "KahanAdamW")
    for step, rows in run.tensors.items():
        rows.append(tensor(step, "opt_state", "head", len(rows), name="weight.compensation", dtype="bfloat16"))
    return run


def signed_steps(
    rounds: Callable[[np.ndarray, np.ndarray], np.ndarray], rate: float = 1e-3, steps: int = 12
) -> Training:
    """BF16 weights of an optimizer of somebody's own, each to be moved by about the rate in every step.

    Args:
        rounds: from the updates in ulps, and what is left over of the steps before, to whole ulps.
        rate: of normal weights.
        steps: of the run.
    """
    rng = np.random.default_rng(3)
    weights = rng.normal(0.0, 1.0, NUMEL)
    ulps = 2.0 ** (np.floor(np.log2(np.abs(weights))) - 7)
    rest = np.zeros(NUMEL)
    run = optimizer_of_ones_own(Training(weight_dtype="bfloat16", steps=steps))
    for rows in run.tensors.values():
        wanted = rate * rng.normal(0.0, 1.0, NUMEL) / ulps
        changes = rounds(wanted, rest) * ulps
        for row in rows:
            if row["kind"] == "update":
                row |= {"exp_lo": None, "exp_hist": None} | histogram(changes)
                row["unchanged"] = row["zero"]
            elif row["kind"] == "weight":
                row |= histogram(weights)
    return run


def to_nearest(wanted: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.round(wanted)


def stochastically(wanted: np.ndarray, _: np.ndarray) -> np.ndarray:
    return np.floor(wanted + np.random.default_rng(4).random(NUMEL))


def with_compensation(wanted: np.ndarray, rest: np.ndarray) -> np.ndarray:
    rest += np.abs(wanted)  # the same sign in every step
    whole = np.round(rest)
    rest -= whole
    return np.copysign(whole, wanted)


def still_piling_up() -> Training:
    """Compensation, so slow that the large weights have not moved yet: larger ones do with every step."""
    return signed_steps(with_compensation, 2e-4, 16)


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


def coordinates(lost: int, size: float = 5e6, steps: int = 12) -> Training:
    """FP32 positions in metres on a map; so many of the embedding's 4,096 updates round away."""
    run = Training(steps=steps)
    place = histogram(size + 100.0 * np.random.default_rng(5).random(NUMEL))
    moved = {"unchanged": lost, "zero": lost, "rel_lo": -26, "rel_hist": [lost, 0, 0, NUMEL - lost]}
    run.change(lambda r: r.update(moved), kind="update", module="emb")
    return run.change(lambda r: r.update({"exp_lo": None, "exp_hist": None} | place), kind="weight", module="emb")


def arrived(lost: int = 3900) -> Training:
    """Coordinates that moved for half of the run and are where they belong, to an ulp, ever after."""
    run = coordinates(lost)
    for step in range(6):
        for row in run.tensors[step]:
            if row["kind"] == "update":
                row.update(unchanged=0, zero=0)
    return run


def hardly_moving(lost: int, share: int = 12) -> Training:
    """FP32 weights whose updates are 2^-27 of them, on so many of twelve steps."""
    run = weights("float32", lost, lost, -27, [NUMEL])
    for step in range(share, 12):
        run.change(lambda r: r.update(unchanged=0, zero=0), kind="update", step=step)
    return run


FIRING = {
    "hardly_moving": Sample(
        lambda: hardly_moving(4000),
        kind="update",
        severity="warning",
        says=("stands still", "2^-27", "limit 90 %"),
    ),
    "coordinates": Sample(
        lambda: coordinates(3900),
        kind="update",
        module="emb",
        severity="warning",
        says=("95 % of the updates of `emb.weight` are lost in FP32", "0.5 apart", "limit 25 %"),
    ),
    "pure_bfloat16": Sample(
        pure_bfloat16,
        kind="update",
        says=("98 %", "limit 25 %", "8 significant bits", "0.001"),
        evidence={"limit": 0.25},
    ),
    "trained_before_at_a_higher_rate": Sample(
        trained_before_at_a_higher_rate,
        says=("98 %", "at learning rates up to 0.001"),
    ),
    "bare_parameter": Sample(
        bare_parameter, module="", kind="update", bare=True, says=("`parameter 3 of group 0 of AdamW#0`", "98 %")
    ),
    "keeps_a_remainder": Sample(keeps_a_remainder, severity="info", says=("98 %", "KahanAdamW rounds")),
    "torch_rmsprop": Sample(
        lambda: optimizer_of_ones_own(pure_bfloat16(), "RMSprop"), says=("98 %", "FP32 weights would")
    ),
    "own_rounds_to_nearest": Sample(
        lambda: signed_steps(to_nearest), severity="error", says=("SignSGD rounds to nearest", "8 moved")
    ),
    "own_stands_still": Sample(
        lambda: signed_steps(to_nearest, 1e-9, 40), severity="error", says=("No element of any of them moved on 40",)
    ),
    "still_piling_up": Sample(still_piling_up, severity="info", says=("Nothing is lost if",)),
    "a_third": Sample(a_third, severity="warning", says=("33 %",)),
    "norm_gains_stand_still": Sample(
        norm_gains_stand_still, module="norm", severity="info", says=("stand still", "limit of a single weight 90 %")
    ),
}
HEALTHY = {
    f.__name__: f
    for f in (
        master_weights, late_in_fp32, unused_embedding_rows, frozen_half, warm_up, learning_rate_zero,
    )
} | {
    "most_move_a_little": lambda: hardly_moving(3000),
    "hardly_moving_at_first": lambda: hardly_moving(4000, 6),
    "a_gate_that_opens_at_last": lambda: hardly_moving(4000, 11),
    "coordinates_that_move": lambda: coordinates(400),
    "coordinates_that_arrived": arrived,
    "few_steps_at_coordinates": lambda: coordinates(3900, steps=6),
    "ordinary_fp32_weights": lambda: coordinates(3900, size=500.0),
    "own_rounds_stochastically": lambda: signed_steps(stochastically),
    "a_namesake_rounds_stochastically": lambda: optimizer_of_ones_own(signed_steps(stochastically), "Muon", "mine"),
    "own_with_compensation": lambda: signed_steps(with_compensation, steps=24),
}  # fmt: skip
