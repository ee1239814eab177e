"""Every rule, in triage order, and how a user names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from precdoctor.diagnosis.rule import Rule
from precdoctor.diagnosis.rules import (
    activation_gradient_underflow,
    activation_growth,
    adam_eps_dominates,
    bad_fp8_scale,
    bad_input_batch,
    catastrophic_cancellation,
    cleared_gradients,
    clip_before_unscale,
    dead_layer,
    double_unscale,
    e4m3_gradients,
    fp8_accumulation,
    fp8_amax_explosion,
    fp8_block_scaling,
    fp8_outlier_channels,
    fp8_saturation,
    fp8_underflow,
    fp16_where_bf16_fits,
    frozen_loss_scale,
    gradient_explosion,
    growth_with_depth,
    half_precision_positions,
    held_down_fp8_scale,
    incomplete_determinism,
    irreproducible_nonfinite,
    logit_growth,
    loss_scale_collapse,
    loss_scale_thrash,
    loss_spike,
    lossy_cast,
    lost_weight_updates,
    low_loss_scale,
    master_weights_apart,
    narrow_gradient_reduction,
    near_format_limit,
    needless_loss_scaler,
    no_master_weights,
    nonfinite_loss,
    nonfinite_origin_backward,
    nonfinite_origin_forward,
    nonfinite_weights,
    oversized_weight_updates,
    poisoned_buffers,
    precision_error_above_expectation,
    reduced_precision_flags,
    reduction_in_half,
    second_moment_underflow,
    sensitive_layer_in_fp8,
    stale_fp8_scale,
    stalled_average,
    stalled_second_moment,
    stalled_state,
    swallowed_nonfinite,
    swallowed_underflow,
    swamped_accumulation,
    unscaled_fp16_gradients,
    unscaled_into_half,
    vanishing_gradients,
    weight_gradient_underflow,
)
from precdoctor.errors import UsageError, did_you_mean

#: In triage order (data, learning rate, loss scale, forward, loss, backward, optimizer), then by code.
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            nonfinite_origin_forward.RULE,
            nonfinite_origin_backward.RULE,
            nonfinite_loss.RULE,
            bad_input_batch.RULE,
            nonfinite_weights.RULE,
            poisoned_buffers.RULE,
            swallowed_nonfinite.RULE,
            irreproducible_nonfinite.RULE,
            activation_gradient_underflow.RULE,
            weight_gradient_underflow.RULE,
            dead_layer.RULE,
            vanishing_gradients.RULE,
            swamped_accumulation.RULE,
            swallowed_underflow.RULE,
            loss_scale_collapse.RULE,
            loss_scale_thrash.RULE,
            low_loss_scale.RULE,
            needless_loss_scaler.RULE,
            narrow_gradient_reduction.RULE,
            incomplete_determinism.RULE,
            fp16_where_bf16_fits.RULE,
            unscaled_fp16_gradients.RULE,
            clip_before_unscale.RULE,
            frozen_loss_scale.RULE,
            unscaled_into_half.RULE,
            double_unscale.RULE,
            fp8_saturation.RULE,
            fp8_underflow.RULE,
            e4m3_gradients.RULE,
            stale_fp8_scale.RULE,
            bad_fp8_scale.RULE,
            fp8_amax_explosion.RULE,
            sensitive_layer_in_fp8.RULE,
            fp8_outlier_channels.RULE,
            fp8_block_scaling.RULE,
            fp8_accumulation.RULE,
            held_down_fp8_scale.RULE,
            lost_weight_updates.RULE,
            no_master_weights.RULE,
            adam_eps_dominates.RULE,
            oversized_weight_updates.RULE,
            stalled_second_moment.RULE,
            stalled_state.RULE,
            cleared_gradients.RULE,
            stalled_average.RULE,
            master_weights_apart.RULE,
            second_moment_underflow.RULE,
            reduced_precision_flags.RULE,
            near_format_limit.RULE,
            activation_growth.RULE,
            logit_growth.RULE,
            gradient_explosion.RULE,
            growth_with_depth.RULE,
            loss_spike.RULE,
            reduction_in_half.RULE,
            half_precision_positions.RULE,
            precision_error_above_expectation.RULE,
            catastrophic_cancellation.RULE,
            lossy_cast.RULE,
        ),
        key=lambda rule: (rule.triage, rule.code),
    )
)


class Named(Protocol):
    """Anything a user selects by code or name: a rule, or a regression the gate looks for."""

    @property
    def code(self) -> str: ...

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)


def find(name: str, known: Sequence[NamedT]) -> NamedT:
    """The one with this code or kebab-case name, in any letter case.

    Raises:
        UsageError: there is none; the message names the nearest.
    """
    wanted = name.strip().lower()
    for rule in known:
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise UsageError(f"no rule is called {name!r}{_meant(wanted, known)}")


def _meant(wanted: str, known: Sequence[Named]) -> str:
    """Codes differ by a digit, so that one code never stands for another; names are compared letter by letter."""
    longer = [r.code for r in known if wanted.startswith("pd") and r.code.lower().startswith(wanted)]
    within = [r.code for r in known if r.code.lower() in wanted]
    if len(longer) > 1:
        return f"; {min(longer)} to {max(longer)} begin like this, name one"
    if within or longer:
        return f"; did you mean {(within or longer)[0]!r}?"
    return did_you_mean(wanted, [r.name for r in known]) or "; `precdoctor explain` lists the rules"


def select(known: Sequence[NamedT], wanted: Iterable[str] = (), ignored: Iterable[str] = ()) -> tuple[NamedT, ...]:
    """Those ``wanted`` (all when empty) without those ``ignored``; codes, names or code prefixes (``PD1``).

    Raises:
        UsageError: an entry matches nothing.
    """
    chosen = _matching(wanted, known) or {r.code for r in known}
    dropped = _matching(ignored, known)
    return tuple(r for r in known if r.code in chosen and r.code not in dropped)


def select_rules(wanted: Iterable[str] = (), ignored: Iterable[str] = ()) -> tuple[Rule, ...]:
    """:func:`select` among the rules of a diagnosis.

    Raises:
        UsageError: an entry matches no rule.
    """
    return select(RULES, wanted, ignored)


def _matching(names: Iterable[str], known: Sequence[NamedT]) -> set[str]:
    codes: set[str] = set()
    for name in names:
        prefix = name.strip().upper()
        by_prefix = {r.code for r in known if prefix.startswith("PD") and r.code.startswith(prefix)}
        codes |= by_prefix or {find(name, known).code}
    return codes


def nearest(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or else the list of what there is."""
    names = list(known)
    return did_you_mean(word, names) or f"; known: {', '.join(sorted(names))}"
