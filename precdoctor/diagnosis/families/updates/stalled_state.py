"""PD509: a tensor that outlives the step and is too narrow for what is written to it: no bit of it changes."""

from __future__ import annotations

import math
from collections.abc import Hashable

from precdoctor.diagnosis.advice.wide_weights import wide_weights
from precdoctor.diagnosis.analyses.parameters import count_of
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, is_optimizers
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import same_module, when, while_it_lasts
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.updates.stalled_state_fingerprints import merged_finding, unchanged_prints
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP32

PAGE = RulePage(
    finds="""
A tensor that outlives the step (a moment of a hand-written optimizer, an average of weights, a running statistic, a
gradient buffer, a counter, a factor that is multiplied down) is written to in BF16 or FP16 and keeps its bits.

A deep scan (`record --deep-scan`) does the same arithmetic in FP64: `add_`, `mul_`, `lerp_`, `addcmul_`, `copy_` of a
rounded result, their `_foreach_` forms, and `state = state * b + x * (1 - b)`. At least `share` of the elements that
FP64 moves must stay, on two scanned steps or more; these must include the last one, or be most of all. FP32 counts only
where whole numbers beyond 2^24 stand still.

On all recorded steps, fingerprints show whether a bit changed. It is a finding if none did in
`min_writes` recorded writes to

- an average of weights: no gradient reaches it, and the trained weight of the same name and shape went on changing.
  Such a weight is recorded only after a write, so a frozen layer does not count, and neither does a copy that is made
  now and then;
- the `running_mean` or `running_var` of a norm while the other of the two moved, so that averaging is switched on;
- a count: a buffer of whole numbers that rose from write to write up to the value at which a sum of like terms stalls
  (256 in BF16, 2048 in FP16, times the term), and has stayed there.

Weights count only if no torch optimizer steps in the run, or if they are a rounded copy of FP32 weights that are filled
from them before each step; PD501 covers the others. Weight decay (`mul_` of weights in
BF16 or FP16) counts in any run if it should have taken `decayed` of them by the end of it. PD505 covers the states of
torch's own optimizers. Stochastic rounding, and sums whose remainder the script keeps (Kahan), are not reported.
""",
    matters="""
An update below half a unit in the last place is dropped, and so is the next one. An average moves by (1 - decay) of the
distance to the weight: with a decay of 0.999 that is below half an ulp of BF16 unless the weight is three times as
large as its average, so the teacher stays what it was initialised to, and evaluation on averaged weights is evaluation
of the first step. A second moment never decays, a count stops at 256 (BF16) or 2048 (FP16), and what is divided by it
drifts away from the data. A batch norm trains on the statistics of each batch and shows nothing; evaluation uses the
running ones. Nothing is ever NaN.
""",
    example="""
    slow = [p.detach().bfloat16() for p in model.parameters()]
    for s, p in zip(slow, model.parameters()):
        s.lerp_(p.to(s.dtype), 1 - 0.999)   # below half an ulp for nearly every element
""",
    remedy="""
Create the state in FP32 and cast it where it is used; casting what is stored in 16 bits mends nothing. It costs two
more bytes per element. An optimizer that gives its states the format of the weights needs FP32 weights. Where memory
forbids, round stochastically or keep the remainder in a second 16-bit tensor (Kahan summation).
""",
    confidence="""
0.9: bits before and after were compared, in a scan also with the same arithmetic in FP64 on the same numbers. By
fingerprints 0.75 when the average is of one tensor only, and 0.85 for a count, which the script could also have stopped
there.
""",
    references=(
        "Tarvainen and Valpola, Mean teachers are better role models, arXiv:1703.01780",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192 (updates below half an ulp)",
        "Higham, Accuracy and Stability of Numerical Algorithms, chapter 4 (compensated summation)",
    ),
)
#: How many other ops a finding names.
_MAX_OTHERS = 3
_NOUNS = {"weight": "weights", "average": "an average of weights", "gradient": "a gradient"}


