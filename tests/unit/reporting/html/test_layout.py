"""The page as Chromium lays it out: on a telephone and on a desk, light and dark, nothing is cut off."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from precdoctor.comparison.op_compare import compare_ops
from precdoctor.reporting.html import op_page
from precdoctor.reporting.html.page import render
from precdoctor.runlog import open_run
from tests.support.browser import CHROMIUM, WITHOUT_BROWSER, dump
from tests.support.op_lists import network
from tests.support.references import statistics_of
from tests.support.runs import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT_BROWSER)

SAMPLES = Path(__file__).resolve().parents[4] / "sample_runs"
BLOCK = ("ln_1", "attn.c_attn", "attn.resid_dropout", "ln_2", "mlp.c_fc", "mlp.c_proj")

#: What runs in the page. An element is cut off when its content is wider than its box and it can neither be scrolled
#: nor says its whole text elsewhere; a box that scrolls may be wider than the page, everything else may not.
PROBE = """<script>
  const root = document.documentElement, cut = [], beyond = [], twins = {};
  for (const e of document.querySelectorAll("body *")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    const name = `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`;
    if (!box.width || e.closest("svg, .away, .skip, script, style, details:not([open]) > :not(summary)")) continue;
    if (!e.closest(".scroll, .maptable, pre") && (box.right > root.clientWidth + 1 || box.left < -1)) beyond.push(name);
    const hides = style.overflowX === "hidden" || style.overflowX === "clip";
    if (hides && e.scrollWidth > e.clientWidth + 1 && !(style.textOverflow === "ellipsis" && e.title)) cut.push(name);
    const cell = e.closest("td, th, li");
    if (e.matches(".name") && cell && box.right > cell.getBoundingClientRect().right + 1) cut.push(name);
    if (e.matches(".maptable, .controls, .heat") && e.scrollWidth > e.clientWidth + 1) beyond.push(name);
    if (e.matches("[data-name]")) (twins[e.closest("section").id + e.innerText] ||= new Set()).add(e.dataset.name);
  }
  parent.seen[frameElement.width] = {
    width: root.clientWidth, scroll: root.scrollWidth, cut, beyond,
    page: getComputedStyle(document.body).backgroundColor,
    alike: Object.entries(twins).filter(([, names]) => names.size > 1).map(([text]) => text),
    elided: document.querySelectorAll("#rows [data-name]").length,
    shares: document.querySelectorAll("#rows td:not(.strips)").length,
    unseen: [...document.querySelectorAll("#rows tbody td, td.num")].filter(
      (e) => !e.closest("details:not([open])") && !e.matches(".minor") && !e.getBoundingClientRect().width).length,
  };
  parent.document.title = JSON.stringify(parent.seen);
