"""The page as a whole: self-contained, harmless whatever the log holds, never too large, right in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis.claims.words import percent
from precdoctor.errors import NothingRecordedError
from precdoctor.numerics.formats import E4M3FN, E5M2, FP16, FP32
from precdoctor.numerics.prediction import TensorStatistics, predict
from precdoctor.reporting.html import page as pages
from precdoctor.reporting.html.page import MARK, MOST_BYTES, prose, render, script_json
from precdoctor.runlog import open_run
from tests.support.browser import CHROMIUM, WITHOUT_BROWSER, dump
from tests.support.hostile import NAMES
from tests.support.references import amax_scale, statistics_of
from tests.support.rows import awkward_rows
from tests.support.runs import write_run

SAMPLES = Path(__file__).resolve().parents[4] / "sample_runs"
#: Names the log can hold: Parquet has no lone surrogates.
STORABLE = tuple(n.encode("utf-8", "replace").decode() for n in NAMES)

#: Every element a report is made of.
TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "a",
        "header",
        "div",
        "span",
        "button",
        "main",
        "section",
        "nav",
    ),
    *("h1", "h2", "h3", "h4", "p", "strong", "em", "b", "br", "code", "pre", "small", "article", "dl", "dt", "dd"),
    *("figure", "figcaption", "svg", "path", "rect", "text", "details", "summary", "table", "thead", "tbody", "tr"),
    *("th", "td", "ol", "ul", "li", "noscript", "form", "label", "select", "fieldset", "legend", "input", "output"),
    *("footer", "script", "wbr"),
}


def tensor(values, **columns):
    """A row of the statistics of ``values``."""
    x = np.asarray(values, dtype=np.float64)
    t = statistics_of(x)
    return {
        "numel": x.size, "zero": int((x == 0).sum()), "amax": t.amax, "amin_nonzero": t.amin_nonzero,
        "exp_lo": t.histogram.lo, "exp_hist": t.histogram.counts.tolist(), **columns,
    }  # fmt: skip


def small_run(path, steps=4, **facts):
    rng = np.random.default_rng(3)
    rows = [
        tensor(rng.standard_normal(500).astype(np.float32) * 2.0**power, step=s, module=module, kind=kind, scale=scale)
        for s in range(steps)
        for module in ("stem", "head")
        for kind, power, scale in (("output", 3, None), ("grad_output", -12, 1024.0))
    ]
    return write_run(path, rows, [{"step": s, "loss": 1.0 / (s + 1), "lr": 0.1} for s in range(steps)], facts=facts)


class Document(HTMLParser):
    """What is in a page: tags with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.inside = [], {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = (tag, dict(attributes).get("type")) if tag in {"script", "style", "title", "h3"} else self.inside

    def handle_data(self, data):
        if self.inside is not None:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def handle_endtag(self, tag):
        self.inside = None


def data_of(text):
    return json.loads(Document(text).texts["script", "application/json"])


@pytest.fixture(scope="module")
def failing():
    return render(open_run(SAMPLES / "gpt-fp16-attention-nan" / "run"))


def test_a_report_says_what_diagnose_says(failing):
    assert failing.startswith(MARK)
    plain = html.unescape(re.sub(r"<[^>]+>", "", failing))
    for said in ("1 error", "PD101", "matmul-overflow", "train.py:62", "earning rate x 0.002"):
        assert said in plain
    assert "group['lr'] *= 0.002" in plain
    assert "no root module was given a floating-point argument" in plain


@pytest.mark.parametrize("name", ["gpt-fp16-attention-nan", "gpt-bf16-healthy", "cnn-fp16-underflow"])
def test_a_report_loads_nothing_and_runs_only_its_own_script(name):
    text = render(open_run(SAMPLES / name / "run"))
    assert len(text.encode()) < 500_000
    document = Document(text)
    policy = next(a["content"] for t, a in document.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for kind, content in (("style", document.texts["style", None]), ("script", document.texts["script", None])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    for tag, attributes in document.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "image", "use", "foreignobject"}
        assert "style" not in attributes and not any(a.startswith("on") for a in attributes)
        assert all(not v or v.startswith("#") for a, v in attributes.items() if a in {"href", "src", "xlink:href"})


def test_the_same_run_gives_the_same_page(tmp_path):
    run = open_run(small_run(tmp_path / "a"))
    assert render(run) == render(run)


def test_values_no_recorder_writes_do_not_break_the_page(tmp_path):
    odd = awkward_rows("tensors")
    for row, kind in zip(odd, ("output", "update", "weight_grad", "loss"), strict=True):
        row.update(kind=kind, dtype="float16")
    plain = [tensor([1.0], step=s, kind="output", amax=1e308, amin_nonzero=0.0, exp_lo=160) for s in range(3)]
    run = open_run(write_run(tmp_path / "a", [*odd, *plain], awkward_rows("steps"), awkward_rows("events")))
    assert data_of(render(run))["kinds"]


def test_a_run_without_a_step_has_no_report(tmp_path):
    with pytest.raises(NothingRecordedError):
        render(open_run(write_run(tmp_path / "a")))


def test_a_run_without_tensors_says_what_is_missing(tmp_path):
    text = render(open_run(write_run(tmp_path / "a", steps=[{"step": 0, "sampled": False}])))
    plain = re.sub(r"<[^>]+>", "", text)
    assert "No weight update was recorded" in plain and "No row of: activations" in plain
    assert "No loss, gradient norm, loss scale or learning rate was recorded" in plain


def hostile_run(path, *names):
    """A run in which everything a log can name is one of ``names``, with a finding about the first."""
    kinds = ("output", "grad_output", "weight_grad", "update", "loss")
    rows = [
        tensor([1.0, 2.0], step=s, kind=kind, order=10 * n + at, root=name, module=name, module_class=name, name=name,
               dtype="float16", nan=int(s == 2), unchanged=0)
        for s in range(3)
        for n, name in enumerate(names)
        for at, kind in enumerate(kinds)
    ]  # fmt: skip
    steps = [
        {"step": s, "loss": float("nan") if s == 2 else 1.0, "non_finite": int(s == 2), "optimizer": names[0]}
        for s in range(3)
    ]
    said = [("error", {"message": names[0]}), *(("drop", {"reason": name, "rows": 3}) for name in names)]
    events = [{"event": event, "data": json.dumps(data)} for event, data in said]
    facts = {
        "roots": [{"name": n, "class": n, "modules": [{"name": n, "class": n}], "parameters": []} for n in names],
        "device": dict(zip(("type", "name"), (*names, names[0]), strict=False)),
        "versions": {n: n for n in names},
        "autocast": list(names),
        "optimizers": [{"name": n, "intended_update": n} for n in names],
    }
    return write_run(path, rows, steps, events, facts=facts, info={"command": ["python", *names], "started": names[0]})


HOSTILE = [STORABLE, *((n,) for n in STORABLE if any(mark in n for mark in ("</script>", "onerror", "\x1b]8", "{{ 7")))]


@pytest.mark.parametrize("names", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_text(tmp_path, names):
    text = render(open_run(hostile_run(tmp_path / "run", *names)))
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]", text
    )
    document = Document(text)
    assert {t for t, _ in document.tags} <= TAGS
    assert [t for t, _ in document.tags].count("script") == 2
    assert not any(a.startswith("on") or a == "style" for _, attributes in document.tags for a in attributes)
    assert len(data_of(text)["tensors"]) == 5 * len(set(names))


def test_json_in_a_script_cannot_leave_it():
    given = {"</script><!--": ["<b>&'\"\u2028\u2029\ud800"]}
    text = str(script_json(given))
    assert not set("<>&'\u2028\u2029") & set(text) and text.isascii()
    assert json.loads(text) == given


def test_prose_sets_names_as_code_and_nothing_else():
    assert prose("`a<b>` and <i> `") == "<code>a&lt;b&gt;</code> and &lt;i&gt; `"


def test_a_report_never_exceeds_its_size(tmp_path, monkeypatch):
    run = open_run(small_run(tmp_path / "a", steps=40))
    whole = render(run)
    assert len(data_of(whole)["run"]["steps"]) == 40
    monkeypatch.setattr(pages, "MOST_BYTES", len(whole) - 5000)
    smaller = render(run)
    steps = [s["step"] for s in data_of(smaller)["run"]["steps"]]
    assert len(smaller) <= len(whole) - 5000 and len(steps) < 40 and {steps[0], steps[-1]} == {0, 39}
    assert MOST_BYTES == 2_000_000


@pytest.mark.parametrize(
    ("dtypes", "started"),
    [
        (("bfloat16", "float32"), ("BF16", False)),
        (("float16", "bfloat16"), ("FP16", False)),
        (("float32",), ("FP32", False)),
        (("float64",), ("FP32", False)),
        (("float8_e4m3fn", "bfloat16"), ("E4M3FN", True)),
    ],
)
def test_the_range_map_opens_on_the_format_that_the_run_uses(tmp_path, dtypes, started):
    rows = [tensor([1.0, 2.0], module=f"m{n}", kind="output", dtype=d) for n, d in enumerate(dtypes)]
    start = data_of(render(open_run(write_run(tmp_path / "run", rows, [{"step": 0, "loss": 1.0}]))))["start"]
    assert (start["kind"], start["format"], start["fill"]) == ("output", *started)


def test_one_tensor_in_a_narrow_format_does_not_make_it_the_run_s_own(tmp_path):
    rows = [tensor([1.0] * n, module=d, kind="output", dtype=d) for n, d in ((1, "float16"), (99, "bfloat16"))]
    text = render(open_run(write_run(tmp_path / "run", rows, [{"step": 0, "loss": 1.0}])))
    assert data_of(text)["start"]["format"] == "BF16"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("gpt-bf16-healthy", ("output", None, "BF16", False)),
        ("cnn-fp16-underflow", ("grad_output", 4, "FP16", False)),
        ("gpt-fp8-wrong-margin", ("fp8_operand", 4, "E5M2", False)),
    ],
)
def test_the_range_map_opens_at_the_finding(name, place):
    start = data_of(render(open_run(SAMPLES / name / "run")))["start"]
    assert tuple(start[key] for key in ("kind", "step", "format", "fill")) == place


