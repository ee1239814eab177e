"""Loss scales that fall for a reason, and scalers at work."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, find, spoil

SCALER = {"class": "GradScaler", "growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}


def scaled(scales: list[float], skipped: list[int], growth_interval: int = 2000) -> Training:
    facts = {**FACTS, "scalers": [{**SCALER, "growth_interval": growth_interval}]}
    run = Training(steps=len(scales), dtype="float16", facts=facts).scales(scales)
    return run.skip(*skipped)


def falls_below_one() -> Training:
    """Ten clean steps, then every step overflows."""
    scales = [1024.0] * 10 + [1024.0 * 0.5**k for k in range(14)]
    return scaled(scales, list(range(10, 24)))


def never_grows_back() -> Training:
    """Every tenth batch overflows, and the growth interval is longer than the run."""
    return scaled([4.0 * 0.5 ** (s // 10) for s in range(60)], list(range(9, 60, 10)), growth_interval=10**6)


def never_calibrates() -> Training:
    """From 2^16 to below 1 without one clean step."""
    return scaled([2.0 ** (16 - k) for k in range(20)], list(range(20)))


def skips_every_step(steps: int = 14) -> Training:
    """From a scale far too high, and the run ends before a step has been clean."""
    return scaled([2.0 ** (40 - k) for k in range(steps)], list(range(steps)))


def pinned() -> Training:
    """The script sets the scale on every step, whatever came of it."""
    return scaled([2.0**15] + [2.0**18] * 39, list(range(40)))


def ends_before_the_first_clean_step() -> Training:
    return skips_every_step(11)


def keeps_gradients() -> Training:
    """After one overflow, weight gradients only: what comes down the backward pass is finite from then on."""
    run = falls_below_one()
    for step in range(11, 24):
        run.change(lambda r: r.update(pos_inf=0, first_bad_order=None), kind="grad_output", step=step)
        run.change(lambda r, s=step: r.update(nan=s - 10), kind="weight_grad", step=step)
    return run


def keeps_a_weight() -> Training:
    """The head's weight gradient overflows, what comes down never does, and becomes smaller with the scale."""
    run = keeps_gradients()
    for step in range(10, 24):
        run.change(lambda r: r.update(pos_inf=0, first_bad_order=None), kind="grad_output", step=step)
        run.change(lambda r, s=step: r.update(amax=2.0 ** (14 - s)), kind="grad_output", step=step)
        run.change(lambda r: r.update(module_class="Linear"), kind="weight_grad", module="head", step=step)
    return run


def slope_of_a_root() -> Training:
    """No product, but a norm of weights that have become zero: NaN at any scale."""
    run = keeps_a_weight()
    return run.change(lambda r: r.update(module_class="WeightNormed"), kind="weight_grad")


def missing_values() -> Training:
    """What the head multiplies has NaN of its own, which the loss leaves out."""
    run = keeps_a_weight()
    for step in range(10, 24):
        spoil(find(run.tensors[step], "input", "blocks.0.attn.proj"), nan=4)
    return run


def weights_overflow() -> Training:
    """Weight gradients only, and fewer elements of them from step to step."""
    run = keeps_gradients()
    for step in range(11, 24):
        run.change(lambda r, s=step: r.update(nan=0, pos_inf=30 - s), kind="weight_grad", step=step)
    return run


def one_layer() -> Training:
    """It is always the attention's gradient that overflows first."""
    run = falls_below_one()
    for step in range(10, 24):
        for row in run.tensors[step]:
            if row["kind"] in ("grad_output", "weight_grad") and row["module"] in ("head", "norm", "blocks.0.mlp.down"):
                row.update(pos_inf=0, first_bad_order=None)
    return run


def cascade() -> Training:
    """Six halvings within thirty steps, long after calibration."""
    scales = [65536.0] * 12
    for k in range(1, 7):
        scales += [65536.0 * 0.5**k] * 4
    return scaled(scales, [11 + 4 * k for k in range(6)])


