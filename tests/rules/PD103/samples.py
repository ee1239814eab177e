"""Finite models, non-finite losses."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training, find, spoil, tensor

LOSS_ROOT = {"name": "CrossEntropyLoss#0", "class": "CrossEntropyLoss", "modules": [], "parameters": []}


def functional_loss() -> Training:
    return Training().poison(7, "loss", nan=1)


def log_of_zero() -> Training:
    run = Training()
    find(run.tensors[7], "output", "head").update(zero=12, amax=0.9)
    return run.poison(7, "loss", pos_inf=1)


def exp_of_a_logit() -> Training:
    run = Training()
    find(run.tensors[7], "output", "head").update(amax=95.0)
    return run.poison(7, "loss", pos_inf=1)


def _with_loss_module() -> Training:
    run = Training(facts={**FACTS, "roots": [*FACTS["roots"], LOSS_ROOT]})
    for step, rows in run.tensors.items():
        at = rows.index(find(rows, "loss"))
        for row in rows[at:]:
            row["order"] += 1
        own = {"root": "CrossEntropyLoss#0", "module_class": "CrossEntropyLoss", "numel": 1, "amax": 2.5}
        rows.insert(at, tensor(step, "output", "", at, **own))
    return run


def loss_module() -> Training:
    return _with_loss_module().poison(7, "output", "", nan=1)


def code_before_the_loss_module() -> Training:
    """Something between the model and the criterion: the criterion's argument has a graph and is bad."""
    run = _with_loss_module()
    for step, rows in run.tensors.items():
        at = rows.index(find(rows, "output", ""))
        for row in rows[at:]:
            row["order"] += 1
        row = tensor(step, "input", "", at, root="CrossEntropyLoss#0", module_class="CrossEntropyLoss", name="0")
        rows.insert(at, row)
    return run.poison(7, "input", "", nan=1)


def not_sampled() -> Training:
    """Every fourth step is recorded; the loss is known on all."""
    run = Training().poison(6, "loss", nan=1)
    return run.unsample(*(s for s in range(12) if s % 4))


def healthy_loss_module() -> Training:
    return _with_loss_module()


def scaled_loss_overflows() -> Training:
    """A loss in FP16 times a fresh scale: a backoff mends it."""
    run = Training(dtype="float16").scales([2.0**16, 2.0**15] + [2.0**14] * 10).skip(0, 1)
    for step in (0, 1):
        spoil(find(run.tensors[step], "loss"), pos_inf=1)
        find(run.tensors[step], "loss")["dtype"] = "float16"
        run.step_rows[step]["loss"] = float("inf")
    return run


def no_loss_recorded() -> Training:
    """backward(gradient) on a tensor that is no scalar: there is no loss row, and null is not NaN."""
    run = Training()
    for step, rows in run.tensors.items():
        run.tensors[step] = [r for r in rows if r["kind"] != "loss"]
        run.step_rows[step]["loss"] = None
    return run


FIRING = {
    "functional_loss": Sample(functional_loss, 7, kind="loss", last_finite=6, says=("outputs are finite", "1 NaN")),
    "log_of_zero": Sample(log_of_zero, 7, cause="log-of-nonpositive", says=("12 exact zeros",)),
    "exp_of_a_logit": Sample(exp_of_a_logit, 7, cause="exp-overflow", says=("88.72",)),
    "loss_module": Sample(loss_module, 7, "", "output", says=("CrossEntropyLoss",)),
    "code_before_the_loss_module": Sample(code_before_the_loss_module, 7, "", "input", says=("`head`",)),
    "not_sampled": Sample(
        not_sampled, 6, None, None, last_finite=4, says=("was not sampled", "--steps 0:7"), bare=True
    ),
}
HEALTHY = {f.__name__: f for f in (healthy_loss_module, scaled_loss_overflows, no_loss_recorded)}
