"""The public surface, written down: an addition is a decision, and a change here needs a line in CHANGELOG.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import precdoctor
from precdoctor.cli import main
from precdoctor.cli.app import app
from tests.support.processes import AS_ANYWHERE

DOCS = Path(__file__).resolve().parents[2] / "docs"

API = {"Format", "__version__", "compare", "diagnose", "open_run", "record"}
FLAGS = {
    "": {"--version", "--any-size", "--install-completion", "--show-completion", "-h", "--help"},
    "record": {
        "-m", "--module", "-o", "--output", "--force", "--budget", "--every", "--steps", "--include", "--exclude",
        "--ranks", "--first-step", "--on-nonfinite", "--autopsy", "--no-autopsy", "--arm-next", "--deep-scan", "--ops",
        "--compiled", "--halt-on",
        "--on-finding", "--reference", "--apply", "--scene-memory", "--max-disk", "--redact-names", "--no-redact-names",
        "--shared", "--no-shared",
        "--inference", "--no-inference", "--strict", "--no-strict", "-h", "--help",
    },
    "shadow": {
        "-m", "--module", "-o", "--output", "--force", "--at", "--every", "--steps", "--reference", "--redact-names",
        "--no-redact-names", "--output-format", "--worst", "-h", "--help",
    },
    "diagnose": {
        "--prescription",
        "--output-format", "-o", "--output", "--also", "--force", "--select", "--ignore", "--fail-on", "-h", "--help",
        "--verbose", "--engine",
    },
    "gate": {
        "--baseline", "--write-baseline", "--aggregate", "--fail-if", "--allow", "--output-format", "-o", "--output",
        "--also", "--force", "--select", "--ignore", "--fail-on", "--engine", "-h", "--help",
    },
    "compare": {
        "--rename", "--output-format", "-o", "--output", "--also", "--force", "--fail-on", "--engine", "-h", "--help",
        "--ops", "--html",
    },
    "whatif": {
        "--format", "--scaling", "--scale", "--scale-rule", "--loss-scale", "--kind", "--module", "--steps", "--worst",
        "--max-flushed", "--max-saturated", "--min-sqnr", "--plan", "--horizon", "--output-format", "-o", "--output",
        "--loss-scaler", "--recipe", "--accumulator", "--state",
        "--force", "-h", "--help",
    },
    "trial": {
        "-m", "--module", "--steps", "--max-loss-gap", "-o", "--output", "--force", "--output-format", "--format",
        "--worst", "-h", "--help",
    },
    "autopsy": {"-h", "--help", "--yes", "-y", "--dry-run"},
    "report": {"--engine", "-o", "--output", "--against", "--force", "-h", "--help"},
    "watch": {"--interval", "-h", "--help"},
    "show": {"--engine", "--top", "--dtypes", "--scans", "--output-format", "-h", "--help"},
    "explain": {"-h", "--help"},
    "formats": {"--output-format", "-h", "--help"},
    "export": {"--to", "-o", "--output", "--kind", "--module", "--force", "-h", "--help"},
    "log": {"-h", "--help"},
    "log verify": {"-h", "--help"},
    "demo": {"-o", "--output", "--force", "-h", "--help"},
}  # fmt: skip


def commands() -> Iterator[tuple[str, object, object]]:
    """Every command with its full name and a context: the program, its commands, their sub-commands."""
    todo = [("", typer.main.get_command(app), None)]
    while todo:
        name, command, parent = todo.pop()
        context = command.make_context(name, [], parent=parent, resilient_parsing=True)
        yield name, command, context
        todo += [(f"{name} {k}".strip(), c, context) for k, c in getattr(command, "commands", {}).items()]


COMMANDS = {name: (command, context) for name, command, context in commands()}


def test_the_python_api():
    assert set(precdoctor.__all__) == API
    for name in API:
        assert getattr(precdoctor, name) is not None
    assert set(precdoctor.__all__) <= set(dir(precdoctor))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = precdoctor.nonsense


def test_the_commands_and_their_flags():
    found = {
        name: {
            o
            for p in command.get_params(context)
            if p.param_type_name == "option"
            for o in (*p.opts, *p.secondary_opts)
        }
        for name, (command, context) in COMMANDS.items()
    }
    assert found == FLAGS


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_parameter_has_help(name):
    command, context = COMMANDS[name]
    assert command.help and command.help.strip().split("\n")[0].endswith(".")
    for parameter in command.get_params(context):
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"
    if name and not getattr(command, "commands", None):
        assert "Examples:" in (command.epilog or ""), f"{name} shows no example"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_80_columns(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*name.split(), "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", sorted(n for n in COMMANDS if n and not getattr(COMMANDS[n][0], "commands", None)))
def test_every_command_has_a_page_that_names_every_flag(name):
    page = (DOCS / "commands" / f"{name.replace(' ', '-')}.md").read_text()
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert headings[:3] == ["What it does", "Options", "Examples"]
    options = page.split("## Options")[1].split("## Examples")[0]
    named = {word.strip(",") for span in re.findall(r"`([^`]+)`", options) for word in span.split()}
    assert FLAGS[name] - {"-h", "--help"} <= named


def modules_after(code: str) -> set[str]:
    """The modules a fresh interpreter holds after ``code``."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.__stdout__)"
    env = {**os.environ, **AS_ANYWHERE}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    return set(done.stdout.split())


def test_importing_precdoctor_is_next_to_nothing():
    loaded = modules_after("import precdoctor")
    assert not loaded & {"torch", "numpy", "pandas", "pyarrow", "typer", "rich", "typing", "re"}


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["record", "--help"], ["gate", "-h"], ["bogus"]])
def test_help_needs_no_heavy_import(args):
    loaded = modules_after(f"from precdoctor.cli import main\nsys.stdout = sys.stderr\nmain({args!r})")
    assert not loaded & {"torch", "numpy", "pandas", "pyarrow", "jinja2", "rich"}


def test_a_command_is_recorded_by_a_light_parent(tmp_path):
    """It starts at once; Arrow would take longer than all the rest, and is for what a dead process has left open."""
    loaded = modules_after(
        f"from precdoctor.cli import main\nmain(['record', '-o', {str(tmp_path / 'run')!r}, 'true'])"
    )
    assert not loaded & {"torch", "numpy", "pandas", "pyarrow", "jinja2", "rich"}


def test_explain_never_imports_torch():
    loaded = modules_after("from precdoctor.cli import main\nsys.stdout = sys.stderr\nmain(['explain', 'PD101'])")
    assert "torch" not in loaded and "precdoctor.diagnosis.registry" in loaded
