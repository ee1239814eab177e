"""Generates pages: those of the rules, which the site builds and nobody commits, and docs/screens.md and
docs/images/diagnose.svg from recorded runs.

``make docs`` writes the latter; a test compares the page with what it would write.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from precdoctor.comparison.compare import FIRST_DIFFERENCE
from precdoctor.comparison.leading import INDICATORS
from precdoctor.comparison.regressions import REGRESSIONS
from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.diagnosis.registry import FAMILIES, RULES
from precdoctor.reporting.console import THEME, make_console
from precdoctor.reporting.terminal import print_full
from precdoctor.runlog import open_run

DOCS = Path(__file__).resolve().parent
#: The run in the picture; `make samples` records it.
PICTURED = DOCS.parent / "sample_runs" / "gpt-fp16-attention-nan" / "run"
#: Columns of the page of screens.
WIDTH = 80
#: Title, recorded run, what was run, what to do next and the command for it, in which RUN is the run's path.
SCREENS = (
    (
        "A clean run",
        "sample_runs/gpt-bf16-healthy/run",
        "A small GPT in BF16. Nothing is wrong with it. (Recorded with `--every 4`; short runs pay tens of percent.)",
        "Nothing needs to be done. To see what was checked, type",
        "precdoctor diagnose RUN --verbose",
    ),
    (
        "NaN in the model",
        "sample_runs/gpt-fp16-attention-nan/run",
        "The same GPT in FP16, at a learning rate a thousand times too high.",
        "Lower the learning rate and start again: the screen names no sound checkpoint. For the rule, type",
        "precdoctor explain PD101",
    ),
    (
        "NaN in the data",
        "sample_runs/nan-in-data/run",
        "A regression on a table in which one cell is missing.",
        "Put the snippet where the loop receives the batch. To learn what else can be wrong with one, type",
        "precdoctor explain PD104",
    ),
    (
        "FP8 with a wrong scale",
        "sample_runs/gpt-fp8-wrong-margin/run",
        "The GPT with FP8 layers whose scales leave no margin.",
        "Ask what other recipes would have done to the same tensors:",
        "precdoctor whatif RUN --recipe current",
    ),
    (
        "A loss scale that collapses",
        "tests/rules/PD301/firing/gan-auxiliary-loss/run",
        "A GAN in FP16, one layer of which overflows at every loss scale.",
        "Put the snippet behind the generator and use its name for `model`. To see the loss scale over time, type",
        "precdoctor show RUN",
    ),
    (
        "LoRA in BF16",
        "sample_runs/lora-bf16/run",
        "Adapters trained in BF16 without a wider copy.",
        "Write the change to a file, then train with `precdoctor record --apply fix.toml -- python train.py`:",
        "precdoctor diagnose RUN --prescription fix.toml",
    ),
    (
        "Two ranks",
        "sample_runs/two-ranks/run",
        "DistributedDataParallel; one rank takes the logarithm of a negative number.",
        "Find out why rank 1 takes the logarithm of negative numbers; a clamp would hide it. For the timeline, type",
        "precdoctor show RUN",
    ),
    (
        "A crash after one step",
        "sample_runs/crash-after-one-step/run",
        "The script fails where it logs its first step.",
        "The traceback on the terminal is the script's own. Fix the script and record it again:",
        "precdoctor record -- python train.py",
    ),
    (
        "A compiled model",
        "sample_runs/compiled/run",
        "`torch.compile`, and a loss that takes the logarithm of a probability that becomes 0.",
        "Change line 17 of the script and resume from a checkpoint at or before step 23. For the reason, type",
        "precdoctor explain PD102",
    ),
    (
        "A short run",
        "sample_runs/five-steps/run",
        "Five steps, as in a smoke test.",
        "Let the script train for at least 8 steps, and record it again:",
        "precdoctor record -- python train.py",
    ),
)

#: How to read a screen; stands in front of them.
READING = """
| on a screen | |
|---|---|
| `6 with full statistics` | steps whose tensors were recorded; the others have only loss, rates, norms and scale |
| `where`, `source` | the module; the line of the op |
| `seen at` | the line at which the fault was noticed, mostly that of `backward()` |
| `certainty` | how sure the rule is, and why |
| `before` | the tensor's largest magnitude (*amax*) on the last steps before the fault |
| `range` | the number of elements by power of two, from the format's smallest number to its largest |
| the `┊` inside it | numbers left of it are subnormal; `53 % above` at the end is the share beyond the range |
| `headroom` | the factor by which amax could grow before it overflows: `2^0` is at the limit, `2^126` far from it |
| `path` | tensors in the order of execution; `▸` is the first bad one |
| `also` | findings that this one explains |
| `do`, `predicted` | the change, and its effect as computed from the log; nobody has tried it |
| `not applicable` | rules about something that the run does not have: FP8, a loss scaler, several ranks, enough steps |
"""


def rule_pages() -> dict[str, str]:
    """The pages of the rules, the index first: content by path below docs/."""
    index = [
        "# Rules",
        "",
        "`precdoctor explain CODE` prints the same pages. A code is never used again: PD405 and PD411 are causes of",
        "PD404 (`invalid-amax`, `held-down`), and PD507 is part of PD509; for PD409 see",
        "`precdoctor whatif RUN --kind fp8_operand --format mxfp8`.",
    ]
    for title, rules in FAMILIES:
        rows = [f"| [{r.code}]({r.code}.md) | {r.name} | {r.severity.value} |" for r in rules]
        index += ["", f"## {title}", "", "| code | name | severity |", "|---|---|---|", *rows]
    index += [
        "",
        "## Against another run",
        "",
        "With a baseline, `precdoctor gate` also checks what got worse since then:",
        "",
        "| code | name | severity | finds |",
        "|---|---|---|---|",
        *(f"| {r.code} | {r.name} | {r.severity.value} | {r.doc} |" for r in REGRESSIONS),
        "",
        "`precdoctor compare A B` reports these regressions and where two runs part:",
        "",
        "| code | name | severity | finds |",
        "|---|---|---|---|",
        *(f"| {d.code} | {d.name} | {d.severity.value} | {d.doc} |" for d in [FIRST_DIFFERENCE]),
        "",
        "`precdoctor record --reference RUN` holds a running training against a healthy one:",
        "",
        "| code | name | severity | finds |",
        "|---|---|---|---|",
        *(f"| {i.code} | {i.name} | {i.severity.value} | {i.doc} |" for i in INDICATORS),
        "",
    ]
    return {"rules/index.md": "\n".join(index)} | {f"rules/{rule.code}.md": rule.markdown() for rule in RULES}


def screens() -> str:
    """The page of screens: what `precdoctor diagnose` prints for recorded runs, and what to type next."""
    what = f"What `precdoctor diagnose` prints for {len(SCREENS)} recorded runs on a terminal of {WIDTH} columns"
    where = "The runs are in the repository: the commands work there."
    parts = ["# Ten screens", f"{what}, and what to type next.\n{where}", READING.strip()]
    for title, run, about, then, command in SCREENS:
        screen = f"$ precdoctor diagnose {run}\n{printed(DOCS.parent / run)}"
        parts += [f"## {title}", about, f"```text\n{screen}```", then, f"    {command.replace('RUN', run)}"]
    return "\n\n".join(parts) + "\n"


def printed(run: Path) -> str:
    """What `precdoctor diagnose` prints for a run of the repository, without colours."""
    stream = io.StringIO()
    print_full(shown_diagnosis(run), make_console(stream, WIDTH, colour=False))
    return stream.getvalue()


def shown_diagnosis(run: Path) -> Diagnosis:
    """The diagnosis of a run, with its path as it is in the repository."""
    diagnosis = diagnose(open_run(run))
    return replace(diagnosis, run={**diagnosis.run, "path": str(run.relative_to(DOCS.parent))})


def picture(run: Path) -> str:
    """What `precdoctor diagnose` prints for a run, as SVG that loads nothing from anywhere."""
    console = Console(
        file=io.StringIO(), record=True, width=104, theme=THEME, force_terminal=True, markup=False, highlight=False
    )
    print_full(shown_diagnosis(run), console)
    svg = console.export_svg(title="precdoctor diagnose", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    """Write what has changed."""
    wanted = {DOCS / "screens.md": screens()}
    if PICTURED.is_dir():
        wanted[DOCS / "images" / "diagnose.svg"] = picture(PICTURED)
    for path, content in wanted.items():
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
            print(f"Wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
