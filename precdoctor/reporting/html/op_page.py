"""Renders an op-by-op comparison of two runs as one HTML file without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

import precdoctor
from precdoctor.comparison.op_compare import OpComparison, branches
from precdoctor.comparison.op_differences import Difference, ListComparison
from precdoctor.reporting import op_view
from precdoctor.reporting.html.page import asset, digest, template
from precdoctor.reporting.text import clean, number

#: Most rows of the tree, and of the list of differences.
MOST_ROWS = 1000
#: Deepest indentation of the tree.
_DEPTH = 12


def render(found: OpComparison) -> str:
    """The HTML page; recorded names and source lines are escaped."""
    first = found.first
    style, *lines = op_view.verdict(found)
    sheet = asset("report.css") + asset("ops.css")
    return template(
        "ops.html.j2"
    ).render(
        style=Markup(sheet),  # noqa: S704 - files of the package
        policy=f"default-src 'none'; style-src '{digest(sheet)}'; base-uri 'none'; form-action 'none'",
        version=precdoctor.__version__,
        state={"pd.strong": "findings", "pd.near": "indeterminate"}.get(style, "clean"),
        headline=lines[0],
        lines=lines[1:],
        a=clean(found.a),
        b=clean(found.b),
        scope=op_view.scope(found),
        notes=[clean(f"{note[:1].upper()}{note[1:]}.") for note in found.notes],
        sources=op_view.sources(found),
        tensors=list(_tensors(found.origin)) if found.origin is not None else [],
        tree=_tree(first) if first is not None else [],
        differences=[_row(d) for d in first.differences[:MOST_ROWS]] if first is not None else [],
        more=number(len(first.differences) - MOST_ROWS) if first and len(first.differences) > MOST_ROWS else "",
    )


def _tensors(origin: Difference) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Rows of the table of tensors: ``(name, run, figures)``."""
    for name, x, y in op_view.tensor_rows(origin):
        for run, tensor in op_view.runs_of(x, y):
            yield clean(name, 200), run.replace("=", " = "), op_view.figures(tensor)


def _tree(first: ListComparison) -> list[dict[str, Any]]:
    return [
        {
            "depth": min(branch.depth, _DEPTH),
            "what": op_view.row_of(branch),
            "source": clean(branch.ops[0].op.source),
            "apart": op_view.apart(branch.end),
            "growth": op_view.growth(branch),
            "beyond": not all(d.explained for d in branch.ops),
        }
        for branch in branches(first)[:MOST_ROWS]
    ]


def _row(found: Difference) -> dict[str, Any]:
    op = found.op
    of = "A and B" if found.a and found.b else "A" if found.a else "B"
    other = f" / {clean(found.b.name)}" if found.a and found.b and found.a.name != found.b.name else ""
    return {
        "index": op.index,
        "name": clean(op.name) + other,
        "module": clean(op.module or op.root),
        "phase": clean(op.phase),
        "source": clean(op.source),
        "of": of,
        "apart": op_view.apart(found),
        "limit": f"{found.limit:.2g}",
        "beyond": not found.explained,
    }
