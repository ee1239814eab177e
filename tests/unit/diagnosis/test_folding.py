"""Consequences are told inside their cause, in whatever order findings come."""

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.ranking import consequences
from precdoctor.diagnosis.registry import RELATIONS

fold = partial(consequences.fold, relations=RELATIONS)
explains = partial(consequences.explains, relations=RELATIONS)


def finding(code: str, step: int | None, *, last: int | None = None, severity: Severity = Severity.ERROR) -> Finding:
    evidence = {} if last is None else {"last_bad_step": last}
    return Finding(code, f"name-{code}", severity, 0.5, f"{code}@{step}", "m", Location(step=step), evidence=evidence)


def test_an_extreme_batch_takes_the_overflow_after_it() -> None:
    batch = finding("PD104", 12, severity=Severity.WARNING)
    batch = Finding(**{**batch.__dict__, "evidence": {"explains_until": 14}})
    [kept] = fold([finding("PD101", 13), batch])
    assert kept.code == "PD104"
    assert kept.severity is Severity.ERROR
    assert [c["code"] for c in kept.evidence["consequences"]] == ["PD101"]


def test_what_began_before_or_after_is_not_explained() -> None:
    cause = finding("PD104", 12, last=14)
    assert not explains(cause, finding("PD101", 11))
    assert not explains(cause, finding("PD101", 15))
    assert not explains(cause, finding("PD501", 13))


def test_a_finding_without_step_is_left_alone() -> None:
    assert len(fold([finding("PD104", None), finding("PD101", None)])) == 2


@pytest.mark.parametrize(("cause", "effect"), [("PD506", "PD504"), ("PD509", "PD701")])
def test_one_fault_of_one_module_is_told_once(cause: str, effect: str) -> None:
    """A second moment of zero makes huge updates; a count in half is a sum in half."""
    here, there = (Location(step=3, root="Net#0", module=m) for m in ("head", "body"))
    first = Finding(**{**finding(cause, 3).__dict__, "location": here})
    same = Finding(**{**finding(effect, 0).__dict__, "location": here})
    other = Finding(**{**finding(effect, 0).__dict__, "location": there})
    assert [f.code for f in fold([same, first])] == [cause]
    assert len(fold([other, first])) == 2


@pytest.mark.parametrize(
    ("code", "step", "told"),
    [("PD603", 12, "PD504"), ("PD603", 1, "PD603"), ("PD605", 9, "PD504"), ("PD606", 1, "PD504")],
)
def test_first_steps_that_replace_the_weights_explain_what_begins_behind_them(code: str, step: int, told: str) -> None:
    """And an explosion that began with them explains them."""
    start = Finding(**{**finding("PD504", 2).__dict__, "evidence": {"first_steps": [0, 1, 2]}})
    assert [f.code for f in fold([finding(code, step), start])] == [told]
    assert [f.code for f in fold([finding("PD603", 12), finding("PD504", 2)])] == ["PD603"], "all along, not at first"


def test_moments_of_zero_explain_first_steps_that_are_too_long_anywhere() -> None:
    kept = {"smallest_gradient_kept": 5e-4, "eps_in_state_format": 1e-6}
    moments = Finding(**{**finding("PD506", 9).__dict__, "evidence": kept})
    there = {"location": Location(step=2, root="Net#0", module="body"), "evidence": {"first_steps": [0, 1, 2]}}
    start = Finding(**{**finding("PD504", 2).__dict__, **there})
    assert [f.code for f in fold([start, moments, finding("PD603", 12)])] == ["PD506"]


def test_one_softmax_of_large_logits_is_told_once() -> None:
    here = {"location": Location(step=3, root="Net#0", module="attn")}
    logits, hard = (Finding(**{**finding(code, 3).__dict__, **here}) for code in ("PD606", "PD208"))
    assert [f.code for f in fold([hard, logits])] == ["PD606"]


@pytest.mark.parametrize(
    ("function", "zero", "kind", "codes"),
    [
        ("round", ["0.weight"], "weight_grad", ["PD208"]),
        ("round", ["4.weight"], "weight_grad", ["PD203", "PD208"]),
        ("round", ["0.weight"], "output", ["PD203", "PD208"]),
        ("tanh", ["0.weight"], "weight_grad", ["PD203", "PD208"]),
    ],
)
def test_a_function_without_slope_explains_the_dead_weights_in_front_of_it(
    function: str, zero: list[str], kind: str, codes: list[str]
) -> None:
    flat = {"location": Location(step=0, root="Net#0", module="4.quantize")}
    flat |= {"evidence": {"function": function, "zero_gradients_of": zero}}
    dead = {
        "location": Location(step=9, root="Net#0", module="0", kind=kind),
        "evidence": {"dead_weights": ["0.weight"]},
    }
    first = Finding(**{**finding("PD208", 0).__dict__, **flat})
    assert sorted(f.code for f in fold([Finding(**{**finding("PD203", 9).__dict__, **dead}), first])) == codes