def busy() -> Training:
    """One step in four is skipped, at a growth interval of 2000."""
    scales = [1024.0 * 2.0 ** -((s // 4) % 2) for s in range(60)]
    return scaled(scales, [s for s in range(60) if s % 4 == 3])


def may_not_go_lower() -> Training:
    """From 2^16 to a bound of 2^12, where every second batch overflows all the same."""
    falling = [2.0 ** (16 - k) for k in range(4)]
    return scaled([*falling, *[4096.0] * 60], [*range(4), *range(5, 64, 2)])


def fresh_gan_scaler() -> Training:
    """Two optimizers are skipped together, ten times in all, for each of five backoffs; then at two growth probes."""
    scales = [2.0 ** (16 - k // 2) for k in range(10)] + [2048.0] * 50
    run = scaled(scales, [*range(10), 30, 31])
    for step, row in run.step_rows.items():
        row |= {"optimizer": f"Adam#{step % 2}", "growth_tracker": 0 if step < 10 else (step - 10) // 2}
    return run


def two_scalers(falling: list[float], skipped: list[int]) -> Training:
    """A GAN's: the generator's stays at 2^16 while the discriminator's goes its way, step by step in turn."""
    scales = [x for pair in zip(falling, [65536.0] * len(falling), strict=True) for x in pair]
    run = scaled(scales, [2 * s for s in skipped])
    run.facts["scalers"] *= 2
    for step, row in run.step_rows.items():
        row |= {"optimizer": f"Adam#{step % 2}", "growth_tracker": step // 2 if step % 2 else 0}
    return run


def gan_with_a_scaler_each() -> Training:
    """The discriminator's finds its level at 32, and stays there."""
    return two_scalers([2.0 ** (16 - min(s, 11)) for s in range(40)], list(range(11)))


def one_of_two_scalers() -> Training:
    """The discriminator's is clean at first and falls below 1 then."""
    return two_scalers([1024.0] * 10 + [1024.0 * 0.5**k for k in range(14)], list(range(10, 24)))


def fresh_scaler() -> Training:
    return scaled([2.0 ** (16 - min(s, 9)) for s in range(24)], list(range(9)))


def one_bad_batch() -> Training:
    return scaled([4096.0] * 12 + [2048.0] * 12, [11])


def probing_upwards() -> Training:
    """A short growth interval: up every eight steps, back at once."""
    scales = [1024.0 if s % 9 else 2048.0 for s in range(60)]
    return scaled(scales, [s for s in range(60) if s % 9 == 0 and s], growth_interval=8)


def constant_scale() -> Training:
    run = Training(dtype="float16", scale=128.0)
    return run.change(lambda r: r.update(scale=128.0), kind="grad_output")


def small_on_purpose() -> Training:
    """A scale set below 1 by hand never fell."""
    return scaled([0.25] * 12, [])


def mask_and_scaler() -> Training:
    run = one_bad_batch()
    return run.change(lambda r: spoil(r, neg_inf=9), kind="input", module="blocks.0.attn.proj")


def forward_overflow_is_to_blame() -> Training:
    """The activations overflow, the loss is clamped, and the scaler pays for it."""
    run = falls_below_one()
    for step in range(10, 24):
        spoil(find(run.tensors[step], "output", "norm"), pos_inf=3)
    return run


FIRING = {
    "forward_overflow_is_to_blame": Sample(
        forward_overflow_is_to_blame, 10, "norm", "output", says=("no loss scale mends that",)
    ),
    "falls_below_one": Sample(falls_below_one, 10, says=("from 1024 to 0.125", "limit 1")),
    "never_grows_back": Sample(
        never_grows_back, 9, evidence={"clean_between_skips": 9},
        says=("from 4 to 0.125", "never grew back: 9 clean steps", "growth interval is 1,000,000"),
    ),
    "pinned": Sample(pinned, 0, says=("no weight has moved", "all 40 steps", "262144")),
    "skips_every_step": Sample(skips_every_step, 0, says=("no weight has moved", "all 14 steps", "limit 12")),
    "never_calibrates": Sample(never_calibrates, 0, says=("from 65536",)),
    "one_layer": Sample(
        one_layer, 10, "blocks.0.mlp.up", "grad_output", says=("14 of 14 examined", "gradient of the output")
    ),
    "keeps_gradients": Sample(
        keeps_gradients, 10, evidence={"gradients_kept_since": 10},
        says=("never zeroed", "all 13 steps behind step 10", "of 8 weights"),
    ),
    "keeps_a_weight": Sample(keeps_a_weight, 10, evidence={"gradients_kept_since": 10}),
    "slope_of_a_root": Sample(slope_of_a_root, 10, evidence={"gradients_kept_since": None}),
    "missing_values": Sample(missing_values, 10, evidence={"gradients_kept_since": None}),
    "weights_overflow": Sample(weights_overflow, 10, evidence={"gradients_kept_since": None}),
    "cascade": Sample(cascade, severity="warning", says=("6 binades (limit 5)", "from 65536 to 1024")),
    "may_not_go_lower": Sample(
        may_not_go_lower, severity="warning", evidence={"lower_bound": 4096.0},
        says=("the scaler may not go lower", "skips at 4096"),
    ),
    "one_of_two_scalers": Sample(one_of_two_scalers, 20, says=("from 1024 to 0.125", "14 steps skipped")),
    "busy": Sample(busy, severity="warning", says=("25 %", "limit 10 %")),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        ends_before_the_first_clean_step,
        fresh_gan_scaler,
        gan_with_a_scaler_each,
        fresh_scaler,
        one_bad_batch,
        probing_upwards,
        constant_scale,
        small_on_purpose,
        mask_and_scaler,
        Training,
    )
}
