"""A run that had left its course is led back to the step that threw it off; an op-level fault is left where it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding
from precdoctor.diagnosis.divergence.onset import calm, clip_level, healthy_norms
from precdoctor.diagnosis.engine import diagnose, diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.families.growth import gradient_explosion
from precdoctor.diagnosis.survey.step_facts import StepFacts
from tests.rules.PD603.samples import diverges
from tests.support.training import FACTS, Training, find, normal

LAST = 12
LAYER = "blocks.0.mlp.up"


def course(
    lr: Callable[[int], float] = lambda _: 1e-3,
    norm: Callable[[int], float] = lambda _: 0.5,
    loss: Callable[[int], float] = lambda s: 3.0 - 0.05 * s,
    ratio: Callable[[int], float] = lambda _: 2.0**-8,
) -> Training:
    """A run in FP32 that becomes infinite at step 12: rates, norms, losses, and updates of one layer before that."""
    run = Training(steps=LAST + 1)
    size = 1.0
    for step, row in run.step_rows.items():
        row.update(lr=lr(step), grad_norm=norm(step), loss=loss(step))
        rows = run.tensors[step]
        find(rows, "weight", LAYER).update(normal(size))
        find(rows, "output", LAYER).update(normal(size))
        find(rows, "update", LAYER).update(normal(ratio(step) * size))
        size *= max(1.0, ratio(step))
    return run.poison(LAST, "output", "blocks.0.mlp.down", pos_inf=4)


def sgd(run: Training) -> Training:
    """The same with an optimizer whose updates are in proportion to the gradient."""
    run.facts = {**FACTS, "optimizers": [{**FACTS["optimizers"][0], "name": "AdamW#0", "class": "SGD"}]}
    return run


def first(run: Training, where: Path) -> tuple[Finding, Diagnosis]:
    """The leading finding."""
    diagnosis = diagnose(run.write(where))
    return diagnosis.findings[0], diagnosis


def after(step: int, sick: float, well: float) -> Callable[[int], float]:
    """``sick`` times more per step from ``step`` on."""
    return lambda s: well if s < step else well * sick ** (s - step + 1)


def test_a_jump_of_the_rate_leads_and_the_op_stays_the_place(tmp_path: Path) -> None:
    run = course(
        lr=lambda s: 1e-3 if s < 8 else 1.0,
        norm=after(9, 100.0, 0.5),
        loss=after(9, 100.0, 2.5),
        ratio=lambda s: 2.0**-8 if s < 8 else 10.0,
    )
    found, diagnosis = first(run, tmp_path)
    assert (found.code, found.location.step, found.location.module) == ("PD101", LAST, "blocks.0.mlp.down")
    assert found.title.startswith("the learning rate rose from 0.001 to 1 at step 8")
    assert found.evidence["root"]["kind"] == "learning-rate"
    assert found.resume_step == 7
    assert [p.change for p in found.prescriptions] == [{"lr": {"from": 1.0, "to": 1e-3}}]
    assert [link["step"] for link in found.evidence["chain"]] == sorted(c["step"] for c in found.evidence["chain"])
    assert "before step 8" in found.message
    assert all(f.resume_step in (None, 7) for f in diagnosis.findings)
    assert [f.code for f in diagnosis.findings if f.severity.value == "error"] == ["PD101"]


def test_a_rate_too_high_from_the_first_step_is_told_by_its_updates(tmp_path: Path) -> None:
    run = course(lr=lambda _: 0.3, norm=after(1, 2.0, 1.0), loss=after(1, 1.5, 3.0), ratio=lambda _: 4.0)
    found, _ = first(run, tmp_path)
    assert found.evidence["root"]["step"] == 0
    assert found.title.startswith("updates at a learning rate of 0.3 reach 4 times the size of")
    assert found.resume_step is None and "start again" in found.message
    assert found.prescriptions[0].change == {"lr_factor": 0.005}


def test_one_gradient_that_explodes_is_clipped_at_what_was_usual_before(tmp_path: Path) -> None:
    run = sgd(course(norm=after(9, 1e4, 0.5), loss=after(10, 1e4, 2.5), ratio=lambda s: 2.0**-8 if s < 9 else 1e3))
    found, _ = first(run, tmp_path)
    assert found.title.startswith("the gradient of step 9 exploded (norm 0.5 -> 5e+03)")
    assert found.prescriptions[0].change["clip_norm"]["to"] == 1.0 == 2.0 * 0.5
    assert found.resume_step == 8


def test_without_a_healthy_norm_the_convention_is_advised(tmp_path: Path) -> None:
    run = sgd(course(norm=lambda s: 4000.0, loss=after(1, 1.5, 30.0), ratio=lambda s: 20.0))
    found, _ = first(run, tmp_path)
    assert found.prescriptions[0].change["clip_norm"]["to"] == 1.0
    assert "no healthy norm" in found.prescriptions[0].title


@pytest.mark.parametrize(("norm", "lowered"), [(2.7, True), (4000.0, False)])
def test_without_a_healthy_norm_clipping_is_advised_only_if_it_bounds_the_update(
    norm: float, lowered: bool, tmp_path: Path
) -> None:
    ratios = [19.0, *[200.0] * LAST]
    run = sgd(course(lr=lambda _: 30.0, norm=lambda s: norm, loss=after(1, 1.5, 30.0), ratio=ratios.__getitem__))
    cure = first(run, tmp_path)[0].prescriptions[0]
    if lowered:
        assert cure.change == {"lr_factor": 0.001}  # of the root's own update, not of those that it enlarged
        assert cure.title == "learning rate x 0.001 (30 -> 0.03)"  # a warm-up would end at the same rate
    else:
        assert cure.change["clip_norm"]["to"] == 1.0


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_first_update_by_hand_is_bounded_by_the_weights_around_it(by_hand: bool, tmp_path: Path) -> None:
    run = course(norm=lambda s: 4000.0, loss=after(1, 1.5, 30.0), ratio=lambda s: 20.0)
    run.tensors[0] = [r for r in run.tensors[0] if r["kind"] != "update"]
    if by_hand:
        run.facts = {**FACTS, "optimizers": []}
        for row in run.step_rows.values():
            row.update(optimizer="", lr=None)
    found, _ = first(run, tmp_path)
    assert found.evidence["root"]["step"] == (0 if by_hand else 1)
    least = [(link["step"], round(link["value"])) for link in found.evidence["chain"] if "at least" in link["what"]]
    assert least == ([(0, 19)] if by_hand else [])


@pytest.mark.parametrize("size", [1e15, 1e4])
def test_a_network_that_is_too_large_before_its_first_update_is_started_smaller(tmp_path: Path, size: float) -> None:
    """No rate and no clipping mends what no update has made."""
    run = sgd(course(norm=lambda s: 4000.0, loss=after(1, 1.5, 30.0), ratio=lambda s: 20.0))
    find(run.tensors[0], "output", LAYER).update(normal(size))
    found, _ = first(run, tmp_path)
    assert found.resume_step is None
    assert (found.evidence["root"]["kind"] == "initial") == (size > 1e6)
    if size > 1e6:
        assert found.title.startswith(f"before any update, `{LAYER}` makes ")
        assert found.prescriptions[0].change == {"initialise": True}


def test_an_objective_without_a_bound_is_named(tmp_path: Path) -> None:
    found, _ = first(course(loss=lambda s: -0.5 * 10.0**s, norm=after(1, 10.0, 1.0)), tmp_path)
    assert found.evidence["root"]["kind"] == "unbounded"
    assert "lower bound" in found.prescriptions[0].title


def test_weights_that_one_number_multiplies_are_no_matter_of_the_rate(tmp_path: Path) -> None:
    run = course(norm=after(4, 10.0, 0.5), loss=after(4, 10.0, 3.0))
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] in ("weight", "update"):
                row.update(normal(1.9**step * (0.9 if row["kind"] == "update" else 1.0)))
            elif row["kind"] == "output" and not row["pos_inf"] and not row["nan"]:
                row.update(normal(1.9**step))
    found, _ = first(run, tmp_path)
    assert found.title.startswith("each step multiplies every weight matrix by 1.9, from step 0 on")


def rewritten(times: float, step: int = 8, back: int = LAST + 1) -> Training:
    """From ``step`` on, and before ``back``, a weight is so many times larger than its updates can have made it."""
    run = course()
    for at in range(step, back):
        find(run.tensors[at], "weight", LAYER).update(normal(times))
        find(run.tensors[at], "output", LAYER).update(normal(times))
    return run


def test_a_weight_that_the_script_wrote_to_is_named(tmp_path: Path) -> None:
    found, _ = first(rewritten(1e18, step=LAST), tmp_path)
    assert found.title.startswith(f"something other than the optimizer multiplied `{LAYER}.weight` by 9.96e+17 after "
                                  "step 11; at step 12")  # fmt: skip
    assert found.evidence["root"]["kind"] == "rewritten"
    assert found.prescriptions[0].change["weights_written"]["after_step"] == LAST - 1
    assert found.location.module == "blocks.0.mlp.down"


@pytest.mark.parametrize("stages", [([0], [1]), ([], [])], ids=["stages", "replicas"])
def test_a_weight_of_another_stage_of_the_pipeline_is_named(tmp_path: Path, stages: tuple[list[int], ...]) -> None:
    run, written = course(), rewritten(1e18, step=LAST)
    run.ranks = 2
    for step, rows in written.tensors.items():
        run.of_rank[0, step] = [r for r in rows if r["module"] == LAYER]
        run.of_rank[1, step] = [r for r in run.tensors[step] if r["module"] != LAYER]
    run.write(tmp_path)
    for rank, own in enumerate(stages):
        facts = tmp_path / f"rank-{rank:05}" / "rank.json"
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "layout": {"stages": own}}))
    found = diagnose(tmp_path).findings[0]
    assert found.location.rank == 1
    if not stages[0]:
        assert "chain" not in found.evidence
        return
    assert found.title.startswith(f"something other than the optimizer multiplied `{LAYER}.weight`")
    assert "It began on rank 0, with another stage of the pipeline." in found.message


@pytest.mark.parametrize("run", [rewritten(3.0), rewritten(1e3, step=6, back=8)], ids=["little", "for a while"])
def test_a_weight_written_to_without_effect_is_no_root(run: Training, tmp_path: Path) -> None:
    found, _ = first(run, tmp_path)
    assert "chain" not in found.evidence


def test_the_earlier_of_two_roots_is_told(tmp_path: Path) -> None:
    run = rewritten(1e3, step=7)
    for step in range(11, LAST + 1):
        run.step_rows[step].update(lr=1.0)
    found, _ = first(run, tmp_path)
    assert found.evidence["root"]["kind"] == "rewritten"
    assert found.evidence["root"]["step"] == 6


def test_a_rate_that_jumps_in_one_group_below_another_is_named(tmp_path: Path) -> None:
    run = course(
        lr=lambda _: 1.0,
        norm=after(9, 100.0, 0.5),
        loss=after(9, 100.0, 2.5),
        ratio=lambda s: 2.0**-8 if s < 8 else 10.0,
    )
    for step, row in run.step_rows.items():
        row["lrs"] = [1.0, 1e-3 if step < 8 else 0.5]
    found, _ = first(run, tmp_path)
    assert found.title.startswith("the learning rate of parameter group 1 rose from 0.001 to 0.5 at step 8")


@pytest.mark.parametrize(
    "run",
    [
        course(),
        course(lr=lambda s: 1e-3 if s < 8 else 1.0),  # as an optimizer that divides by the gradient's size takes it
        course(norm=lambda s: 0.5 if s < 11 else 500.0, loss=lambda s: 3.0 if s < 11 else 900.0),  # no weight moved
        course(ratio=lambda _: 0.5),  # brisk, and it learns
        course(norm=lambda s: 90.0 if s == 6 else 0.5, ratio=lambda s: 0.4 if s == 6 else 0.01),  # survived
    ],
    ids=["calm", "rate without effect", "loud and harmless", "brisk", "long over"],
)
def test_what_did_not_throw_the_weights_is_no_root(run: Training, tmp_path: Path) -> None:
    found, _ = first(run, tmp_path)
    assert "chain" not in found.evidence
    assert found.title.startswith("first non-finite value")
    assert found.resume_step == LAST - 1


def facts(*norms: float) -> list[StepFacts]:
    return [
        StepFacts(i, 3.0 - 0.01 * i, 0, False, True, True, None, 1e-3, False, grad_norm=n) for i, n in enumerate(norms)
    ]


def test_norms_of_the_sick_phase_are_no_yardstick() -> None:
    well, sick = [1.0, 1.1, 0.9, 1.01, 1.0, 0.95], [1e3, 2.7e7, 1e9]
    assert healthy_norms(facts(*well, *sick)) == well
    assert clip_level(healthy_norms(facts(*well, *sick))) == pytest.approx(2.0)
    assert healthy_norms(facts(*well)) == well
    assert clip_level([4000.0]) == 1.0


def test_the_calmest_level_ignores_what_came_later() -> None:
    assert calm([1.0] * 8 + [100.0] * 20)[-1] == 1.0
    assert calm([1.0, 1.0])[-1] is None


def test_a_loss_that_jumps_behind_a_rewritten_weight_leads_with_it(tmp_path: Path) -> None:
    run = Training(steps=36)
    for step, row in run.step_rows.items():
        row["loss"] = 2.0 + 0.02 * ((step * 7) % 5 - 2) if step < 24 else 6.0
        find(run.tensors[step], "weight", LAYER).update(normal(1.0 if step < 24 else 30.0))
        find(run.tensors[step], "update", LAYER).update(normal(2.0**-8))
    found = next(f for f in diagnose(run.write(tmp_path)).findings if f.code == "PD605")
    root = f"something other than the optimizer multiplied `{LAYER}.weight` by 29.9 after step 23"
    assert found.title.startswith(f"{root}; the loss jumps from 2 to 6 at step 24")


def test_a_run_diverges_by_its_own_limit_where_no_norm_stands_out(tmp_path):
    """The limit of a divergence may be set below that of an explosion."""
    view = view_of(diverges().write(tmp_path))
    options = resolve_options({"PD603": {"diverged": 10.0, "factor": 1e9}}, [gradient_explosion.RULE])
    (finding,) = diagnose_view(view, [gradient_explosion.RULE], options).findings
    assert "diverges" in finding.title
