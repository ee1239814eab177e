"""Inside the two big packages: which room may import which when it is loaded or runs; type checks are left out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "precdoctor"
#: Rooms from the lowest to the highest: one may import those in the rows above its own. ``families/*`` are rooms each;
#: ``diagnosis`` and ``recording`` are the packages' own ``__init__``.
ORDERS = {
    "diagnosis": (
        ("claims",),
        ("survey",),
        ("analyses",),
        ("advice",),
        ("divergence",),
        ("families/*",),
        ("offline",),
        ("prescriptions",),
        ("ranking",),
        ("*",),
    ),
    "recording": (
        ("options",),
        ("process",),
        ("model",),
        ("ops",),
        ("kernels",),
        ("slots",),
        ("output",),
        ("recorder",),
        ("steps", "fp8", "applying"),
        ("scene",),
        ("microscope", "deepscan"),
        ("shadowing",),
        ("observe",),
        ("installation",),
        ("session", "boot_path"),
    ),
}
#: What only looks takes a StepContext.
WITHOUT_RECORDER = {"scene", "microscope", "deepscan", "shadowing", "applying"}


def runtime_imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names that a module imports, in functions too, but not for type checks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from runtime_imports(other)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", child.lineno) for alias in child.names)
        else:
            yield from runtime_imports(child)


def room(inner: tuple[str, ...]) -> str:
    """The room of a module, given its path below the package."""
    return "/".join(inner[:2]) if inner[0] == "families" and len(inner) > 1 else inner[0]


def floor(order: tuple[tuple[str, ...], ...], name: str) -> int | None:
    """The row of a room; that of ``*`` for whatever is named in none."""
    general = "families/*" if name.startswith("families/") else "*"
    found = [i for i, rooms in enumerate(order) if name in rooms] or [i for i, r in enumerate(order) if general in r]
    return found[0] if found else None


def offenders(package: str) -> Iterator[str]:
    """One line per import that points sideways or up, and per room that has no place in the order."""
    order, root = ORDERS[package], PACKAGE / package
    paths = sorted(root.rglob("*.py"))
    rooms = {room(path.relative_to(root).with_suffix("").parts) for path in paths} - {"__init__"}
    for path in paths:
        own = room(path.relative_to(root).with_suffix("").parts)
        if own == "__init__":
            continue
        mine = floor(order, own)
        if mine is None:
            yield f"{path}: the room {own} has no place in the order"
            continue
        for name, line in runtime_imports(ast.parse(path.read_text())):
            parts = tuple(name.split("."))
            if parts[:2] != ("precdoctor", package) or len(parts) < 3:
                continue
            other = room(parts[2:])
            theirs = floor(order, other) if other in rooms else None
            top = order[mine] == ("*",)
            if other in rooms and other != own and not top and (theirs is None or theirs >= mine):
                yield f"{path}:{line}: {own} must not import {other}"
            if name == "precdoctor.recording.recorder.Recorder" and own in WITHOUT_RECORDER:
                yield f"{path}:{line}: {own} takes a StepContext"


def test_arrows_between_rooms_point_one_way():
    assert [line for package in ORDERS for line in offenders(package)] == []
