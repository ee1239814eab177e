"""PD410: long sums of FP8 products in the narrow accumulator of `use_fast_accum`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.fp8.fp8_casts import KIND, operands
from precdoctor.diagnosis.survey.frames import PARAMETER, at, groups, lasts, parameters
from precdoctor.diagnosis.survey.measures import format_values
from precdoctor.diagnosis.survey.rows import integer, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.accumulation import Accumulator, Factor, SumError, sum_error
from precdoctor.numerics.formats import format_of_dtype

PAGE = RulePage(
    finds="""
Products of float8 tensors (`torch._scaled_mm`) with `use_fast_accum=True` whose sums are so long, and so much of one
sign, that the accumulator costs more than the casts to FP8. The length K of the sums and the flag are recorded at the
product, and the means and root mean squares of the two operands show how far the terms have one sign. With these the
rule simulates the sums in the accumulator of a Hopper unit: 14 significant bits, 32 products aligned at a time,
truncated. It reports a loss of `lost_bits` beyond rounding the operands that is also `relative_error` of the sums. The
finding is a warning on Ada and Hopper devices (compute capability 8.9 and 9.0), and information in a run on a CPU,
which adds up in FP32 whatever the flag; other devices are not judged. `precdoctor whatif RUN --accumulator 14:128`
bounds the error for every sum of the model, without recorded means or flags.
""",
    matters="""
Truncation always errs towards zero, so its errors add up over terms of one sign: 1 % at K = 1024, 5 % at 4096, 18 % at
16 384. Every output of the layer is too small by that share, and a gradient points elsewhere. Terms that cancel (a
weight with mean zero) hide it: there even K = 65 536 is off by 0.7 %, a fifth of what the casts cost.
""",
    example="""
Probabilities times features behind a ReLU, K = 4096, no term is negative:

    pooled = torch._scaled_mm(weights8, features8, sw, sf, out_dtype=torch.bfloat16, use_fast_accum=True)

After the casts such a sum is good to 9 significant bits; the accumulator leaves 4, and the sum is 7 % too small.
""",
    remedy="""
Set `use_fast_accum=False` for the listed products: the unit's sum then goes to an FP32 register every 128 terms, which
costs a few percent of speed. Transformer Engine and torchao do so in the backward pass by default. Or subtract the mean
of an operand before the cast, and add its product in FP32.
""",
    confidence="""
