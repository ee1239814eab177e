"""What is prescribed where weights are replaced: the rate, or its warm-up."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from tests.rules.PD504.samples import diverges, thrown_off, updates
from tests.support.training import Training


def advice(run: Training, path: Path, code: str = "PD504") -> list[str]:
    [finding] = [f for f in diagnose(run.write(path)).findings if f.code == code]
    return [p.title.split(":")[0] for p in finding.prescriptions]


def test_a_run_that_never_came_back_wants_a_lower_rate_first(tmp_path: Path) -> None:
    lower, warm_up = advice(thrown_off(), tmp_path / "run")

    assert lower.startswith("learning rate x 0.02")
    assert warm_up.startswith("warm up from")


def came_back_at(step: int) -> Training:
    """Thrown off in its first steps, and above its first loss until this step."""
    run = thrown_off(steps=40)
    for row in run.step_rows.values():
        row["loss"] = 1.0 if row["step"] >= step else row["loss"]
    return run


def test_one_that_came_back_at_once_is_not_reported(tmp_path: Path) -> None:
    assert [f.code for f in diagnose(came_back_at(7).write(tmp_path / "run")).findings] == []


def test_one_that_came_back_wants_a_warm_up(tmp_path: Path) -> None:
    run = came_back_at(10)

    [only] = advice(run, tmp_path / "run")
    assert only.startswith("warm up from")


def warmed_up(steps: int, peak: float = 0.1) -> Training:
    """Replaced in its first steps, on all of which but the first the rate is at its peak, or on the way there."""
    run = thrown_off()
    for step, row in run.step_rows.items():
        row["lr"] = max(1e-6, peak * min(1.0, step / steps))
    return run


@pytest.mark.parametrize(("steps", "measured"), [(1, "0.1"), (2, "0.05")])
def test_the_rate_is_that_of_the_steps_that_were_measured(steps: int, measured: str, tmp_path: Path) -> None:
    [finding] = [f for f in diagnose(warmed_up(steps).write(tmp_path / "run")).findings if f.code == "PD504"]

    assert f"at a learning rate of {measured}; there is a warm-up of {steps} step" in finding.message
    assert (finding.evidence["lr"], finding.evidence["warm_up_steps"]) == (float(measured), steps)


def test_rates_of_two_optimizers_are_no_warm_up(tmp_path: Path) -> None:
    run = thrown_off()
    for step, row in run.step_rows.items():
        row.update(optimizer=f"AdamW#{step % 2}", lr=5.0 if step % 2 else 1e-4)
    [finding] = [f for f in diagnose(run.write(tmp_path / "run")).findings if f.code == "PD504"]

    assert finding.evidence["warm_up_steps"] == 0
    assert "warm-up of" not in finding.message


def test_a_warm_up_that_is_there_is_made_longer_or_its_peak_lower(tmp_path: Path) -> None:
    lower, longer = advice(warmed_up(2), tmp_path / "run")

    assert lower == "learning rate x 0.02 (peak 0.1 -> 0.002)"
    assert longer == "warm up over 1,000 steps, not 2"


def test_a_long_warm_up_is_made_longer_by_what_the_updates_are_too_large(tmp_path: Path) -> None:
    run = came_back_at(10)
    for step, row in run.step_rows.items():
        row["lr"] = max(1e-6, 0.1 * step)

    longer, lower = advice(run, tmp_path / "run")
    assert longer == "warm up over 1,950 steps, not 39"  # as far as the run came, by the inverse of the factor
    assert lower.startswith("learning rate x 0.02 (peak 3.9 -> ")


def test_the_rate_of_the_newer_half_is_not_that_of_a_schedule_that_has_ended(tmp_path: Path) -> None:
    run = updates(0.9)
    for step, row in run.step_rows.items():
        row["lr"] = 0.1 * (1.0 - step / 11.5)
    [finding] = [f for f in diagnose(run.write(tmp_path / "run")).findings if f.code == "PD504"]

    assert finding.evidence["lr"] > run.step_rows[11]["lr"]
    assert finding.prescriptions[0].title.startswith("learning rate x 0.02 (peak 0.1 -> 0.002)")


def test_gradient_descent_that_diverges_wants_a_stable_rate(tmp_path: Path) -> None:
    """It multiplies the gradient by 1.5 at 0.1, so that 0.08 is the limit; half of that, rounded down."""
    [only] = advice(diverges(), tmp_path / "run")

    assert only.startswith("learning rate x 0.2 (0.1 -> 0.02)")


def test_an_explosion_that_the_rate_makes_wants_it_lowered_before_it_is_clipped(tmp_path: Path) -> None:
    lower, clip = advice(diverges(factor=4.0), tmp_path / "run", "PD603")

    assert lower.startswith("learning rate x 0.2 (0.1 -> 0.02)")
    assert clip.startswith("clip the norm")


def test_a_run_that_died_of_its_first_updates(tmp_path: Path) -> None:
    """Two losses, the second three times the first, and then a NaN."""
    findings = diagnose(thrown_off().poison(2, "loss").write(tmp_path / "run")).findings

    assert [f.code for f in findings] == ["PD103"]
    assert "PD504" in [c["code"] for c in findings[0].evidence["consequences"]]


def test_what_exploded_in_the_second_step_is_no_measure_of_the_first(tmp_path: Path) -> None:
    """The first step changes the weights by 0.8 of their size, the second by 1e15 times as much; then NaN."""
    run = thrown_off().poison(3, "loss").unsample(2)
    run.change(lambda r: r.update(sum_sq=r["sum_sq"] * 1e30, amax=r["amax"] * 1e15), kind="update", step=1)
    [finding] = diagnose(run.write(tmp_path / "run")).findings

    told = {c["code"]: c["message"] for c in finding.evidence["consequences"]}
    assert told["PD504"] == "the first steps change `head.weight` by 0.8 times its initial size each"


def test_a_first_update_that_was_not_recorded_is_not_the_one_measured(tmp_path: Path) -> None:
    whole, run = thrown_off(), thrown_off()
    run.tensors[0] = [r for r in run.tensors[0] if r["kind"] != "update"]
    [known, later] = [
        next(f for f in diagnose(r.write(tmp_path / name)).findings if f.code == "PD504")
        for name, r in (("whole", whole), ("later", run))
    ]
    assert known.title.startswith("the first steps change")
    assert later.title.startswith("steps 1 to 2 change `")
    assert "In the median of steps 1 to 2, each step changed" in later.message


def in_groups(run: Training, rates: tuple[float, ...]) -> Training:
    """The head is alone in parameter group 1."""
    [optimizer], [root] = run.facts["optimizers"], run.facts["roots"]
    groups = [{**optimizer["groups"][0], "lr": rate} for rate in rates]
    parameters = [{**p, "group": [0, int(len(rates) > 1 and p["module"] == "head")]} for p in root["parameters"]]
    run.facts = {
        **run.facts,
        "optimizers": [{**optimizer, "groups": groups}],
        "roots": [{**root, "parameters": parameters}],
    }
    for row in run.step_rows.values():
        row.update(lr=max(rates), lrs=list(rates))
    return run


def test_a_parameter_group_is_named(tmp_path: Path) -> None:
    run = in_groups(updates(0.9), (0.5, 0.25, 1e-3))
    [finding] = [f for f in diagnose(run.write(tmp_path / "run")).findings if f.code == "PD504"]

    assert "at a learning rate of 0.25." in finding.message
    assert "in parameter group 1 of AdamW#0 (learning rate of the others: 0.5, 0.001)" in finding.message
    [lower] = finding.prescriptions
    assert lower.title.startswith("learning rate of parameter group 1 x 0.02 (0.25 -> 0.005)")
    assert "optimizer.param_groups[1]['lr'] *= 0.02" in (lower.snippet or "")


def test_a_single_parameter_group_has_no_number(tmp_path: Path) -> None:
    run = in_groups(updates(0.9), (0.25,))
    [finding] = [f for f in diagnose(run.write(tmp_path / "run")).findings if f.code == "PD504"]

    assert "parameter group" not in finding.message
    assert finding.evidence["parameter_group"] is None