@pytest.mark.parametrize(("eps", "told"), [(1e-6, ["PD506"]), (0.0, ["PD506"]), (1e-4, ["PD506", "PD603"])])
def test_moments_of_zero_explain_an_explosion_where_eps_lets_steps_be_long(eps: float, told: list[str]) -> None:
    kept = {"smallest_gradient_kept": 5e-4, "eps_in_state_format": eps}
    moments = Finding(**{**finding("PD506", 9).__dict__, "evidence": kept})
    assert sorted(f.code for f in fold([finding("PD603", 3), moments])) == told


def test_moments_of_zero_explain_a_state_that_stands_still_in_their_format() -> None:
    def stalled(target: str) -> Finding:
        told = {"evidence": {"dtype": "float16", "target": target}, "location": Location(phase=Phase.OPTIMIZER)}
        return Finding(**{**finding("PD509", 5).__dict__, **told})

    moments = Finding(**{**finding("PD506", 9).__dict__, "evidence": {"dtype": "float16"}})
    assert explains(moments, stalled("state"))
    assert not explains(moments, stalled("average"))
    assert not explains(finding("PD506", 9), stalled("state"))


def test_a_layer_that_pulls_the_scale_down_is_told_once() -> None:
    place = {"root": "GPT#0", "module": "head"}
    collapse = Finding(**{**finding("PD301", 5).__dict__, "location": Location(step=5, **place)})
    near = Finding(**{**finding("PD601", 3).__dict__, "location": Location(step=3, **place)})
    elsewhere = Finding(**{**finding("PD601", 3).__dict__, "location": Location(step=3, root="GPT#0", module="mlp")})
    assert [f.code for f in fold([near, collapse])] == ["PD301"]
    assert len(fold([elsewhere, collapse])) == 2


def test_logits_are_told_once() -> None:
    """Those that a module's softmax reads with what grows inside it, and with what says how coarse they are."""

    def told(code: str, module: str, **evidence: float) -> Finding:
        place = Location(step=3, root="GPT#0", module=module)
        return Finding(**{**finding(code, 3).__dict__, "location": place, "evidence": evidence})

    logits = told("PD606", "blocks.0.attn")
    assert [f.code for f in fold([told("PD602", "blocks.0.attn.query"), logits])] == ["PD606"]
    assert [f.code for f in fold([told("PD602", "head", spacing_nats=2.0), logits])] == ["PD606"]
    assert len(fold([told("PD602", "blocks.0.mlp"), logits])) == 2
    assert [f.code for f in fold([logits, told("PD101", "blocks.0.attn")])] == ["PD101"]


@pytest.mark.parametrize(
    ("recovered", "cause", "first"),
    [
        (True, "matmul-overflow", "PD301"),  # a lower scale was all it took
        (False, "matmul-overflow", "PD102"),
        (True, "sqrt-gradient-at-zero", "PD102"),  # no scale mends that
    ],
)
def test_an_overflow_that_a_lower_scale_mends_is_told_with_the_scale(recovered: bool, cause: str, first: str) -> None:
    gradient = finding("PD102", 5, last=20)
    gradient = Finding(
        **{**gradient.__dict__, "cause": cause, "evidence": {**gradient.evidence, "recovered": recovered}}
    )
    collapse = finding("PD301", 5, last=25)
    assert [f.code for f in fold([gradient, collapse])] == [first]
    assert [f.code for f in fold([collapse, gradient])] == [first]


@pytest.mark.parametrize(("evidence", "first"), [({"clean_between_skips": 9}, "PD301"), ({}, "PD101")])
def test_bad_batches_are_told_with_the_scale_that_never_grows_back(evidence: dict[str, int], first: str) -> None:
    origin, collapse = finding("PD101", 5, last=20), finding("PD301", 5, last=25)
    collapse = Finding(**{**collapse.__dict__, "evidence": {**collapse.evidence, **evidence}})
    assert [f.code for f in fold([origin, collapse])] == [first]


def test_what_a_scan_saw_where_it_later_broke_is_told_once() -> None:
    place = {"root": "GPT#0", "module": "norm"}
    origin = Finding(**{**finding("PD101", 40).__dict__, "location": Location(step=40, **place)})
    hidden = Finding(**{**finding("PD107", 8).__dict__, "location": Location(step=8, **place)})
    elsewhere = Finding(**{**finding("PD107", 8).__dict__, "location": Location(step=8, root="GPT#0", module="mlp")})
    assert [f.code for f in fold([hidden, origin])] == ["PD101"]
    assert len(fold([elsewhere, origin])) == 2


findings = st.builds(
    lambda code, step, more: finding(code, step, last=step + more),
    st.sampled_from(["PD101", "PD103", "PD104", "PD301", "PD501"]),
    st.integers(0, 6),
    st.integers(0, 4),
)


