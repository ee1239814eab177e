"""Layers that get nothing from the loss."""

import functools
import json

import numpy as np

from tests.support.samples import Sample
from tests.support.training import FACTS, NUMEL, ROOT, Training, find, histogram, normal, tensor

ZERO = normal(0.0)


def dead(*modules: str, output: str = "", steps: int = 12) -> Training:
    """Gradients of these weights are zero throughout, and so is one output."""
    run = Training(steps=steps)
    for module in modules:
        run.change(lambda r: r.update(ZERO), kind="weight_grad", module=module)
        run.change(lambda r: r.update(ZERO), kind="weight_grad_step", module=module)
    return run.change(lambda r: r.update(ZERO), kind="output", module=output) if output else run


def dies(at: int, steps: int = 16) -> Training:
    """The first steps throw the layer where no gradient comes from; or it had one for most of the run."""
    run = Training(steps=steps)
    for step in range(at, steps):
        for row in run.tensors[step]:
            if row["kind"].startswith("weight_grad") and row["module"] == "blocks.0.mlp.up":
                row.update(ZERO)
    return run


def dies_behind_zeros() -> Training:
    """In the second half of the run the layer's output is zero as well."""
    run = dies(8)
    for step in range(8, 16):
        find(run.tensors[step], "output", "blocks.0.mlp.up").update({"exp_lo": None, "exp_hist": None} | ZERO)
    return run


def margins_met() -> Training:
    """In the second half of the run the loss is zero for every sample, and so are all gradients."""
    run = Training(steps=16)
    for step in range(8, 16):
        for row in run.tensors[step]:
            if row["kind"] in ("grad_output", "weight_grad", "weight_grad_step"):
                row.update(ZERO)
        find(run.tensors[step], "output", "head").update({"exp_lo": None, "exp_hist": None} | ZERO)
    return run


def dies_where_few_steps_are_recorded() -> Training:
    """The first 16 steps are recorded in full, then every fourth; the layer is dead on 53 of 64 steps."""
    return dies(11, steps=64).unsample(*(s for s in range(16, 64) if s % 4))


def on_two_ranks(*dead_on: int) -> Training:
    """Each rank logs its own share of a step's gradient."""
    run, up = Training(steps=12, ranks=2), "blocks.0.mlp.up"
    for step, rows in run.tensors.items():
        without = [r | ZERO if r["module"] == up and r["kind"].startswith("weight_grad") else r for r in rows]
        for rank in (0, 1):
            run.of_rank[rank, step] = without if rank in dead_on else list(rows)
    return run


def dead_on_one_rank() -> Training:
    return on_two_ranks(1)


def idle_at_the_end() -> Training:
    return dies(8)


def unreached() -> Training:
    """It runs, it requires a gradient, and there is none."""
    run = Training()
    for step, rows in run.tensors.items():
        run.tensors[step] = [r for r in rows if not (r["module"] == "head" and r["kind"].startswith("weight_grad"))]
    return run


def under_no_grad(*, root: str = "", held: bool = True, evaluating: bool = False, moves: bool = False) -> Training:
    """The embedding runs under ``no_grad``, by default inside the model that is trained.

    Args:
        root: of the embedding, if it is a model of its own.
        held: it is in the optimizer of the other weights.
        evaluating: it is in evaluation mode.
        moves: something else updates it.
    """
    run = Training()
    for step, rows in run.tensors.items():
        emb = [r for r in rows if r["module"] == "emb" and r["kind"] in ("output", "weight")]
        for row in emb:
            row.update(phase="no_grad" if row["kind"] == "output" else "train", fingerprint=step if moves else 7)
            row.update(root=root or row["root"])
        run.tensors[step] = [r for r in rows if r["module"] != "emb" or r in emb]
    [model] = FACTS["roots"]
    parameters = [{**p, "group": [0, 0]} for p in model["parameters"]]
    first = {**parameters[0], "evaluating": evaluating}
    if not held:
        del first["group"]
    roots = [{**model, "parameters": [first, *parameters[1:]]}]
    if root:
        roots = [{**model, "name": root, "parameters": [first]}, {**model, "parameters": parameters[1:]}]
    run.facts = {**FACTS, "roots": roots}
    return run


def a_teacher_under_no_grad() -> Training:
    """It is an average of other weights, and was left in the optimizer."""
    return under_no_grad(moves=True)


