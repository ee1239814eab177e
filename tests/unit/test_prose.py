"""Screens, docstrings and comments use the verbs of a tool, and sentences that read once."""

from __future__ import annotations

import ast
import io
import re
import tokenize

import typer

from precdoctor.cli.app import app
from precdoctor.diagnosis.registry import RULES
from tests.support.processes import ROOT

#: Verbs that a tool does not do, and joints that need a second reading.
AVOIDED = re.compile(
    r"\b(tells?|told|speaks?|is led|are led|was led|came to|comes to|looked at|of which|of whom|that which|too,)(?!\w)",
    re.IGNORECASE,
)
#: The same in the source, where a reader sees the code beside the words.
AVOIDED_IN_SOURCE = re.compile(
    r"\b(tells|told|speaks?|is led|are led|was led|came to|comes to|looked at|looks at|of whom|that which)\b",
    re.IGNORECASE,
)


def offenders(texts, avoided=AVOIDED):
    lines = [(place, " ".join(text.split())) for place, text in texts]
    return [
        f"{place}: ...{line[max(0, m.start() - 40) : m.end() + 20]}"
        for place, line in lines
        for m in avoided.finditer(line)
    ]


def test_help_texts():
    commands = typer.main.get_command(app).commands
    texts = []
    for name, command in commands.items():
        for each in (command, *getattr(command, "commands", {}).values()):
            texts.append((name, each.help or ""))
            texts += [(f"{name} {p.name}", getattr(p, "help", None) or "") for p in each.params]
    assert len(texts) > 100
    assert offenders(texts) == []


def test_rule_pages():
    assert offenders((rule.code, rule.markdown()) for rule in RULES) == []


def test_docstrings_and_comments():
    texts = []
    for path in sorted((ROOT / "precdoctor").rglob("*.py")):
        source, name = path.read_text(), path.relative_to(ROOT)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                texts.append((name, ast.get_docstring(node) or ""))
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [(f"{name}:{t.start[0]}", t.string) for t in tokens if t.type == tokenize.COMMENT]
    assert len(texts) > 5_000
    assert offenders(texts, AVOIDED_IN_SOURCE) == []
