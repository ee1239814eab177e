"""Small files that would unfold to gigabytes: refused in one sentence before they do, by every reader of them."""

import json
import math
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.torture.files import MEMORY, put_part
from precdoctor.cli import main
from precdoctor.cli.config import Settings
from precdoctor.comparison.allowances import read_allowances
from precdoctor.comparison.baseline_file import read_baseline
from precdoctor.comparison.compare import compare
from precdoctor.diagnosis.engine import diagnose
from precdoctor.diagnosis.prescriptions.file import load
from precdoctor.errors import RunTooLargeError, UsageError
from precdoctor.reporting.html.page import render
from precdoctor.reporting.summary import summarise
from precdoctor.runlog import caps, open_run, toml
from tests.support.runs import write_run

STEPS = [{"step": s, "loss": 1.0} for s in (0, 1)]
TENSORS = [{"step": s, "module": m, "numel": 4} for s in (0, 1) for m in "ab"]
READERS = {
    "settings": lambda file: Settings({}, file.parent),
    "baseline": read_baseline,
    "prescriptions": load,
    "allow-list": read_allowances,
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A log, and a cap that a small bomb is above of."""
    monkeypatch.delenv(caps.ANY_SIZE, raising=False)
    monkeypatch.setattr(caps, "MAX_MEMORY", 16 << 20)
    return write_run(tmp_path / "run", TENSORS, STEPS)


def refused(run, *commands):
    for command in commands:
        with pytest.raises(RunTooLargeError, match=r"unfolds to [\d,]+ MiB .*--any-size") as error:
            command(run)
        assert "\n" not in str(error.value)


def show(run):
    return summarise(open_run(run))


def measured(parse):
    tracemalloc.start()
    kept = parse()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return size


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(['{"":0}'] * 1000) + "]",
        "[" + ",".join(["[]"] * 1000) + "]",
        "[" + ",".join(["[1000]"] * 1000) + "]",
        "[" + ",".join(["3.5"] * 1000) + "]",
        "[" + ",".join(['"ab"'] * 1000) + "]",
        "[" + ",".join(['"\\u20ac"'] * 1000) + "]",
        "[" + ",".join(["9" * 400] * 500) + "]",
        "{" + ",".join(f'"{n}":1' for n in range(1000)) + "}",
        "{" + ",".join(f'"{n}":{{"{n}":[]}}' for n in range(1000)) + "}",
        '["' + "x" * 10_000 + '\\ud83d\\ude00"]',
        '["' + "x" * 10_000 + '😀"]',
    ],
    ids=lambda text: text[:12],
)
def test_a_document_takes_at_most_what_is_counted_for_it(text):
    assert measured(lambda: json.loads(text)) <= caps.json_cost(text.encode())


def test_a_document_that_unfolds(run):
    text = (run / "rank-00000/rank.json").read_text()
    bomb = '"x":[' + ",".join(['{"":0}'] * 50_000) + "],"
    (run / "rank-00000/rank.json").write_text(text.replace("{", "{" + bomb, 1))
    refused(run, diagnose)
    assert main(["log", "verify", str(run)]) == 3


def test_documents_of_many_processes_that_unfold_together(tmp_path, monkeypatch):
    """Each alone is far below the cap. What all ranks have in common, the tree of modules, counts once."""
    monkeypatch.setattr(caps, "MAX_MEMORY", 2 << 20)
    shared = [{"name": "Net#0", "modules": [{"name": f"{n}"} for n in range(1000)]}]
    run = write_run(tmp_path / "same", TENSORS, STEPS, facts={"roots": shared}, ranks=12)
    diagnose(run)
    roots = [log.facts["roots"] for log in open_run(run).ranks]
    assert all(r is roots[0] for r in roots)
    run = write_run(tmp_path / "other", TENSORS, STEPS, ranks=12)
    for rank in range(12):
        own = [{"name": "Net#0", "modules": [{"name": f"{rank}.{n}"} for n in range(1000)]}]
        (run / f"rank-{rank:05d}/rank.json").write_text(json.dumps({"roots": own}))
    refused(run, diagnose)


def test_rows_of_events_that_unfold(run):
    for data in ("x" * 90_000, '{"what":[' + ",".join(['{"":0}'] * 10_000) + "]}"):
        put_part(run, "events", [{"event": "warning", "data": data}], 100)
        refused(run, diagnose, show)


def test_many_events_steps_and_rates(run):
    put_part(run, "events", [{"event": "warning"}], 9000)
    refused(run, diagnose)
    put_part(run, "events", [{"event": "warning"}], 1)
    put_part(run, "steps", [{"lrs": [0.1] * 1000}], 300)
    refused(run, diagnose)
    put_part(run, "steps", [{}], 10000)
    refused(run, diagnose)


def test_as_many_rows_in_streams_that_no_line_lists(run, tmp_path):
    run = write_run(tmp_path / "open", [], [{"step": n} for n in range(10000)], end=False)
    refused(run, diagnose)


def names(run, distinct):
    modules = pa.array([f"{n:06d}" for n in range(distinct)])
    put_part(run, "tensors", [{"module": "a"}], distinct, module=modules)


@pytest.mark.slow
def test_more_tensors_than_any_model_has(run):
    names(run, 4000)
    refused(run, diagnose, show, lambda run: compare(run, run))
    names(run, 3000)
    diagnose(run)
    refused(run, lambda run: render(open_run(run)))


@pytest.mark.slow
def test_two_runs_that_unfold_together(run, tmp_path):
    names(run, 2500)
    diagnose(run)
    with pytest.raises(RunTooLargeError, match="with what is kept of other runs, unfolds to"):
        compare(run, run)


def test_tensors_that_differ_in_two_names_are_counted_as_pairs(run):
    modules, own = (a.ravel().astype(str) for a in np.meshgrid(np.arange(70), np.arange(70)))
    put_part(run, "tensors", [{"module": "a"}], 4900, module=pa.array(modules), name=pa.array(own))
    refused(run, diagnose)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text",
    ["a" + ".a" * 20_000 + "=1\n", "\n".join(f"k{n}" + ".a" * 500 + "=1" for n in range(1000)), "[a]\n" * 900_000],
    ids=["one key", "many keys", "tables"],
)
def test_dotted_keys_that_unfold(tmp_path, monkeypatch, reader, text):
    """80 000 parts of one key, 160 kB, took all memory of a machine."""
    monkeypatch.delenv(caps.ANY_SIZE, raising=False)
    (tmp_path / "precdoctor.toml").write_text(text)
    refused(tmp_path / "precdoctor.toml", READERS[reader])


@pytest.mark.parametrize("reader", READERS)
def test_values_nested_too_deeply_are_one_sentence(tmp_path, reader):
    file = tmp_path / "precdoctor.toml"
    file.write_text("x = " + "[" * 20_000 + "]" * 20_000 + "\n")
    with pytest.raises(UsageError, match="nested too deeply"):
        READERS[reader](file)


@pytest.mark.parametrize("reader", ["baseline", "prescriptions", "allow-list"])
def test_a_device_is_read_to_the_limit_and_no_further(tmp_path, monkeypatch, reader):
    """Its size is stated as zero; before, it was read for ever."""
    (tmp_path / "file.toml").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="larger than"):
        READERS[reader](tmp_path / "file.toml")


@pytest.mark.slow
def test_what_is_counted_for_toml_is_what_it_takes(tmp_path):
    for text in ("\n".join(f"k{n}" + ".a" * parts + "=1" for n in range(100)) for parts in (2, 16, 64, 300)):
        (tmp_path / "file.toml").write_text(text)
        taken = measured(lambda: toml.read_toml(tmp_path / "file.toml", 1 << 22))
        assert taken <= toml._cost(text.encode())


def test_the_cap_leaves_room_for_the_program_and_what_is_decoded():
    assert caps.MAX_MEMORY + 600_000_000 <= MEMORY == math.floor(1.5e9)
