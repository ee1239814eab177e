"""Scalers that look for their ceiling too often, and scalers that do not."""

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


def probing(interval: int, steps: int = 60) -> Training:
    """Up after every ``interval`` clean steps, back at once."""
    period = interval + 1
    scales = [2048.0 if s % period == 0 and s else 1024.0 for s in range(steps)]
    return scaled(scales, [s for s in range(steps) if s % period == 0 and s], interval=interval)


def seldom() -> Training:
    return probing(28)


def bad_batches() -> Training:
    """Skips at a scale that was never grown to."""
    scales = [1024.0 * 0.5 ** (s // 15) for s in range(60)]
    return scaled(scales, [14, 29, 44])


def fresh() -> Training:
    return scaled([2.0 ** (16 - min(s, 9)) for s in range(24)], list(range(9)))


def by_hand() -> Training:
    return Training(dtype="float16", scale=128.0)


FIRING = {
    "every_eight": Sample(
        lambda: probing(8, steps=64), 9, severity="warning",
        says=("limit 10 %", "growth interval of 8", "1024 had been clean"),
        also=frozenset(),
    ),
    "every_sixteen": Sample(lambda: probing(16), 17, severity="info", says=("5 %", "limit 4 %", "not harmed")),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (seldom, bad_batches, fresh, by_hand)}
