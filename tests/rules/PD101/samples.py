"""Non-finite values that begin in the forward pass, and activations that only look like it."""

from tests.support.samples import Sample
from tests.support.training import Training, find, normal, poison, spoil, tensor


def linear_overflow() -> Training:
    run = Training(dtype="float16").change(lambda r: r.update(amax=4000.0), kind="output", module="blocks.0.attn.proj")
    return run.poison(7, "output", "blocks.0.mlp.up", pos_inf=4)


def diverged() -> Training:
    """FP32, and still out of range: the learning rate, not the format."""
    run = Training().change(lambda r: r.update(amax=1e37), kind="output", module="blocks.0.attn.proj")
    return run.poison(7, "output", "blocks.0.mlp.up", pos_inf=4)


def rate_jumps() -> Training:
    """Step 8 has a thousand times the rate; four steps later a product leaves FP32."""
    run = Training(steps=13)
    for step in range(8, 13):
        size = 30.0 ** (step - 8)
        run.step_rows[step].update(lr=1.0, loss=2.5 * size**2, grad_norm=size)
        find(run.tensors[step], "weight", "blocks.0.mlp.up").update(normal(size))
        find(run.tensors[step], "update", "blocks.0.mlp.up").update(normal(30.0 * size))
        find(run.tensors[step], "output", "blocks.0.attn.proj").update(normal(size))
    return run.poison(12, "output", "blocks.0.mlp.up", pos_inf=4)


def weight_changed_in_between() -> Training:
    """Inputs and weights on record cannot give an Inf, and the step died before its weights were recorded."""
    run = Training(steps=8).poison(7, "output", "blocks.0.mlp.up", pos_inf=4)
    run.tensors[7] = [r for r in run.tensors[7] if r["kind"] in ("input", "output")]
    run.step_rows[7].update(complete=False, optimizer="", loss=None, non_finite=0)
    return run


def weight_thrown_far() -> Training:
    """As before, but the update of the last step is on record, and large enough: no weight is non-finite."""
    run = weight_changed_in_between()
    return run.change(lambda r: r.update(amax=1e38), kind="update", module="blocks.0.mlp.up")


def linear_cast_overflow() -> Training:
    run = Training(dtype="float16")
    find(run.tensors[7], "output", "blocks.0.attn.proj").update(dtype="float32", amax=1e5)
    return run.poison(7, "output", "blocks.0.mlp.up", pos_inf=4)


def functional_attention() -> Training:
    """Logits overflow between qkv and proj, in code no hook sees; what proj is given is NaN."""
    run = Training(dtype="float16")
    run.change(lambda r: r.update(amax=300.0), kind="output", module="blocks.0.attn.qkv")
    return run.poison(7, "input", "blocks.0.attn.proj", nan=64)


def masked_attention() -> Training:
    """A mask that is there on every step, and once leaves a row with nothing."""
    run = Training()
    run.change(lambda r: spoil(r, neg_inf=1000), kind="input", module="blocks.0.attn.proj")
    return run.poison(7, "output", "blocks.0.attn.proj", nan=64)


def first_step_with_mask() -> Training:
    """No healthy step to compare the mask with."""
    run = Training(steps=3)
    run.change(lambda r: spoil(r, neg_inf=1000), kind="input", module="blocks.0.attn.proj")
    return run.poison(0, "output", "blocks.0.attn.proj", nan=64)


def overflow_inside_a_mask() -> Training:
    """Eleven logits fall below FP16's range and hide among the masked ones; softmax finds an empty row."""
    run = Training(dtype="float16").change(lambda r: spoil(r, neg_inf=276), kind="input", module="blocks.0.attn.proj")
    run.change(lambda r: r.update(amax=6e4), kind="input", module="blocks.0.attn.proj")
    run.change(lambda r: r.update(amax=143.6), kind="output", module="blocks.0.attn.qkv")
    run.poison(7, "output", "blocks.0.attn.proj", nan=24)
    find(run.tensors[7], "input", "blocks.0.attn.proj").update(neg_inf=287, amax=64992.0)
    return run