@given(st.lists(findings, max_size=6, unique_by=lambda f: f.title), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_does_not_matter_and_nothing_is_lost(given_findings: list[Finding], rng: random.Random) -> None:
    shuffled = list(given_findings)
    rng.shuffle(shuffled)
    kept = fold(given_findings)
    assert {f.title for f in kept} == {f.title for f in fold(shuffled)}
    told = {f.title for f in kept} | {c["message"] for f in kept for c in f.evidence.get("consequences", ())}
    assert told == {f.title for f in given_findings}


def operand_finding(
    code: str, *modules: str, severity: Severity = Severity.WARNING, cause: str | None = None
) -> Finding:
    tensors = [{"root": "GPT#0", "module": m, "kind": "fp8_operand", "name": "input", "call": 0} for m in modules]
    place = Location("GPT#0", modules[0], step=3)
    return Finding(code, f"name-{code}", severity, 0.5, code, "m", place, cause, {"tensors": tensors})


def test_what_fp8_tensors_suffer_is_told_with_what_made_it() -> None:
    held, flushed = operand_finding("PD404", "up", "down", cause="held-down"), operand_finding("PD402", "down")
    [kept] = fold([flushed, held])
    assert kept.code == "PD404" and [c["code"] for c in kept.evidence["consequences"]] == ["PD402"]


def test_other_tensors_keep_their_own_finding() -> None:
    held, flushed = operand_finding("PD404", "up", cause="held-down"), operand_finding("PD402", "up", "head")
    assert {f.code for f in fold([held, flushed])} == {"PD402", "PD404"}
    assert not explains(held, Finding("PD402", "n", Severity.WARNING, 0.5, "t", "m", Location()))


def test_a_stale_scale_takes_the_clipping_of_its_worst_tensor_along() -> None:
    stale = operand_finding("PD404", "up", cause="stale")
    [kept] = fold([operand_finding("PD401", "up", "down", severity=Severity.ERROR), stale])
    assert (kept.code, kept.severity) == ("PD404", Severity.ERROR)
    assert len(fold([operand_finding("PD401", "down", "up"), stale])) == 2


@pytest.mark.parametrize(
    ("cause", "effects"),
    [
        ("stale", {"PD401", "PD407"}),
        ("held-down", {"PD402", "PD407"}),
        ("left-in", set()),
        ("invalid-amax", {"PD102", "PD401", "PD402", "PD407"}),
    ],
)
def test_a_wrong_scale_explains_what_its_cause_can_do(cause: str, effects: set[str]) -> None:
    """Too large a scale flushes nothing, too small a one clips nothing, and neither makes NaN."""
    wrong = operand_finding("PD404", "up", cause=cause)
    others = [finding("PD102", 3), *(operand_finding(code, "up") for code in ("PD401", "PD402", "PD407"))]
    assert {f.code for f in others if explains(wrong, f)} == effects


def test_a_scale_that_makes_nan_takes_the_nan_along() -> None:
    bad = operand_finding("PD404", "up", severity=Severity.ERROR, cause="invalid-amax")
    assert [f.code for f in fold([finding("PD102", 3), finding("PD105", 3), bad])] == ["PD404"]
    assert len(fold([finding("PD101", 2), bad])) == 2, (
        "an infinity that came before is the history's cause, not its work"
    )


@pytest.mark.parametrize(("weight", "kept"), [("encoder.0.weight", ["PD204"]), ("head.weight", ["PD204", "PD503"])])
def test_gradients_that_vanished_are_below_eps_for_that(weight: str, kept: list[str]) -> None:
    vanish = finding("PD204", 5)
    vanish.evidence["layers"] = [{"module": "encoder.0"}, {"module": "encoder.2"}]
    small = finding("PD503", 5)
    small.evidence["weights"] = [{"parameter": weight}]
    assert [f.code for f in fold([vanish, small])] == kept


@pytest.mark.parametrize(("effect", "kept"), [("radians", ["PD703"]), ("angles", ["PD706"])])
def test_a_cast_is_nearer_to_the_fault_than_its_sine_and_a_table_nearer_than_a_cast(
    effect: str, kept: list[str]
) -> None:
    positions, cast = finding("PD703", 5), finding("PD706", 5)
    positions.evidence["effect"] = effect
    assert [f.code for f in fold([positions, cast])] == kept
    assert [f.code for f in fold([cast, positions])] == kept


@pytest.mark.parametrize(("parameter", "codes"), [("body.weight", ["PD503"]), ("other.weight", ["PD501", "PD503"])])
def test_an_eps_that_swallows_gradients_explains_weights_without_updates(parameter: str, codes: list[str]) -> None:
    swallowed = {"weights": [{"parameter": "head.weight"}, {"parameter": "body.weight"}]}
    still = {"is_negligible": True, "tensors": [{"parameter": parameter}]}
    eps = Finding(**{**finding("PD503", 5, severity=Severity.WARNING).__dict__, "evidence": swallowed})
    stuck = Finding(**{**finding("PD501", 5, severity=Severity.WARNING).__dict__, "evidence": still})
    assert sorted(f.code for f in fold([stuck, eps])) == codes