def a_frozen_encoder_in_evaluation_mode() -> Training:
    return under_no_grad(evaluating=True)


def a_network_under_no_grad_in_no_optimizer() -> Training:
    return under_no_grad(held=False)


def moved_by_something_else() -> Training:
    """It shares its memory with a weight that the optimizer moves, or is an average of others."""
    run = unreached()
    run.change(lambda row: row.update(fingerprint=int(row["step"])), kind="weight")
    return run


def written_by_hand() -> Training:
    """Its gradient is computed apart and written to `grad`, as schedules of pipeline stages do: no hook sees it."""
    run = Training()
    for step, rows in run.tensors.items():
        run.tensors[step] = [r for r in rows if not (r["module"] == "head" and r["kind"] == "weight_grad")]
    return run


def one_of_two(name: str = "weight", part: str = "") -> Training:
    """The layer's other parameter is trained: it is fed zeros, or its reverse direction is read where it begins."""
    run, up = dead("blocks.0.mlp.up"), "blocks.0.mlp.up"
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"].startswith("weight_grad") and row["module"] == up:
                row |= {"name": name, "module": f"{up}{part}"}
        rows.append(tensor(step, "weight_grad", up, None, name="other", dtype="float32", **normal(1.0)))
    return run


def given_nothing(output: float = 1.0) -> Training:
    """The head's gradient is zero where it arrives already; its output is ``output`` times a normal distribution."""
    run = dead("head").change(lambda r: r.update(ZERO), kind="grad_output", module="head")
    return run.change(lambda r: r.update(normal(output)), kind="output", module="head")


def all_zero(dtype: str = "float16") -> Training:
    """No gradient behind the loss has an element that is not zero."""
    run = Training(steps=12, dtype=dtype, scale=1.0)
    for kind in ("grad_output", "weight_grad", "weight_grad_step"):
        run.change(lambda r: r.update(ZERO), kind=kind)
    return run


def whole_model() -> Training:
    """None of its layers gets a gradient; the density that an earlier one returns would not pass a ReLU."""
    run = all_zero("float32").change(lambda r: r.update(normal(1.0)), kind="output")
    negative = {**normal(1.0), "sum": -float(NUMEL)}
    return run.change(lambda r: r.update(negative), kind="output", module="blocks.0.mlp.up")


def multiplied(run: Training, module: str, *, forward: int = 256) -> Training:
    """A deep scan lists a product in this module: zeros in the backward pass, and so many in the forward pass.

    A product on another line is no zero anywhere.
    """
    place = {"op": "aten.mul.Tensor", "inputs": "float32", "outputs": "float32", "file": "lora.py", "line": 9}
    product = {**place, "calls": 1, "numel": 256}
    sums = {**product, "op": "aten.add.Tensor", "phase": "backward"}
    ops = [{**product, "phase": "forward", "zero": forward}, sums, {**product, "phase": "backward", "zero": 256}]
    other = {**product, "phase": "forward", "line": 8, "zero": 0}
    data = json.dumps({"kind": "coverage", "ops": [other, *ops]})
    run.events.append({"event": "scan", "step": 0, "root": ROOT, "module": module, "data": data})
    return run


def scaled_by_zero(**products: int) -> Training:
    return multiplied(dead("blocks.0.mlp.up"), "blocks.0.mlp.up", **products)


def whole_model_scaled_by_zero() -> Training:
    """A gradient arrives at the output of the model, and at that of no layer."""
    run = whole_model().change(lambda r: r.update(normal(1.0)), kind="output", module="blocks.0.mlp.up")
    for step, rows in run.tensors.items():
        rows.append(tensor(step, "grad_output", "", None, dtype="float32", **normal(1.0)))
    return multiplied(run, "")


def loss_of_zero() -> Training:
    """FP16, all gradients are zero, and so is the loss: nothing was flushed behind it."""
    return all_zero().change(lambda r: r.update({"exp_lo": None, "exp_hist": None} | ZERO), kind="loss")


def given_nothing_in_half() -> Training:
    """FP16, and the other gradients are well inside of it: the loss gives the head nothing."""
    run = Training(steps=12, dtype="float16", scale=1024.0)
    run.change(lambda r: r.update(ZERO), kind="grad_output", module="head")
    run.change(lambda r: r.update(ZERO), kind="weight_grad_step", module="head")
    return run.change(lambda r: r.update(ZERO), kind="weight_grad", module="head")


