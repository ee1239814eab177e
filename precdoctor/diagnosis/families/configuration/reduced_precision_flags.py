"""PD702: switches of torch that lower the precision of matrix products, where this run shows that it matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.frames import groups, worst_rows
from precdoctor.diagnosis.survey.histories import watched_steps
from precdoctor.diagnosis.survey.rows import integer, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import FP16

PAGE = RulePage(
    finds="""
Three switches, each only where the recorded tensors show which layers it touches.

Warnings, on CUDA: `allow_fp16_accumulation` with FP16 layers that add up `min_terms` products or more, and
`allow_fp16_reduced_precision_reduction` (on by default) with such layers if their outputs come within `headroom`
binades of 65504, so that a partial sum may leave the range of FP16 although the result does not.

Information: TF32 or BF16 for FP32 products (`allow_tf32`, `fp32_precision`, `set_float32_matmul_precision`; on by
default for convolutions on CUDA) in a run under autocast with linear or convolution layers outside it, which are then
FP32 in name only. In runs that are FP32 throughout it is a choice and is not reported, nor is it on CUDA devices
without TF32.
""",
    matters="""
The output is FP32 or FP16 whatever happens inside. TF32 keeps 11 significant bits of every factor, BF16 8, FP32 24. A
layer that was taken out of autocast for its precision gets its range back, but hardly any bits. An FP16 accumulator
stops at 2048 like terms, and overflows where an FP32 one does not.
""",
    example="""
    torch.set_float32_matmul_precision("high")   # TF32
    with torch.autocast("cuda", enabled=False):
        logits = head(hidden.float())            # meant to be FP32: 11 bits
""",
    remedy="""
Turn the switch off for the whole run, or, with torch 2.9 and later, set `fp32_precision` to `"ieee"` around the layers
in question. `record --apply` can set it for a trial.
""",
    confidence="""
