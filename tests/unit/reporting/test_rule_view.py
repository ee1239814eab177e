import io
import re

import pytest

from precdoctor.diagnosis.registry import RULES
from precdoctor.reporting.console import make_console
from precdoctor.reporting.rule_view import print_page, reflow
from tests.support.offenders import check_each


@pytest.mark.parametrize("width", [48, 80, 140])
def test_what_does_not_fit_goes_on_under_its_own_beginning(width):
    check_each(lambda rule: check_page(rule, width), RULES, lambda rule: rule.code)


def check_page(rule, width):
    file = io.StringIO()
    print_page(rule, make_console(file, width))
    sections = re.split(r"\n\n(?=\S)", file.getvalue())
    options = next(s for s in sections if s.startswith("Options\n")).splitlines()[1:]
    names = {f"{o.name} = {o.default:g}" for o in rule.options}
    assert names <= {line.strip() for line in options}
    for line in options[1:]:
        assert line.startswith("      ") or line.strip() in names, line
    references = next(s for s in sections if s.startswith("References\n")).splitlines()[1:]
    assert all(line.startswith(("  - ", "    ")) for line in references)


def test_paragraphs_and_items_of_a_list_are_joined_and_code_is_not():
    text = "One sentence,\ncut in two:\n\n- an item,\n  cut in\n  three;\n- another\n\n    code(1)\n    code(2)"
    joined = [
        "One sentence, cut in two:",
        "",
        "- an item, cut in three;",
        "- another",
        "",
        "    code(1)",
        "    code(2)",
    ]
    assert reflow(text).splitlines() == joined
