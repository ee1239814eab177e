// What a cast does to a tensor, told from its exponent histogram: the twin of precdoctor/numerics/prediction.py,
// and held to it by a test. Fractions are of the elements that are finite and not zero.
"use strict";
const Predict = (() => {
  const LARGEST = 2 ** 1023;
  const POINTS = 128;

  // Bins as cells (lo, hi], times the scale; the smallest and the largest element are cells of their own.
  function parts(t, scale) {
    const cells = [], known = [];
    t.counts.forEach((n, i) => {
      if (n > 0) {
        const k = t.lo + i;
        cells.push({
          lo: k > -160 ? 2 ** k : 0, hi: k < 160 ? 2 ** (k + 1) : Number.MAX_VALUE, n, closed: false,
          grid: t.grid ? Math.max(2 ** (k - t.grid[0]), t.grid[1]) : 0,
        });
      }
    });
    if (cells.length && t.amax) {
      const top = cells[cells.length - 1];
      top.hi = t.amax;
      top.n -= 1;
      known.push({ lo: t.amax, hi: t.amax, n: 1, closed: true, grid: top.grid });
    }
    if (cells.length && t.amin) {
      const low = cells[0];
      low.lo = t.amin;
      low.closed = true;
      if (low.n > 0) {
        low.n -= 1;
        known.push({ lo: t.amin, hi: t.amin, n: 1, closed: true, grid: low.grid });
      }
    }
    const scaled = (c) => ({
      lo: c.lo * scale, hi: c.hi * scale, n: c.n, closed: c.closed || c.lo * scale === 0, grid: c.grid * scale,
    });
    return { cells: cells.filter((c) => c.n > 0).map(scaled), known: known.map(scaled) };
  }

  const below = (c, limit, inclusive) => inclusive
    ? [c.hi <= limit, c.lo < limit || (c.closed && c.lo <= limit)]
    : [c.hi < limit, c.lo < limit];
  const above = (c, limit, inclusive) => {
    const [sure, possible] = below(c, limit, !inclusive);
    return [!possible, !sure];
  };
  // Each says of a cell: surely all of it, possibly some of it.
  const statements = (f) => ({
    flushed: (c) => below(c, f.flush, true),
    subnormal: (c) => {
      const kept = above(c, f.flush, false), small = below(c, f.normal, false);
      return [kept[0] && small[0], kept[1] && small[1] && c.lo < f.normal];
    },
    saturated: (c) => {
      const tie = f.tieOverflows && f.saturate === f.saturateNegative;
      return [above(c, f.saturateNegative, tie)[0], above(c, f.saturate, f.tieOverflows)[1]];
    },
  });

  // First and half the second derivative of the parabola through each point and its neighbours; lines at the ends.
  function parabola(x, y) {
    const size = x.length, slope = Array(size).fill(0), bend = Array(size).fill(0);
    if (size < 2) return [slope, bend];
    const step = [], rise = [];
    for (let i = 0; i + 1 < size; i++) {
      step.push(x[i + 1] - x[i]);
      rise.push((y[i + 1] - y[i]) / (step[i] > 0 ? step[i] : Infinity));
    }
    slope[0] = rise[0];
    slope[size - 1] = rise[size - 2];
    for (let i = 1; i + 1 < size; i++) {
      bend[i] = Math.min((rise[i] - rise[i - 1]) / Math.max(x[i + 1] - x[i - 1], 1e-9), 0);
      slope[i] = (rise[i - 1] * step[i] + rise[i] * step[i - 1]) / Math.max(step[i - 1] + step[i], 1e-9);
    }
    return [slope, bend];
  }

  // Share of a cell's elements that a statement holds for, from magnitudes that stand for them.
  function share(cell, centre, slope, bend, statement) {
    const lo = Math.min(cell.lo, LARGEST), hi = Math.min(cell.hi, LARGEST);
    const coarse = cell.grid > 0 && cell.grid * 128 * 1.001 >= hi / 2;
    let all = 0, held = 0;
    for (let i = 0; i < POINTS; i++) {
      let p = lo + (hi - lo) * ((i + 0.5) / POINTS);
      if (coarse) p = Math.min(Math.ceil(p / cell.grid) * cell.grid, hi);
      const away = Math.log(Math.max(p, 1e-300)) - centre;
      const weight = Math.exp(Math.min(Math.max(slope * away + bend * away * away, -30), 30));
      all += weight;
      if (statement({ lo: p, hi: p, closed: true })[1]) held += weight;
    }
    return held / all;
  }

  function fraction(statement, { cells, known }, total) {
    let low = 0, high = 0, likely = 0, curve = null;
    for (const c of known) {
      const [sure, possible] = statement(c);
      if (sure) low += c.n;
      if (possible) { high += c.n; likely += c.n; }
    }
    cells.forEach((c, i) => {
      const [sure, possible] = statement(c);
      if (sure) low += c.n;
      if (possible) high += c.n;
      if (sure) likely += c.n;
      else if (possible) {
        if (!curve) {
          const width = (d) => Math.max(Math.min(d.hi, LARGEST) - Math.min(d.lo, LARGEST), 1e-300);
          const centre = cells.map((d) => Math.log(Math.max(Math.min(d.lo, LARGEST) / 2 + Math.min(d.hi, LARGEST) / 2, 1e-300)));
          const density = cells.map((d) => Math.log(Math.max(d.n, 0.3)) - Math.log(width(d)));
          curve = [centre, ...parabola(centre, density)];
        }
        likely += c.n * share(c, curve[0][i], curve[1][i], curve[2][i], statement);
      }
    });
    const n = Math.max(total, 1);
    return { low: low / n, high: high / n, estimate: Math.min(Math.max(likely / n, low / n), high / n) };
  }

  // The multiplier that brings amax to the format's maximum.
  const amaxScale = (amax, f) => amax ? Math.min(f.max / amax, Number.MAX_VALUE) : 1;

  // t: {lo, counts, amax, amin, grid}; f: a format as the page's data has it; scale: multiplier in front of the cast.
  function predict(t, f, scale) {
    const both = parts(t, scale), says = statements(f);
    const total = [...both.cells, ...both.known].reduce((sum, c) => sum + c.n, 0);
    return {
      elements: total,
      flushed: fraction(says.flushed, both, total),
      subnormal: fraction(says.subnormal, both, total),
      saturated: fraction(says.saturated, both, total),
      headroom: total && t.amax ? Math.log2(f.max) - Math.log2(scale) - Math.log2(t.amax) : Infinity,
    };
  }

  // Of what the recorded dtype had rounded to zero, how many elements would be again: numerics/tail.py, still_flushed.
  function flushedAgain(tail, f, scale) {
    const top = Math.floor(Math.log2(f.flush / 2 ** Math.round(Math.log2(scale))));
    return tail.counts.slice(0, Math.max(0, top - tail.lo)).reduce((sum, n) => sum + n, 0);
  }
  // The share that becomes zero, of the elements that were meant not to be: those recorded and those lost before.
  function flushedShare(p, tail, f, scale) {
    if (!tail) return p.flushed.estimate;
    const before = tail.counts.reduce((sum, n) => sum + n, 0);
    return (p.flushed.estimate * p.elements + flushedAgain(tail, f, scale)) / Math.max(before + p.elements, 1);
  }

  const decode = (text) => text === "" ? [] : text.split(".").map((s) => s === "" ? 0 : parseInt(s, 36));

  return { predict, amaxScale, flushedAgain, flushedShare, decode };
})();
if (typeof module !== "undefined") module.exports = Predict;
