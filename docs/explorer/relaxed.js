/* The relaxed top-k operators of one row x, with their derivatives in closed form.
 *
 * The symbols are those of the page on the maths: R(y) = lam * sum_i r(y_i) is the regulariser and
 * S = (r*)' its response, so that y_i = S(d_i) with d_i = (x_i - threshold) / lam. An entry is left
 * out (y_i = 0), selected whole (y_i is at its ceiling), or in the block of those in between, which
 * share what is left of k. One scalar, the threshold, decides all of it.
 */
"use strict";

const relaxed = (() => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const range = (n) => Array.from({ length: n }, (_, i) => i);

  /** The zero of an increasing f on (lo, hi) to the last digit; f gives its value and its slope. */
  function increasingRoot(f, lo, hi) {
    let at = lo + (hi - lo) / 2;
    for (let step = 1; ; step++) {
      const [value, slope] = f(at);
      if (value === 0) return at;
      if (value > 0) hi = at;
      else lo = at;
      // Newton, kept inside the bracket; every third step halves it, so that it always ends.
      let next = step % 3 === 0 ? NaN : at - value / slope;
      if (next === at) return at;
      if (!(next > lo && next < hi)) next = lo + (hi - lo) / 2;
      if (next <= lo || next >= hi) return at;
      at = next;
    }
  }

  /** q - 1 = 1/(p - 1), with the rounding of p = 3/2 and p = 4/3 taken out. */
  function exponent(p) {
    const e = 1 / (p - 1);
    return Math.abs(e - Math.round(e)) < 1e-12 * e ? Math.round(e) : e;
  }

  /** r(y) = |y|^p / p for y >= 0: S(t) = t^(q-1), which leaves 0 at t = `zero` and is 1 at t = 1. */
  function pNorm(p) {
    const e = exponent(p);
    // For p > 2 the slope is unbounded at 0: nearer than this it stays as it is, and finite.
    const nearest = e < 1 ? 1e-140 : 0;
    return {
      zero: 0,
      S: (t) => Math.max(t, 0) ** e,
      slope: (t) => e * Math.max(t, nearest) ** (e - 1),
    };
  }

  /** r(y) = (|y|^p + |1-y|^p) / p: the inverse of S is y^(p-1) - (1-y)^(p-1), on [-1, 1]. */
  function twoSidedPNorm(p) {
    const inverseSlope = (y) => (p - 1) * (y ** (p - 2) + (1 - y) ** (p - 2));

    /** S(t) for t <= 0, where y is the smaller of y and 1 - y and keeps its relative precision. */
    function lowerHalf(t) {
      if (t <= -1) return 0;
      const m = Math.min(p - 1, 1); // for p < 2 the equation is nearly linear in c = y^(p-1)
      const c = increasingRoot(
        (c) => {
          const y = c ** (1 / m);
          return [y ** (p - 1) - (1 - y) ** (p - 1) - t, (inverseSlope(y) * y) / (m * c)];
        },
        0,
        0.5 ** m * (1 + 1e-15), // S(0) = 1/2 is a root too
      );
      return c ** (1 / m);
    }

    return {
      zero: -1,
      S: (t) => (t <= 0 ? lowerHalf(t) : 1 - lowerHalf(-t)),
      slope: (t) => 1 / inverseSlope(lowerHalf(-Math.abs(t))), // it is even in t
    };
  }

  /** 1_k paired with x: floor(k) ones, the fraction of k, zeros; the lowest index wins a tie. */
  function hardMask(x, k) {
    const order = range(x.length).sort((i, j) => x[j] - x[i] || i - j);
    const mask = [];
    order.forEach((i, place) => (mask[i] = Math.min(Math.max(k - place, 0), 1)));
    return mask;
  }

  /** x_[floor k + 1] and x_[ceil k], the entries on the two sides of the boundary, for 0 < k < n. */
  function boundary(x, k) {
    const s = [...x].sort((a, b) => b - a);
    return [s[Math.floor(k)], s[Math.ceil(k) - 1]];
  }

  /* Both thresholds below are found as delta = (pivot - threshold)/lam, with the pivot an entry at
   * the boundary: then neither a common shift of x nor a tiny lam costs digits. Where the bracket
   * of delta is empty the gap at the boundary is too wide to share anything: the hard answer. */

  /** tau with sum_i S((x_i - tau)/lam) = k, as {threshold, d}. */
  function maskThreshold(x, k, lam, R) {
    const at = (pivot, delta) => ({
      threshold: pivot - lam * delta,
      d: x.map((xi) => (xi - pivot) / lam + delta),
    });
    if (k <= 0) return at(Math.max(...x), R.zero);
    if (k >= x.length) return at(Math.min(...x), 1);
    const [pivot, above] = boundary(x, k);
    const hi = 1 - (above - pivot) / lam;
    if (hi <= R.zero) return at(pivot, R.zero);
    const t = x.map((xi) => (xi - pivot) / lam);
    const equation = (delta) => {
      const d = t.map((ti) => ti + delta);
      const inside = d.filter((di) => di > R.zero && di < 1);
      const ones = d.filter((di) => di >= 1).length;
      return [sum(inside.map(R.S)) + ones - k, sum(inside.map(R.slope))];
    };
    return at(pivot, increasingRoot(equation, R.zero, hi));
  }

  /** d of a magnitude a that is selected whole: S(d) = a - lam d, which is T(a). */
  function aloneMagnitude(a, lam, R) {
    if (a === 0) return 0;
    const hi = a / lam;
    return increasingRoot((d) => [R.S(d) + lam * d - a, R.slope(d) + lam], 0, hi);
  }

  /** g with sum_i min(S((a_i - g)/lam), g) = k g, as {threshold, d}. */
  function magnitudeThreshold(a, k, lam, R) {
    const at = (pivot, delta) => ({
      threshold: pivot - lam * delta,
      d: a.map((ai) => (ai - pivot) / lam + delta),
    });
    if (k <= 0) return at(Math.max(...a), 0);
    if (k >= a.length) return at(0, 0);
    const [pivot, above] = boundary(a, k);
    const hi = aloneMagnitude(above, lam, R) - (above - pivot) / lam;
    if (hi <= 0) return at(pivot, 0);
    const equation = (delta) => {
      const { threshold: g, d } = at(pivot, delta);
      const inside = d.filter((di) => di > 0 && R.S(di) < g);
      const left = k - d.filter((di) => di > 0 && R.S(di) >= g).length;
      return [sum(inside.map(R.S)) - left * g, sum(inside.map(R.slope)) + lam * left];
    };
    return at(pivot, increasingRoot(equation, 0, hi));
  }

  /** Which part an entry has, from its d and from whether its response is at the ceiling. */
  const kindOf = (d, zero, atCeiling) => (d <= zero ? "zero" : atCeiling ? "whole" : "fractional");

  function solveMask({ x, k, lam, p, twoSided }) {
    const R = twoSided ? twoSidedPNorm(p) : pNorm(p);
    const { threshold, d } = maskThreshold(x, k, lam, R);
    const kind = d.map((di) => kindOf(di, R.zero, di >= 1));
    const value = { zero: () => 0, whole: () => 1, fractional: R.S };
    return {
      y: d.map((di, i) => value[kind[i]](di)),
      threshold,
      from: threshold + lam * R.zero,
      to: threshold + lam,
      kind,
      d,
      slope: d.map((di, i) => (kind[i] === "fractional" ? R.slope(di) : 0)),
      sign: x.map(() => 1),
      ceiling: 1, // phi'(threshold), phi(x) = x
      curvature: 0, // phi''(threshold)
      debias: 0,
    };
  }

  function solveMagnitude({ x, k, lam, p, debias }) {
    const R = pNorm(p);
    const a = x.map(Math.abs);
    const sign = x.map((xi) => Math.sign(xi) || 1);
    const n = x.length;
    const { threshold, d } = magnitudeThreshold(a, k, lam, R);
    const kind = d.map((di) => (k >= n ? "whole" : kindOf(di, 0, R.S(di) >= threshold)));
    const left = k - kind.filter((name) => name === "whole").length;
    const mass = sum(d.filter((_, i) => kind[i] === "fractional").map(R.S));
    const g = mass > 0 && left > 0 ? mass / left : threshold; // keeps its digits where g << a
    const own = { zero: () => 0, whole: (i) => aloneMagnitude(a[i], lam, R), fractional: (i) => d[i] };
    const distance = range(n).map((i) => own[kind[i]](i));
    const biased = distance.map(R.S);
    const shown = { zero: () => 0, whole: (i) => a[i], fractional: (i) => biased[i] + lam * d[i] };
    return {
      y: sign.map((si, i) => si * (debias ? shown[kind[i]](i) : biased[i])),
      threshold: g,
      from: g,
      to: g + lam * g ** (p - 1),
      kind,
      d: distance,
      slope: distance.map((di, i) => (kind[i] === "zero" ? 0 : R.slope(di))),
      sign,
      ceiling: g, // phi'(g), phi(x) = x^2/2
      curvature: 1, // phi''(g)
      debias: debias ? 1 : 0,
    };
  }

  /** dy/dx, dy/dk and dy/dlam: with D_i = S'(d_i)/lam and c = phi''(g) * (what is left of k),
   *  d(threshold) = sum_B D_j dx_j / (sum_B D_j + c),  dy_i = D_i (dx_i - d(threshold)) on a block B.
   *  An entry selected whole is a block of its own with c = phi''. Debiased, D_i + 1 replaces the
   *  first D_i of dy_i. */
  function derivatives({ k, lam }, solved) {
    const { kind, d, slope, sign, ceiling, curvature, debias } = solved;
    const n = d.length;
    const gain = slope.map((si) => si / lam + debias);
    const J = range(n).map(() => Array(n).fill(0));
    const dk = Array(n).fill(0);
    for (const i of range(n)) {
      if (kind[i] === "whole" && curvature) J[i][i] = (gain[i] * lam) / (slope[i] + lam);
    }
    const block = range(n).filter((i) => kind[i] === "fractional");
    const left = k - kind.filter((name) => name === "whole").length;
    const total = sum(block.map((i) => slope[i])) + lam * curvature * left;
    for (const i of block) {
      // Where every slope underflows the limit is an equal share.
      const share = (j) => (total > 0 ? slope[j] / total : 1 / block.length);
      const others = sum(block.filter((j) => j !== i).map(share));
      for (const j of block) J[i][j] = -gain[i] * share(j);
      J[i][i] = gain[i] * (others + (lam * curvature * left) / (total || 1)); // free of cancellation
      dk[i] = curvature ? (gain[i] * lam * ceiling) / total : share(i);
    }
    const inLam = range(n).map((i) => debias * d[i] - sum(J[i].map((Jij, j) => Jij * d[j])));
    return {
      jacobian: J.map((row, i) => row.map((Jij, j) => sign[i] * Jij * sign[j] + 0)),
      dk: dk.map((value, i) => sign[i] * value + 0),
      dlam: inLam.map((value, i) => sign[i] * value + 0),
    };
  }

  /** lam = 0: a mask does not move, kept magnitudes move with x, k and lam move nothing. */
  function hard({ operator, x, k }) {
    const n = x.length;
    const size = operator === "mag" ? x.map(Math.abs) : x;
    const mask = hardMask(size, k);
    const threshold = [...size].sort((a, b) => b - a)[Math.min(Math.floor(k), n - 1)];
    const diagonal = mask.map((mi) => (operator === "mag" ? mi : 0));
    return {
      y: operator === "mag" ? x.map((xi, i) => xi * mask[i] + 0) : mask,
      threshold,
      from: threshold,
      to: threshold,
      kind: mask.map((mi) => (mi === 0 ? "zero" : mi === 1 ? "whole" : "fractional")),
      jacobian: range(n).map((i) => range(n).map((j) => (i === j ? diagonal[i] : 0))),
      dk: Array(n).fill(0),
      dlam: Array(n).fill(0),
    };
  }

  /** The operator "mask" (with twoSided) or "mag" (with debias) at x, k in [0, n], lam >= 0, p > 1.
   *
   *  Gives y; the threshold and the interval (from, to) in which an entry (for mag its magnitude)
   *  is fractional; the kind of each entry; jacobian[i][j] = dy_i/dx_j; dk and dlam. */
  function evaluate(problem) {
    if (problem.lam === 0) return hard(problem);
    const solved = problem.operator === "mag" ? solveMagnitude(problem) : solveMask(problem);
    const { y, threshold, from, to, kind } = solved;
    return { y, threshold, from, to, kind, ...derivatives(problem, solved) };
  }

  return { evaluate };
})();
