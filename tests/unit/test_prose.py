"""What people read on a screen uses the verbs of a tool, and sentences that read once."""

from __future__ import annotations

import re

import typer

from precdoctor.cli.app import app
from precdoctor.diagnosis.registry import RULES

#: Verbs that a tool does not do, and joints that need a second reading.
AVOIDED = re.compile(
    r"\b(tells?|told|speaks?|is led|are led|was led|came to|comes to|looked at|of which|of whom|that which|too,)(?!\w)",
    re.IGNORECASE,
)


def offenders(texts):
    lines = [(place, " ".join(text.split())) for place, text in texts]
    return [
        f"{place}: ...{line[max(0, m.start() - 40) : m.end() + 20]}"
        for place, line in lines
        for m in AVOIDED.finditer(line)
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
