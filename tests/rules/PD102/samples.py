"""Gradients that become non-finite although forward pass and loss are finite."""

from tests.support.samples import Sample
from tests.support.training import Training, find, poison, spoil


def constant_loss_scale() -> Training:
    """Scaling by hand, nobody checks for overflow."""
    run = Training(dtype="float16", scale=65536.0)
    run.change(lambda r: r.update(amax=20000.0), kind="grad_output", module="blocks.0.mlp.up")
    return run.poison(7, "grad_output", "blocks.0.mlp.up", pos_inf=6)


def sqrt_at_zero() -> Training:
    """As many non-finite gradient elements as the tensor has zeros."""
    run = Training()
    run.change(lambda r: r.update(zero=17), kind="output", module="norm")
    return run.poison(7, "grad_output", "norm", nan=17)


def loss_backward() -> Training:
    return Training().poison(7, "grad_output", "head", nan=3)


def own_weight_gradient() -> Training:
    return Training().poison(7, "weight_grad", "blocks.0.mlp.up", nan=1)


def functional_backward() -> Training:
    """What qkv gave went through functional code before proj."""
    return Training().poison(7, "grad_output", "blocks.0.attn.qkv", nan=3)


def reduction() -> Training:
    return Training(ranks=1).poison(7, "weight_grad_step", "emb", nan=3)


def not_sampled() -> Training:
    run = Training().poison(7, "weight_grad", "head", nan=3, then=False)
    rows = {s: [r for r in rows if not r["nan"]] for s, rows in run.tensors.items()}
    run.tensors = rows
    run.unsample(7)
    run.events.append(
        {"event": "nonfinite", "step": 7, "file": "train.py", "line": 31, "data": '{"kinds": ["weight_grad"]}'}
    )
    return run


def later_than_a_mask() -> Training:
    """A mask in the forward pass is not blamed for a gradient."""
    run = Training().change(lambda r: spoil(r, neg_inf=2000), kind="input", module="blocks.0.attn.proj")
    return run.poison(7, "grad_output", "norm", nan=3)


def scaler_backoff() -> Training:
    return Training(dtype="float16").scales([1024.0] * 8 + [512.0] * 4).skip(7)


def gradient_nan_thrown_away() -> Training:
    """The gradient of an unused branch, on every step; no weight sees it."""
    return Training().change(lambda r: spoil(r, nan=5), kind="grad_output", module="norm")


def overflow_of_one_rank_skipped() -> Training:
    run = Training(dtype="float16", ranks=2).scales([1024.0] * 8 + [512.0] * 4).skip(7)
    theirs = [dict(r) for r in run.tensors[7]]
    for row in theirs:
        row.update(nan=0, pos_inf=0, neg_inf=0)
    poison(theirs, "weight_grad_step", "emb", pos_inf=1)
    run.of_rank[1, 7] = theirs
    return run


def zero_gradients() -> Training:
    """Zero-initialised layers: every gradient is exactly zero at first."""
    run = Training()
    for row in run.tensors[0]:
        if "grad" in row["kind"]:
            row.update(zero=row["numel"], amax=0.0, amin_nonzero=None, exp_lo=None, exp_hist=None)
    assert find(run.tensors[0], "weight_grad", "emb")["amax"] == 0.0
    return run


def left_by_another_optimizer() -> Training:
    """In a GAN the generator's backward pass adds to what a skipped step of the discriminator has left in its
    gradients; the generator is given nothing of that.
    """
    run = Training(dtype="float16", scale=1024.0).skip(4)
    spoil(find(run.tensors[5], "weight_grad", "emb"), pos_inf=7)
    run.step_rows[5] |= {"optimizer": "AdamW#1", "non_finite": 1}
    return run


FIRING = {
    "constant_loss_scale": Sample(
        constant_loss_scale, 7, cause="loss-scale-overflow", last_finite=6, says=("65536", "Inf")
    ),
    "sqrt_at_zero": Sample(sqrt_at_zero, 7, "head", "grad_output", "sqrt-gradient-at-zero", says=("17 zeros",)),
    "loss_backward": Sample(loss_backward, 7, None, "grad_output", says=("the backward pass of the loss code",)),
    "own_weight_gradient": Sample(own_weight_gradient, 7, "blocks.0.mlp.up", "weight_grad"),
    "functional_backward": Sample(functional_backward, 7, "blocks.0.attn", "grad_output", says=("functional code",)),
    "reduction": Sample(reduction, 7, "emb", "weight_grad_step", says=("reduction, unscaling or clipping",)),
    "not_sampled": Sample(not_sampled, 7, None, None, last_finite=5, says=("was not sampled",), bare=True),
    "later_than_a_mask": Sample(later_than_a_mask, 7, "head", "grad_output"),
}
HEALTHY = {
    f.__name__: f
    for f in (
        scaler_backoff,
        gradient_nan_thrown_away,
        left_by_another_optimizer,
        overflow_of_one_rank_skipped,
        zero_gradients,
    )
}