0.85: flags, device and formats are facts of the run, but which kernel the library chose for a shape is not known.
""",
    references=(
        "PyTorch documentation: CUDA semantics, TensorFloat-32 and reduced precision reduction in FP16 GEMMs",
        "Stosic and Micikevicius, Accelerating AI Training with NVIDIA TF32 Tensor Cores, NVIDIA 2021",
    ),
)
_COLUMNS = ("module_class", "dtype", "amax")
#: From this compute capability on, devices have TF32.
_TF32_FROM = (8, 0)
_CONVOLUTIONS = tuple(f"Conv{transposed}{n}d" for transposed in ("", "Transpose") for n in (1, 2, 3))


@dataclass(frozen=True)
class _Layer:
    """A linear or convolution layer, with the largest of its recorded outputs."""

    root: str
    module: str
    module_class: str
    dtype: str
    amax: float
    step: int
    rank: int


@dataclass(frozen=True)
class _Flag:
    """A switch in force, the layers it touches, and the finding about it."""

    severity: Severity
    name: str
    before: Any
    to: Any
    title: str
    message: str
    layers: Sequence[_Layer]
    evidence: Mapping[str, Any]
    predicted: Mapping[str, Any]


def check(view: RunView, options: Options) -> Checked:
    """One finding: the switch that does most harm."""
    device = view.any_facts.get("device")
    flags = view.any_facts.get("flags")
    if not isinstance(flags, Mapping) or not isinstance(device, Mapping):
        return Checked.not_applicable("the log does not say how torch's switches were set")
    layers = _layers(view)
    if not layers:
        return Checked.not_applicable("no linear or convolution layer was recorded")
    cuda = device.get("type") == "cuda"
    half = [layer for layer in layers if cuda and layer.dtype == FP16.dtype and layer.module_class == "Linear"]
    terms = _terms(view)
    long = [layer for layer in half if terms.get((layer.root, layer.module), 0) >= options["min_terms"]]
    found = (
        _accumulation(flags, long, terms),
        _reduction(flags, [x for x in long if FP16.headroom(x.amax) < options["headroom"]], terms, options),
        _narrow_products(view, flags, device, layers),
    )
    seen = f"the switches of torch, and {plural(len(layers), 'linear or convolution layer')}"
    worst = next((flag for flag in found if flag is not None), None)
    if worst is None:
        return Checked((), seen)
    return Checked([_finding(worst)], f"{worst.name} touches {plural(len(worst.layers), 'layer')}", Status.FAILED)


def _layers(view: RunView) -> list[_Layer]:
    where = [("module_class", "in", ("Linear", *_CONVOLUTIONS)), ("phase", "==", "train"), ("amax", ">", 0.0)]
    rows = view.measured((), ("output",), columns=_COLUMNS, steps=watched_steps(view), where=where)
    largest = rows.iloc[worst_rows(groups(rows, ("root", "module")), rows["amax"])]
    columns = ("root", "module", "module_class", "dtype", "amax", "step", "rank")
    return [_Layer(*layer) for layer in zip(*(largest[c].tolist() for c in columns), strict=True)]


def _terms(view: RunView) -> Mapping[tuple[str, str], int]:
    """Number of products that a linear layer adds up (second extent of its weight), by root and module."""
    return {
        (text(root.get("name")), text(p.get("module"))): integer(p["shape"][1]) or 0
        for root in view.any_facts.get("roots") or ()
        for p in root.get("parameters") or ()
        if p.get("name") == "weight" and len(p.get("shape") or ()) == 2
    }


def _accumulation(
    flags: Mapping[str, Any], layers: Sequence[_Layer], terms: Mapping[tuple[str, str], int]
) -> _Flag | None:
    if not flags.get("matmul_allow_fp16_accumulation") or not layers:
        return None
    longest = max(layers, key=lambda x: terms[x.root, x.module])
    count = terms[longest.root, longest.module]
    return _Flag(
        Severity.WARNING,
        "matmul_allow_fp16_accumulation",
        True,
        False,
        f"`{longest.module}` adds up {count:,} products in FP16",
        f"`torch.backends.cuda.matmul.allow_fp16_accumulation` is on, and {plural(len(layers), 'FP16 layer')} add up "
        f"long sums, `{longest.module}` {count:,} products (limit 2,048: there a running sum of like terms stops).",
        [longest, *(x for x in layers if x is not longest)],
        {"terms": count, "limit": 2048, "significant_bits": 11},
        {"relative_error": {"from": count * 2.0**-12, "to": count * 2.0**-25}},
    )


def _reduction(
    flags: Mapping[str, Any], layers: Sequence[_Layer], terms: Mapping[tuple[str, str], int], options: Options
) -> _Flag | None:
    if not flags.get("matmul_allow_fp16_reduced_precision_reduction") or not layers:
        return None
    worst = min(layers, key=lambda x: FP16.headroom(x.amax))
    room = FP16.headroom(worst.amax)
    return _Flag(
        Severity.WARNING,
        "matmul_allow_fp16_reduced_precision_reduction",
        True,
        False,
        f"`{worst.module}` comes within {room:.1f} binades of FP16's end, and may be added up in FP16",
        f"The output of `{worst.module}` reaches {worst.amax:.4g}, {room:.1f} binades below the end of FP16 (limit "
        f"{options['headroom']:g}), and is a sum of {terms[worst.root, worst.module]:,} products. With "
        "`allow_fp16_reduced_precision_reduction`, which is on by default, parts of such a sum are added up in FP16, "
        f"and one of them may overflow where the result does not. {plural(len(layers), 'layer')} affected.",
        [worst, *(x for x in layers if x is not worst)],
        {"headroom_binades": room, "limit": options["headroom"], "terms": terms[worst.root, worst.module]},
        {"headroom_of_partial_sums": {"from": room, "to": 127.0 - FP16.max_exponent + room}},
    )


def _products(flags: Mapping[str, Any], device: Mapping[str, Any]) -> tuple[str, str]:
    """Format in which FP32 matrix products and convolutions are multiplied: ``TF32``, ``BF16``, or "" for FP32."""
    if device.get("type") == "cpu":  # oneDNN, on processors that multiply BF16
        known = {"bf16": "BF16", "tf32": "TF32"}
        return known.get(text(flags.get("mkldnn_matmul_fp32_precision")), ""), ""
    capability = device.get("capability")
    if not isinstance(capability, list) or not all(isinstance(n, int) for n in capability):
        return "", ""
    if tuple(capability) < _TF32_FROM:
        return "", ""
    matmul = flags.get("matmul_fp32_precision") == "tf32" or flags.get("matmul_allow_tf32")
    matmul = matmul or flags.get("float32_matmul_precision") in ("high", "medium")
    convolution = flags.get("cudnn_conv_fp32_precision") == "tf32" or flags.get("cudnn_allow_tf32")
    return "TF32" if matmul else "", "TF32" if convolution else ""


def _narrow_products(
    view: RunView, flags: Mapping[str, Any], device: Mapping[str, Any], layers: Sequence[_Layer]
) -> _Flag | None:
    matmul, convolution = _products(flags, device)
    autocast = any(s.autocast_dtype for steps in view.timeline.values() for s in steps)
    touched = [x for x in layers if x.dtype == "float32" and (matmul if x.module_class == "Linear" else convolution)]
    if not touched or not autocast:
        return None
    of_matmul = touched[0].module_class == "Linear"
    narrow = matmul if of_matmul else convolution
    bits = {"TF32": 11, "BF16": 8}[narrow]
    names = ", ".join(f"`{x.module}`" for x in touched[:3]) + (" and others" if len(touched) > 3 else "")
    where = ", on processors that have BF16 products" if device.get("type") == "cpu" else ""
    return _Flag(
        Severity.INFO,
        "float32_matmul_precision" if of_matmul else "cudnn_allow_tf32",
        flags.get("float32_matmul_precision") if of_matmul else True,
        "highest" if of_matmul else False,
        f"{plural(len(touched), 'layer')} outside autocast: FP32 in name, multiplied in {narrow}{where}",
        f"{names}: outputs in FP32 in a run under autocast, but torch is set to multiply FP32 in {narrow}{where}, with "
        f"{bits} significant bits instead of 24 (limit 24; BF16 has 8). Leaving autocast gains only range there.",
        touched,
        {"significant_bits": bits, "limit": 24, "layers": [x.module for x in touched[:16]]},
        {"significant_bits": {"from": bits, "to": 24}},
    )


def _finding(flag: _Flag) -> Finding:
    layer = flag.layers[0]
    return RULE.finding(
        severity=flag.severity,
        confidence=0.85,
        title=flag.title,
        message=flag.message,
        location=Location(
            *(layer.root, layer.module, layer.module_class or None, "output"), Phase.FORWARD, layer.rank, layer.step
        ),
        evidence={
            **flag.evidence,
            "flag": flag.name,
            "confidence_reason": "flags, device and formats are facts; which kernel ran is not known",
        },
        prescriptions=(
            Prescription(
                title=f"{flag.name} {flag.before} -> {flag.to}",
                change={flag.name: {"from": flag.before, "to": flag.to}},
                predicted=flag.predicted,
                snippet=_snippet(flag),
            ),
        ),
    )


def _snippet(flag: _Flag) -> str:
    if flag.name == "float32_matmul_precision":
        return 'import torch\n\ntorch.set_float32_matmul_precision("highest")  # before training\n'
    where = (
        "cudnn.allow_tf32" if flag.name == "cudnn_allow_tf32" else f"cuda.matmul.{flag.name.removeprefix('matmul_')}"
    )
    return f"import torch\n\ntorch.backends.{where} = False  # before training\n"


RULE = Rule(
    code="PD702",
    name="reduced-precision-flags",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("min_terms", 1024.0, "products", "Linear layers that add up fewer products are not judged.",
                   "Half of the 2,048 like terms at which a running FP16 sum stops.", 1.0),
        RuleOption("headroom", 2.0, "binades", "Outputs nearer to the end of FP16 may have partial sums beyond it.",
                   "Chosen empirically: partial sums of zero-mean products exceed the result by a factor of a few."),
    ),
    check=check,
    preview="A flag costs precision that most models do not miss, and no recorded harm decides which do.",
)  # fmt: skip
