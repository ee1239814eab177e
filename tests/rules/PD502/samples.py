"""16-bit weights whose updates stick, for now."""

from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, NUMEL, Training


def facts(dtype: str, beta2: float) -> dict[str, Any]:
    """The usual ones, with weights in ``dtype`` under AdamW."""
    roots = [{**r, "parameters": [{**p, "dtype": dtype} for p in r["parameters"]]} for r in FACTS["roots"]]
    group = {**FACTS["optimizers"][0]["groups"][0], "betas": [0.9, beta2]}
    return {**FACTS, "roots": roots, "optimizers": [{**FACTS["optimizers"][0], "groups": [group]}]}


def updates(rel_lo: int, unchanged: int = 0, dtype: str = "bfloat16") -> Training:
    """Updates in two bins, half in each."""
    run = Training(weight_dtype=dtype, facts=facts(dtype, 0.99))
    columns = {"rel_lo": rel_lo, "rel_hist": [NUMEL // 2, NUMEL // 2], "unchanged": unchanged, "zero": unchanged}
    return run.change(lambda r: r.update(columns), kind="update")


def far_above_the_ulp() -> Training:
    return updates(-4)


def in_fp32() -> Training:
    return updates(-9, dtype="float32")


def in_fp16() -> Training:
    """Three more bits hold a tenth of the rate."""
    return updates(-7, dtype="float16")


def by_hand() -> Training:
    """No rate is known; such updates may keep what rounding takes (Kahan)."""
    run = updates(-8, 600)
    for row in run.step_rows.values():
        row.update(lr=None, lrs=[])
    return run


FIRING = {
    "lost_later": Sample(lambda: updates(-7), kind="update", severity="info", rank=None, bare=True, says=("25 %",)),
    "lost_already": Sample(lambda: updates(-8, 600), severity="warning", rank=None, bare=True, says=("15 %", "100 %")),
}
HEALTHY = {f.__name__: f for f in (far_above_the_ulp, in_fp32, in_fp16, by_hand)}
