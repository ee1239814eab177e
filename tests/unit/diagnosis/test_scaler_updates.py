"""Attempts of several optimizers that share a loss scaler are one update of it; several scalers are told apart."""

from pathlib import Path

from precdoctor.diagnosis.analyses.loss_scales import joined_updates
from precdoctor.diagnosis.engine import view_of
from precdoctor.diagnosis.families.loss_scaling.loss_scale_collapse_prescriptions import lower_bound
from precdoctor.diagnosis.offline.replay.updates import updates_of
from precdoctor.diagnosis.survey.step_facts import StepFacts
from tests.rules.PD301.samples import gan_with_a_scaler_each, one_of_two_scalers, two_scalers
from tests.support.training import Training


def attempt(step: int, optimizer: str, scale: float, tracker: int | None, **more: bool) -> StepFacts:
    known = {"skipped": False, "sampled": True, **more}
    return StepFacts(
        step=step, loss=1.0, non_finite=0, complete=True, loss_scale=scale, lr=0.1, loss_is_bad=False,
        optimizer=optimizer, growth_tracker=tracker, **known,
    )  # fmt: skip


def test_two_optimizers_skipped_together_are_one_backoff() -> None:
    steps = [
        attempt(0, "D", 1024.0, 0, skipped=True),
        attempt(1, "G", 1024.0, 0, skipped=True),
        attempt(2, "D", 512.0, 0),
        attempt(3, "G", 512.0, 0, skipped=True),
        attempt(4, "D", 256.0, 0),
        attempt(5, "G", 256.0, 0),
    ]
    joined = joined_updates(steps)
    assert [(s.step, s.loss_scale, s.skipped) for s in joined] == [
        (0, 1024.0, True),
        (3, 512.0, True),
        (4, 256.0, False),
    ]


def test_an_update_after_every_step_keeps_them_apart() -> None:
    steps = [attempt(i, "DG"[i % 2], 1024.0, i) for i in range(6)]
    assert joined_updates(steps) == steps


def test_one_optimizer_makes_an_update_of_every_attempt() -> None:
    """Even if the scaler stands still, or keeps no count because it is written by hand."""
    assert len(joined_updates([attempt(i, "D", 1024.0, 0) for i in range(6)])) == 6
    assert len(joined_updates([attempt(i, "DG"[i % 2], 1024.0, None) for i in range(6)])) == 6


def test_the_attempt_whose_tensors_are_on_record_speaks_for_the_update() -> None:
    steps = [
        attempt(0, "D", 64.0, 3, skipped=True, sampled=False),
        attempt(1, "G", 64.0, 3, skipped=True),
        attempt(2, "E", 64.0, 3),
    ]
    assert [s.step for s in joined_updates(steps)] == [1]


def course(scales: list[float], skipped: set[int]) -> list[StepFacts]:
    return [attempt(i, "D", s, 0, skipped=i in skipped) for i, s in enumerate(scales)]


def test_a_bound_is_where_skips_no_longer_lower_the_scale() -> None:
    bounded = course([64.0, 32.0, 16.0, 16.0, 16.0, 16.0, 16.0], {0, 1, 2, 4, 5})
    assert lower_bound(bounded, 3) == 16.0
    assert lower_bound(bounded, 4) is None
    assert lower_bound(course([64.0, 32.0, 16.0, 8.0, 8.0], {0, 1, 2}), 1) is None
    assert lower_bound(course([64.0] * 5, {0, 1, 2, 3}), 1) is None  # a constant


def replayed(run: Training, path: Path) -> list[tuple[float | None, bool]]:
    view = view_of(run.write(path))
    return [(u.scale, u.overflow) for u in updates_of(view, view.processes[0])]


def test_a_replay_follows_the_scaler_that_overflows(tmp_path: Path) -> None:
    fresh = replayed(gan_with_a_scaler_each(), tmp_path / "fresh")
    assert fresh == [(2.0 ** (16 - min(s, 11)), s < 11) for s in range(40)]
    falling = replayed(one_of_two_scalers(), tmp_path / "falling")
    assert falling == [(1024.0, False)] * 10 + [(1024.0 * 0.5**k, True) for k in range(14)]


def test_a_replay_follows_no_optimizer_without_a_scaler(tmp_path: Path) -> None:
    run = two_scalers([1024.0] * 12, [])
    for step in range(0, 24, 2):
        run.step_rows[step]["loss_scale"] = None
    assert replayed(run, tmp_path / "run") == [(65536.0, False)] * 12
