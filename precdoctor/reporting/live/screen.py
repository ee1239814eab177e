"""Renders the live view as lines of text that fit the terminal, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS
from precdoctor.reporting.finding_view import KINDS
from precdoctor.reporting.live.check import Check
from precdoctor.reporting.live.picture import Picture, Tensor
from precdoctor.reporting.live.watcher import Phase, Watcher
from precdoctor.reporting.rangebar import RangeBar
from precdoctor.reporting.run_head import command_words, run_name
from precdoctor.reporting.sparkline import sparkline
from precdoctor.reporting.text import SERIES, clean, factor, number

_STYLES = {Phase.STARTING: "pd.near", Phase.RUNNING: "pd.good", Phase.SILENT: "pd.near", Phase.ENDED: "pd.strong"}
#: Styles of the sentence on the phase; yellow for phases not listed.
_SENTENCE_STYLES = {Phase.STARTING: "pd.quiet", Phase.ENDED: "pd.quiet", Phase.DIED: "pd.bad", Phase.GONE: "pd.bad"}
_SHORT = {**KINDS, "grad_output": "gradient", "weight_grad": "w. gradient"}
_LABEL, _VALUE = 14, 9
_MARKS = {"error": "pd.error", "warning": "pd.warning", "info": "pd.info"}


@dataclass(frozen=True)
class Size:
    """Width and height of the terminal in characters, and whether it lacks block characters."""

    width: int
    height: int
    ascii_only: bool = False


def screen(watcher: Watcher, check: Check, size: Size) -> Text:
    """The whole screen: at most ``size.height`` lines of at most ``size.width`` characters."""
    head = _head(watcher, size)
    series = _series(watcher.picture, size)
    foot = _foot(watcher, check)
    findings = _findings(check)
    room = size.height - len(head) - len(foot)
    shown = findings[: max(2, min(len(findings), room // 3))]
    series = series[: max(0, room - len(shown))]
    blocks: list[list[Text]] = [series] if series else []
    left = room - sum(map(len, blocks)) - len(shown) - (len(blocks) + 2)  # a blank line above each block
    tables = _tables(watcher.picture, size, left)
    blocks += [*tables, shown]
    lines = list(head)
    for block in blocks:
        if size.height >= _ROOMY:
            lines.append(Text())
        lines += block
    lines = lines[: max(0, size.height - len(foot))]
    lines += [Text()] * (size.height - len(foot) - len(lines)) + foot
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
        if size.ascii_only:
            line.plain = line.plain.translate(_PLAIN)
    return Text("\n").join(lines[: size.height])


#: ASCII replacements, of one character each, so that the offsets of styles stay valid.
_PLAIN = str.maketrans({"…": "~", "–": "-"})
#: Terminals with fewer lines than this get no blank lines.
_ROOMY = 20


def _head(watcher: Watcher, size: Size) -> list[Text]:
    picture, phase = watcher.picture, watcher.phase
    title = Text.assemble((run_name(watcher.path), "pd.strong"), "  ", (command_words(watcher.info, 200), "pd.quiet"))
    mark = Text(f"{'*' if size.ascii_only else '●'} {phase.value}", _STYLES.get(phase, "pd.error"))
    title.truncate(max(0, size.width - mark.cell_len - 2), overflow="ellipsis", pad=True)
    facts = []
    if picture.last_step is not None:
        facts += [f"step {picture.last_step}", f"{number(picture.sampled)} sampled"]
    if watcher.ranks:
        facts.append(plural(watcher.ranks, "rank") + (f", {clean(watcher.device, 30)}" if watcher.device else ""))
    if picture.step_seconds is not None:
        facts.append(f"{duration(picture.step_seconds)} a step")
    if picture.overhead is not None:
        facts.append(f"recorder {percent(picture.overhead)}")
    if picture.dropped:
        facts.append(f"{number(picture.dropped.total())} rows lost")
    joint = " | " if size.ascii_only else " · "
    lines = [Text.assemble(title, "  ", mark), Text(joint.join(facts), "pd.quiet")]
    if watcher.words:
        lines.append(Text(watcher.words, _SENTENCE_STYLES.get(phase, "pd.near")))
    return lines


def duration(seconds: float) -> str:
    """A duration: ``12 ms``, ``3.4 s``."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _series(picture: Picture, size: Size) -> list[Text]:
    """One line per series: first value, sparkline, last value; then the numbers of skipped and non-finite steps."""
    lines = []
    width = max(8, min(100, size.width - _LABEL - 2 * _VALUE - 4))
    for name, (title, log, spell) in SERIES.items():
        values, last = picture.series[name].values, picture.series[name].last
        if last is None or (name == "lr" and min(values) == max(values)):
            continue
        line = sparkline(values, width, ascii_only=size.ascii_only, log=log)
        lines.append(
            Text.assemble(
                (f"{title:<{_LABEL}}", "pd.label"), f"{spell(values[0]):>{_VALUE}}  ", (line, "pd.code"),
                f"  {spell(last)}",
            )
        )  # fmt: skip
    counts = [
        (plural(picture.skipped, "skipped step"), "pd.near") if picture.skipped else None,
        (plural(picture.non_finite, "non-finite step"), "pd.bad") if picture.non_finite else None,
    ]
    if any(counts):
        lines.append(Text(", ", "pd.label").join(Text(*t) for t in counts if t))
    return lines


