"""Gradients against Adam's eps."""

from tests.support.samples import Sample
from tests.support.states import with_moment
from tests.support.training import FACTS, Training, normal


def given(sigma: float, first: int = 0) -> Training:
    """The head's gradient, as the optimizer is given it, from step ``first`` on."""
    run = Training()
    for step, rows in run.tensors.items():
        for row in rows:
            if step >= first and row["kind"] == "weight_grad_step" and row["module"] == "head":
                row.update(normal(sigma))
    return run


def scaled() -> Training:
    """A fused Adam under a GradScaler divides the gradient itself: it is recorded times 65536."""
    return given(2.0**16 * 1e-10).change(lambda r: r.update(scale=2.0**16), kind="weight_grad_step", module="head")


def converges() -> Training:
    """Falls below eps as the loss reaches zero."""
    return given(1e-10, first=4)


def a_gate_opens() -> Training:
    """Behind a gain that starts at zero; every step of Adam's opens it further."""
    run = Training()
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == "weight_grad_step" and row["module"] == "head":
                row.update(normal(step * 3e-11 or 1e-13))
    return run


def grows(eps: float, last: float) -> Training:
    """A gradient that grows from step to step, to ``last`` of eps."""
    run = Training()
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == "weight_grad_step" and row["module"] == "head":
                row.update(normal(eps * last * (step + 1) / run.steps))
    (optimizer,) = FACTS["optimizers"]
    run.facts = {**FACTS, "optimizers": [{**optimizer, "groups": [{**g, "eps": eps} for g in optimizer["groups"]]}]}
    return run


def above() -> Training:
    return given(1e-6)


def about_eps() -> Training:
    """Steps of half their size: as PPO runs at eps 1e-5."""
    return given(1e-8)


def a_bias_before_a_norm() -> Training:
    """Its gradient is zero by mathematics, and rounding in the log."""
    return given(1e-10).change(lambda r: r.update(shape=[4096]), kind="weight_grad_step", module="head")


def one_large_gradient() -> Training:
    """Most gradients are far below eps, but sqrt(v) remembers the one that was not."""
    return with_moment(Training(), lambda step, x: (1e-3 if step == 0 else 1e-10) * x)


def under_sgd() -> Training:
    run = given(1e-10)
    run.facts = {**FACTS, "optimizers": [{"name": "SGD#0", "class": "SGD", "groups": [{"lr": 0.1, "parameters": 8}]}]}
    return run


def under(kind: str, sigma: float) -> Training:
    """An Adam of another library."""
    (optimizer,) = FACTS["optimizers"]
    run = given(sigma)
    run.facts = {**FACTS, "optimizers": [{**optimizer, "class": kind}]}
    return run


def above_under_eight_bits() -> Training:
    return under("AdamW8bit", 1e-6)


def tiny_under_another_eps() -> Training:
    """Adafactor's eps is another."""
    return under("Adafactor", 1e-10)


def beside(run: Training, kind: str) -> Training:
    """Another optimizer trains the rest."""
    other = {"name": f"{kind}#0", "class": kind, "groups": [{"lr": 0.02, "parameters": 4}]}
    run.facts = {**FACTS, "optimizers": [*FACTS["optimizers"], other]}
    return run


def tiny_gradient_under_muon() -> Training:
    """It has no second moment: it is not AdamW's."""
    return beside(given(1e-10), "Muon")


def beside_rmsprop() -> Training:
    """Which has an eps as well; whose second moment it is, the log does not say."""
    return beside(with_moment(Training(), lambda _, x: 1e-10 * x), "RMSprop")


def two_groups(head: float, others: float) -> Training:
    """The head is in a group of its own, with its own eps."""
    (root,), (optimizer,) = FACTS["roots"], FACTS["optimizers"]
    parameters = [{**p, "group": [0, int(p["module"] == "head")]} for p in root["parameters"]]
    groups = [{**optimizer["groups"][0], "eps": eps} for eps in (others, head)]
    run = given(1e-6)
    run.facts = {
        **FACTS,
        "roots": [{**root, "parameters": parameters}],
        "optimizers": [{**optimizer, "groups": groups}],
    }
    return run


def a_large_eps_for_the_others() -> Training:
    """Their gradients are larger still."""
    return two_groups(head=1e-8, others=1e-4)


def indices_that_name_no_group() -> Training:
    """As a damaged file may have them: too few, beyond the end, negative."""
    run = Training()
    (root,) = FACTS["roots"]
    wrong = [[0], [], [7, 0], [0, 7], [-1, -1]]
    parameters = [{**p, "group": wrong[i % len(wrong)]} for i, p in enumerate(root["parameters"])]
    run.facts = {**FACTS, "roots": [{**root, "parameters": parameters}]}
    return run


FIRING = {
    "one_group_with_a_large_eps": Sample(
        lambda: two_groups(head=1e-2, others=1e-8), module="head", severity="warning", says=("eps, 0.01,",),
    ),
    "beside_muon": Sample(
        lambda: beside(with_moment(Training(), lambda _, x: 1e-10 * x), "Muon"), module="head", severity="warning",
        says=("1 weight of 1",),
    ),
    "grows_but_stays_below": Sample(lambda: grows(1e-2, 0.05), module="head", severity="warning"),
    "tiny": Sample(lambda: given(1e-10), module="head", kind="weight_grad_step", severity="warning",
                   says=("1e-08", "limit 50 %")),
    "tiny_under_eight_bits": Sample(lambda: under("AdamW8bit", 1e-10), module="head", severity="warning"),
    "tiny_under_a_fused_adam": Sample(lambda: under("FusedAdam", 1e-10), module="head", severity="warning"),
    "scaled": Sample(scaled, module="head", severity="warning", says=("its RMS is 1e-10", "a step is 0.99 %")),
    "state_recorded": Sample(lambda: with_moment(Training(), lambda _, x: 1e-10 * x), module="head",
                             severity="warning", says=("the RMS of sqrt(v), as recorded, 9.9e-11",)),
    "a_tenth_of_eps": Sample(lambda: given(1e-9), module="head", severity="warning"),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        *(converges, a_gate_opens, above, about_eps, a_bias_before_a_norm, under_sgd, one_large_gradient),
        *(tiny_gradient_under_muon, beside_rmsprop, a_large_eps_for_the_others),
        *(indices_that_name_no_group, above_under_eight_bits, tiny_under_another_eps),
    )
}