def check(view: RunView, options: Options) -> Checked:
    """One finding for each state that a scan saw; what fingerprints show is added to the first, or is one by itself."""
    scanned, logged = _scanned(view, options), unchanged_prints(RULE, view, options)
    if scanned.findings and logged.findings:
        first, *others = scanned.findings
        return Checked([merged_finding([first, *logged.findings]), *others], f"{scanned.reason}; {logged.reason}")
    if scanned.findings or logged.findings:
        return scanned if scanned.findings else logged
    checked = [c.reason for c in (scanned, logged) if c.status is not Status.NOT_APPLICABLE]
    return Checked((), "; ".join(checked)) if checked else scanned


def _scanned(view: RunView, options: Options) -> Checked:
    """One finding for each state, over all lines that write to it; if the state has no name, for each line."""
    stepped = any(s.optimizer for steps in view.timeline.values() for s in steps)

    def guilty(fact: Fact) -> float:
        """Return the share of elements that the write leaves unchanged; 0 if it is not this rule's to report."""
        if _target(fact) == "weight" and _short(fact) == "mul":
            if _decay(fact, view.last_step + 1) < options["decayed"]:
                return 0.0
        elif is_optimizers(fact) or (_target(fact) == "weight" and stepped and not _short(fact).endswith("copy")):
            return 0.0
        share = fact.share("stalled", "moved")
        return share if share >= options["share"] else 0.0

    def lasts(group: Group) -> bool:
        """Return whether the state stalls on two scans or more, and either on the last scan or on most.

        Otherwise it moves later: an average (a teacher) begins to move once its weights have moved away.
        """
        done = group.done_steps
        still = [s for s in group.steps if s in done]
        return len(still) > 1 and (max(done) in still or 2 * len(still) > len(done))

    return check_facts(
        view, ("stalled",), guilty, lambda g: _finding(view, g, options), seen="no state that stands still", keep=lasts,
        same=_subject,
    )  # fmt: skip


def _subject(fact: Fact) -> Hashable:
    """Return the key of the tensor written to: state or average by name and file, any other tensor by source line."""
    state, at = text(fact.data.get("state")), fact.source
    named = state or _target(fact) == "average"
    place = ("", 0) if at is None else (at.file, 0 if named else at.line)
    return fact.root, _target(fact), state, fact.data.get("dtype"), place, "" if at is not None else fact.module


def _other_ops(group: Group) -> str:
    """Name the other ops that leave the tensor unchanged, as a sentence; empty if there are none."""
    worst, seen = group.worst, []
    for fact in group.facts:
        words = f"`{_short(fact)}`{fact.line if fact.line != worst.line else ''}"
        if (fact.op, fact.line) != (worst.op, worst.line) and words not in seen:
            seen.append(words)
    leave = "leaves" if len(seen) == 1 else "leave"
    return f" {' and '.join(seen[:_MAX_OTHERS])} {leave} it unchanged, too." if seen else ""


def _target(fact: Fact) -> str:
    """Return what the op writes to: ``weight``, ``average``, ``gradient``, ``state``."""
    return text(fact.data.get("target"))


def _short(fact: Fact) -> str:
    """The op's short name, without ``foreach_``: ``mul`` of ``_foreach_mul_``."""
    return fact.short.removeprefix("foreach_")


def _decay(fact: Fact, steps: int) -> float:
    """Return the share of a weight that this decay would take away in ``steps`` steps if no write were lost."""
    each = fact.number("move") / fact.number("value") if fact.number("value") > 0 else 0.0
    return float(1.0 - max(0.0, 1.0 - each) ** steps)


def _bits_missing_in_fp32(fact: Fact, missing: float) -> float:
    """Return how many bits below half an ulp of an FP32 element the write is; ``missing``: those below its own."""
    fmt, value, move = known_format(text(fact.data.get("dtype"))), fact.number("value"), fact.number("move")
    if fmt is None or value >= fmt.min_normal or move <= 0.0:
        return missing - (FP32.mantissa_bits - (fmt.mantissa_bits if fmt is not None else 0))
    normal = max(value, FP32.min_normal)  # below it, numbers are as far apart as just above it
    return math.floor(math.log2(normal)) - FP32.mantissa_bits - 1 - math.log2(move)