def lowest_number_as_mask() -> Training:
    """finfo.min in place of -inf; adding logits to it overflows here and there, and means nothing."""
    run = masked_attention()
    for step, rows in run.tensors.items():
        find(rows, "input", "blocks.0.attn.proj").update(dtype="float16", amax=65504.0, at_max=1500, neg_inf=40 + step)
    return run


def new_minus_infinity() -> Training:
    """log(0): nothing but -Inf, in a tensor that never had any."""
    run = Training().poison(7, "output", "norm", neg_inf=2)
    find(run.tensors[7], "output", "head").update(nan=0, pos_inf=0, neg_inf=0, amax=3.0)
    return run


def own_code_of_a_parent() -> Training:
    """The root changes its last child's output itself."""
    run = Training()
    for step, rows in run.tensors.items():
        at = rows.index(find(rows, "loss"))
        for row in rows[at:]:
            row["order"] += 1
        rows.insert(at, tensor(step, "output", "", at, module_class="GPT"))
    return run.poison(7, "output", "", nan=2)


def died_in_forward() -> Training:
    """The loop checks its loss and raises before any backward."""
    run = Training(steps=8).poison(7, "output", "blocks.0.mlp.down", nan=5)
    run.tensors[7] = [r for r in run.tensors[7] if r["kind"] in ("input", "output")]
    run.step_rows[7].update(complete=False, optimizer="", loss=None, non_finite=0)
    return run


def one_of_two_ranks() -> Training:
    """Rank 1 overflows; rank 0 gets it from the reduced gradient."""
    run = Training(ranks=2)
    theirs = [dict(r) for r in run.tensors[7]]
    poison(theirs, "output", "blocks.0.mlp.up", nan=4)
    run.of_rank[1, 7] = theirs
    run.poison(7, "weight_grad_step", "emb", nan=9)
    return run


def second_micro_step() -> Training:
    """Under accumulation an earlier tensor of the step went bad later: the first bad *launch* counts."""
    run = Training().poison(7, "output", "blocks.0.mlp.up", nan=4)
    rows = run.tensors[7]
    find(rows, "output", "blocks.0.mlp.up").update(first_bad_order=1000, first_bad_micro_step=1)
    for row in rows:
        if row["order"] > find(rows, "output", "blocks.0.mlp.up")["order"]:
            row["first_bad_order"] = 1000 + row["order"]
    emb = find(rows, "output", "emb")
    spoil(emb, nan=1)
    emb["first_bad_order"] = 3000  # poisoned by the step after the incident's micro-step
    return run


def skipped_and_recovered() -> Training:
    """A forward overflow under a scaler: the step is skipped, and it was not the scaler's doing."""
    run = Training(dtype="float16", scale=1024.0).poison(7, "output", "blocks.0.mlp.up", then=False, pos_inf=4)
    run.skip(7)
    run.step_rows[7]["loss"] = float("nan")
    return run


def skipped_without_a_scaler() -> Training:
    """The same without a scaler."""
    run = Training().poison(7, "output", "blocks.0.mlp.up", then=False, pos_inf=4).skip(7)
    run.step_rows[7].update(loss=float("nan"), found_inf=None)
    return run


def another_time() -> Training:
    """The same module on two steps, healthy ones between: one finding."""
    run = Training(dtype="float16", scale=1024.0)
    for step in (4, 9):
        run.poison(step, "output", "blocks.0.mlp.up", then=False, pos_inf=4).skip(step)
        run.step_rows[step]["loss"] = float("nan")
    return run


def masks_on_every_step() -> Training:
    return Training().change(lambda r: spoil(r, neg_inf=2000), kind="input", module="blocks.0.attn.proj")


def mask_only_once() -> Training:
    """Padding occurs in one batch; nothing comes of it."""
    run = Training()
    spoil(find(run.tensors[5], "input", "blocks.0.attn.proj"), neg_inf=2000)
    return run


def swallowed_nan() -> Training:
    """NaN inside, replaced before it matters."""
    return Training().change(lambda r: spoil(r, nan=5), kind="output", module="blocks.0.mlp.up")


def fresh_scaler() -> Training:
    return Training(dtype="float16").scales([2.0**16, 2.0**15, 2.0**14] + [2.0**13] * 9).skip(0, 1, 2)


