"""Which lines may have made a value without a gradient, as the source shows it."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.recording.ops.assigned_lines import risky_lines
from precdoctor.recording.ops.source_lines import Line

#: Each reads at the line that ends in ``# here``; lines that end in ``# seen`` were computed again; those that end in a
#: number are to be found, in that order.
SOURCES = {
    "in the same function": """
        def loss(out, target):
            target = torch.log(target)  # 1
            target = target - target.mean()
            return smooth_l1(out, target)  # here
    """,
    "at the top of a script": """
        for x, y in loader:
            advantage = (y - y.mean()) / (y.std() + 1e-8)  # 1
            loss = (advantage * model(x)).mean()  # here
    """,
    "a function and a method that are called": """
        class Schedule:
            def weight(self, t):
                snr = self.alpha[t] / self.sigma[t]  # 2
                return snr.clamp(max=5) / snr  # 1
        def step(schedule):
            loss = (schedule.weight(t) * error).mean()  # here
    """,
    "a method whose name another class uses too": """
        class First:
            def loss(self, out, x):
                weight = x.log()  # 1
                return weight * out  # here
        class Second:
            def loss(self, out, x):
                weight = x.sqrt()
                return weight * out
    """,
    "the closest first": """
        def step(x):
            a = x.sqrt()  # 3
            b = a ** y  # 2
            c = b / a  # 1
            return (c *
                    x)  # here
    """,
    "no more than three": """
        def step(x):
            a = x.sqrt()
            a = a.log()  # 3
            a = a.exp()  # 2
            a /= x  # 1
            return a + x  # here
    """,
    "an op of several lines": """
        def step(x):
            a = torch.stack([
                x,
                x.log(),  # 1
            ])
            return a * x  # here
    """,
    "nothing that was computed again, and nothing behind it": """
        def step(x):
            a = x.log()
            b = a / x  # seen
            return b * x  # here
    """,
    "the statement itself, though it was computed in part": """
        def step(x):
            a = x.sqrt()  # 1
            return (torch.log(x) *  # 2
                    a * y)  # here
    """,
    "no literal divisor or power": """
        def step(x):
            a = x ** 2 / 255.0
            return a * x  # here
    """,
    "neither other functions nor what comes after": """
        def other(x):
            a = x.log()
        def step(x, a):
            b = a * x  # here
            a = x / b
            return b
    """,
    "a value that is made of itself": """
        def step(x):
            x = step(x / x)  # 1
            return x * 2  # here
    """,
}


@pytest.mark.parametrize("what", SOURCES)
def test_lines_that_lead_to_what_a_statement_reads(what, tmp_path) -> None:
    text = textwrap.dedent(SOURCES[what]).lstrip()
    lines = text.splitlines()
    (tmp_path / "train.py").write_text(text)
    marks = {number: line.rpartition("# ")[2] for number, line in enumerate(lines, 1) if "# " in line}
    (here,) = [number for number, mark in marks.items() if mark == "here"]
    expected = sorted((int(mark), number) for number, mark in marks.items() if mark.isdigit())
    found = risky_lines(
        Line(str(tmp_path / "train.py"), here), {n for n, mark in marks.items() if mark == "seen"}, own=True
    )
    assert [line.number for line in found] == [number for _, number in expected]


def test_what_the_statement_does_itself_can_be_left_out(tmp_path) -> None:
    (tmp_path / "train.py").write_text("x = x / norm\nloss = net(x).sum() / accumulated\n")
    line = Line(str(tmp_path / "train.py"), 2)
    assert [[found.number for found in risky_lines(line, (), own=own)] for own in (True, False)] == [[1, 2], [1]]


def test_without_source_there_are_no_lines(tmp_path) -> None:
    (tmp_path / "other.txt").write_text("no Python\n")
    (tmp_path / "large.py").write_text("a = b / c; d = a\n" * 70_000)
    for file in ("missing.py", "other.txt", "large.py"):
        assert risky_lines(Line(str(tmp_path / file), 1), (), own=True) == []
    assert risky_lines(Line("<string>", 1), (), own=True) == []


@given(st.text(alphabet="ab= /().\n:,#*", max_size=80), st.integers(-1, 9))
@settings(max_examples=150, deadline=None)
def test_no_text_makes_it_fail(tmp_path_factory, text, number) -> None:
    file = tmp_path_factory.mktemp("any") / "any.py"
    file.write_text(text)
    assert len(risky_lines(Line(str(file), number), (), own=True)) <= 3
