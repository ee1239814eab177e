"""``precdoctor formats`` as a shell sees it."""

from __future__ import annotations

import io
import json

import pytest
from rich.cells import cell_len

from precdoctor.cli import main
from precdoctor.numerics.bitview import bit_view
from precdoctor.numerics.blocks import BLOCK_FORMATS
from precdoctor.numerics.formats import FORMATS, SCALE_FORMATS
from precdoctor.reporting import formats_view
from precdoctor.reporting.console import make_console

ALL = [*FORMATS.values(), *SCALE_FORMATS.values()]


def run(capsys, *args):
    status = main(["formats", *args])
    done = capsys.readouterr()
    return status, done.out, done.err


def test_the_list_names_every_format(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    for name in (*FORMATS, *SCALE_FORMATS, *BLOCK_FORMATS):
        assert any(line.startswith(name + " ") for line in out.splitlines())


@pytest.mark.parametrize("number", ["1e400", "-1e400", "0x1p5000", "2^9999", "0^-1"])
def test_a_number_beyond_fp64_is_not_passed_off_as_infinity(capsys, number):
    status, out, err = run(capsys, "--", number)
    assert status == 2 and not out and f"{number} is beyond the largest number of FP64" in err
    assert run(capsys, "inf")[0] == 0


def test_one_format_with_its_code_points(capsys):
    status, out, _ = run(capsys, "fp8_e4m3")
    assert status == 0 and out.startswith("E4M3FN")
    assert "17.8 binades, 4.5 decades" in out and "above 464" in out
    assert out.splitlines()[-2].split() == ["1111", "256", "288", "320", "352", "384", "416", "448", "NaN"]
    assert "elements" in run(capsys, "mxfp8")[1] and "Code points" not in run(capsys, "bf16")[1]
    assert " 2^-127 " in run(capsys, "e8m0")[1] and "-8" in run(capsys, "int4")[1]


def test_one_number(capsys):
    status, out, _ = run(capsys, "1e-5")
    assert status == 0
    assert any(line.split() == ["FP16", "0", "00000", "0010101000"] for line in out.splitlines())
    assert any(line.split()[:4] == ["FP16", "1.00136e-05", "0.14", "%"] for line in out.splitlines())
    assert "flushed" in out


@pytest.mark.parametrize(("power", "value"), [("2^-24", 2.0**-24), ("-2^4", -16.0), ("2^6", 64.0)])
def test_a_power_is_a_number_as_it_is_for_scales(capsys, power, value):
    assert run(capsys, "--", power) == run(capsys, "--", repr(value))
    assert run(capsys, "2^x")[0] == 2


@pytest.mark.parametrize("value", ["-0.1", "-1e-5", "-inf", "nan", "0", "0x1.8p-3", "1e308"])
def test_every_kind_of_number(capsys, value):
    assert run(capsys, value)[0] == 0
    assert run(capsys, value, "--output-format", "json")[0] == 0


def test_json(capsys):
    listed = json.loads(run(capsys, "--output-format", "json")[1])
    assert [f["name"] for f in listed["formats"]] == [f.name for f in ALL] and len(listed["block_formats"]) == 8
    one = json.loads(run(capsys, "e5m2", "--output-format", "json")[1])["format"]
    assert len(one["code_points"]) == 256 and one["code_points"][0x7C] == "Infinity" and one["overflow_limit"] == 61440
    views = json.loads(run(capsys, "0.3", "--output-format", "json")[1])["formats"]
    fp16 = next(v for v in views if v["format"] == "FP16")
    assert (fp16["stored"], fp16["outcome"], fp16["up"]["inclusive"]) == (0.300048828125, "rounded", True)


@pytest.mark.parametrize(
    ("args", "message"),
    [(["e4m4"], "did you mean 'E4M3FN'"), (["fp8"], "say which"), (["--bogus"], "no such option: --bogus"),
     (["e4m3", "--output-format", "xml"], "is not one of full, json"), (["1", "2"], "see precdoctor formats --help")],
)  # fmt: skip
def test_mistakes(capsys, args, message):
    status, out, err = run(capsys, *args)
    assert status == 2 and not out and message in err and err.count("\n") == 1


def drawn(width, show, encoding="utf-8"):
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(make_console(raw, width))
    raw.flush()
    return raw.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_and_nothing_is_cut(width, encoding):
    pages = [
        drawn(width, lambda c: formats_view.print_formats(ALL, [*BLOCK_FORMATS.values()], c), encoding),
        *(drawn(width, lambda c, f=f: formats_view.print_format(f, c), encoding) for f in ALL),
        *(drawn(width, lambda c, v=v: formats_view.print_number(v, [bit_view(v, f) for f in ALL], c), encoding)
          for v in (1e-5, -1e-5, -0.1, 448.5, 0.0)),
    ]  # fmt: skip
    for page in pages:
        assert max(map(cell_len, page.splitlines())) <= width
        assert "…" not in page and "..." not in page