</script></body>"""


def measured(tmp_path, text, *widths, dark):
    """What :data:`PROBE` found, by the width of its frame in pixels; no window is as narrow as a telephone."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", text).replace("</body>", PROBE)
    source = html.escape(text)
    frames = [f'<iframe width="{w}" height="900" style="border:0" srcdoc="{source}"></iframe>' for w in widths]
    head = (
        '<meta charset="utf-8"><meta name="color-scheme" content="light dark"><title></title><script>seen = {}</script>'
    )
    (tmp_path / "report.html").write_text(f"<!doctype html>{head}{''.join(frames)}", encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom, console = dump(tmp_path / "report.html", "--window-size=1400,1000", scheme)
    assert console == []
    seen = json.loads(html.unescape(re.search("<title>(.*?)</title>", dom)[1]))
    assert set(seen) == set(map(str, widths))
    return {int(width): found for width, found in seen.items()}


def fits(seen):
    for width, found in seen.items():
        assert found["width"] == pytest.approx(width, abs=20) and found["scroll"] <= found["width"]
        assert (width, found["cut"], found["beyond"], found["alike"], found["unseen"]) == (width, [], [], [], 0)


def deep_run(path, layers, steps=3, ranks=1, **last):
    """A transformer with the names that Hugging Face gives; ``last`` goes into the outputs of the last step."""
    modules = [f"model.transformer.h.{n}.{part}" for n in range(layers) for part in BLOCK]
    modules = ["model.transformer.wte", *modules, "model.transformer.ln_f", "lm_head"]
    rng = np.random.default_rng(0)
    rows = []
    for step in range(steps):
        for order, module in enumerate(modules):
            for kind, power in (("output", 12), ("grad_output", -20), ("update", -12)):
                x = (rng.standard_normal(16) * 2.0**power).astype(np.float16).astype(np.float64)
                t = statistics_of(x)
                row = {"numel": x.size, "zero": int((x == 0).sum()), "amax": t.amax, "amin_nonzero": t.amin_nonzero,
                       "exp_lo": t.histogram.lo, "exp_hist": t.histogram.counts.tolist()}  # fmt: skip
                row |= {"step": step, "module": module, "kind": kind, "dtype": "float16", "subnormal": 3}
                row |= {"order": order} if kind == "output" else {"name": "weight"} if kind == "update" else {}
                row |= {"unchanged": 4, "rel_lo": -20, "rel_hist": [2] * 8} if kind == "update" else {}
                rows.append(row | (last if step == steps - 1 and kind == "output" else {}))
    return write_run(path, rows, [{"step": s, "loss": 1.0, "lr": 0.1} for s in range(steps)], ranks=ranks)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)], ids=["desk, light", "phone, dark"])
def test_a_page_fits_its_window_and_follows_the_theme(tmp_path, width, dark):
    text = render(open_run(SAMPLES / "gpt-fp16-attention-nan" / "run"))
    seen = measured(tmp_path, text, width, dark=dark)
    fits(seen)
    brightness = sum(map(int, re.findall(r"\d+", seen[width]["page"])[:3])) / 3
    assert brightness < 60 if dark else brightness > 200


def test_deep_names_are_shortened_so_that_the_layer_can_be_told(tmp_path):
    text = render(open_run(deep_run(tmp_path / "run", layers=12, nan=2)))
    seen = measured(tmp_path, text, 320, 400, 700, 1280, dark=False)
    fits(seen)
    assert all(found["elided"] > 12 and found["shares"] > 5 * 12 for found in seen.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.parent.name for p in SAMPLES.glob("*/run")))
def test_the_samples_fit(tmp_path, name):
    text = render(open_run(SAMPLES / name / "run"))
    fits(measured(tmp_path, text, 400, dark=True))
    fits(measured(tmp_path, text, 1280, dark=False))


@pytest.mark.slow
@pytest.mark.parametrize("made", [{"layers": 60}, {"layers": 2, "steps": 1}, {"layers": 4, "ranks": 8}], ids=str)
def test_large_small_and_parallel_runs_fit(tmp_path, made):
    fits(measured(tmp_path, render(open_run(deep_run(tmp_path / "run", **made))), 400, 1280, dark=False))


@pytest.mark.slow
def test_two_runs_fit(tmp_path):
    ours, other = (open_run(deep_run(tmp_path / n, layers=6, pos_inf=int(n == "a"))) for n in "ab")
    fits(measured(tmp_path, render(ours, other), 400, 1280, dark=False))


def test_a_comparison_op_by_op_fits_a_telephone_and_a_desk(tmp_path):
    layers = [0, 1, 2, 3] * 8
    long = "model.layers.17.self_attn.a_projection_with_a_long_name"
    runs = []
    for name, fault in (("a", None), ("b", 3)):
        rows = [{**row, "module": long} for row in network(layers, fault=fault).rows]
        runs.append(open_run(write_run(tmp_path / name, [{}], [{}], ops=rows)))
    text = op_page.render(compare_ops(*runs))
    for dark in (False, True):
        for width, found in measured(tmp_path, text, 400, 1280, dark=dark).items():
            assert (width, found["cut"], found["beyond"], found["scroll"]) == (width, [], [], found["width"])