# -- in a browser -----------------------------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_BROWSER)


def shown(tmp_path, text, fragment, *arguments):
    """The rows of the range map as the browser shows them: whole name and dtype to cells; and the console."""
    file = tmp_path / "report.html"
    file.write_text(text, encoding="utf-8")
    dom, console = dump(file, *arguments, fragment=fragment)
    body = dom.split('id="rows"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = {}
    for row in re.findall(r"<tr.*?</tr>", body, flags=re.DOTALL):
        label, *cells = [
            html.unescape(re.sub(r"<[^>]+>", "", c)) for c in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        ]
        whole = re.search('data-name="(.*?)"', row)
        label = f"{html.unescape(whole[1])} {label.split()[-1]}" if whole else label
        rows[label] = cells[1:]  # the first is the drawing
    return rows, console


@in_browser
def test_switching_format_and_loss_scale_changes_the_numbers_to_what_is_predicted(tmp_path):
    path = small_run(tmp_path / "run")
    text = render(open_run(path))
    row = open_run(path).tensors(filters=[("step", "==", 2), ("module", "==", "stem"), ("kind", "==", "grad_output")])
    statistics = TensorStatistics.of_row(row.to_dict("records")[0], FP32)
    seen = []
    for fmt, exponent in ((FP16, 10), (E5M2, 2)):
        rows, console = shown(tmp_path, text, f"#kind=grad_output&format={fmt.name}&step=2&scale={exponent}")
        wanted = predict(statistics, fmt, scale=2.0**exponent / 1024.0)
        assert rows["stem float32"][1:4] == [
            percent(e.estimate) for e in (wanted.flushed, wanted.subnormal, wanted.saturated)
        ]
        assert float(rows["stem float32"][4]) == pytest.approx(wanted.headroom_binades.estimate, abs=0.05)
        assert console == []
        seen.append(tuple(rows["stem float32"]))
    assert len(set(seen)) == 2
    filled = predict(statistics, E4M3FN, scale=amax_scale(statistics.amax, E4M3FN))
    rows, _ = shown(tmp_path, text, "#kind=grad_output&format=E4M3FN&step=2&fill=1")
    assert rows["stem float32"][1] == percent(filled.flushed.estimate) and rows["stem float32"][4] == "0.0"


@in_browser
def test_hostile_names_do_nothing_in_a_browser(tmp_path):
    rows = [tensor([1.0, 2.0], module=n, kind="output", root=n, name=n, step=0) for n in STORABLE]
    text = render(
        open_run(write_run(tmp_path / "run", rows, [{"step": 0, "loss": 1.0}], info={"command": list(STORABLE)}))
    )
    found, console = shown(tmp_path, text, "#kind=output&format=FP16&step=0&scale=0", "--window-size=400,800")
    assert console == [] and len(found) == len(STORABLE)
    assert any("</script><script>alert(1)</script>" in label for label in found)
