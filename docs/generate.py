"""Writes the generated pages: docs/rules/ from the rules themselves, docs/images/diagnose.svg from a sample run.

``make docs`` runs it; a test compares the pages with what it would write.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from precdoctor.comparison.leading import INDICATORS
from precdoctor.comparison.regressions import REGRESSIONS
from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.registry import RULES
from precdoctor.reporting.console import THEME
from precdoctor.reporting.terminal import print_full
from precdoctor.runlog import open_run

DOCS = Path(__file__).resolve().parent
#: The run in the picture; `make samples` records it.
PICTURED = DOCS.parent / "sample_runs" / "gpt-fp16-attention-nan" / "run"


def pages() -> dict[Path, str]:
    """Every generated page with its content."""
    rows = [f"| [{r.code}]({r.code}.md) | {r.name} | {r.severity.value} |" for r in RULES]
    index = [
        "# Rules",
        "",
        "In the order in which they are checked. `precdoctor explain CODE` prints the same pages.",
        "",
        "| code | name | severity |",
        "|---|---|---|",
        *rows,
        "",
        "With a baseline, `precdoctor gate` also checks what got worse since then:",
        "",
        "| code | name | severity | finds |",
        "|---|---|---|---|",
        *(f"| {r.code} | {r.name} | {r.severity.value} | {r.doc} |" for r in REGRESSIONS),
        "",
        "`precdoctor record --reference RUN` holds a running training against a healthy one:",
        "",
        "| code | name | severity | finds |",
        "|---|---|---|---|",
        *(f"| {i.code} | {i.name} | {i.severity.value} | {i.doc} |" for i in INDICATORS),
        "",
    ]
    generated = {DOCS / "rules" / f"{rule.code}.md": rule.markdown() for rule in RULES}
    return generated | {DOCS / "rules" / "index.md": "\n".join(index)}


def picture(run: Path) -> str:
    """What `precdoctor diagnose` prints for a run, as SVG that loads nothing from anywhere."""
    console = Console(
        file=io.StringIO(), record=True, width=104, theme=THEME, force_terminal=True, markup=False, highlight=False
    )
    diagnosis = diagnose(open_run(run))
    shown = {**diagnosis.run, "path": str(run.relative_to(DOCS.parent))}
    print_full(replace(diagnosis, run=shown), console)
    svg = console.export_svg(title="precdoctor diagnose", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    """Write what has changed, and remove pages of rules that are gone."""
    wanted = pages()
    for stale in set((DOCS / "rules").glob("*.md")) - set(wanted):
        stale.unlink()
    if PICTURED.is_dir():
        wanted[DOCS / "images" / "diagnose.svg"] = picture(PICTURED)
    for path, content in wanted.items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            print(f"Wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