def _finding(view: RunView, group: Group, options: Options) -> Finding:
    fact = group.worst
    dtype, name, state = (text(fact.data.get(key)) for key in ("dtype", "name", "state"))
    share, missing = fact.share("stalled", "moved"), fact.number("bits_missing")
    own = f" (`{state}` of `{name}`)" if state else f" (`{name}`)" if name else ""
    what = _NOUNS.get(_target(fact), "a state") + own
    left, short = max(0.0, _bits_missing_in_fp32(fact, missing)), _short(fact)
    anew = _target(fact) == "weight" and short == "copy"
    gone = " The FP32 copy is made from them on every step: what they did not take up is gone." if anew else ""
    wide = "float64" if dtype == "float32" else "float32"
    follows = bool(state) and dtype != FP32.dtype and count_of(view, (dtype,), trained=True) > 0
    if follows:
        mend, snippet = "keep FP32 weights, whose format the optimizer gives its states", wide_weights(view, (dtype,))
    elif anew:
        mend = f"fill its FP32 copy once{fact.own_line}"
        snippet = "masters = [p.detach().float() for p in model.parameters()]  # once, before the loop\n"
    elif _target(fact) == "weight":
        mend = f"keep it in {wide}{fact.own_line}"
        snippet = f"import torch\n\nmodel.to(torch.{wide})  # once, before training; autocast for the computation\n"
    else:
        mend = f"create it in {wide}, and write to it in {wide}{fact.own_line}"
        snippet = _created_in(wide, _target(fact))
    return group.finding(
        RULE,
        title=f"{short} changes nothing: {percent(share)} of the elements of {what} stand still in {dtype}{fact.line}",
        message=f"{fact.op_words} left {percent(share)} of the elements of {what} in {dtype} unchanged (limit "
        f"{percent(options['share'])}), though FP64 moves them: values of {fact.number('value'):.3g} by "
        f"{fact.number('move'):.3g}, {missing:.1f} bits below half a unit in the last place (medians).{gone} "
        f"{plural(fact.count('tensors'), 'tensor')} on this line.{_other_ops(group)}{group.elsewhere_words}",
        certain=(0.9, "bits before and after were compared with the same arithmetic in FP64"),
        limits={"share": options["share"]},
        prescription=Prescription(
            title=f"{mend}: bits missing {max(missing, 0.0):.1f} -> {left:.1f}",
            change={"weight_dtype" if follows else "state_dtype": {"from": dtype, "to": wide}, "op": fact.op},
            predicted={"bits_missing": {"from": max(missing, 0.0), "to": left}},
            snippet=snippet,
        ),
    )


def _created_in(wide: str, target: str) -> str:
    """Return lines that create a state in the format ``wide``; casting a copy of it later mends nothing."""
    created = "state = torch.zeros_like(x, dtype=torch.{})  # where it is created; cast it where it is read\n"
    if target == "average":
        created = "average = copy.deepcopy(model).to(torch.{})  # where it is created; cast it where it is read\n"
    elif target == "gradient":
        created = "sums = [torch.zeros_like(p, dtype=torch.{}) for p in model.parameters()]  # where they are created\n"
    module = "import copy\n\n" if target == "average" else ""
    of_weights = "# an average of weights: p.detach().to(torch.{}, copy=True)\n" if target == "state" else ""
    return f"{module}import torch\n\n{created}{of_weights}".replace("{}", wide)


def same_line(cause: Finding, effect: Finding) -> bool:
    """Return whether both findings are about the same line of code."""
    return cause.location.source is not None and cause.location.source == effect.location.source


RULE = Rule(
    code="PD509",
    name="stalled-state",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        fraction("share", 0.6, "Least share of unchanged elements among those that FP64 moves."),
        fraction("decayed", 0.1, "Least share of the weights that a decay should take during the run.",
                 "Chosen empirically: weights a tenth too large."),
        RuleOption("min_writes", 6.0, "recorded steps", "Least number of writes by which a fingerprint has to change.",
                   "Chosen empirically: a weight that is at rest for one step is not at rest for six.", 1.0),
    ),
    sampled_steps=False,
    explains={**when(same_line, "PD706"), **when(while_it_lasts, "PD605"), **when(same_module, "PD701")},
    check=check,
)  # fmt: skip
