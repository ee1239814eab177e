"""What holds logits down, with the largest logit that each change would leave."""

from __future__ import annotations

import math

from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.families.growth.logit_growth_histories import LogitHistory
from precdoctor.diagnosis.survey.rows import Key

#: Gemma 2's caps: of attention logits, and of those of the output.
CAPS = {"attention": 50.0, "output": 30.0, "router": 30.0}
#: Coefficients of PaLM's z-loss (output) and ST-MoE's (router).
_Z_LOSS = {"output": 1e-4, "router": 1e-3}
#: What Kimi K2's clip holds attention logits at.
CLIP = 100.0
#: Heads whose width is not known are taken to be this wide at most.
_WIDEST = 256


def cures(key: Key, history: LogitHistory, slope: float | None) -> tuple[Prescription, ...]:
    """The changes for its role, the most certain first.

    Args:
        key: of the softmax.
        history: its logits.
        slope: binades per step over the newer half of the steps; None where there is no trend.
    """
    level = history.last
    if history.role == "attention":
        slower = () if slope is None else (_rate(key, slope),)
        return (_norm(key, history, level), _clip(key, level), *slower)
    return (_z_loss(key, history, level), _cap(key, history, level))


def _predicted(level: float, to: float) -> dict[str, dict[str, float]]:
    return {"max_logit": {"from": float(f"{level:.4g}"), "to": float(f"{to:.4g}")}}


def _norm(key: Key, history: LogitHistory, level: float) -> Prescription:
    """With queries and keys of RMS 1 and the usual scale no logit is above the root of the head's width."""
    known = key[3].startswith("sdpa") and len(history.shape) == 4  # a query; else the scores themselves
    width = history.shape[-1] if known else _WIDEST
    to = min(level, math.sqrt(width))
    heads = "" if known else f" in heads up to {_WIDEST} wide"
    return Prescription(
        title=f"normalise queries and keys per head (qk-norm), with scores over the root of the width: largest logit "
        f"{level:.3g} -> {to:.3g} at gain 1{heads}",
        change={"module": key[1], "qk_norm": "rms"},
        predicted=_predicted(level, to),
        snippet=(
            "import torch.nn.functional as F\n\n"
            f"# in {module_expression(key[1])}, before the scores; with a learnt gain per head in front\n"
            "q = F.rms_norm(q, q.shape[-1:])\n"
            "k = F.rms_norm(k, k.shape[-1:])\n"
        ),
    )


def _clip(key: Key, level: float) -> Prescription:
    factor = math.sqrt(min(1.0, CLIP / level))
    to = min(level, CLIP)
    words = f"now by {factor:.3g}, " if factor < 1.0 else ""
    return Prescription(
        title=f"scale the query and key weights down whenever a logit passes {CLIP:g} (qk-clip): {words}"
        f"largest logit {level:.3g} -> {to:.3g}",
        change={"module": key[1], "qk_clip": CLIP, "factor": factor},
        predicted=_predicted(level, to),
        snippet=(
            "import torch\n\n"
            f"# after optimizer.step(), on both projections of {module_expression(key[1])}; biases as well\n"
            "with torch.no_grad():\n"
            "    for projection in (query_projection, key_projection):\n"
            f"        projection.weight *= min(1.0, {CLIP!r} / largest_logit) ** 0.5\n"
        ),
    )


def _rate(key: Key, slope: float) -> Prescription:
    """A step of Adam is as large as its rate, whatever the gradient."""
    now = 100.0 * slope
    return Prescription(
        title=f"a tenth of the learning rate for the query and key projections: {now:.3g} -> {now / 10.0:.2g} binades "
        "per 100 steps",
        change={"module": key[1], "lr_factor": 0.1, "parameters": "query and key projections"},
        predicted={"binades_per_100_steps": {"from": float(f"{now:.3g}"), "to": float(f"{now / 10.0:.3g}")}},
        snippet=(
            "import torch\n\n"
            "slow = [*query_projection.parameters(), *key_projection.parameters()]\n"
            "known = {id(p) for p in slow}\n"
            "rest = [p for p in model.parameters() if id(p) not in known]\n"
            "optimizer = torch.optim.AdamW([{'params': rest}, {'params': slow, 'lr': lr / 10}], lr=lr)\n"
        ),
    )


def _z_loss(key: Key, history: LogitHistory, level: float) -> Prescription:
    weight = _Z_LOSS[history.role]
    added = weight * level**2
    return Prescription(
        title=f"add a z-loss, {weight:g} times the squared logsumexp: about {added:.2g} at logits of {level:.3g}",
        change={"module": key[1], "z_loss": weight},
        predicted={"loss_added": float(f"{added:.3g}")},
        snippet=f"loss = loss + {weight!r} * logits.float().logsumexp(-1).square().mean()\n",
    )


def _cap(key: Key, history: LogitHistory, level: float) -> Prescription:
    cap = CAPS[history.role]
    to = cap * math.tanh(level / cap)
    return Prescription(
        title=f"cap the logits softly at {cap:g}: {level:.3g} -> {to:.3g}",
        change={"module": key[1], "logit_cap": cap},
        predicted=_predicted(level, to),
        snippet=f"import torch\n\nlogits = {cap!r} * torch.tanh(logits / {cap!r})\n",
    )
