"""The house rules that no linter knows: which package may import which, and how long things may get."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "precdoctor"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: What everything may import: they know nothing of the rest when they are imported.
LEAVES = {"errors", "_attach_file", "_version"}
#: What a package may import of precdoctor, beside itself and the leaves. An arrow that is not here is a decision.
ARROWS = {
    "numerics": set(),
    "runlog": {"numerics"},
    "recording": {"runlog", "numerics", "_boot"},  # what a source tree starts with (sitecustomize) imports _boot
    "diagnosis": {"runlog", "numerics"},
    "comparison": {"diagnosis", "runlog", "numerics"},
    "reporting": {"comparison", "diagnosis", "runlog", "numerics"},
    "integrations": {"reporting", "comparison", "diagnosis", "recording", "runlog", "numerics"},
    "cli": {"reporting", "comparison", "diagnosis", "recording", "runlog", "numerics", "integrations"},
    # beside the packages: the public names, the entry point, the module every process starts with, the errors
    "__init__": {"comparison", "diagnosis", "recording", "runlog", "numerics"},
    "__main__": {"cli"},
    "_boot": {"recording"},
    "_attach_file": set(),
    "_version": set(),
    "errors": set(),
}
TORCH_ALLOWED = {"recording", "integrations"}
MAX_MODULE, MAX_FUNCTION = 400, 60


def part_of(module: Path) -> str:
    """The package a module belongs to; for one at the top, its own name."""
    inner = module.relative_to(PACKAGE)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


@functools.cache
def nodes(module: Path) -> tuple[ast.AST, ...]:
    """A module's syntax, parsed once for every test."""
    return tuple(ast.walk(ast.parse(module.read_text())))


@functools.cache
def imports(module: Path) -> tuple[tuple[str, int], ...]:
    """Every imported dotted name of a module, also inside functions and type checks; relative ones begin with a dot."""
    found = []
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found += [(base, node.lineno), *((f"{base}.{alias.name}", node.lineno) for alias in node.names)]
    return tuple(found)


def place(module: Path, line: int) -> str:
    return f"{module.relative_to(ROOT)}:{line}"


def test_arrows_point_one_way():
    offenders = []
    for module in MODULES:
        own = part_of(module)
        for name, line in imports(module):
            top, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if not top:
                offenders.append(f"{place(module, line)}: imports are absolute")
            elif top == "precdoctor" and other in ARROWS and other not in {own, *LEAVES, *ARROWS[own]}:
                offenders.append(f"{place(module, line)}: {own} must not import {other}")
    assert not offenders, "\n".join(offenders)


def test_no_file_imports_itself_through_others():
    """Also not for types alone: whoever reads one file of a circle has to read them all."""
    named = {".".join(m.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): m for m in MODULES}
    arrows = {}
    for name, module in named.items():
        others = {other for other, _ in imports(module) if other in named}
        # ``from room import file`` is an arrow to the file alone.
        arrows[name] = {o for o in others if not any(longer.startswith(f"{o}.") for longer in others)}
    arrows["precdoctor.recording.recorder.rank_claim"].remove("precdoctor.recording.recorder")  # halves of one thing
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_only_recording_imports_torch_and_nothing_loads_pickles():
    offenders = []
    for module in MODULES:
        own = part_of(module)
        for name, line in imports(module):
            top = name.split(".")[0]
            if top == "torch" and own not in TORCH_ALLOWED:
                offenders.append(f"{place(module, line)}: {own} must not import torch")
            if top in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}:
                offenders.append(f"{place(module, line)}: no pickles")
        for node in nodes(module) if own not in TORCH_ALLOWED else ():
            if isinstance(node, ast.Attribute) and node.attr in {"load", "read_pickle"}:
                called = ast.unparse(node)
                if called in {"torch.load", "pd.read_pickle", "np.load"}:
                    offenders.append(f"{place(module, node.lineno)}: {called} can run code")
    assert not offenders, "\n".join(offenders)


def test_every_top_level_part_is_in_the_plan():
    parts = {part_of(module) for module in MODULES}
    assert parts <= set(ARROWS), f"add to ARROWS, deliberately: {parts - set(ARROWS)}"


def test_modules_and_functions_stay_short():
    offenders = []
    for module in MODULES:
        lines = module.read_text().count("\n")
        if lines > MAX_MODULE:
            offenders.append(f"{module.relative_to(ROOT)} has {lines} lines")
        for node in nodes(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - declared(node)
                if length > MAX_FUNCTION:
                    offenders.append(f"{place(module, node.lineno)}: {node.name} has {length} lines")
    assert not offenders, "\n".join(offenders)


def declared(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the parameter list: a command's flags are data, not steps."""
    return node.body[0].lineno - node.lineno
