"""PD706: a cast that loses most of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from precdoctor.diagnosis.analyses.scan_effects import EFFECT, effect_words, has_effect
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, facts, short_name
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format

PAGE = RulePage(
    finds="""
Four kinds of casts in the forward pass, in deep scans (`record --deep-scan`).

Range: the cast flushes to zero, clips to the largest number or sends to infinity most of the tensor, by magnitude: sum
|x - cast(x)| over sum |x|. The loss must matter: the scan carries the right values along in FP64 to the first result
that is mostly made of something else, and the lost part must make up `effect` of it. A bias of 1e-8 added to
activations of 1 is not reported, nor is a zero-initialised layer in the first steps of a warm-up, a tail of tiny
probabilities, or a mask of the most negative number that becomes -Inf.

Integers: positions, indices or counts that are cast to BF16 (exact up to 256) or FP16 (up to 2048), or made in it by
`arange`, so that distinct integers become the same number. So do indices that are read from a tensor of floats
(`batch[:, 0].long()`, perhaps behind `- first`, then an embedding or a lookup, perhaps modulo its size); FP32 is exact
up to 16,777,216. There the finding counts which integers of their range the format holds; of a range beyond 2^20, of so
many around the median. If the log shows the cast of integers whose result is read, the finding is about that cast.

Bytes and 16-bit integers that wrap round (`a - b` of two images), and floats that are cast to integers beyond their
range, count if `wrapped` of the elements are other numbers and an op reads them as floats.

Features: data without a gradient that is cast to BF16 or FP16 before it is normalised (longitudes in one town, years,
pressures), so that `rounded` of the variance of a feature is rounding error. A feature is an index of the last
dimension, of images a channel. In a module three in ten of the features must be like that.

Casts of gradients, buffers and data outside of modules are measured in the same way, without their effect. A copy that
no op of the step reads, such as the halved weights of a checkpoint, does not count.
""",
    matters="""
A tensor that is zero after the cast takes no part in anything, and its gradient is as small. Positions that collide
make a model that cannot distinguish neighbours, from token 256 on. In BF16 the longitudes from -122.7 to -122 are two
numbers.
""",
    example="""
    t = torch.arange(1000).to(torch.bfloat16)   # 1000 time steps, 507 different numbers
    y = x / (norm * 1e-9).half()                # the divisor is zero
""",
    remedy="""
Scale before the cast and back after it, by the power of two in the finding: it lifts 99 % of the magnitude over the
format's subnormals and leaves a binade below its maximum. Where no power of two does both, keep the tensor in a format
whose range holds it. Keep integers in an integer type or in FP32 until after the sine, the embedding or the
division. Normalise data in FP32, and cast the result.
""",
    confidence="""
