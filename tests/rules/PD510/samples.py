"""Gradients that the optimizer gets, does not get, and gets too late to matter."""

from typing import Any

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
    """Both dimensions differ, or there is one counterpart to two layers."""
    return with_groups(("head",), [[32, 32], [64]])


def one_counterpart_of_another_shape_to_two_layers() -> Training:
    return with_groups(("head", "norm"), [[10, 64]])


def a_head_for_other_classes() -> Training:
    """The first steps train the old head, of another size."""
    run = with_groups(("head",), [[10, 64]])
    for step in range(3):
        run.tensors[step] = [dict(row) for row in Training().tensors[step]]
    return run


def unfrozen(*, at: int = 4, given: bool = False) -> Training:
    """The head is frozen as the optimizer is made, and gets gradients from step ``at`` on."""
    run = with_groups((), []) if given else with_groups(("head",), [])
    (root,) = run.facts["roots"]
    frozen = [{k: v for k, v in p.items() if k != "group"} | {"requires_grad": False} for p in root["parameters"]]
    parameters = [f if p["module"] == "head" else p for p, f in zip(root["parameters"], frozen, strict=True)]
    run.facts = {**run.facts, "roots": [{**root, "parameters": parameters}]}
    for step, rows in run.tensors.items():
        gone = ("weight_grad", "weight_grad_step", "update") if step < at else ()
        run.tensors[step] = [r for r in rows if not (r["module"] == "head" and r["kind"] in gone)]
    return run


def unfrozen_and_given_to_the_optimizer() -> Training:
    return unfrozen(given=True)


def unfrozen_for_a_few_steps() -> Training:
    return unfrozen(at=6)


def held_and_still(
    modules: tuple[str, ...],
    *,
    gradients: bool = False,
    optimizer: int = 0,
    group: int = 0,
    frozen: tuple[str, ...] = (),
) -> Training:
    """Weights that an optimizer holds keep their bits; ``frozen`` ones require no gradient, all others are trained.

    ``gradients``: the backward pass leaves them some. Two optimizers of two groups step in turns.
    """
    (root,), (first,) = FACTS["roots"], FACTS["optimizers"]
    run = Training(steps=24)

    def place(p: dict[str, Any]) -> dict[str, Any]:
        if p["module"] in frozen:
            return {**p, "requires_grad": False}
        return {**p, "group": [optimizer, group] if p["module"] in modules else [0, 0]}

    groups = [{**first["groups"][0], "parameters": 4}] * 2
    run.facts = {
        **FACTS,
        "roots": [{**root, "parameters": [place(p) for p in root["parameters"]]}],
        "optimizers": [{**first, "name": f"AdamW#{n}", "groups": groups} for n in range(2)],
    }
    of_others = ("weight_grad", "weight_grad_step", "update", "grad_output")
    dropped = of_others[1:3] if gradients else of_others
    for step, rows in run.tensors.items():
        second = step % 2 == 1 and optimizer == 1
        run.step_rows[step].update(optimizer=f"AdamW#{int(second)}", grad_norm=None if second else 1.0, lrs=[1e-3] * 2)
        kept = []
        for row in rows:
            still = row["module"] in modules + frozen
            if row["kind"] == "weight":
                row["fingerprint"] = 7 if still else step
            gone = (of_others if row["module"] in frozen else dropped) if still else ()
            if row["kind"] not in (of_others if second else gone):
                kept.append(row)
        run.tensors[step] = kept
    return run


_UP, _DOWN = "blocks.0.mlp.up", "blocks.0.mlp.down"
_ATTENTION = ("blocks.0.norm", "blocks.0.attn.qkv", "blocks.0.attn.proj")


def an_optimizer_behind_its_zero_grad() -> Training:
    return held_and_still(("emb",), gradients=True, optimizer=1)


def two_layers_whose_gradients_are_removed() -> Training:
    """By surgery on gradients, or to freeze them: nothing says which."""
    return held_and_still((_UP, _DOWN), gradients=True)


def an_optimizer_that_gets_gradients() -> Training:
    """A norm says so: something else keeps the bits, such as a rate that rounds away."""
    run = an_optimizer_behind_its_zero_grad()
    for row in run.step_rows.values():
        row["grad_norm"] = 0.5
    return run


def an_optimizer_under_no_grad() -> Training:
    return held_and_still(("emb",), optimizer=1)


def a_group_at_the_same_rate() -> Training:
    """A frozen encoder, and a group for each weight or for each weight decay."""
    return held_and_still((_UP, _DOWN), group=1)


def a_group_under_no_grad() -> Training:
    run = a_group_at_the_same_rate()
    for row in run.step_rows.values():
        row["lrs"] = [1e-3, 1e-4]
    return run


