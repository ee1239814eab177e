from __future__ import annotations

import pytest

from precdoctor.cli import values


@pytest.mark.parametrize(
    ("text", "count"),
    [("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), ("2 GiB", 2 << 30), ("512", 512), (4096, 4096), ("10kb", 10_000)],
)
def test_sizes(text, count):
    assert values.parse_size(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "256Mib/s", "-1MiB", "0", "1e3MiB", True, None, "256XB"])
def test_a_bad_size_is_quoted_with_an_example(text):
    with pytest.raises(ValueError, match="such as 256MiB|and a unit") as error:
        values.parse_size(text)
    assert repr(text) in str(error.value)


def test_step_ranges_are_half_open():
    assert values.parse_steps("100:200") == (100, 200)
    assert values.parse_steps(":50") == (None, 50)
    assert values.parse_steps("500:") == (500, None)
    for bad in ("100", "200:100", "5:5", ":0", "a:b", "-1:4", 3):
        with pytest.raises(ValueError, match="100:200"):
            values.parse_steps(bad)


def test_powers_of_two():
    assert [values.parse_every(v) for v in ("1", 16)] == [1, 16]
    for bad in ("3", 0, "-2", True, "x"):
        with pytest.raises(ValueError, match="power of two|whole number"):
            values.parse_every(bad)


def test_deep_scans_are_a_number_or_off():
    assert [values.parse_scans(text) for text in ("3", 3, "off", " OFF ", False)] == [3, 3, 0, 0, 0]
    for text in ("0", "-1", "few", ""):
        with pytest.raises(ValueError, match="neither a number of steps from 1"):
            values.parse_scans(text)


def test_lists_codes_switches_choices():
    assert values.parse_list("a.*, b") == values.parse_list(["a.*", "b"]) == ("a.*", "b")
    assert [values.parse_switch(v) for v in (True, "on", "0", False)] == [True, True, False, False]
    with pytest.raises(ValueError, match="did you mean 'json'"):
        values.choice("full", "json")("jsno")
    for parse, bad in ((values.parse_list, 3), (values.parse_switch, "maybe"), (values.parse_path, "")):
        with pytest.raises(ValueError, match="is not|neither"):
            parse(bad)
