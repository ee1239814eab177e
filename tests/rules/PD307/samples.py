"""Scalers that stand still, and scalers that merely had no reason to move."""

from tests.support.samples import Sample
from tests.support.training import FACTS, Training


def scaled(scales: list[float], skipped: list[int], *, interval: int = 2000, tracker: bool = True) -> Training:
    """A dynamic scaler's course; its count of clean steps goes along."""
    facts = {**FACTS, "scalers": [{"class": "GradScaler", "growth_interval": interval}]}
    run = Training(steps=len(scales), dtype="float16", scale=scales[0], facts=facts).scales(scales)
    clean = 0
    for step, row in run.step_rows.items():
        row["growth_tracker"] = clean if tracker else 0
        clean = 0 if step in skipped else clean + 1
    return run.skip(*skipped)


def counting() -> Training:
    return scaled([1024.0] * 12, [])


def grows_on_every_step() -> Training:
    return scaled([1024.0] * 12, [], interval=1, tracker=False)


def too_short() -> Training:
    return scaled([1024.0] * 6, [], tracker=False)


def backs_off() -> Training:
    return scaled([1024.0] * 6 + [512.0] * 6, [5])


def by_hand(skipped: list[int]) -> Training:
    return Training(steps=12, dtype="float16", scale=2.0**20).scales([2.0**20] * 12).skip(*skipped)


def one_step_gets_through() -> Training:
    return by_hand([step for step in range(12) if step != 7])


FIRING = {
    "never_updated": Sample(
        lambda: scaled([1024.0] * 12, [], tracker=False), 0, severity="warning", bare=True, says=("limit 8", "1024"),
    ),
    "overflows_repeat": Sample(
        lambda: scaled([1024.0] * 12, [4, 9], tracker=False), 0, bare=True, says=("4, 9", "2 overflows"),
    ),
    "by_hand": Sample(lambda: by_hand(list(range(12))), 0, bare=True, says=("1.04858e+06", "limit 8")),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (counting, grows_on_every_step, too_short, backs_off, one_step_gets_through)}