def a_group_at_rate_zero() -> Training:
    """Gradual unfreezing, by the rate."""
    run = a_group_under_no_grad()
    for row in run.step_rows.values():
        row["lrs"] = [1e-3, 0.0]
    return run


def adapters_under_no_grad() -> Training:
    return held_and_still((_UP,), frozen=(_DOWN, *_ATTENTION))


def an_encoder_under_no_grad() -> Training:
    """All its weights are in the optimizer of everything, and none was frozen."""
    return held_and_still((_UP, _DOWN, *_ATTENTION))


def adapters_that_are_not_called() -> Training:
    run = adapters_under_no_grad()
    for step, rows in run.tensors.items():
        run.tensors[step] = [r for r in rows if not (r["module"] == _UP and r["kind"] == "output")]
    return run


def the_last_weights_under_no_grad() -> Training:
    """Nothing frozen follows them: the phase of their calls says that it is no pooler."""
    run = a_pooler_without_use()
    run.change(lambda r: r.update(phase="no_grad"), kind="output", module=_DOWN)
    return run


def a_pooler_without_use() -> Training:
    """It is called on top of what is frozen, and nothing takes what it returns."""
    return held_and_still((_DOWN,), frozen=(_UP, *_ATTENTION))


def a_discriminator_before_its_start() -> Training:
    """Its loss has the weight 0 on half of the recorded steps, so its gradients are zeros."""
    run = an_optimizer_behind_its_zero_grad()
    for step in range(2, 24, 4):
        run.change(lambda r: r.update(ZEROS, zero=r["numel"]), kind="weight_grad", module="emb", step=step)
    return run


def adapters_trained_late() -> Training:
    """They are under ``no_grad`` during a warm-up."""
    run = adapters_under_no_grad()
    late = held_and_still((), frozen=(_DOWN, *_ATTENTION))
    for step in range(16, 24):
        run.tensors[step] = late.tensors[step]
    return run


FIRING = {
    "removed": Sample(
        two_layers_whose_gradients_are_removed, 0, module="blocks.0.mlp", severity="info",
        says=("never moves 2 weights", "Unless that is on purpose"),
    ),
    "unfrozen": Sample(unfrozen, 4, module="head", severity="warning", says=("unfrozen by step 4", "8 sampled steps")),
    "replaced": Sample(
        a_head_replaced_behind_the_optimizers_back, 0, module="head", kind="weight_grad", bare=True,
        says=("no optimizer holds 1 weight of `head`", "`AdamW#0` holds"), evidence={"weights": ["head.weight"]},
    ),
    "two_replaced": Sample(
        two_layers_replaced, 0, module="", kind="weight_grad", bare=True,
        says=("no optimizer holds 2 weights of `GPT#0`",),
    ),
    "resized": Sample(
        a_head_for_other_classes, 3, module="head", kind="weight_grad", bare=True,
        says=("no optimizer holds 1 weight of `head`", "differ in one dimension", "on 9 sampled steps"),
    ),
    "optimizer_cleared": Sample(
        an_optimizer_behind_its_zero_grad, 0, module="emb", kind="weight_grad", bare=True,
        says=("`AdamW#1` never moves 1 weight of `emb`", "12 steps", "trains nothing else", "`zero_grad()`"),
        evidence={"steps_with_gradients": 12},
    ),
    "optimizer_under_no_grad": Sample(
        an_optimizer_under_no_grad, 0, module="emb", kind="weight_grad", bare=True, severity="warning",
        says=("trains nothing else", "detached"), evidence={"steps_with_gradients": 0},
    ),
    "group_under_no_grad": Sample(
        a_group_under_no_grad, 0, module="blocks.0.mlp", kind="weight_grad", bare=True, severity="warning",
        says=("parameter groups of `AdamW#0`", "rate of their own"),
    ),
    "adapters_under_no_grad": Sample(
        adapters_under_no_grad, 0, module="blocks.0.mlp.up", kind="weight_grad", bare=True, severity="warning",
        says=("most weights around them were frozen",), evidence={"weights": ["blocks.0.mlp.up.weight"]},
    ),
    "last_under_no_grad": Sample(
        the_last_weights_under_no_grad, 0, module="blocks.0.mlp.down", kind="weight_grad", bare=True,
        severity="warning", says=("under `torch.no_grad()`",),
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
        one_counterpart_of_another_shape_to_two_layers,
        an_optimizer_that_gets_gradients,
        a_group_at_rate_zero,
        a_group_at_the_same_rate,
        an_encoder_under_no_grad,
        adapters_that_are_not_called,
        adapters_trained_late,
        a_pooler_without_use,
        a_discriminator_before_its_start,
        unfrozen_and_given_to_the_optimizer,
        unfrozen_for_a_few_steps,
        Training,
    )
}
