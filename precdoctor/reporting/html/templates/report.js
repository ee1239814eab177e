// The interactive part of the page: the theme button and the range map.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const make = (name, attributes = {}, text = null) => {
    const e = /^(svg|path|rect|text)$/.test(name) ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== null) e.textContent = text;
    return e;
  };

  // -- theme ---------------------------------------------------------------------------------------------------------
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; };
  $("theme").hidden = false;
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // -- names: shown without their middle where there is no room, copied whole ------------------------------------------
  document.addEventListener("copy", (event) => {
    const selected = getSelection(), at = selected.anchorNode && selected.anchorNode.parentElement.closest("[data-name]");
    let text = selected.toString(), from = 0;
    if (at && at.contains(selected.focusNode)) {
      text = at.dataset.name;
    } else {
      for (const name of document.querySelectorAll("[data-name]")) {
        const place = selected.containsNode(name, true) ? text.indexOf(name.innerText, from) : -1;
        if (place < 0) continue;
        text = text.slice(0, place) + name.dataset.name + text.slice(place + name.innerText.length);
        from = place + name.dataset.name.length;
      }
      if (!from) return;
    }
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });

  // -- the rows of a step --------------------------------------------------------------------------------------------
  if (!data.kinds.length) return;
  $("map").hidden = false;
  const decoded = new Map();
  const rowsOf = (run, at) => {
    const rows = at < run.steps.length ? run.steps[at].rows : run.all;
    if (!decoded.has(rows)) {
      decoded.set(rows, new Map(rows.map(([n, numel, zero, bad, sub, amax, amin, scale, lo, counts, tailLo, tail]) => [n, {
        numel, zero, bad, sub, amax, amin, scale, lo, counts: Predict.decode(counts), grid: run.grids[n], tail: tail ? { lo: tailLo, counts: tail } : null,
      }])));
    }
    return decoded.get(rows);
  };
  // The other run at the same step, or over all steps where this one is.
  const othersOf = (at) => {
    if (!data.against) return null;
    if (at >= data.run.steps.length) return rowsOf(data.against, data.against.steps.length);
    const same = data.against.steps.findIndex((s) => s.step === data.run.steps[at].step);
    return same < 0 ? null : rowsOf(data.against, same);
  };

  // -- numbers as the rest of the page writes them -------------------------------------------------------------------
  const percent = (x) => {
    const v = 100 * x;
    if (v === 0) return "0 %";
    if (v < 0.01) return "<0.01 %";
    if (v > 99 && v < 100) return v < 99.9 ? `${v.toFixed(1)} %` : ">99.9 %";
    return v < 9.95 ? `${Number(v.toPrecision(2))} %` : `${v.toFixed(0)} %`;
  };
  const raised = (k) => "2" + [...String(k)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("");
  const power = (x) => x === 1 ? "1" : Number.isInteger(Math.log2(x)) ? raised(Math.log2(x)) : String(Number(x.toPrecision(4)));
  const binades = (x) => Number.isFinite(x) ? (Math.abs(x) < 0.05 ? 0 : x).toFixed(1) : "–";
  const SLIP = -1e-9;  // what rounding makes of a headroom of zero
  const range = (e, show) => e.low === e.high ? `${show(e.estimate)} (exact)` : `${show(e.estimate)} (between ${show(e.low)} and ${show(e.high)})`;
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

  // -- controls ------------------------------------------------------------------------------------------------------
  const format = () => data.formats.find((f) => f.name === document.querySelector("input[name=format]:checked").value);
  const kind = () => data.kinds[Number($("kind").value)];
  const all = data.run.steps.length;
  data.kinds.forEach((k, i) => $("kind").append(make("option", { value: i }, `${k.title} (${k.tensors.length})`)));
  data.formats.forEach((f) => {
    const pick = make("label", { class: "pick" });
    pick.append(make("input", { type: "radio", name: "format", value: f.name }), make("span", {}, f.name));
    $("formats").append(pick);
  });
  $("step").max = all;

  // For gradients the slider is the loss scale, and starts at the one in force; else a multiplier in front of the cast.
  let touched = false;
  const scaleInForce = () => {
    const rows = rowsOf(data.run, Math.min(Number($("step").value), all - 1));
    for (const n of kind().tensors) if (rows.has(n)) return rows.get(n).scale;
    return 1;
  };
  function resetScale() {
    const scaled = kind().scaled;
    $("scalename").textContent = scaled ? "Loss scale" : "Scale";
    $("scale").min = scaled ? -8 : -24;
    $("scale").max = scaled ? 32 : 24;
    $("scale").value = scaled ? Math.round(Math.log2(scaleInForce())) : 0;
  }
  // What the values in memory are multiplied by before the cast.
  function multiplier(row, f) {
    if ($("fill").checked) return Predict.amaxScale(row.amax, f);
    const chosen = 2 ** Number($("scale").value);
    return kind().scaled ? chosen / row.scale : chosen;
  }

  // -- drawing -------------------------------------------------------------------------------------------------------
  let view = { lo: -30, hi: 20 };
  function frame(rows, f) {
    let lo = Infinity, hi = -Infinity;
    for (const n of kind().tensors) {
      const row = rows.get(n);
      if (!row || !row.counts.length) continue;
      const shift = $("fill").checked ? Math.log2(multiplier(row, f)) : kind().scaled ? -Math.log2(row.scale) + Math.round(Math.log2(scaleInForce())) : 0;
      lo = Math.min(lo, (row.tail ? Math.max(row.tail.lo, row.lo - 12) : row.lo) + shift);
      hi = Math.max(hi, row.lo + shift + row.counts.length);
    }
    if (lo > hi) [lo, hi] = [-20, 10];
    const narrow = Math.log2(f.max) - Math.log2(f.minSubnormal) < 60;
    const a = narrow ? Math.min(lo, Math.log2(f.flush)) : lo - 6, b = narrow ? Math.max(hi, Math.log2(f.max)) : hi + 6;
    view = { lo: Math.max(Math.floor(a) - 3, -160), hi: Math.min(Math.ceil(b) + 3, 162) };
  }
  const share = (x) => `${(100 * (Math.min(Math.max(x, view.lo), view.hi) - view.lo) / (view.hi - view.lo)).toFixed(3)}%`;
  const across = (a, b) => `${Math.max(0, 100 * (Math.min(Math.max(b, view.lo), view.hi) - Math.min(Math.max(a, view.lo), view.hi)) / (view.hi - view.lo)).toFixed(3)}%`;

  function drawAxis(f) {
    const parts = [];
    data.formats.slice(0, 4).forEach((g, i) => {
      const y = 1 + 15 * i, on = g.name === f.name ? " on" : "";
      const sub = Math.log2(g.minSubnormal), low = Math.log2(g.minNormal), high = Math.log2(g.max);
      parts.push(make("rect", { x: share(sub), y, width: across(sub, low), height: 13, class: `band thin${on}` }));
      parts.push(make("rect", { x: share(low), y, width: across(low, high), height: 13, class: `band${on}` }));
      const inside = Math.min(Math.max((Math.max(low, view.lo) + Math.min(high, view.hi)) / 2, view.lo), view.hi);
      parts.push(make("text", { x: share(inside), y: y + 10, class: "bandname", "text-anchor": "middle" }, g.name));
    });
    const every = [1, 2, 4, 5, 8, 10, 16, 20, 32, 40].find((n) => (view.hi - view.lo) / n <= 9) || 64;
    for (let k = Math.ceil(view.lo / every) * every; k <= view.hi; k += every) {
      const at = (k - view.lo) / (view.hi - view.lo);
      parts.push(make("text", { x: share(k), y: 80, "text-anchor": at < 0.04 ? "start" : at > 0.96 ? "end" : "middle" }, raised(k)));
    }
    $("axis").replaceChildren(...parts);
  }

  // One bar per bin, moved by the scale and cut at amax; its colour is what becomes of it.
  function bars(row, scale, f, ghost = false) {
    const shift = Math.log2(scale), top = Math.log2(1 + Math.max(...row.counts));
    const paths = { kept: "", sub: "", lost: "" };
    const draw = (lo, n, last) => {
      if (n < 0.5) return;
      const a = lo + shift, b = (last ? Math.log2(row.amax) : lo + 1) + shift, middle = 2 ** ((a + b) / 2);
      const fate = middle <= f.flush || middle > f.saturate ? "lost" : middle < f.normal ? "sub" : "kept";
      const x = Math.min(Math.max(a, view.lo), view.hi - 1), w = Math.max(0.88 * (b - a), 0.25), h = 2 + 20 * Math.log2(1 + n) / top;
      paths[fate] += `M${(x + 0.06).toFixed(2)} 26v${(-h).toFixed(2)}h${w.toFixed(2)}V26z`;
    };
    if (ghost) row.tail.counts.forEach((n, i) => draw(row.tail.lo + i, n, false));
    else row.counts.forEach((n, i) => draw(row.lo + i, n, i === row.counts.length - 1 && row.amax));
    return paths;
  }
  function strip(row, other, f) {
    const box = make("svg", { viewBox: `${view.lo} 0 ${view.hi - view.lo} 26`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const flush = Math.log2(f.flush), normal = Math.log2(f.minNormal), end = Math.log2(f.max);
    for (const [a, b, name] of [[view.lo, flush, "outside"], [flush, normal, "subband"], [end, view.hi, "outside"]]) {
      const [x, y] = [Math.max(a, view.lo), Math.min(b, view.hi)];
      if (y > x) box.append(make("rect", { x, y: 0, width: y - x, height: 26, class: name }));
    }
    if (row && !row.counts.length) box.append(make("path", { d: `M${view.lo} 25H${view.hi}`, class: "empty" }));
    if (row && row.counts.length) {
      for (const [name, d] of Object.entries(bars(row, multiplier(row, f), f))) if (d) box.append(make("path", { d, class: name }));
    }
    if (row && row.tail) {
      for (const [name, d] of Object.entries(bars(row, multiplier(row, f), f, true))) if (d) box.append(make("path", { d, class: `${name} ghost` }));
    }
    if (other && other.counts.length) {
      const d = Object.values(bars(other, multiplier(other, f), f)).join("");
      box.append(make("path", { d, class: "outline" }));
    }
    return box;
  }

  function cell(e, hot, warm, show, other) {
    const td = make("td", { class: hot ? "hot" : warm ? "warm" : "" }, show(e));
    if (other !== undefined && other !== null) td.append(make("span", { class: "b" }, show(other)));
    return td;
  }
  function detail(n, row, p, f, scale) {
    const tr = make("tr", { class: "detail" }), td = make("td", { colspan: 7 });
    const t = data.tensors[n];
    const said = [
      `${t.label}, ${t.dtype}: ${plural(row.numel, "element")}, ${row.zero.toLocaleString("en")} zero, ${row.bad.toLocaleString("en")} not finite.`,
      `amax ${row.amax === null ? "–" : row.amax}, smallest non-zero ${row.amin === null ? "–" : row.amin}${row.scale === 1 ? "" : `, with a scale of ${power(row.scale)} in force`}.`,
      `Times ${power(scale)}, cast to ${f.name}, of the ${plural(p.elements, "element")} that are finite and not zero: flushed ${range(p.flushed, percent)}; subnormal ${range(p.subnormal, percent)}; saturated ${range(p.saturated, percent)}.`,
    ];
    if (row.tail) {
      const before = row.tail.counts.reduce((a, b) => a + b, 0), again = Predict.flushedAgain(row.tail, f, scale);
      said.push(`Before that, ${t.dtype} itself had rounded about ${plural(Math.round(before), "element")} to zero, told from the mark that leaves; of these about ${Math.round(again).toLocaleString("en")} would be again. With them, ${percent(Predict.flushedShare(p, row.tail, f, scale))} are flushed.`);
    }
    said.forEach((s) => td.append(make("div", {}, s)));
    const list = row.counts.map((c, i) => c ? `${raised(row.lo + i)}: ${c.toLocaleString("en")}` : null).filter(Boolean);
    td.append(make("div", { class: "soft" }, `Elements above each power of two, up to and including the next: ${list.join(", ") || "none"}.`));
    tr.append(td);
    return tr;
  }

  const opened = new Set();
  function draw() {
    const at = Number($("step").value), rows = rowsOf(data.run, at), others = othersOf(at), f = format();
    const wanted = $("find").value.trim().toLowerCase();
    frame(rows, f);
    drawAxis(f);
    const shown = [];
    for (const n of kind().tensors) {
      const row = rows.get(n);
      if (!row || (wanted && !data.tensors[n].label.toLowerCase().includes(wanted))) continue;
      const scale = multiplier(row, f), other = others && others.get(n);
      const of = (r, s) => { const p = Predict.predict(r, f, s); return { ...p, lost: Predict.flushedShare(p, r.tail, f, s) }; };
      shown.push({ n, row, scale, p: of(row, scale), other, q: other ? of(other, multiplier(other, f)) : null });
    }
    const badness = (s) => s.p.lost + s.p.saturated.estimate + s.p.subnormal.estimate / 1e3;
    if ($("worst").checked) shown.sort((a, b) => badness(b) - badness(a) || a.p.headroom - b.p.headroom);
    const body = [];
    for (const s of shown) {
      const tr = make("tr"), th = make("th", { scope: "row" }), { label, short, dtype } = data.tensors[s.n];
      const button = make("button", { type: "button", "aria-expanded": opened.has(s.n), title: label });
      const name = make("span", { class: "name" }, short || label);
      if (short) name.dataset.name = label;
      button.addEventListener("click", () => {
        if (!opened.delete(s.n)) opened.add(s.n);
        draw();
        const again = [...document.querySelectorAll("#rows button")].find((b) => b.dataset.n === String(s.n));
        if (again) again.focus();
      });
      button.dataset.n = s.n;
      button.append(name, " ", make("small", {}, dtype));
      th.append(button);
      const td = make("td", { class: "strips" });
      td.append(strip(s.row, s.other, f));
      // Beside the bars, not on them: they stand at one end of the range more often than not.
      const middle = s.row.lo + Math.log2(s.scale) + s.row.counts.length / 2;
      if (s.row.bad) td.append(make("span", { class: middle > (view.lo + view.hi) / 2 ? "mark left" : "mark" }, `${s.row.bad.toLocaleString("en")} NaN or Inf`));
      const of = (name) => (q) => q.elements ? percent(q[name].estimate) : "–";
      const zero = s.row.numel ? s.row.zero / s.row.numel : 0;
      const others = s.other ? make("span", { class: "b" }, percent(s.other.zero / s.other.numel)) : "";
      const zeros = make("td", { class: zero === 1 ? "hot" : "" }, percent(zero));
      zeros.append(others);
      tr.append(th, td, zeros,
        cell(s.p, s.p.lost >= 0.01, s.p.lost > 0, (q) => q.elements ? percent(q.lost) : "–", s.q),
        cell(s.p, false, s.p.subnormal.estimate >= 0.1, of("subnormal"), s.q),
        cell(s.p, s.p.saturated.estimate > 0, false, of("saturated"), s.q),
        cell(s.p, s.p.headroom < SLIP, s.p.headroom < 1 && !$("fill").checked, (q) => binades(q.headroom), s.q));
      if (s.other) tr.className = "two";
      tr.dataset.tensor = s.n;
      body.push(tr);
      if (opened.has(s.n)) body.push(detail(s.n, s.row, s.p, f, s.scale));
    }
    document.querySelector("#rows tbody").replaceChildren(...body);
    tell(shown, f, at);
  }

  function tell(shown, f, at) {
    const fill = $("fill").checked, scale = 2 ** Number($("scale").value);
    const force = kind().scaled ? scaleInForce() : 1;
    $("scaleout").textContent = fill ? "per tensor" : power(scale) + (kind().scaled ? force === scale ? ", as recorded" : `, recorded ${power(force)}` : "");
    for (const name of ["scale", "step"]) $(name).setAttribute("aria-valuetext", $(`${name}out`).textContent);
    $("scale").disabled = fill;
    $("stepout").textContent = at < all ? `${data.run.steps[at].step.toLocaleString("en")}` : "all together";
    const flushed = shown.filter((s) => s.p.lost >= 0.01).length;
    const saturated = shown.filter((s) => s.p.saturated.estimate > 0).length;
    const empty = shown.filter((s) => s.row.zero && s.row.zero === s.row.numel).length;
    const broken = shown.filter((s) => s.row.bad).length;
    const how = fill ? "each tensor scaled to fill it" : kind().scaled ? `loss scale ${power(scale)}` : scale === 1 ? "unscaled" : `times ${power(scale)}`;
    $("sum").textContent = shown.length
      ? `${f.name}, ${how}: ${flushed ? `${flushed} of ${plural(shown.length, "tensor")} lose 1 % or more to zero` : `no tensor of ${shown.length} loses 1 % to zero`}, ${saturated ? `${saturated} saturate` : "none saturates"}${empty ? `; ${empty} ${empty === 1 ? "is" : "are"} all zero as recorded` : ""}${broken ? `; ${broken} hold${broken === 1 ? "s" : ""} NaN or Inf` : ""}.`
      : "No tensor to show here.";
    const carried = all < data.run.recorded ? `The slider stops at ${all} of ${data.run.recorded.toLocaleString("en")} recorded steps: first, last, those around findings, the rest evenly; ` : "";
    const merged = "“all together” adds up every recorded step, scales that changed taken out.";
    $("mapnote").textContent = carried + merged + " Pale bars: what the recorded dtype had rounded to zero already, as far as it left a mark; other zeros stay zero at any scale. Choose a name for its exact counts and bounds.";
  }

  // -- where to begin: at what the first finding is about, else at what the run is in -----------------------------------
  const start = data.start;
  $("kind").value = Math.max(0, data.kinds.findIndex((k) => k.kind === start.kind));
  document.querySelector(`input[name=format][value="${start.format}"]`).checked = true;
  const first = data.run.steps.findIndex((s) => s.step === start.step);
  $("step").value = first < 0 ? all : first;
  $("fill").checked = start.fill;
  resetScale();

  // What is set is in the address, so that a view can be sent and found again.
  const settings = () => new URLSearchParams({
    kind: kind().kind, format: format().name, scale: $("scale").value, step: Number($("step").value) < all ? data.run.steps[$("step").value].step : "all",
    ...($("fill").checked && { fill: 1 }), ...($("worst").checked && { worst: 1 }), ...($("find").value && { find: $("find").value }),
  });
  function restore() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const k = data.kinds.findIndex((x) => x.kind === asked.get("kind"));
    if (k < 0) return;
    $("kind").value = k;
    for (const input of document.querySelectorAll("input[name=format]")) if (input.value === asked.get("format")) input.checked = true;
    const s = data.run.steps.findIndex((x) => String(x.step) === asked.get("step"));
    $("step").value = s < 0 ? all : s;
    resetScale();
    touched = /^-?\d+$/.test(asked.get("scale") || "");
    if (touched) $("scale").value = asked.get("scale");
    $("fill").checked = asked.has("fill");
    $("worst").checked = asked.has("worst");
    $("find").value = asked.get("find") || "";
  }
  function changed() {
    draw();
    try { history.replaceState(null, "", `#${settings()}`); } catch { /* some viewers of local files forbid it */ }
  }
  restore();
  addEventListener("hashchange", () => { restore(); draw(); });
  $("kind").addEventListener("change", () => { opened.clear(); touched = false; resetScale(); changed(); });
  // Until somebody moves it, the loss scale is the one of the step that is shown.
  $("scale").addEventListener("input", () => { touched = true; });
  $("step").addEventListener("input", () => { if (!touched && kind().scaled) resetScale(); });
  for (const id of ["step", "scale", "fill", "worst", "find", "formats"]) $(id).addEventListener("input", changed);
  document.querySelector(".controls").addEventListener("submit", (e) => e.preventDefault());
  draw();
})();
