"""Gradients that the optimizer gets, does not get, and gets too late to matter."""

from tests.support.samples import Sample
from tests.support.scanning import fact, scanned, with_scans
from tests.support.training import FACTS, Training

ZEROS = {"amax": 0.0, "amin_nonzero": None, "sum": 0.0, "sum_sq": 0.0, "exp_lo": None, "exp_hist": None}


def starved(steps: int, *, moves: bool = False, skipped: bool = False, lr: float = 1e-3) -> Training:
    """On the first ``steps`` of twelve the optimizer is given zeros; weights keep their bits unless they ``move``."""
    run = Training()
    for step, row in run.step_rows.items():
        row.update(skipped=skipped, lr=lr)
        run.change(lambda r: r.update(fingerprint=7 if not moves else 7 + int(r["step"])), kind="weight", step=step)
        for kind in ("weight_grad_step", "update") if step < steps else ():
            run.change(lambda r: r.update(ZEROS, zero=r["numel"]), kind=kind, step=step)
    return run


def every_step_but_one() -> Training:
    return starved(11)


def half_of_the_steps() -> Training:
    """Two optimizers take turns in a step of one, say."""
    return starved(6)


def one_of_two_optimizers() -> Training:
    """Two optimizers step in turns, each with weights and gradients of its own; the first is given zeros."""
    run = Training(steps=24)
    for step, row in run.step_rows.items():
        row["optimizer"] = f"AdamW#{step % 2}"
        run.change(lambda r: r.update(fingerprint=7), kind="weight", step=step)
        for kind in ("weight_grad_step", "update") if step % 2 == 0 else ():
            run.change(lambda r: r.update(ZEROS, zero=r["numel"]), kind=kind, step=step)
    return run


def one_that_often_has_nothing_to_do() -> Training:
    """The same, but for some steps of the first."""
    run = one_of_two_optimizers()
    for step in (0, 8, 16):
        run.tensors[step] = [dict(row) for row in Training(steps=24).tensors[step]]
    return run


def weights_that_move() -> Training:
    """Something else takes the gradients: a fused step in the backward pass, or code of the script's."""
    return starved(12, moves=True)


def masters(steps: int, grad_norm: float = 0.0) -> Training:
    """The optimizer holds one flat copy of the weights, which moves by weight decay; its gradient has no row."""
    run = starved(0, moves=True)
    run.change(lambda r: r.update(ZEROS, zero=r["numel"]), kind="weight_grad_step")
    for row in run.step_rows.values():
        row["grad_norm"] = grad_norm if row["step"] < steps else 1.0
    return run


def masters_with_gradients() -> Training:
    """Masters of which the log holds no gradient, and a norm all the same."""
    return masters(12, 0.25)


def masters_without_some() -> Training:
    return masters(8)


def skipped_by_a_scaler() -> Training:
    return starved(12, skipped=True)


def rate_of_zero() -> Training:
    return starved(12, lr=0.0)


def dropped(steps: tuple[int, ...] = (0, 1)) -> Training:
    """Four micro-steps, each of which clears the gradients of the one before."""
    told = fact("dropped", "zero_grad", phase="backward", micro_step=1, weights=6)
    run = scanned({**told, "op": "zero_grad"}, steps=steps)
    for row in run.step_rows.values():
        row["micro_steps"] = 4
    return run


def dropped_behind_overflows() -> Training:
    """The first scans are of steps that the scaler skips."""
    run = with_scans(dropped((8, 9)), 0, 1, 2)
    for row in run.step_rows.values():
        row["skipped"] = row["step"] < 3
    return run


def dropped_once() -> Training:
    """On one scanned step of three."""
    return with_scans(dropped((0,)), 1, 8)


def with_groups(outside: tuple[str, ...], unused: list[list[int]]) -> Training:
    """The optimizer holds all weights but those of some modules, and ``unused`` ones that no model has."""
    (root,), (optimizer,) = FACTS["roots"], FACTS["optimizers"]
    parameters = [p if p["module"] in outside else {**p, "group": [0, 0]} for p in root["parameters"]]
    run = Training()
    groups = [{**group, "unused": unused} for group in optimizer["groups"]]
    run.facts = {
        **FACTS,
        "roots": [{**root, "parameters": parameters}],
        "optimizers": [{**optimizer, "groups": groups}],
    }
    for step, rows in run.tensors.items():
        run.tensors[step] = [
            r for r in rows if not (r["module"] in outside and r["kind"] in ("weight_grad_step", "update"))
        ]
    return run


def a_head_replaced_behind_the_optimizers_back() -> Training:
    return with_groups(("head",), [[64, 64]])


def two_layers_replaced() -> Training:
    modules = tuple(p["module"] for p in FACTS["roots"][0]["parameters"][:2])
    return with_groups(modules, [[64, 64]] * 2)


def a_head_left_out_on_purpose() -> Training:
    """No optimizer holds a counterpart; or one of another shape, an unused part of the model."""
    return with_groups(("head",), [])


def an_unused_part_beside_it() -> Training:
    return with_groups(("head",), [[64, 32]])


FIRING = {
    "replaced": Sample(
        a_head_replaced_behind_the_optimizers_back, 0, module="head", kind="weight_grad", bare=True,
        says=("no optimizer holds 1 weight of `head`", "`AdamW#0` holds"), evidence={"weights": ["head.weight"]},
    ),
    "two_replaced": Sample(
        two_layers_replaced, 0, module="", kind="weight_grad", bare=True,
        says=("no optimizer holds 2 weights of `GPT#0`",),
    ),
    "micro_steps": Sample(
        dropped, 0, module=None, kind=None, bare=True, severity="warning", says=("one of 4 micro-steps",),
        evidence={"micro_steps": 4},
    ),
    "micro_steps_behind_overflows": Sample(
        dropped_behind_overflows, 8, module=None, kind=None, bare=True, severity="warning", evidence={"micro_steps": 4},
    ),
    "never_fed": Sample(
        lambda: starved(12), 0, module=None, kind=None, bare=True, says=("12 of 12", "limit 90 %"),
        evidence={"starved_share": 1.0, "steps": 12},
    ),
    "masters_of_zero_gradients": Sample(
        lambda: masters(12), 0, module=None, kind=None, bare=True, says=("12 of 12", "were zero"),
    ),
    "one_of_two_optimizers": Sample(
        one_of_two_optimizers, 0, module=None, kind=None, bare=True, says=("`AdamW#0` trains nothing", "12 of 12"),
    ),
    "fed_once": Sample(every_step_but_one, 0, module=None, kind=None, bare=True, says=("11 of 12",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        dropped_once,
        half_of_the_steps,
        one_that_often_has_nothing_to_do,
        weights_that_move,
        masters_with_gradients,
        masters_without_some,
        skipped_by_a_scaler,
        rate_of_zero,
        a_head_left_out_on_purpose,
        an_unused_part_beside_it,
        Training,
    )
}