def _tables(picture: Picture, size: Size, room: int) -> list[list[Text]]:
    """Up to two tables of tensors, of at most ``room`` lines together."""
    if room < 2 or not picture.tensors:
        return []
    subnormal = picture.most_subnormal(room)
    second = min(len(subnormal) + 1, room // 2 - 1) if room >= 6 and subnormal else 0
    first = room - second - bool(second)
    tables = [_table("Least headroom", picture.tightest(first - 1), size, share=False)]
    if second:
        tables.append(_table("Most subnormal", subnormal[: second - 1], size, share=True))
    return tables


def _table(title: str, tensors: Sequence[Tensor], size: Size, *, share: bool) -> list[Text]:
    bar = max(10, min(40, size.width // 4))
    name = size.width - bar - 32
    value = "of them" if share else "headroom"
    lines = [Text.assemble((f"{title:<{name}}", "pd.strong"), (f"  {'':8}{'amax':>10}{value:>10}  ", "pd.label"))]
    for tensor in tensors:
        bad = tensor.bad_since is not None
        shown = percent(tensor.subnormal_share) if share else _room(tensor)
        fmt = tensor.format
        line = Text.assemble(
            f"{shortened(label_of(tensor), name):<{name}}",
            (f"  {fmt.name if fmt else tensor.dtype:8.8}", "pd.quiet"),
            f"{number(tensor.amax):>10}",
            (f"{shown:>10}  ", "pd.bad" if bad else ""),
        )
        histogram = tensor.histogram
        evidence = {"dtype": tensor.dtype, "exp_lo": histogram.lo, "exp_hist": histogram.counts}
        range_bar = RangeBar.of(evidence, bar - 1)  # the mark between subnormal and normal takes a cell
        if range_bar is not None:
            line.append_text(range_bar.text(ascii_only=size.ascii_only, ends=False))
        lines.append(line)
    return lines


def _room(tensor: Tensor) -> str:
    if tensor.bad_since is not None:
        return "NaN/Inf"
    return factor(tensor.headroom)


def label_of(tensor: Tensor) -> str:
    """The label of a tensor: ``blocks.3.attn gradient``; ``blocks.3.attn.weight`` for a parameter or buffer."""
    module, kind = tensor.module or tensor.root, _SHORT.get(tensor.kind, tensor.kind)
    if tensor.kind in (*FORWARD_KINDS, "grad_output"):
        words = [module, kind, tensor.name]
    else:
        words = [f"{module}.{tensor.name}".rstrip("."), "" if tensor.kind == "weight" else kind]
    return clean(" ".join(w for w in words if w), 400)


def shortened(text: str, width: int) -> str:
    """``text`` cut to ``width`` characters at its beginning, because names differ at their ends."""
    return text if len(text) <= width else "…" + text[1 - width :]


def _findings(check: Check) -> list[Text]:
    if check.findings is None:
        status = check.problem or "not judged yet"
        return [Text.assemble(("Findings", "pd.strong"), (f"  {clean(status, 200)}", "pd.quiet"))]
    at = f"  as of step {check.step}" if check.step is not None else ""
    count = number(len(check.findings)) if check.findings else "none"
    title = Text.assemble(("Findings", "pd.strong"), (f"  {count}", "" if check.findings else "pd.good"))
    lines = [title.append(at, "pd.quiet")]
    return [*lines, *map(finding_line, check.findings)]


def finding_line(finding: Mapping[str, Any]) -> Text:
    """A finding of a JSON report in one line: ``ERROR PD101  title``."""
    severity = clean(finding.get("severity"), 10)
    return Text.assemble(
        (severity.upper(), _MARKS.get(severity, "pd.info")),
        f" {clean(finding.get('code'), 10)}  {clean(finding.get('title'), 300)}",
    )


def _foot(watcher: Watcher, check: Check) -> list[Text]:
    problem = watcher.problem or watcher.picture.trouble or ""
    keys = Text.assemble(("q", "pd.strong"), (" quits", "pd.quiet"))
    if check.busy:
        keys.append("   diagnosing", "pd.quiet")
    if problem:
        keys.append(f"   {clean(problem, 300)}", "pd.near")
    return [keys]
