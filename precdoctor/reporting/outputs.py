"""The output formats of ``diagnose``, ``compare`` and ``gate``, by name. A format never changes the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import IO, TYPE_CHECKING

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding
from precdoctor.diagnosis.ranking.verdict import ExitCode, at_or_above, untrustworthy

if TYPE_CHECKING:
    from precdoctor.comparison.compare import Comparison
    from precdoctor.comparison.gate import GateReport
    from precdoctor.comparison.op_compare import OpComparison


@dataclass(frozen=True)
class Report:
    """The input of every writer.

    Attributes:
        diagnosis: findings and rules; for a gate, those of all its runs.
        exit_code: the exit status of the command, whatever the format.
        fail_on: the severity that fails a build; None if none does.
        gate: the gate's report, if the command is ``gate``.
        comparison: the comparison, if the command is ``compare``.
        ops: the comparison op by op, if the command is ``compare --ops``.
        verbose: list every rule with its reason on the terminal.
    """

    diagnosis: Diagnosis
    exit_code: int
    fail_on: str | None
    gate: GateReport | None = None
    comparison: Comparison | None = None
    ops: OpComparison | None = None
    verbose: bool = False

    @property
    def failing(self) -> list[Finding]:
        """Findings that fail a build; if ``fail_on`` is None the errors, so that CI pages show them red."""
        return at_or_above(self.diagnosis.findings, self.fail_on or "error")

    @property
    def distrust(self) -> list[str]:
        """Why the verdict cannot be trusted, one sentence each; empty if it can."""
        if self.gate is not None:
            return list(self.gate.untrustworthy)
        reason = untrustworthy(self.diagnosis)
        return [reason] if reason is not None and (self.exit_code == ExitCode.UNTRUSTWORTHY or not self.failing) else []

    @property
    def headline(self) -> str:
        """The verdict in one line without a full stop."""
        from precdoctor.reporting.terminal import verdict_line

        words = verdict_line(self.diagnosis)
        if self.gate is None:
            return words
        verdict = {ExitCode.CLEAN: "passed", ExitCode.FINDINGS: "failed"}
        return f"{verdict.get(ExitCode(self.exit_code), 'no trustworthy verdict')}: {words[0].lower()}{words[1:]}"


Writer = Callable[[Report, IO[str]], None]


def _terminal_writer(*, concise: bool) -> Writer:
    def write(report: Report, stream: IO[str]) -> None:
        from precdoctor.reporting.console import make_console
        from precdoctor.reporting.gate_view import print_gate
        from precdoctor.reporting.terminal import print_concise, print_full

        console = make_console(stream)
        if report.gate is not None:
            print_gate(report.gate, console, concise=concise)
        elif report.ops is not None:
            from precdoctor.reporting.op_view import print_ops

            print_ops(report.ops, console, concise=concise)
        elif report.comparison is not None:
            from precdoctor.reporting.compare_view import print_compare

            print_compare(report.comparison, console, concise=concise)
        elif concise:
            print_concise(report.diagnosis, console)
        else:
            print_full(report.diagnosis, console, verbose=report.verbose)

    return write


def _json(report: Report, stream: IO[str]) -> None:
    from precdoctor.reporting.json_report import document, dumps, gate_document

    content = gate_document(report.gate) if report.gate is not None else document(report.diagnosis, report.exit_code)
    if report.comparison is not None:
        from precdoctor.reporting.compare_view import compare_section

        content["compare"] = compare_section(report.comparison)
    if report.ops is not None:
        from precdoctor.reporting.op_view import ops_section

        content["compare_ops"] = ops_section(report.ops)
    stream.write(dumps(content))


def _text_writer(name: str) -> Writer:
    """A writer that uses the function ``precdoctor.reporting.<name>.<name>``, imported on use, to render the report."""

    def write(report: Report, stream: IO[str]) -> None:
        made = getattr(import_module(f"precdoctor.reporting.{name}"), name)
        stream.write(made(report))

    return write


WRITERS: Mapping[str, Writer] = {
    "full": _terminal_writer(concise=False),
    "concise": _terminal_writer(concise=True),
    "json": _json,
    **{name: _text_writer(name) for name in ("markdown", "junit", "github", "gitlab", "sarif")},
}
