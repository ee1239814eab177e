"""Diagnoses made by hand, for the reporters: one that went wrong, one that is clean, one that cannot be judged."""

from __future__ import annotations

import dataclasses
from typing import Any

from precdoctor.diagnosis.claims.finding import (
    Diagnosis,
    Finding,
    Location,
    Phase,
    Prescription,
    RuleOutcome,
    Severity,
    Source,
    Status,
)

RUN: dict[str, Any] = {
    "path": "precdoctor-runs/train-20260101T120000Z-4242",
    "command": ["python", "train.py", "--lr", "3e-4"],
    "steps": 38,
    "first_step": 0,
    "last_step": 37,
    "sampled_steps": 38,
    "ranks": 1,
    "device": {"type": "cpu", "name": "x86_64"},
    "complete": True,
}
RECORDER: dict[str, Any] = {"overhead_fraction": 0.0123, "dropped": {}, "errors": []}


def _entry(
    module: str, kind: str, order: int, amax: float | None, headroom: float | None, inf: int = 0
) -> dict[str, Any]:
    return {
        "module": module,
        "kind": kind,
        "name": "",
        "dtype": "float16",
        "order": order,
        "amax": amax,
        "headroom_binades": headroom,
        "nan": 0,
        "inf": inf,
    }


OVERFLOW = Finding(
    code="PD101",
    name="nonfinite-origin-forward",
    severity=Severity.ERROR,
    confidence=0.97,
    title="`blocks.3.attn` made the first Inf at step 37",
    message="The output of `blocks.3.attn` holds 128 +Inf of 65,536 elements. Everything before it was finite; its "
    "inputs reached 52.5, and 64 products of that size sum to more than float16 can hold (65504).",
    location=Location(
        root="GPT#0",
        module="blocks.3.attn",
        module_class="CausalSelfAttention",
        kind="output",
        phase=Phase.FORWARD,
        rank=0,
        step=37,
        source=Source("train.py", 42, "att = q @ k.transpose(-2, -1)"),
    ),
    cause="matmul-overflow",
    evidence={
        "range": {
            "dtype": "float16",
            "amax": 65504.0,
            "amin_nonzero": 2.0**-14,
            "exp_lo": -14,
            "exp_hist": [1, 2, 5, 9, 20, 41, 80, 150, 300, 600, 1200, 2400, 4100, 5200, 6100, 7000, 7400, 7100, 6000,
                         4100, 2500, 1300, 700, 380, 200, 110, 60, 30, 12, 4],
        },
        "path": [
            _entry("blocks.2.mlp", "output", 210, 12.5, 12.4),
            _entry("blocks.3.norm1", "output", 214, 4.125, 14.0),
            _entry("blocks.3.attn.qkv", "output", 217, 52.5, 10.3),
            _entry("blocks.3.attn", "output", 220, 65504.0, 0.0, inf=128),
        ],
        "non_finite": 128,
        "last_finite_step": 36,
        "recovered": False,
        "confidence_reason": "the product of two finite inputs left the range of float16",
        "detected_at": Source("train.py", 88, "loss.backward()"),
        "history": [{"step": s, "amax": 2.0 ** (s - 21), "headroom_binades": 37.0 - s} for s in range(30, 37)],
    },
    prescriptions=(
        Prescription(
            title="Compute the attention scores of `blocks.3.attn` in float32",
            change={"module": "blocks.3.attn", "dtype": "float32"},
            predicted={"headroom_binades": 111.0},
            snippet='with torch.autocast("cuda", enabled=False):\n    att = q.float() @ k.float().transpose(-2, -1)',
        ),
    ),
)  # fmt: skip
UNDERFLOW = Finding(
    code="PD201",
    name="activation-gradient-underflow",
    severity=Severity.WARNING,
    confidence=1.0,
    title="41 % of the gradient of `stem.0` is flushed to zero",
    message="Gradients of `stem.0` fall below 2^-25, half of float16's smallest number, on 12 of 12 steps.",
    location=Location(
        root="Net#0", module="stem.0", module_class="Conv2d", kind="grad_output", phase=Phase.BACKWARD, step=4
    ),
    evidence={"flushed_fraction": 0.41, "limit": 0.05},
    prescriptions=(
        Prescription(
            title="Scale the loss by 2^13",
            change={"loss_scale": 8192.0},
            predicted={"flushed_fraction": {"from": 0.41, "to": 0.003}, "overflow": 0},
            snippet='scaler = torch.amp.GradScaler("cuda", init_scale=2.0**13)',
        ),
    ),
)


def _outcomes(**changes: tuple[Status, str]) -> tuple[RuleOutcome, ...]:
    passed = {
        "PD104": ("bad-input-batch", "38 batches, all finite, amax 4.2"),
        "PD301": ("loss-scale-collapse", "no loss scaler in this run"),
        "PD101": ("nonfinite-origin-forward", "412 outputs on 38 steps, none non-finite"),
        "PD103": ("nonfinite-loss", "38 losses, all finite"),
        "PD201": ("activation-gradient-underflow", "412 gradients on 38 steps, none flushed above 1 %"),
    }
    out = []
    for code, (name, reason) in passed.items():
        status = Status.NOT_APPLICABLE if code == "PD301" else Status.PASSED
        status, reason = changes.get(code, (status, reason))
        out.append(RuleOutcome(code, name, status, reason))
    return tuple(out)


BROKEN = Diagnosis(
    run=RUN | {"complete": False},
    findings=(OVERFLOW, UNDERFLOW),
    rules=_outcomes(
        PD101=(Status.FAILED, "blocks.3.attn at step 37"),
        PD201=(Status.FAILED, "1 tensor above 5 %"),
        PD103=(Status.INDETERMINATE, "no loss was recorded"),
    ),
    recorder=RECORDER,
)
CLEAN = Diagnosis(run=RUN, findings=(), rules=_outcomes(), recorder=RECORDER)
UNKNOWN = dataclasses.replace(
    CLEAN,
    rules=_outcomes(PD103=(Status.INDETERMINATE, "1,024 rows were dropped (queue_full)")),
    recorder={"overhead_fraction": None, "dropped": {"queue_full": 1024}, "errors": ["disk full at step 12"]},
)
