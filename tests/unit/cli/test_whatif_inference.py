"""``precdoctor whatif`` of a run of ``record --inference``, as a shell sees it."""

from __future__ import annotations

import json
import sys

import jsonschema
import numpy as np
import pytest
from rich.cells import cell_len

from precdoctor.cli import main
from tests.support.runs import write_run
from tests.support.schemas import schema
from tests.support.tensors import grouped_row_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RNG = np.random.default_rng(0)


@pytest.fixture
def run(tmp_path):
    def row(x, kind, module, order, name=""):
        place = {"module": module, "name": name, "step": 0, "order": order, "dtype": "bfloat16"}
        return grouped_row_of(x, kind, module_class="Linear", **place)

    rows = [
        row(RNG.standard_normal((64, 64)), "weight", "layers.0.up", 0, "weight"),
        row(RNG.standard_normal((2, 6, 64)), "output", "layers.0.up", 1),
        row(RNG.standard_normal((2, 4, 12, 32)), "kv_key", "layers.0.attention", 2),
        row(RNG.standard_normal((2, 4, 12, 32)), "kv_value", "layers.0.attention", 3),
        row(RNG.standard_normal((64, 64)), "weight", "head", 4, "weight"),
        row(RNG.standard_normal((2, 6, 64)), "output", "head", 5),
    ]
    return write_run(tmp_path / "run", rows, [{"step": 0, "optimizer": "", "micro_steps": 0}])


def whatif(capsys, *args):
    status = main(["whatif", *map(str, args)])
    done = capsys.readouterr()
    return status, done.out, done.err


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("options", [("--format", "int4", "--scaling", "head"), ("--plan",)])
def test_screens_fit(capsys, run, monkeypatch, width, options):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, err = whatif(capsys, run, *options)
    assert (status, err) == (0, "")
    assert max(map(cell_len, out.splitlines())) <= width
    assert "Cache: 512 B per token in 1 layer of 2 x 4 heads x 32, " in out.replace("\n", " ")


def test_json_has_the_memory_of_each_layer(capsys, run):
    status, out, _ = whatif(capsys, run, "--format", "int8", "--scaling", "token", "--output-format", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema("whatif"))
    memory = {"now": 512.0, "asked": 2 * 4 * (32 + 2)}
    assert status == 0 and document["cache"]["bytes_per_token"] == memory
    (layer,) = document["cache"]["layers"]
    assert (layer["module"], layer["tensors"], layer["bytes_per_token"]) == ("layers.0.attention", 2, memory)
    assert {t["scaling"] for t in document["tensors"]} == {"token"}
    _, out, _ = whatif(capsys, run, "--format", "int8", "--kind", "weight", "--output-format", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema("whatif"))
    assert document["cache"] is None and document["tensors"][0]["bulk_sqnr_db"] > 30.0


def test_a_plan_in_every_form(capsys, run, tmp_path):
    _, out, _ = whatif(capsys, run, "--plan", "--min-sqnr", "17")
    assert "Plan for inference, SQNR at least 17 dB" in out and "final logits: kept wide" in " ".join(out.split())
    for name in ("plan.toml", "plan.json"):
        status, _, _ = whatif(capsys, run, "--plan", "--min-sqnr", "17", "-o", tmp_path / name)
        text = (tmp_path / name).read_text()
        document = tomllib.loads(text) if name.endswith("toml") else json.loads(text)
        modules = {m["module"]: m.get("operands", m) for m in document["modules"]}
        assert status == 0 and document["plan"]["of"] == "inference"
        up = modules["layers.0.up"]["weight"]
        assert (up["format"], up["scaling"], up["bits_per_element"]) == ("INT4", "channel", 4.0)
        assert modules["head"]["weight"].get("format") is None
        assert {"kv_key", "kv_value"} <= set(modules["layers.0.attention"])
        assert main(["trial", str(tmp_path / name), "--", "python", "train.py"]) == 2
        assert "is a plan for inference" in capsys.readouterr().err


def test_a_plan_for_inference_has_no_horizon(capsys, run):
    status, out, err = whatif(capsys, run, "--plan", "--horizon", "100")
    assert (status, out) == (2, "") and "--horizon has nothing to act on: nothing trains in this run" in err
