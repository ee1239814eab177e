"""Every rule has a whole page, thresholds with a source, and a name that states the defect."""

import ast
import re
from pathlib import Path

import pytest

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.registry import RULES, find
from precdoctor.errors import UsageError
from tests.support.offenders import check_each

HEADINGS = [
    "What it finds", "Why it matters", "Example", "What to do", "Options", "Confidence", "References",
]  # fmt: skip
NAMES = {
    "PD101": "nonfinite-origin-forward",
    "PD102": "nonfinite-origin-backward",
    "PD103": "nonfinite-loss",
    "PD104": "bad-input-batch",
    "PD105": "nonfinite-weights",
    "PD106": "poisoned-buffers",
    "PD107": "swallowed-nonfinite",
    "PD108": "irreproducible-nonfinite",
    "PD201": "activation-gradient-underflow",
    "PD202": "weight-gradient-underflow",
    "PD203": "dead-layer",
    "PD204": "vanishing-gradients",
    "PD205": "swamped-accumulation",
    "PD206": "swallowed-underflow",
    "PD207": "dominant-epsilon",
    "PD208": "saturated-function",
    "PD301": "loss-scale-collapse",
    "PD302": "loss-scale-thrash",
    "PD303": "low-loss-scale",
    "PD304": "needless-loss-scaler",
    "PD305": "unscaled-fp16-gradients",
    "PD306": "clip-before-unscale",
    "PD307": "frozen-loss-scale",
    "PD308": "unscaled-into-half",
    "PD309": "double-unscale",
    "PD401": "fp8-saturation",
    "PD402": "fp8-underflow",
    "PD403": "e4m3-gradients",
    "PD404": "wrong-fp8-scale",
    "PD406": "fp8-amax-explosion",
    "PD407": "sensitive-layer-in-fp8",
    "PD408": "fp8-outlier-channels",
    "PD501": "lost-weight-updates",
    "PD502": "no-master-weights",
    "PD503": "adam-eps-dominates",
    "PD504": "oversized-weight-updates",
    "PD505": "stalled-second-moment",
    "PD506": "second-moment-underflow",
    "PD508": "master-weights-apart",
    "PD509": "stalled-state",
    "PD510": "cleared-gradients",
    "PD511": "decayed-learning-rate",
    "PD512": "stalled-module",
    "PD601": "near-format-limit",
    "PD602": "activation-growth",
    "PD603": "gradient-explosion",
    "PD604": "growth-with-depth",
    "PD605": "loss-spike",
    "PD606": "logit-growth",
    "PD701": "reduction-in-half",
    "PD703": "half-precision-positions",
    "PD704": "precision-error-above-expectation",
    "PD705": "catastrophic-cancellation",
    "PD706": "lossy-cast",
    "PD708": "narrow-gradient-reduction",
    "PD710": "unequal-replicas",
}


def _code(rule: Rule) -> str:
    return rule.code


def test_codes_and_names_are_the_published_ones() -> None:
    assert {r.code: r.name for r in RULES} == NAMES


def test_page_is_complete() -> None:
    check_each(_check_page, RULES, _code)


def _check_page(rule: Rule) -> None:
    text = rule.markdown()
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == HEADINGS
    for heading in HEADINGS:
        body = text.split(f"## {heading}\n\n")[1].split("\n## ")[0]
        assert len(body.strip()) > 40, heading
    assert f"({rule.code})" in text.splitlines()[0]


def test_options_have_unit_meaning_and_source() -> None:
    check_each(_check_options, RULES, _code)


def _check_options(rule: Rule) -> None:
    assert rule.options
    for option in rule.options:
        assert option.unit
        assert option.doc.endswith(".")
        assert option.source.endswith(".")
        assert option.minimum <= option.default <= option.maximum
        assert option.name.isidentifier()
    assert len({o.name for o in rule.options}) == len(rule.options)


def test_needs_and_relations_name_what_exists() -> None:
    codes = {rule.code for rule in RULES}
    for rule in RULES:
        assert set(rule.explains) <= codes - {rule.code}, rule.code


def test_examples_in_pages_are_python() -> None:
    check_each(_check_example, RULES, _code)


def _check_example(rule: Rule) -> None:
    shown = rule.markdown().split("## Example\n\n")[1].split("\n## ")[0]
    indented = re.compile(r"(?:^    .*\n?)+", flags=re.MULTILINE)
    assert [b.rstrip() for b in indented.findall(shown)] == [b.rstrip() for b in indented.findall(rule.page.example)]
    for block in indented.findall(shown):
        ast.parse("\n".join(line.removeprefix("    ") for line in block.splitlines()))


def test_no_bare_threshold_in_a_check() -> None:
    check_each(_check_thresholds, RULES, _code)


def _check_thresholds(rule: Rule) -> None:
    """Each option is read in the files under the rule's name, so changing it changes something."""
    source = Path(rule.check.__code__.co_filename)
    shared = source.parents[1] / "nonfinite" / "incident_report.py"
    files = [*source.parent.glob(f"{source.stem}*.py"), shared]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for option in rule.options:
        assert f'options["{option.name}"]' in text or f"options['{option.name}']" in text, option.name


def test_rules_are_found_by_code_and_name() -> None:
    assert find("pd201", RULES) is find("activation-gradient-underflow", RULES)
    with pytest.raises(UsageError, match="did you mean 'fp8-saturation'"):
        find("fp8-satuation", RULES)


@pytest.mark.parametrize(
    ("module", "expression"),
    [
        ("", "model"),
        ("blocks.3.attn", "model.blocks[3].attn"),
        ("0.weight", "model[0].weight"),
        ("a b.c'd", 'model.get_submodule("a b.c\'d")'),
        ("class", "model.get_submodule('class')"),
    ],
)
def test_modules_as_python(module: str, expression: str) -> None:
    assert snippets.module_expression(module) == expression
    ast.parse(snippets.halt_on_nonfinite(module))
    ast.parse(snippets.run_in_float32(module, "cuda"))


@pytest.mark.parametrize(
    "text",
    [
        snippets.bfloat16_autocast("cuda"),
        snippets.detect_anomaly(),
        snippets.lower_rate_and_clip(),
        snippets.grad_scaler("cuda", 8192.0),
        snippets.grad_scaler("cpu", 8192.0, 500),
    ],
)
def test_snippets_are_python(text: str) -> None:
    ast.parse(text)