0.7 on Ada and Hopper: flag, length and means are recorded, but the accumulator is a model of the published behaviour,
and operands are simulated as independent normal numbers. Means of single rows or columns, which the whole tensor does
not show, make the error larger. 0.6 in a run on another device.
""",
    references=(
        "DeepSeek-V3 Technical Report, arXiv:2412.19437, sections 3.3.2 and 3.5.2 (14 bits; promotion every 128)",
        "Zhang et al., SageAttention2, arXiv:2411.10958 (the accumulator of FP8 products on Ada and Hopper)",
        "NVIDIA cuBLAS documentation, CUBLASLT_MATMUL_DESC_FAST_ACCUM",
    ),
)
#: Compute capabilities whose FP8 units have the narrow accumulator.
_NARROW = ((8, 9), (9, 0))
#: A Hopper unit, as it is and with promotion every 128 terms (references of the page).
_FAST, _PROMOTED = Accumulator(), Accumulator(promote=128)
#: Number of simulated products, those with the largest drift, to bound the time.
_SIMULATED = 8
#: Number of newest steps whose operands are read, to bound the time.
_STEPS = 8
_COLUMNS = ("module_class", "phase", "format")


@dataclass(frozen=True)
class _Side:
    """One operand: its mean over the steps, and where it was recorded last."""

    module_class: str
    factor: Factor
    process: Process
    step: int


@dataclass(frozen=True)
class _Product:
    """A product with the fast flag.

    Attributes:
        names: of the operands.
        terms: length of its sums, K.
    """

    root: str
    module: str
    backward: bool
    names: tuple[str, str]
    sides: tuple[_Side, _Side]
    terms: int

    @property
    def coherence(self) -> float:
        """Mean of the terms over their root mean square."""
        return abs(self.sides[0].factor.mean * self.sides[1].factor.mean)

    @property
    def drift(self) -> float:
        """A measure that grows with the error of truncation: long sums of terms of one sign."""
        return self.terms * min(1.0, self.coherence * math.sqrt(self.terms))

    def error(self, accumulator: Accumulator) -> SumError:
        return sum_error(self.terms, (self.sides[0].factor, self.sides[1].factor), accumulator)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the product that loses most, the others above the limits as evidence."""
    noted = [p for process in view.processes for p in _noted(view.facts(process))]
    if not noted:
        return Checked.not_applicable("no product of float8 tensors was seen")
    fast = [p for p in noted if p.get("fast_accum")]
    if not fast:
        return Checked((), f"{plural(len(noted), 'product')} of float8 tensors, none with fast accumulation")
    device = view.any_facts.get("device")
    capability = _capability(device)
    if capability is not None and capability not in _NARROW:
        return Checked((), f"fast accumulation, on a device of compute capability {capability[0]}.{capability[1]}, "
                       "which is not known to have a narrow accumulator")  # fmt: skip
    products = _products(view, fast)
    if not products:
        return Checked((), f"{plural(len(fast), 'product')} with fast accumulation, of operands cast elsewhere")
    judged = sorted(products, key=lambda p: -p.drift)[:_SIMULATED]
    errors = [(p, p.error(_FAST)) for p in judged]
    limits = options["lost_bits"], options["relative_error"]
    guilty = [(p, e) for p, e in errors if e.lost_bits >= limits[0] and e.accumulated >= limits[1]]
    seen = (
        f"{plural(len(products), 'product')} with fast accumulation, the longest of {max(p.terms for p in products):,}"
    )
    if not guilty:
        worst = max(e.accumulated for _, e in errors)
        return Checked((), f"{seen} terms: {percent(worst)} off at most, at operands of these means")
    guilty.sort(key=lambda item: -item[1].lost_bits)
    finding = _finding(view, guilty, options, narrow=capability in _NARROW)
    return Checked([finding], f"bits are lost in {len(guilty):,} of {seen} terms", Status.FAILED)


