"""Updates against the weights they change."""

from tests.support.samples import Sample
from tests.support.training import Training, normal


def updates(sigma: float, until: int = 12) -> Training:
    """Updates of the head (weights have RMS 1) up to step ``until``."""
    run = Training()
    for step, rows in run.tensors.items():
        for row in rows:
            if step < until and row["kind"] == "update" and row["module"] == "head":
                row.update(normal(sigma))
    return run


def brisk() -> Training:
    return updates(0.1)


def large_at_first() -> Training:
    return updates(1.0, until=6)


def a_bias() -> Training:
    run = updates(1.0)
    return run.change(lambda r: r.update(shape=[4096]), module="head")


FIRING = {
    "replaced": Sample(lambda: updates(0.9), module="head", kind="update", severity="warning",
                       says=("limit 0.3", "0.001")),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (brisk, large_at_first, a_bias)}
