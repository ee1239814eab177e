"""Two runs op by op as people and programs read it: on terminals, piped, as JSON and as a page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from precdoctor.cli import main
from precdoctor.comparison.op_compare import compare_ops
from precdoctor.errors import IncomparableRunsError, NothingRecordedError
from precdoctor.reporting.console import make_console
from precdoctor.reporting.html.op_page import render
from precdoctor.reporting.html.page import MARK
from precdoctor.reporting.op_view import print_ops
from precdoctor.runlog import open_run
from tests.support.hostile import NAMES
from tests.support.op_lists import Program, network
from tests.support.runs import write_run

LAYERS = [0, 1, 2, 3, 0, 2]
#: Names the log can hold: Parquet has no lone surrogates.
STORABLE = tuple(n.encode("utf-8", "replace").decode() for n in NAMES)


def written(path: Path, program: Program, *, step: int = 0, **columns) -> Path:
    """A run with this list of ops."""
    rows = [{**row, "step": step, **columns} for row in program.rows]
    tensors, steps = [{"step": step, "amax": 1.0}], [{"step": step, "loss": 1.0}]
    return write_run(path, tensors, steps, ops=rows)


@pytest.fixture
def runs(tmp_path):
    """Equal, equal, wrong at the third layer, and with a cast."""
    return {
        "a": written(tmp_path / "a", network(LAYERS)),
        "equal": written(tmp_path / "equal", network(LAYERS)),
        "wrong": written(tmp_path / "wrong", network(LAYERS, fault=2)),
        "cast": written(tmp_path / "cast", network(LAYERS, frozenset({1}))),
    }


def compared(runs, name):
    return compare_ops(open_run(runs["a"]), open_run(runs[name]))


def shown(found, width=None, **options) -> str:
    stream = io.StringIO()
    print_ops(found, make_console(stream, width), **options)
    return stream.getvalue()


def test_the_screen_names_the_op_its_line_both_numbers_and_what_follows(runs):
    text = shown(compared(runs, "wrong"))
    assert "The runs part at step 0: aten.tanh.default in layer, forward" in text
    assert "model.py:3  line 3" in text and "beyond the limit" in text
    assert re.search(r"result +A +float32 \[4, 16\] .*\n +B +float32 \[4, 16\]", text)
    assert "What follows from it: 4 ops" in text and "layer: aten.pow.Tensor_Scalar + 2 ops (forward)" in text
    assert "What follows" not in shown(compared(runs, "wrong"), concise=True)


def test_equal_runs_and_other_formats_are_no_alarm(runs, capsys):
    assert "Nothing differs: every op of both runs gives the same bits." in shown(compared(runs, "equal"))
    text = shown(compared(runs, "cast"))
    assert "Nothing differs beyond what formats explain; the first bits differ at step 0" in text.replace("\n", " ")
    assert "it casts float32 to float16" in text
    for name, status in (("equal", 0), ("cast", 0), ("wrong", 1)):
        assert main(["compare", str(runs["a"]), str(runs[name]), "--ops", "--fail-on", "warning"]) == status
    assert main(["compare", str(runs["a"]), str(runs["wrong"]), "--ops"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal(runs, width):
    for name in ("equal", "wrong", "cast"):
        lines = shown(compared(runs, name), width).splitlines()[2:]  # paths are not broken: people copy them
        assert [line for line in lines if len(line) > width] == []


def test_json_has_the_whole_answer(runs, capsys):
    assert main(["compare", str(runs["a"]), str(runs["wrong"]), "--ops", "--output-format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["compare_ops"]
    assert set(told) == {"a", "b", "equal", "lists", "step", "rank", "first", "origin", "following", "notes"}
    assert set(told["lists"][0]) == {
        "step", "rank", "ops_a", "ops_b", "paired", "differing", "beyond", "apart_before",
    }  # fmt: skip
    origin = told["origin"]
    assert set(origin) == {
        "op_a", "op_b", "made_a", "made_b", "error", "limit", "explained", "reads_others", "reason", "parents",
    }  # fmt: skip
    assert origin["op_a"]["line"] == 3 and origin["error"] > origin["limit"] and not told["equal"]
    assert len(told["following"]) == 4


def test_the_page_is_one_file_that_loads_nothing(runs, tmp_path, capsys):
    page = tmp_path / "ops.html"
    assert main(["compare", str(runs["a"]), str(runs["wrong"]), "--ops", "--html", str(page)]) == 0
    text = page.read_text()
    assert text.startswith(MARK)
    assert not re.search(r"<script|<link|<img|src=|url\(|href=", text)
    assert "aten.<wbr>tanh.<wbr>default" in text and "model.py:3" in text
    assert main(["compare", str(runs["a"]), str(runs["equal"]), "--ops", "--html", str(page)]) == 0  # replaces its own
    assert "Nothing differs" in page.read_text()
    page.write_text("mine")
    assert main(["compare", str(runs["a"]), str(runs["equal"]), "--ops", "--html", str(page)]) == 2
    assert "already there" in capsys.readouterr().err and page.read_text() == "mine"


@pytest.mark.parametrize("name", STORABLE, ids=repr)
def test_hostile_names_are_text(tmp_path, name):
    names = {"module": name, "root": name, "file": name, "code": name, "settings": name, "argument": name}
    good, bad = network([0, 2, 3]), network([0, 2, 3], fault=1)
    bad.rows = [{**row, "op": name} if row["index"] == 1 else row for row in bad.rows]
    good.rows = [{**row, "op": name} if row["index"] == 1 else row for row in good.rows]
    a, b = (written(tmp_path / n, p, **names) for n, p in (("a", good), ("b", bad)))
    found = compare_ops(open_run(a), open_run(b))
    assert found.first is not None
    text = shown(found, 80)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert not re.search(r"^\s*::", text, re.MULTILINE) and "##[" not in text and "##vso[" not in text
    page = render(found)
    assert (
        "<script" not in page and "<img" not in page and "onerror=alert" not in page.replace("&gt;", ">").split("<")[0]
    )
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2066]", page)


def test_a_run_without_a_list_of_ops_is_told_what_to_type(runs, tmp_path, capsys):
    plain = write_run(tmp_path / "plain", [{"amax": 1.0}], [{"loss": 1.0}])
    with pytest.raises(NothingRecordedError, match="record one with: precdoctor record --ops 0"):
        compare_ops(open_run(runs["a"]), open_run(plain))
    assert main(["compare", str(plain), str(runs["a"]), "--ops"]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    why = '{"outcome": "refused", "why": "another dispatch mode is active"}'
    refused = write_run(tmp_path / "refused", [{}], [{}], [{"event": "ops", "step": 0, "data": why}])
    with pytest.raises(NothingRecordedError, match="another dispatch mode is active"):
        compare_ops(open_run(refused), open_run(runs["a"]))


def test_lists_of_other_steps_are_told(runs, tmp_path):
    later = written(tmp_path / "later", network(LAYERS), step=5)
    with pytest.raises(IncomparableRunsError, match="no step is listed in both"):
        compare_ops(open_run(runs["a"]), open_run(later))


def test_a_damaged_list_is_one_sentence(runs, capsys):
    [part] = runs["wrong"].glob("rank-00000/ops-*.parquet")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 0xFF
    part.write_bytes(bytes(content))
    assert main(["compare", str(runs["a"]), str(runs["wrong"]), "--ops"]) == 3
    err = capsys.readouterr().err
    assert "ops-000001.parquet" in err and "log verify" in err and err.count("\n") == 1
    part.unlink()
    assert main(["compare", str(runs["a"]), str(runs["wrong"]), "--ops"]) == 3
    assert "missing" in capsys.readouterr().err


def test_html_asks_for_ops(runs, capsys):
    assert main(["compare", str(runs["a"]), str(runs["equal"]), "--html", "x.html"]) == 2
    assert "--html is for --ops" in capsys.readouterr().err
    assert main(["compare", str(runs["a"]), str(runs["equal"]), "--ops", "--rename", "a=b"]) == 2
    assert "--rename cannot be combined with --ops" in capsys.readouterr().err