def _noted(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the products in ``rank.json`` that have terms; the log may hold anything."""
    listed = facts.get("fp8_products")
    for product in listed if isinstance(listed, list) else ():
        if isinstance(product, Mapping) and (integer(product.get("terms")) or 0) > 0:
            yield product


def _capability(device: Any) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for any other."""
    if not isinstance(device, Mapping) or device.get("type") != "cuda":
        return None
    found = device.get("capability")
    if not isinstance(found, Sequence) or len(found) != 2:
        return 0, 0
    return integer(found[0]) or 0, integer(found[1]) or 0


def _products(view: RunView, noted: Sequence[Mapping[str, Any]]) -> list[_Product]:
    """Products whose operands were recorded; of those that differ only in length, the longest."""
    sides = _sides(view)
    found: dict[tuple[str, str, bool, tuple[str, str]], _Product] = {}
    for p in noted:
        names = p.get("operands")
        if not isinstance(names, Sequence) or len(names) != 2 or not all(isinstance(n, str) for n in names):
            continue
        root, module, terms = text(p.get("root")), text(p.get("module")), integer(p.get("terms")) or 0
        pair = str(names[0]), str(names[1])
        both = [side for n in pair if (side := sides.get((root, module, n))) is not None]
        key = root, module, bool(p.get("backward")), pair
        if len(both) == 2 and (key not in found or found[key].terms < terms):
            found[key] = _Product(*key, (both[0], both[1]), terms)
    return list(found.values())


def _sides(view: RunView) -> dict[tuple[str, str, str], _Side]:
    rows = view.measured(("coherence",), (KIND,), columns=_COLUMNS, steps=view.kept_steps[-_STEPS:])
    known = rows["coherence"].notna() & ~np.isnan(format_values(rows, "max", "format"))
    rows = rows[known & (rows["phase"] != "recompute")]
    ids = groups(rows, PARAMETER)
    last = rows.iloc[lasts(ids)]
    means = rows["coherence"].groupby(ids).median()
    described = zip(last["module_class"].map(text), last["format"].map(format_of_dtype), means, at(last), strict=True)
    sides = (_Side(name, Factor(mean, fmt), *where) for name, fmt, mean, where in described)
    return dict(zip(parameters(last), sides, strict=True))


def _finding(view: RunView, guilty: Sequence[tuple[_Product, SumError]], options: Options, *, narrow: bool) -> Finding:
    product, error = guilty[0]
    side = product.sides[0]
    place, phase = product.module or product.root, "backward" if product.backward else "forward"
    verb, device = ("makes", "") if narrow else ("would make", " on an Ada or Hopper device")
    ratios = " and ".join(f"{s.factor.mean:.2f}" for s in product.sides)
    return RULE.finding(
        severity=Severity.WARNING if narrow else Severity.INFO,
        confidence=0.7 if narrow else 0.6,
        title=f"fast accumulation {verb} sums of {product.terms:,} FP8 products in `{place}` "
        f"{percent(error.accumulated)} wrong{device}",
        message=f"The {phase} pass of `{place}` multiplies its `{product.names[0]}` and `{product.names[1]}` with "
        f"`use_fast_accum=True` and adds up {product.terms:,} products. Means of {ratios} times the root mean square "
        f"give the terms one sign. A truncating accumulator of {_FAST.bits} bits {verb} the sums "
        f"{percent(error.accumulated)} wrong (limit {percent(options['relative_error'])}), the casts to FP8 "
        f"{percent(error.rounded)}: {error.lost_bits:.1f} significant bits are lost (limit {options['lost_bits']:g}). "
        f"{plural(len(guilty), 'product')} affected." + ("" if narrow else " This device adds up in FP32."),
        location=Location(
            product.root, product.module, side.module_class or None, KIND,
            Phase.BACKWARD if product.backward else Phase.FORWARD, side.process.rank, side.step,
        ),
        evidence={
            "terms": product.terms,
            "operands": list(product.names),
            "means_over_rms": [s.factor.mean for s in product.sides],
            "accumulation_error": error.accumulated,
            "limit": options["relative_error"],
            "rounding_error": error.rounded,
            "lost_bits": error.lost_bits,
            "products": [
                {"root": p.root, "module": p.module, "backward": p.backward, "operands": list(p.names),
                 "terms": p.terms, "accumulation_error": e.accumulated, "lost_bits": e.lost_bits}
                for p, e in guilty
            ],
            **_range(view, product),
            "confidence_reason": "flag, length and means are recorded; the accumulator is simulated",
        },
        prescriptions=(_prescription(product, error, place),),
    )  # fmt: skip


def _range(view: RunView, product: _Product) -> dict[str, Any]:
    """``range`` and ``path`` of the first operand."""
    wanted = product.root, product.module, KIND, product.names[0]
    operand = next((o for key, o in operands(view).items() if key[:4] == wanted and o.settled), None)
    return {} if operand is None else operand.evidence(view, operand.typical)


def _prescription(product: _Product, error: SumError, place: str) -> Prescription:
    after = product.error(_PROMOTED)
    of_weight = any(name.startswith("weight") for name in product.names)
    gemm = ("grad_input" if of_weight else "grad_weight") if product.backward else "output"
    return Prescription(
        title=f"`use_fast_accum=False` in `{place}`: error of its sums {percent(error.accumulated)} -> "
        f"{percent(after.accumulated)}, bits lost {error.lost_bits:.1f} -> {after.lost_bits:.1f}",
        change={"module": product.module, "use_fast_accum": {"from": True, "to": False}},
        predicted={
            "accumulation_error": {"from": error.accumulated, "to": after.accumulated},
            "lost_bits": {"from": error.lost_bits, "to": after.lost_bits},
        },
        snippet=(
            "import torch\n\n"
            "y = torch._scaled_mm(\n"
            "    a8, b8, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=False\n"
            ")\n"
            f"# torchao: Float8LinearConfig(gemm_config_{gemm}=Float8GemmConfig(use_fast_accum=False))\n"
        ),
    )


RULE = Rule(
    code="PD410",
    name="fp8-accumulation",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("lost_bits", 1.0, "bits",
                   "Least number of significant bits that the accumulator costs beyond the casts.",
                   "At one bit it costs more than casting both operands to FP8 does."),
        RuleOption("relative_error", 0.01, "fraction", "Least error of the sums from the accumulator alone.",
                   "Chosen empirically: two and a half times the largest error of rounding a result to BF16 (2^-8).",
                   maximum=1.0),
    ),
    check=check,
    preview="No script of the fault corpus runs FP8 matrix products, which need a GPU.",
)  # fmt: skip
