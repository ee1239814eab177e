"""The pytest plugin: a ``precdoctor`` fixture that records a block of a test and applies ``precdoctor gate`` to it.

    def test_smoke_training(precdoctor):
        with precdoctor.record():
            train(steps=50, seed=0)
        precdoctor.check(baseline="numerics.toml")     # beside the test file

``pytest --precdoctor-write-baseline`` writes the baselines instead of comparing with them. Nothing heavy is imported
before a test requests the fixture.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from precdoctor.comparison.gate import GateReport
    from precdoctor.diagnosis.claims.finding import Finding
    from precdoctor.recording.session import Recording

_WRITTEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's flag."""
    parser.getgroup("precdoctor").addoption(
        "--precdoctor-write-baseline",
        action="store_true",
        default=False,
        help="Write the baselines that precdoctor.check(baseline=...) names, from runs that pass; compare nothing.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create the list of baseline files written in this session."""
    config.stash[_WRITTEN] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the names of the baselines that were written: they should be reviewed and committed."""
    for file in config.stash.get(_WRITTEN, []):
        terminalreporter.write_line(f"precdoctor wrote {file}")


@pytest.fixture
def precdoctor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checker:
    """Records blocks of this test and judges them."""
    return Checker(request, tmp_path_factory)


class Checker:
    """The value of the ``precdoctor`` fixture.

    Attributes:
        recordings: the blocks recorded so far; :meth:`check` evaluates all of them.
    """

    def __init__(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._beside = request.path.parent
        self._config = request.config
        self._directories = tmp_path_factory
        self.recordings: list[Recording] = []

    @contextlib.contextmanager
    def record(self, **options: Any) -> Iterator[Recording]:
        """:func:`precdoctor.record` the training inside the block, every step in full unless ``every`` is given."""
        from precdoctor.recording.session import record

        run = self._directories.mktemp("precdoctor") / "run"
        with record(run, **{"every": 1, **options}) as recording:
            yield recording
        self.recordings.append(recording)

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings of the last recorded block, for the test's own assertions."""
        from precdoctor.diagnosis import diagnose

        if not self.recordings:
            pytest.fail(_NOTHING, pytrace=False)
        return diagnose(self.recordings[-1].open()).findings

    def check(
        self,
        *,
        baseline: str | Path | None = None,
        fail_on: str = "error",
        aggregate: str = "worst",
        fail_if: Sequence[str] = (),
        allow: str | Path | None = None,
        select: Sequence[str] = (),
        ignore: Sequence[str] = (),
        options: dict[str, dict[str, float]] | None = None,
    ) -> GateReport:
        """Fail the test, with the gate's report, unless the recorded blocks pass the gate.

        Args:
            baseline: file to compare with, relative to the test file; None: the rules alone.
            fail_on, aggregate, fail_if, allow, select, ignore: as the flags of ``precdoctor gate``.
            options: thresholds, such as ``{"PD804": {"relative": 0.1}}``.

        Returns:
            The report, if the gate passed.
        """
        if not self.recordings:
            pytest.fail(_NOTHING, pytrace=False)
        file = self._beside / baseline if baseline is not None else None
        writing = bool(self._config.getoption("--precdoctor-write-baseline"))
        if file is not None and not writing and not file.is_file():
            pytest.fail(f"no baseline {file}; pytest --precdoctor-write-baseline makes it", pytrace=False)
        report = _gate(
            [recording.path for recording in self.recordings],
            baseline=None if writing else file,
            limits=fail_if,
            allow=self._beside / allow if allow is not None else None,
            fail_on=fail_on,
            aggregate=aggregate,
            select=select,
            ignore=ignore,
            options=options or {},
        )
        if not report.passed:
            pytest.fail(_report_text(report), pytrace=False)
        if file is not None and writing:
            self._write(file)
        return report

    def _write(self, file: Path) -> None:
        from precdoctor.comparison.baseline import learn_from
        from precdoctor.comparison.baseline_file import text_of

        file.write_text(text_of(learn_from([recording.open() for recording in self.recordings])), encoding="utf-8")
        self._config.stash[_WRITTEN].append(str(file))


_NOTHING = "nothing was recorded: put the training into `with precdoctor.record():` before the check"


def _gate(
    paths: Sequence[Path], *, baseline: Path | None, limits: Sequence[str], allow: Path | None, **options: Any
) -> GateReport:
    from precdoctor.comparison.allowances import read_allowances
    from precdoctor.comparison.baseline_file import read_baseline
    from precdoctor.comparison.fail_if import parse_limit
    from precdoctor.comparison.gate import gate
    from precdoctor.runlog import open_run

    return gate(
        [open_run(path) for path in paths],
        read_baseline(baseline) if baseline is not None else None,
        limits=[parse_limit(text) for text in limits],
        allowances=read_allowances(allow) if allow is not None else (),
        **options,
    )


def _report_text(report: GateReport) -> str:
    from precdoctor.reporting.outputs import WRITERS, Report

    stream = io.StringIO()
    WRITERS["concise"](Report(report.diagnosis, report.exit_code, report.fail_on, report), stream)
    return stream.getvalue()
