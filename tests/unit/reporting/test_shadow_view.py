"""What a tired person reads: one sentence, a table of 80 columns, and the same as JSON."""

from __future__ import annotations

import io
import json
import math

import jsonschema
import pytest

from precdoctor.diagnosis.analyses.shadow_errors import Limits, Piece, Shadowed
from precdoctor.numerics.formats import FORMATS
from precdoctor.reporting import shadow_view
from precdoctor.reporting.console import make_console
from tests.support.hostile import NAMES
from tests.support.offenders import check_each
from tests.support.schemas import schema

U = 2.0**-8
RUN = {"path": "runs/a", "command": ["python", "train.py"], "steps": 9, "first_step": 0, "last_step": 8, "ranks": 1}


def piece(module, own, order=0, kind="output", beside=None, total=None, given=None, root="GPT#0"):
    total = None if total is None else total * U
    given = None if given is None else given * U
    return Piece(root, module, "Linear", beside, kind, "", "bfloat16", 4, order, own * U, total, given)


def layers(*more, count=12):
    usual = [piece(f"blocks.{i}", 0.7, i, total=0.7 * (i + 1) ** 0.5, given=0.7) for i in range(count)]
    return Shadowed("float32", FORMATS["BF16"], (0, 4), (*usual, *more), roots=("GPT#0",))


SHARDED = Shadowed("float32", None, (), (), ((3, "it is sharded"),))
FULL = {
    "clean": (layers(), "Precision is not the problem in the modules: all 12 layers are within 4 u of FP32"),
    "between": (layers(piece("head", 5.1, 12)), "the problem in the modules: 12 of 13 layers are within 4 u of FP32"),
    "precision": (layers(piece("norm", 310, 12)), "norm is 310 u off where 4 u is expected; the 12 layers before it"),
    "functional": (layers(piece("attn", 40, 12, "input", "attn.proj")), "attn before .proj is 40 u off"),
    "amplified": (layers(piece("sub", 0.5, 12, total=80, given=0.8)), "sub makes errors of 0.8 u in what it is given"),
    "overflow": (layers(piece("exp", math.inf, 12)), "exp overflows in BF16"),
    "backward": (layers(piece("fc", 99, 12, "weight_grad")), "fc is 99 u off where 4 u is expected, in the gradient"),
    "nothing": (Shadowed("float32", None, (), (), nothing_reduced=(0,)), "This run is FP32 throughout"),
    "refused": (SHARDED, "step 3 could not be compared: it is sharded"),
    "none": (shadow_view.NOTHING, "no step was reached"),
}  # fmt: skip


def printed(found, width=80, **more):
    stream = io.StringIO()
    shadow_view.print_full(found, RUN, make_console(stream, width=width), Limits(), worst=more.get("worst", 10))
    return stream.getvalue()


@pytest.mark.parametrize("name", FULL)
def test_the_sentence_says_it(name):
    found, words = FULL[name]
    assert words in shadow_view.verdict(found, Limits())[1]
    text = printed(found)
    assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert words in shadow_view.markdown(found, RUN, Limits(), worst=5)


@pytest.mark.parametrize("name", FULL)
def test_json_is_of_its_schema_and_of_the_same_verdict(name):
    found, _ = FULL[name]
    document = json.loads(json.dumps(shadow_view.document(found, RUN, Limits()), allow_nan=False))
    jsonschema.validate(document, schema("shadow"))
    assert (document["verdict"], document["sentence"]) == shadow_view.verdict(found, Limits())
    assert sum(p["guilty"] for p in document["pieces"]) == (document["verdict"] == "precision")


def test_the_worst_comes_first_and_growth_follows_the_chain():
    text = printed(layers(piece("norm", 310, 12, total=300), piece("blocks.3.attn", 2.0, 3, total=2.0)))
    rows = [line.split()[0] for line in text.splitlines() if " u " in line]
    assert rows[rows.index("norm") : rows.index("norm") + 2] == ["norm", "blocks.3.attn"]
    assert "0.7 u at blocks.0, 300 u at norm" in " ".join(text.split())


def test_errors_beyond_the_tensors_size_are_told_as_such():
    assert shadow_view.units(26.0, U) == "26x" and shadow_view.units(0.5, U) == "128 u"
    assert shadow_view.units(None, U) == "–" and shadow_view.units(math.inf, U) == "all of it"


def test_sums_of_fp32_have_wider_limits():
    small = 2.0**-24
    found = Shadowed(
        "float64",
        FORMATS["FP32"],
        (0,),
        (Piece("a", "b", "", None, "output", "", "float32", 0, 0, 100 * small, None, None),),
    )
    assert shadow_view.verdict(found, Limits())[0] == "clean"


def test_hostile_names_do_no_harm():
    check_each(check_shown, NAMES, repr)


def check_shown(name):
    found = layers(piece(name, 400, 13), piece("a", 90, 14, "input", name))
    for text in (printed(found), shadow_view.markdown(found, RUN, Limits(), worst=5)):
        assert "\x1b" not in text and "\u202e" not in text