def behind_a_functional_relu() -> Training:
    """All of its output is negative."""
    negative = histogram(-np.abs(np.random.default_rng(1).normal(3.0, 0.5, NUMEL)))
    return given_nothing().change(lambda r: r.update(negative), kind="output", module="head")


def a_branch_whose_loss_ends() -> Training:
    """From step 4 on an auxiliary loss has the weight zero; all logits of its classifier are negative."""
    run, trained = behind_a_functional_relu(), Training()
    for step in range(4):
        run.tensors[step] = trained.tensors[step]
    return run


def cut_to_zero(level: float, *, numel: int = NUMEL, gradient: bool = True) -> Training:
    """The function behind ``qkv``, whose outputs lie around ``level``, makes all of them zero: ``proj`` gets zeros.

    Args:
        level: a negative one, and it is a ReLU; zero, and it is something else.
        numel: number of elements of these outputs.
        gradient: whether the gradient of these outputs is zero.
    """
    run, qkv, proj = dead("blocks.0.attn.qkv", "blocks.0.attn.proj"), "blocks.0.attn.qkv", "blocks.0.attn.proj"
    outputs = histogram(np.random.default_rng(4).normal(level, 0.05 if level else 1.0, numel))
    run.change(lambda r: r.update({"exp_lo": None, "exp_hist": None} | outputs), kind="output", module=qkv)
    run.change(lambda r: r.update(ZERO), kind="input", module=proj)
    return run.change(lambda r: r.update(ZERO), kind="grad_output", module=qkv) if gradient else run


def before_a_zero_output() -> Training:
    """``proj`` has no bias: its output is zero, too."""
    return cut_to_zero(-4.1).change(lambda r: r.update(ZERO), kind="output", module="blocks.0.attn.proj")


def first_steps_of_a_zero_layer() -> Training:
    run = Training()
    for step in range(2):
        for row in run.tensors[step]:
            if row["kind"] == "weight_grad" and row["module"] != "head":
                row.update(ZERO)
    return run


def frozen() -> Training:
    roots = [
        {**root, "parameters": [{**p, "requires_grad": p["module"] != "head"} for p in root["parameters"]]}
        for root in FACTS["roots"]
    ]
    run = unreached()
    run.facts = {**FACTS, "roots": roots}
    return run


def rate_zero() -> Training:
    run = dead("head")
    for row in run.step_rows.values():
        row["lr"] = 0.0
    return run


def too_short() -> Training:
    return dead("head", steps=5)


def before_tanh(gain: float, *, from_step: int = 0, relu: bool = False) -> Training:
    """Attention's values go through a tanh; ``qkv`` makes them so large, from a step on."""
    run = Training(steps=12)
    x = gain * np.random.default_rng(6).normal(size=NUMEL)
    y = np.maximum(x, 0.0) if relu else np.tanh(x.astype(np.float32))
    slope = (x > 0.0) if relu else 1.0 - y**2
    for step in range(from_step, 12):
        for kind, module, values in (
            ("output", "blocks.0.attn.qkv", x),
            ("input", "blocks.0.attn.proj", y),
            ("grad_output", "blocks.0.attn.qkv", slope * np.random.default_rng(7).normal(size=NUMEL)),
        ):
            row = find(run.tensors[step], kind, module)
            row |= {"exp_lo": None, "exp_hist": None} | histogram(values)
    return run


def died(
    at: int = 5,
    *,
    zeros: float = 0.96,
    before: float = 0.5,
    loss: float = 1.0,
    pixels: float = 1.0,
    to_the_end: int = 16,
) -> Training:
    """What comes out of a ReLU behind ``qkv`` is nearly all zero from a step on.

    Args:
        at: that step.
        zeros: share of the elements since then.
        before: share before.
        loss: at the end, as a share of that until it died.
        pixels: largest element of the input.
        to_the_end: the step on which it is back.
    """
    run = Training(steps=16)
    x = np.random.default_rng(3).normal(size=NUMEL)
    for step, rows in run.tensors.items():
        share = zeros if at <= step < to_the_end else before
        columns = {"exp_lo": None, "exp_hist": None} | histogram(np.where(np.arange(NUMEL) < share * NUMEL, 0.0, x))
        for kind, module in (("input", "blocks.0.attn.proj"), ("weight_grad", "blocks.0.attn.qkv")):
            find(rows, kind, module).update(columns)
        batch = histogram(pixels * np.linspace(0.0, 1.0, NUMEL))
        rows.append(tensor(step, "batch", "", None, name="0", dtype="float32", **batch))
        run.step_rows[step]["loss"] = 2.5 * (1.0 - (1.0 - loss) * max(0, step - at) / (15 - at))
    return run


