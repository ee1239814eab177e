from __future__ import annotations

import ast

from hypothesis import given
from hypothesis import strategies as st

from precdoctor.reporting.finding_view import fitted


def test_a_comment_behind_a_wide_line_goes_above_it():
    code = "for p in model.parameters():\n    p.grad.div_(scale)  # in FP32, before clipping and before the optimizer"
    assert fitted(code, 40).split("\n") == [
        "for p in model.parameters():",
        "    # in FP32, before clipping and",
        "    # before the optimizer",
        "    p.grad.div_(scale)",
    ]
    assert fitted(code, 80) == code


def test_wide_code_and_what_only_looks_like_a_comment_stay():
    code = "print('#' * 60, 'and so on, and so on, and so on')"
    assert fitted(code, 20) == code


def test_a_comment_of_its_own_is_broken_between_words():
    assert fitted("# one two three four five six seven", 24) == "# one two three four\n# five six seven"


@given(st.lists(st.from_regex(r"( {0,8}x = y)?(  # [a-z ]{0,60}[a-z])?", fullmatch=True)), st.integers(30, 90))
def test_only_comments_move(lines, width):
    code = "\n".join(lines)
    told = fitted(code, width)
    assert [x.split("#")[0].rstrip() for x in told.split("\n") if x.split("#")[0].strip()] == [
        x.split("#")[0].rstrip() for x in lines if x.split("#")[0].strip()
    ]
    assert all(len(line) <= width or "#" not in line or " " not in line.split("# ")[-1] for line in told.split("\n"))


def test_what_is_printed_still_parses():
    code = "state = {}\nif not state:\n    raise ValueError(state)  # nothing was loaded from the checkpoint at all\n"
    assert ast.dump(ast.parse(fitted(code, 40))) == ast.dump(ast.parse(code))
