"""PD707: a run that asks torch for determinism and does not get it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.frames import firsts, groups
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Runs that ask for determinism with one switch of torch and leave it open with another, if a recorded layer falls into
the gap. A run asks by `torch.use_deterministic_algorithms`, `torch.backends.cudnn.deterministic`, or
`CUBLAS_WORKSPACE_CONFIG=:4096:8` or `:16:8`. Gaps are `cudnn.benchmark` (timing chooses the algorithm of a
convolution), `warn_only=True`, or `use_deterministic_algorithms` left off (layers with CUDA kernels that add up with
atomics). The finding is a warning on CUDA if `use_deterministic_algorithms` is on, because that asks for the whole run.
It is information if only cuDNN was asked, and in a run on a CPU, where these switches do nothing. A run that asks for
nothing is not reported: torch is not deterministic by default, and most training need not be.
""",
    matters="""
Two runs of one commit differ in the last bit of one sum, and after some hundred steps in everything. A comparison bit
for bit, or a bisection for a regression, then blames code that is not at fault; `precdoctor compare` names the first
tensor that differs, and that is this layer.
""",
    example="""
The seed function of many a script; layers such as bilinear upsampling stay as they were:

    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = True   # added for speed: timing now chooses the algorithm
""",
    remedy="""
`torch.use_deterministic_algorithms(True)` without `warn_only`, `cudnn.benchmark = False`, and in the environment
`CUBLAS_WORKSPACE_CONFIG=:4096:8`; torch then raises an error at any op without a deterministic kernel. Or turn
everything off and judge runs by their spread over seeds, as `precdoctor gate` does.
""",
    confidence="""
0.85 on CUDA: switches and layers are facts of the run, but whether a kernel gives other bits on these shapes is not.
0.7 in a run on a CPU.
""",
    references=(
        "PyTorch documentation: Reproducibility; torch.use_deterministic_algorithms (the list of operations)",
        "NVIDIA cuBLAS documentation, results reproducibility",
    ),
)
#: Number of sampled steps whose layers are read; by then every layer has run.
_STEPS = 4
_WORKSPACES = (":4096:8", ":16:8")
_CONVOLUTIONS = frozenset(f"Conv{transposed}{n}d" for transposed in ("", "Transpose") for n in (1, 2, 3))
#: Modules without a deterministic CUDA kernel, and those that take one only when asked; torch's own list.
_WITHOUT = frozenset(
    (
        *("AvgPool3d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d", "FractionalMaxPool2d"),
        *("FractionalMaxPool3d", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d", "UpsamplingBilinear2d"),
        *("ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "CTCLoss"),
    )
)
#: Of these, layers that are plain means when they pool to one element.
_MEANS = frozenset(("AdaptiveAvgPool2d", "AdaptiveAvgPool3d"))
_WHEN_ASKED = frozenset(("ReplicationPad1d", "ReplicationPad2d", "ReplicationPad3d", "MaxPool3d"))


@dataclass(frozen=True)
class _Gap:
    """A switch that leaves determinism open, and the layers it concerns: ``(root, FQN, class)``."""

    switch: str
    value: Any
    to: Any
    words: str
    layers: Sequence[tuple[str, str, str]]
    snippet: str


def check(view: RunView, options: Options) -> Checked:
    """One finding: the gap with most layers, the others as evidence."""
    flags = view.any_facts.get("flags")
    if not isinstance(flags, Mapping):
        return Checked.not_applicable("the log does not say how torch's switches were set")
    asked = list(_asked(flags))
    if not asked:
        return Checked.not_applicable("the run does not ask for determinism")
    layers = _trained_layers(view)
    gaps = sorted((g for g in _gaps(flags, layers) if g.layers), key=lambda g: -len(g.layers))
    words = f"determinism asked for by {' and '.join(asked)}, {plural(len(layers), 'trained module')}"
    touched = sorted({layer for g in gaps for layer in g.layers})
    if not gaps or len(touched) < options["min_layers"]:
        return Checked((), f"{words}: {len(touched):,} that may differ from run to run")
    cuda = view.device == "cuda"
    severity = Severity.WARNING if cuda and flags.get("deterministic_algorithms") else Severity.INFO
    finding = _finding(gaps, touched, asked, options, severity, cuda=cuda)
    return Checked([finding], f"{words}, {len(touched):,} of them left open", Status.FAILED)


def _asked(flags: Mapping[str, Any]) -> Iterator[str]:
    if flags.get("deterministic_algorithms"):
        yield "`use_deterministic_algorithms`"
    if flags.get("cudnn_deterministic"):
        yield "`cudnn.deterministic`"
    if flags.get("cublas_workspace_config") in _WORKSPACES:
        yield "`CUBLAS_WORKSPACE_CONFIG`"


def _trained_layers(view: RunView) -> list[tuple[str, str, str]]:
    """Modules with a gradient: root, FQN, class."""
    columns = ("root", "module", "module_class")
    frame = view.measured((), ("grad_output",), columns=("module_class", "shape"), steps=view.kept_steps[:_STEPS])
    means = frame["module_class"].isin(_MEANS)
    kept = ~means.to_numpy()
    kept[means.to_numpy()] = [not plain for plain in _plain(frame[means])]
    frame = frame[kept]
    first = frame.iloc[firsts(groups(frame, columns))]
    layers = zip(*(first[c].map(text) for c in columns), strict=True)
    return sorted((root, module, kind) for root, module, kind in layers if kind)


def _plain(frame: pd.DataFrame) -> Iterator[bool]:
    """Whether each mean is over a single element."""
    for kind, shape in zip(frame["module_class"], frame["shape"], strict=True):
        extents = () if shape is pd.NA else tuple(shape)
        yield all(n == 1 for n in extents[-int(str(kind)[-2]) :])


def _gaps(flags: Mapping[str, Any], layers: Sequence[tuple[str, str, str]]) -> Iterator[_Gap]:
    strict, lenient = bool(flags.get("deterministic_algorithms")), bool(flags.get("deterministic_warn_only"))
    if flags.get("cudnn_benchmark"):
        yield _Gap(
            "cudnn_benchmark", True, False, "`cudnn.benchmark` lets timing choose their algorithm",
            [x for x in layers if x[2] in _CONVOLUTIONS], "torch.backends.cudnn.benchmark = False\n",
        )  # fmt: skip
    if strict and lenient:
        yield _Gap(
            "deterministic_warn_only", True, False, "`warn_only` lets their kernels add up in any order",
            [x for x in layers if x[2] in _WITHOUT], "torch.use_deterministic_algorithms(True)\n",
        )  # fmt: skip
    if not strict:
        yield _Gap(
            "deterministic_algorithms", False, True,
            "without `use_deterministic_algorithms` their kernels add up in any order",
            [x for x in layers if x[2] in _WITHOUT | _WHEN_ASKED], "torch.use_deterministic_algorithms(True)\n",
        )  # fmt: skip


def _finding(
    gaps: Sequence[_Gap],
    touched: Sequence[tuple[str, str, str]],
    asked: Sequence[str],
    options: Options,
    severity: Severity,
    *,
    cuda: bool,
) -> Finding:
    root, module, kind = gaps[0].layers[0]
    listed = "; ".join(
        f"{', '.join(f'`{m or r}` ({c})' for r, m, c in g.layers[:3])}"
        + (f" and {len(g.layers) - 3} more" if len(g.layers) > 3 else "")
        + f": {g.words}"
        for g in gaps
    )
    where = "" if cuda else " This run is on a CPU, where the switches do nothing; on a CUDA device they would."
    return RULE.finding(
        severity=severity,
        confidence=0.85 if cuda else 0.7,
        title=f"determinism is asked for, and {plural(len(touched), 'layer')} may differ from run to run"
        + ("" if cuda else " on CUDA"),
        message=f"The run asks for determinism ({', '.join(asked)}), and {plural(len(touched), 'layer')} (limit "
        f"{options['min_layers']:g}) may give other bits from run to run. {listed}.{where}",
        location=Location(root, module, kind, "grad_output", Phase.BACKWARD),
        evidence={
            "asked_by": [a.strip("`") for a in asked],
            "open_switches": {g.switch: g.value for g in gaps},
            "layers": [".".join(p for p in (r, m) if p) for r, m, _ in touched[:32]],
            "count": len(touched),
            "limit": options["min_layers"],
            "confidence_reason": "switches and layers are facts of the run; other bits were not observed",
        },
        prescriptions=(
            Prescription(
                title=f"close {plural(len(gaps), 'switch')}: layers left open {len(touched):,} -> 0",
                change={g.switch: {"from": g.value, "to": g.to} for g in gaps},
                predicted={"open_layers": {"from": len(touched), "to": 0}},
                snippet="import os\n\n"
                'os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first CUDA call\n'
                "import torch\n\n" + "".join(dict.fromkeys(g.snippet for g in gaps)),
            ),
        ),
    )


RULE = Rule(
    code="PD707",
    name="incomplete-determinism",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("min_layers", 1.0, "layers", "Least number of layers in a gap.", "One is enough.", 1.0),
    ),
    check=check,
    preview="It reports a setting of two ranks or runs; no fault of the corpus is found by it first.",
)  # fmt: skip