0.95: every element was compared before and after, and the loss was followed to the result it feeds. 0.7 when only one
scanned step shows it, or when it could not be followed.
""",
    references=(
        "IEEE 754-2019, section 4.3 (rounding); integers are exact up to 2 to the power of the significand's bits",
        "OCP 8-bit Floating Point Specification (OFP8), revision 1.0: E4M3 ends at 448",
    ),
)

#: Share of the magnitude below the bulk of a tensor: the recorder's ``bulk`` holds 99 % of it.
_TAIL = 0.01
#: In a module, where what is cast may be an embedding of time whose slowest cosine is constant: least share of rounded
#: features. Of 32 cosines and sines up to a period of 10,000, 8 are over ten steps of time, and 4 over a hundred.
_MANY_FEATURES = 0.3


def check(view: RunView, options: Options) -> Checked:
    """One finding per line of code."""

    def guilty(fact: Fact) -> float:
        """Return the share that the cast wraps, makes equal or loses; 0 below its limit."""
        if "wrapped" in fact.data:
            wrapped = fact.share("wrapped", "numel")
            return wrapped if wrapped >= options["wrapped"] else 0.0
        if "features_rounded" in fact.data:
            few = fact.phase != "script" and fact.share("features_rounded", "features") < _MANY_FEATURES
            rounded = fact.number("spread_lost")
            return rounded if rounded >= options["rounded"] and not few else 0.0
        if "distinct_before" in fact.data:
            collided = _collided_share(fact)
            return collided if collided >= _collision_limit(fact, options) else 0.0
        lost = fact.number("lost")
        return lost if lost >= options["lost"] and has_effect(fact, options["effect"]) else 0.0

    checked = check_facts(
        view, ("cast",), guilty, lambda g: _finding(g, options), seen="no cast that loses most of a tensor",
        flushes=lambda f: f.count("flushed") > f.count("clipped"),
    )  # fmt: skip
    return replace(checked, findings=_under_their_cast(checked.findings))


def _under_their_cast(findings: Sequence[Finding]) -> list[Finding]:
    """List findings about integers that are read back as indices in the finding about the cast of these integers."""
    casts = {s.place: f for f in findings if "cast_at" not in f.evidence and (s := f.location.source) is not None}
    read = [f for f in findings if f.evidence.get("cast_at") in casts]
    kept = []
    for finding in findings:
        if finding in read:
            continue
        own = [f for f in read if casts[f.evidence["cast_at"]] is finding]
        consequences = [{"code": f.code, "name": f.name, "message": f.title} for f in own]
        more = {"consequences": consequences} if consequences else {}
        kept.append(replace(finding, evidence={**finding.evidence, **more}))
    return kept


def _is_read_back(fact: Fact) -> bool:
    """Return whether narrow floats are used as indices; the integers that they were before their cast are unknown."""
    return "read_by" in fact.data


def _collision_limit(fact: Fact, options: Options) -> float:
    """Return the least share of lost integers that is reported."""
    return options["missing"] if _is_read_back(fact) else options["collided"]


def _collided_share(fact: Fact) -> float:
    """Return the share of the distinct integers that became equal to another one."""
    return 1.0 - fact.share("distinct_after", "distinct_before")


def _wrapped_finding(group: Group, options: Options) -> Finding:
    """Return the finding about integers that their type cannot hold."""
    fact = group.worst
    to, share = text(fact.data.get("to")), percent(fact.share("wrapped", "numel"))
    op, there = fact.where("read_by")
    instance = f"{fact.number('seen'):.10g} where it should be {fact.number('exact'):.10g}"
    return group.finding(
        RULE,
        title=f"{share} of the integers that {fact.short} makes {fact.place_words} do not fit {to}: {instance}"
        f"{fact.line}",
        message=f"{fact.op_words} made {fact.count('wrapped'):,} of {fact.count('numel'):,} elements that {to} cannot "
        f"hold ({share}, limit {percent(options['wrapped'])}), for instance {instance}. {short_name(op)}{there} reads "
        f"them as floats.{group.elsewhere_words}",
        certain=(0.9, "every element was compared with 64-bit arithmetic"),
        limits={"wrapped": options["wrapped"]},
        prescription=Prescription(
            title=f"widen first{fact.own_line}: wrong elements {fact.count('wrapped'):,} -> 0",
            change={"cast": {"from": to, "to": "float32"}, "op": fact.op},
            predicted={"wrong_elements": {"from": fact.count("wrapped"), "to": 0}},
            snippet="difference = a.float() - b.float()  # before the arithmetic, not after it\n",
        ),
    )


def _finding(group: Group, options: Options) -> Finding:
    if "wrapped" in group.worst.data:
        return _wrapped_finding(group, options)
    if "features_rounded" in group.worst.data:
        return _features_finding(group, options)
    fact = group.worst
    before, after = text(fact.data.get("from")), text(fact.data.get("to"))
    if "distinct_before" in fact.data:
        effect = f"{fact.count('distinct_before'):,} integers become {fact.count('distinct_after'):,} different numbers"
        measured = f"up to {fact.number('largest'):,.0f}, {percent(_collided_share(fact))} collide"
        if _is_read_back(fact):
            among = f"{fact.count('distinct_before'):,} integers from {fact.number('least'):,.0f} to"
            effect = f"only {fact.count('distinct_after'):,} of the {among} {fact.number('largest'):,.0f} can occur"
            op, there = fact.where("read_by")
            measured = f"{before} holds no others; they are used as indices by {short_name(op)}{there}"
        least = _collision_limit(fact, options)
        limit, limits = percent(least), {"missing" if _is_read_back(fact) else "collided": least}
    else:
        effect = f"{percent(fact.number('lost'))} of its magnitude is lost"
        measured = (
            f"{fact.count('flushed'):,} of {fact.count('nonzero'):,} non-zero elements flushed to zero, "
            f"{fact.count('clipped'):,} clipped or overflowed, largest {fact.number('amax'):.4g}"
        )
        limit, limits = percent(options["lost"]), {"lost": options["lost"], "effect": options["effect"]}
    made = _maker(group)
    made_words = f" The integers were cast to {before}{made.line}." if made is not None else ""
    found = group.finding(
        RULE,
        title=f"cast from {before} to {after} {fact.place_words}: {effect}{fact.line}",
        message=f"At step {fact.step}, a tensor of {fact.count('numel'):,} elements is cast from {before} to "
        f"{after}{fact.line} {fact.place_words}: {effect} ({measured}; limit "
        f"{limit}).{made_words}{effect_words(fact, options['effect'])}{group.elsewhere_words}",
        certain=_certainty(group),
        limits=limits,
        prescription=_prescription(fact, after, are_indices=_are_indices(group)),
    )
    if made is None or made.source is None:
        return found
    return replace(found, evidence={**found.evidence, "cast_at": made.source.place})


def _maker(group: Group) -> Fact | None:
    """Return the cast of integers whose result a group of facts reads back as indices; None if the log has none."""
    read = [f for f in group.facts if _is_read_back(f)]
    return next((c for c in facts(group.view, "cast") if any(_is_read_by(c, f) for f in read)), None)


def _are_indices(group: Group) -> bool:
    """Return whether the integers that a group of facts casts are used as indices afterwards."""
    read = [f for f in facts(group.view, "cast") if _is_read_back(f)]
    return any(_is_read_by(cast, f) for cast in group.facts for f in read)


def _is_read_by(cast: Fact, read: Fact) -> bool:
    """Return whether ``read`` uses integers as indices that ``cast`` has made floats of.

    The format, the number of elements and the range must be the same; the range only if the line cast one tensor.
    """
    if (
        _is_read_back(cast)
        or "distinct_before" not in cast.data
        or (cast.process, cast.step) != (read.process, read.step)
    ):
        return False
    if cast.data.get("to") != read.data.get("from") or cast.count("numel") != read.count("numel"):
        return False
    return cast.count("times") > 1 or cast.number("largest") == read.number("largest")


def _features_finding(group: Group, options: Options) -> Finding:
    """Return the finding about features whose values differ by less than the format resolves."""
    fact = group.worst
    before, after = text(fact.data.get("from")), text(fact.data.get("to"))
    lost, values = fact.number("spread_lost"), fact.count("values_after")
    mean, deviation = fact.number("mean"), fact.number("deviation")
    which = f"feature {fact.count('feature')}"
    return group.finding(
        RULE,
        title=f"cast from {before} to {after} {fact.place_words}: {plural(values, 'value')} left of {which}{fact.line}",
        message=f"At step {fact.step}, data of {fact.count('numel'):,} elements is cast from {before} to "
        f"{after}{fact.line} {fact.place_words}. {which.capitalize()} has mean {mean:.6g} and standard deviation "
        f"{deviation:.3g}; of its {fact.count('values_before'):,} different values {values:,} are left, and "
        f"{percent(lost)} of its variance is rounding error (limit {percent(options['rounded'])}). In "
        f"{fact.count('features_rounded'):,} of {plural(fact.count('features'), 'feature')} it is a tenth or "
        f"more.{group.elsewhere_words}",
        certain=(0.95, "every element was compared before and after"),
        limits={"rounded": options["rounded"]},
        prescription=Prescription(
            title=f"normalise in FP32 before the cast{fact.own_line}: variance of {which} lost {percent(lost)} -> 0 %",
            change={"subtract": mean, "divide_by": deviation, "to": after},
            predicted={"variance_lost": {"from": lost, "to": 0.0}},
            snippet=(
                "import torch\n\n"
                "# mean and std of each feature, of the training data, in FP32\n"
                f"x = ((x - mean) / std).to(torch.{after})\n"
            ),
        ),
    )


def _certainty(group: Group) -> tuple[float, str]:
    why = "every element was compared before and after"
    # Integers that have become equal stay equal wherever they are used.
    return (0.95, why) if "distinct_before" in group.worst.data else group.certainty(0.95, why)


def _prescription(fact: Fact, after: str, *, are_indices: bool) -> Prescription:
    if are_indices or "distinct_before" in fact.data:
        return _keep_integers(fact, after, are_indices=are_indices)
    lost, fmt = fact.number("lost"), known_format(after)
    exponent = _exponent(fact, fmt) if fmt is not None else None
    if exponent is None:
        return Prescription(
            title=f"cast to BF16{fact.own_line}, or not at all: its range is that of FP32; magnitude lost "
            f"{percent(lost)} -> 0 %",
            change={"cast": {"from": after, "to": "bfloat16"}},
            predicted={"magnitude_lost": {"from": lost, "to": 0.0}},
            snippet=f"import torch\n\ny = x.to(torch.bfloat16)  # was {after}\n",
        )
    amax = fact.number("amax")
    return Prescription(
        title=f"scale by 2^{exponent} before the cast{fact.own_line} and back after it: largest element "
        f"{amax:.3g} -> {math.ldexp(amax, exponent):.3g}, magnitude lost {percent(lost)} -> at most {percent(_TAIL)}",
        change={"scale_before_cast": 2.0**exponent, "to": after},
        predicted={"magnitude_lost": {"from": lost, "to": _TAIL}},
        snippet=f"import torch\n\ny = (x * 2.0**{exponent}).to(torch.{after})  # times 2.0**{-exponent} after use\n",
    )


def _keep_integers(fact: Fact, after: str, *, are_indices: bool) -> Prescription:
    """Prescribe to keep integers that this cast makes equal, or an earlier one before they were used as indices.

    ``are_indices``: they are used as indices after this cast; then to leave them out of a cast of the whole batch.
    """
    narrow, wide, kept = after, "float32", "integers in FP32"
    snippet = f"angles = positions.float()[:, None] * frequencies  # cast sines and cosines to {after} instead\n"
    if are_indices:
        wide, kept = text(fact.data.get("from")), "indices as integers"
        snippet = (
            f"import torch\n\nx = x.to(torch.{after}) if x.is_floating_point() else x  # each tensor of the batch\n"
        )
    elif _is_read_back(fact):
        narrow = text(fact.data.get("from"))
        wide, kept = ("int64", "integers as integers") if narrow == "float32" else (wide, kept)
        snippet = "indices = table.long()  # before the batch is cast; keep them beside it, as integers\n"
    left, all_of_them = fact.count("distinct_after"), fact.count("distinct_before")
    return Prescription(
        title=f"keep the {kept}{fact.own_line}: different numbers {left:,} -> {all_of_them:,}",
        change={"cast": {"from": narrow, "to": wide}},
        predicted={"different_numbers": {"from": left, "to": all_of_them}},
        snippet=snippet,
    )


def _exponent(fact: Fact, fmt: Format) -> int | None:
    """Exponent of the power of two nearest to 1 that lifts the bulk over the subnormals and leaves a binade over amax.

    None if no power of two does both, or none is needed.
    """
    amax, bulk = fact.number("amax"), fact.number("bulk")
    bulk = fact.number("amin_nonzero") if math.isnan(bulk) else bulk
    if not (0.0 < bulk < math.inf and 0.0 < amax < math.inf):
        return None
    least, most = math.ceil(math.log2(fmt.min_normal / bulk)), math.floor(math.log2(fmt.max / amax)) - 1
    exponent = min(max(least, 0), most)
    return exponent if exponent and exponent >= least else None


def cast_of_angles(cause: Finding, effect: Finding) -> bool:
    """Return whether the angles of ``effect`` come from this cast: it is nearer to the fault than their sine."""
    return same_module(cause, effect) and effect.evidence.get("effect") == "angles"


RULE = Rule(
    code="PD706",
    name="lossy-cast",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        fraction("lost", 0.5, "Least share of a tensor's sum of magnitudes that is lost.", "Half: most of it."),
        EFFECT,
        fraction("collided", 0.25, "Least share of distinct integers that become equal to another one.",
                 "Chosen empirically: 64 random integers below 1000 stay below it; 512 positions in BF16 reach it."),
        fraction("missing", 0.1, "Least share of a range of indices that their format cannot hold.",
                 "BF16 lacks a tenth of the positions up to 320, FP16 of those up to 2560."),
        fraction("rounded", 0.25, "Least share of a feature's variance that is rounding error.",
                 "A quarter; features whose mean is below 200 standard deviations stay below it in BF16."),
        fraction("wrapped", 0.05, "Least share of integers beyond the range of their type.",
                 "Chosen empirically: images that are subtracted as bytes wrap in half of their pixels."),
    ),
    sampled_steps=False,
    explains=when(cast_of_angles, "PD703"),
    check=check,
)  # fmt: skip