def died_before_the_heads_had_learnt() -> Training:
    """What is left alive learns the mean of the targets, in the first half of the run."""
    run = died(1, pixels=3200.0)
    for step, row in run.step_rows.items():
        row["loss"] = 2.0 + 9000.0 * 0.1**step
    return run


def died_with_the_loss() -> Training:
    """Every margin is kept: the last layer gets nothing either."""
    head = {**ZERO, "exp_lo": None, "exp_hist": None}
    return died().change(lambda r: r.update(head), kind="grad_output", module="head")


def died_beside_another_optimizer() -> Training:
    run = died()
    run.facts = {**FACTS, "optimizers": [FACTS["optimizers"][0], {**FACTS["optimizers"][0], "name": "AdamW#1"}]}
    return run


FIRING = {
    "died_on_the_way": Sample(
        died, module="blocks.0.attn.qkv", kind="weight_grad", severity="warning",
        says=(
            *("died at step 5", "96 % of the activations after", "(50 % before)", "limit 90 %"),
            "has not fallen since step 7 (2.5",
        ),
    ),
    "died_before_the_heads_had_learnt": Sample(
        died_before_the_heads_had_learnt, module="blocks.0.attn.qkv", kind="weight_grad", severity="warning",
        says=("died at step 1", "has not fallen since step 7 (2 right after, 2 at the end)"),
    ),
    "died_of_pixels": Sample(
        lambda: died(1, zeros=1.0, pixels=255.0), module="blocks.0.attn.qkv", kind="weight_grad", severity="warning",
        says=("reaches 255",),
    ),
    "saturated_tanh": Sample(
        lambda: before_tanh(40.0), module="blocks.0.attn.qkv", kind="grad_output", severity="warning",
        says=("function behind it is saturated", "limit 50 %", "larger than 8"),
    ),
    "dies_early": Sample(
        lambda: dies(2), module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("the last 14 of 16 recorded steps",),
    ),
    "dies_behind_zeros": Sample(
        dies_behind_zeros, module="blocks.0.mlp.up", kind="output", severity="warning",
        says=("lets no gradient pass", "the last 8 of 16 recorded steps"),
    ),
    "dies_where_few_steps_are_recorded": Sample(
        dies_where_few_steps_are_recorded, module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("the last 17 of 28 recorded steps",),
    ),
    "one_layer": Sample(
        lambda: dead("blocks.0.mlp.up"), module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("12 recorded steps", "limit 6", "does arrive"),
    ),
    "one_weight_of_a_layer": Sample(
        one_of_two, module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("`blocks.0.mlp.up.weight` is not trained", "other parameters are trained"),
    ),
    "reverse_direction_read_where_it_begins": Sample(
        lambda: one_of_two("weight_hh_l0_reverse"), module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("outputs[-1]",),
    ),
    "sequences_of_one_step": Sample(
        lambda: one_of_two("weight_hh_l0"), module="blocks.0.mlp.up", kind="weight_grad", severity="info",
        says=("sequences of one step",),
    ),
    "sequences_of_one_step_under_weight_norm": Sample(
        lambda: one_of_two("original1", ".parametrizations.weight_hh_l0"), kind="weight_grad", severity="info",
        module="blocks.0.mlp.up.parametrizations.weight_hh_l0", says=("sequences of one step",),
    ),
    "two_ranks": Sample(
        lambda: on_two_ranks(0, 1), module="blocks.0.mlp.up", kind="weight_grad", severity="warning", rank=...,
        says=("all 12 recorded steps",),
    ),
    "behind_a_dead_output": Sample(
        lambda: dead("blocks.0.mlp.up", "blocks.0.mlp.down", output="blocks.0.mlp.down"),
        module="blocks.0.mlp.down", kind="output", severity="warning", says=("lets no gradient pass",),
    ),
    "weight_zero_in_the_loss": Sample(
        given_nothing, module="head", severity="info", says=("not trained", "weight zero")
    ),
    "flushed_at_the_loss": Sample(
        all_zero, module=..., kind="weight_grad", severity="error", says=("cast of the model's output", "12 of 12"),
    ),
    "whole_model": Sample(
        whole_model, module=..., kind="weight_grad", severity="error",
        says=("`GPT#0` is not trained", "Every output of `blocks.0.mlp.up` is negative", "No weight of the run got"),
    ),
    "scaled_by_zero": Sample(
        scaled_by_zero, module="blocks.0.mlp.up", kind="weight_grad", severity="warning",
        says=("A gradient arrives at the output of `blocks.0.mlp.up`", "mul at lora.py:9 multiplies it by zero"),
    ),
    "whole_model_scaled_by_zero": Sample(
        whole_model_scaled_by_zero, module="head", kind="weight_grad", severity="error",
        says=("the output of `GPT#0` (", "mul at lora.py:9 multiplies it by zero", "No weight of the run got"),
    ),
    "loss_of_zero": Sample(
        loss_of_zero, module=..., kind="weight_grad", severity="error", says=("the loss itself is exactly 0",),
        evidence={"loss_is_zero": True},
    ),
    "weight_zero_in_half": Sample(given_nothing_in_half, module="head", severity="info", says=("not trained",)),
    "functional_relu": Sample(
        behind_a_functional_relu, module="head", severity="warning", says=("is dead", "almost all negative")
    ),
    "a_branch_whose_loss_ends": Sample(
        a_branch_whose_loss_ends, module="head", severity="info", says=("the weight zero since then",)
    ),
    "relu_behind_the_layer_before": Sample(
        lambda: cut_to_zero(-4.1), module="blocks.0.attn.qkv", kind="output", severity="warning",
        says=(
            "every output of `blocks.0.attn.qkv` is negative, and the ReLU behind it passes none", "(largest -3.9",
            "input of `blocks.0.attn.proj` is zero", "limit 6",
        ),
    ),
    "relu_before_a_zero_output": Sample(
        before_a_zero_output, module="blocks.0.attn.qkv", kind="output", severity="warning",
        says=("passes none", "input of `blocks.0.attn.proj` is zero"),
    ),
    "cut_by_something_else": Sample(
        lambda: cut_to_zero(0.0), module="blocks.0.attn.qkv", kind="output", severity="warning",
        says=("no output of `blocks.0.attn.qkv` passes the function behind it", "None of the 4,096 outputs"),
    ),
    "zeros_from_elsewhere": Sample(
        lambda: cut_to_zero(0.0, gradient=False), module="blocks.0.attn.proj", kind="weight_grad", severity="warning",
        says=("does arrive", "its input, or the code between, is zero"),
    ),
    "zeros_of_another_size": Sample(
        lambda: cut_to_zero(-4.1, numel=1000), module="blocks.0.attn.proj", kind="weight_grad", severity="warning",
        says=("does arrive", "its input, or the code between, is zero"),
    ),
    **{
        name: Sample(
            functools.partial(under_no_grad, root=root), module="emb", severity="info", rank=None, bare=True,
            says=("never got a gradient: it ran under `torch.no_grad()` only",), evidence={"under_no_grad": True},
        )
        for name, root in (("under_no_grad", ""), ("model_under_no_grad", "Encoder#0"))
    },
    "unreached": Sample(unreached, module="head", severity="info", rank=None, bare=True, says=("never got",)),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        a_frozen_encoder_in_evaluation_mode,
        a_network_under_no_grad_in_no_optimizer,
        a_teacher_under_no_grad,
        dead_on_one_rank,
        died_beside_another_optimizer,
        died_with_the_loss,
        first_steps_of_a_zero_layer,
        frozen,
        idle_at_the_end,
        margins_met,
        moved_by_something_else,
        rate_zero,
        too_short,
        written_by_hand,
        Training,
    )
} | {
    "tanh_that_bends": lambda: before_tanh(2.0),
    "tanh_that_has_learnt": lambda: before_tanh(40.0, from_step=6),
    "large_outputs_and_a_relu": lambda: before_tanh(40.0, relu=True),
    "dies_and_the_loss_falls": lambda: died(loss=0.6),
    "dies_late": lambda: died(10),
    "sparse_from_the_start": lambda: died(before=0.96),
    "thins_out": lambda: died(zeros=0.8),
    "comes_back": lambda: died(to_the_end=13),
}
