"""Lines to paste: they compile, and what they import and call exists where the framework is installed."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

from precdoctor.diagnosis.prescriptions.frameworks import edits
from precdoctor.runlog.changes import SETTINGS, Change

VALUES = {
    "module.dtype": "float32",
    "autocast.dtype": "bfloat16",
    "scaler.init_scale": 1024.0,
    "scaler.growth_interval": 2000,
    "scaler.min_scale": 1.0,
    "scaler.enabled": False,
    "optimizer.eps": 1e-9,
    "optimizer.master_weights": "float32",
}
MADE = [
    Change(name, VALUES.get(name, False), module="blocks.0.attn" if setting.of_module else "")
    for name, setting in SETTINGS.items()
    # Not what emulates formats, which no script can say, nor torch's flags, which no rule prescribes.
    if not setting.warns and name != "module.casts" and not name.startswith("flag.")
]
EDITS = [
    pytest.param(text, id=f"{change.setting}-{framework}")
    for change in MADE
    for framework, text in edits([change], "cuda").items()
]


@pytest.mark.parametrize("change", MADE, ids=lambda c: c.setting)
def test_every_change_can_be_made_for_good(change):
    assert "torch" in edits([change], "cuda")


def test_what_belongs_together_is_one_edit():
    both = [Change("scaler.init_scale", 1024.0), Change("scaler.growth_interval", 2000)]
    assert all("init_scale=1024.0, growth_interval=2000" in text for text in edits(both, "cpu").values())


@pytest.mark.parametrize("text", EDITS)
def test_the_lines_compile_and_name_what_there_is(text):
    tree = ast.parse(text)
    imported = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = pytest.importorskip(node.module)
            imported |= {alias.name: getattr(module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name: importlib.import_module(alias.name) for alias in node.names}
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = ast.unparse(call.func)
        called = imported.get(name)
        if name.startswith("torch."):
            called = eval(name, {"torch": imported["torch"]})
        if called is not None and call.keywords:
            known = inspect.signature(called).parameters
            assert {k.arg for k in call.keywords} <= set(known) or any(p.kind is p.VAR_KEYWORD for p in known.values())