def stopped_between_hooks() -> Training:
    """Interrupted in the middle of a step, with a mask in it."""
    run = Training().change(lambda r: spoil(r, neg_inf=2000), kind="input", module="blocks.0.attn.proj")
    run.tensors[11] = run.tensors[11][:6]
    run.step_rows[11].update(complete=False, optimizer="", loss=None)
    return run


def overflow_after_clean_run_of_masks() -> Training:
    """Masks and scaler backoffs together, later in the run."""
    run = masks_on_every_step()
    run.dtype = "float16"
    return run.scales([1024.0] * 8 + [512.0] * 4).skip(7)


FIRING = {
    "rate_jumps": Sample(
        rate_jumps, 12, module="blocks.0.mlp.up", last_finite=11,
        says=("the learning rate rose from 0.001 to 1 at step 8", "Resume from a checkpoint before step 8"),
        evidence={"left_its_course_at": 8},
    ),
    "diverged": Sample(diverged, 7, "blocks.0.mlp.up", "output", "matmul-overflow"),
    "weight_changed_in_between": Sample(weight_changed_in_between, 7, "blocks.0.mlp.up", cause="nonfinite-weights"),
    "linear_overflow": Sample(
        linear_overflow, 7, "blocks.0.mlp.up", "output", "matmul-overflow", last_finite=6,
        says=("65504", "4 +Inf", "limit 0"),
    ),
    "linear_cast_overflow": Sample(linear_cast_overflow, 7, "blocks.0.mlp.up", "output", "cast-overflow"),
    "functional_attention": Sample(
        functional_attention, 7, "blocks.0.attn", "input", "matmul-overflow", last_finite=6,
        says=("functional code in `blocks.0.attn` (CausalSelfAttention)", "`blocks.0.attn.qkv`"),
    ),
    "masked_attention": Sample(
        masked_attention, 7, "blocks.0.attn.proj", "output", "softmax-fully-masked", says=("mask with 1,000 -inf",)
    ),
    "overflow_inside_a_mask": Sample(
        overflow_inside_a_mask, 7, "blocks.0.attn", "input", "matmul-overflow", says=("the other 11 are new",)
    ),
    "lowest_number_as_mask": Sample(
        lowest_number_as_mask, 7, "blocks.0.attn.proj", "output", "softmax-fully-masked"
    ),
    "first_step_with_mask": Sample(first_step_with_mask, 0, "blocks.0.attn.proj", "output", last_finite=None),
    "new_minus_infinity": Sample(new_minus_infinity, 7, "norm", "output", last_finite=6),
    "own_code_of_a_parent": Sample(own_code_of_a_parent, 7, "", "output", says=("after its submodule `head`",)),
    "weight_thrown_far": Sample(
        weight_thrown_far, 7, "blocks.0.mlp.up", "output", "matmul-overflow",
        says=("the update before moved them by up to 1e+38",),
    ),
    "died_in_forward": Sample(died_in_forward, 7, "blocks.0.mlp.down", "output", last_finite=6),
    "one_of_two_ranks": Sample(one_of_two_ranks, 7, "blocks.0.mlp.up", "output", rank=1, says=("on rank 1",)),
    "second_micro_step": Sample(second_micro_step, 7, "blocks.0.mlp.up", says=("micro-step 1",)),
    "skipped_and_recovered": Sample(
        skipped_and_recovered, 7, "blocks.0.mlp.up", severity="warning",
        says=("The loss scaler skipped these steps", "nothing to resume"),
    ),
    "skipped_without_a_scaler": Sample(
        skipped_without_a_scaler, 7, "blocks.0.mlp.up", severity="warning",
        says=("These steps changed no weight, so the weights are intact",),
    ),
    "another_time": Sample(
        another_time, 4, "blocks.0.mlp.up", severity="warning", evidence={"steps": [4, 9], "occurrences": 2}
    ),
}  # fmt: skip
HEALTHY = {
    f.__name__: f
    for f in (
        Training, masks_on_every_step, mask_only_once, swallowed_nan, fresh_scaler, stopped_between_hooks,
        overflow_after_clean_run_of_masks,
    )
}  # fmt: skip
