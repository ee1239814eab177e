"""The house rules that no linter knows: which package may import which, and how long things may get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "precdoctor"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: What everything may import: they know nothing of the rest when they are imported.
LEAVES = {"errors", "_boot", "__version__"}
#: What a package may import of precdoctor, beside itself and the leaves. An arrow that is not here is a decision.
ARROWS = {
    "numerics": set(),
    "runlog": {"numerics"},
    "recording": {"runlog", "numerics"},
    "diagnosis": {"runlog", "numerics"},
    "comparison": {"diagnosis", "runlog", "numerics"},
    "reporting": {"comparison", "diagnosis", "runlog", "numerics"},
    "integrations": {"reporting", "comparison", "diagnosis", "recording", "runlog", "numerics"},
    "cli": {"reporting", "comparison", "diagnosis", "recording", "runlog", "numerics", "integrations"},
    # beside the packages: the public names, the entry point, the module every process starts with, the errors
    "__init__": {"comparison", "diagnosis", "recording", "runlog", "numerics"},
    "__main__": {"cli"},
    "_boot": {"recording"},
    "errors": set(),
}
TORCH_ALLOWED = {"recording", "integrations"}
MAX_MODULE, MAX_FUNCTION = 400, 60


def part_of(module: Path) -> str:
    """The package a module belongs to; for one at the top, its own name."""
    inner = module.relative_to(PACKAGE)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


def imports(module: Path) -> Iterator[tuple[str, int]]:
    """Every imported dotted name of a module, those inside functions and type checks too."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute"
            base = node.module or ""
            yield base, node.lineno
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def ids(paths):
    return [str(p.relative_to(ROOT)) for p in paths]


@pytest.mark.parametrize("module", MODULES, ids=ids(MODULES))
def test_arrows_point_one_way(module):
    own = part_of(module)
    for name, line in imports(module):
        parts = name.split(".")
        if parts[0] != "precdoctor" or len(parts) == 1:
            continue
        other = parts[1]
        if other in {own, *LEAVES} or other not in ARROWS:
            continue
        assert other in ARROWS[own], f"{module}:{line}: {own} must not import {other}"


@pytest.mark.parametrize("module", MODULES, ids=ids(MODULES))
def test_only_recording_imports_torch_and_nothing_loads_pickles(module):
    own = part_of(module)
    for name, line in imports(module):
        top = name.split(".")[0]
        assert top != "torch" or own in TORCH_ALLOWED, f"{module}:{line}: {own} must not import torch"
        assert top not in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}, f"{module}:{line}: no pickles"
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "pd.read_pickle", "np.load"}:
            assert own in TORCH_ALLOWED, f"{module}:{node.lineno}: {ast.unparse(node)} can run code"


def test_every_top_level_part_is_in_the_plan():
    parts = {part_of(module) for module in MODULES}
    assert parts <= set(ARROWS), f"add to ARROWS, deliberately: {parts - set(ARROWS)}"


@pytest.mark.parametrize("module", MODULES, ids=ids(MODULES))
def test_modules_and_functions_stay_short(module):
    text = module.read_text()
    assert text.count("\n") <= MAX_MODULE, f"{module} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - declared(node)
            assert length <= MAX_FUNCTION, f"{module}:{node.lineno}: {node.name} has {length} lines"


def declared(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the parameter list: a command's flags are data, not steps."""
    return node.body[0].lineno - node.lineno
