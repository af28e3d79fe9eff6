/* The page: state, controls and pictures. The maths is in relaxed.js. */
"use strict";

(() => {
  const LIMIT = 3; // entries of x lie in [-3, 3]
  const OPERATORS = {
    mask: { operator: "mask", twoSided: false, call: "topk_mask", option: "" },
    "two-sided": { operator: "mask", twoSided: true, call: "topk_mask", option: ", two_sided=True" },
    debiased: { operator: "mag", debias: true, call: "topk_mag", option: "" },
    biased: { operator: "mag", debias: false, call: "topk_mag", option: ", debias=False" },
  };
  const NORMS = { 1.2: 1.2, "4/3": 4 / 3, "3/2": 1.5, 2: 2, 3: 3 };
  const PRESETS = {
    "Fig. 1": {
      state: { x: [3, 1, 0.4, 1.4], k: 2, lam: 1, p: 4 / 3, operator: "mask" },
      note: "x = (3, 1, s − 1, s) with s = 1.4. Move the third and the fourth bar up together, as the paper's Fig. 1 does.",
    },
    Ties: {
      state: { x: [1, 1, 1, 0], k: 2, lam: 0.5, p: 2, operator: "mask" },
      note: "Three equal entries share k = 2. Set λ to 0: the lowest index wins.",
    },
    Saturation: {
      state: { x: [0.45, 0.3, 0.2, -0.5], k: 2, lam: 1, p: 4 / 3, operator: "mask" },
      note: "Raise x₁ to 0.46: it becomes whole, and ∂y₁/∂x₁ drops from 1.67 to 0. The two-sided mask has no such jump.",
    },
    Magnitude: {
      state: { x: [-2.2, 1.1, 0.9, -0.7, 0.3, -0.1], k: 2, lam: 0.3, p: 2, operator: "debiased" },
      note: "The sign is kept. Compare with y*, which shrinks even an entry that is clearly selected.",
    },
  };
  const START = { x: [1.6, 0.7, 0.4, -0.3, 0.2, -1.1], k: 2, lam: 0.6, p: 1.5, operator: "mask" };
  const SPARE = [1.6, 0.7, 0.4, -0.3, 0.2, -1.1, 0.9, -0.6, 1.2, 0, -1.7, 0.5];
  const NOTES = {
    mask: "Below τ an entry is dropped, above τ + λ it is whole, in between it is fractional. The entries of y sum to k.",
    "two-sided": "Fractional from τ − λ to τ + λ. For p < 2 the slope fades at both ends: differentiable everywhere.",
    debiased: "As y*, but a whole entry is equal to x.",
    biased: "Below g a magnitude is dropped. Above g + λgᵖ⁻¹ an entry is whole, and smaller than x all the same.",
  };
  const GLYPHS = { whole: "●", fractional: "◐", zero: "○" };

  // x has all twelve entries, of which n are shown: an entry taken away comes back as it was.
  const state = { x: SPARE, n: 6, k: 2, lam: 0.6, p: 1.5, operator: "mask" };

  const byId = (id) => document.getElementById(id);
  const clamp = (value, lo, hi) => Math.min(Math.max(value, lo), hi);
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const subscript = (i) => [...String(i + 1)].map((c) => "₀₁₂₃₄₅₆₇₈₉"[c]).join("");
  const minus = (text) => text.replace("-", "−");
  const fixed = (value, digits) => minus((Number(value.toFixed(digits)) + 0).toFixed(digits));

  /** A number in few characters, exact zeros as "0". */
  function brief(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e4 || size < 1e-3) return minus(value.toExponential(1));
    return minus(String(Number(value.toPrecision(digits))));
  }

  function element(parent, name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    set(made, attributes);
    parent.append(made);
    return made;
  }

  function set(node, attributes) {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  }

  /* ---- Bars ---- */

  /** n bars in columns, from a base line at 0. All charts have the same columns. */
  class Bars {
    constructor(svg, n, { left = 0, right = 0, foot = 0 }) {
      svg.replaceChildren();
      Object.assign(this, { svg, n, left, foot });
      this.width = svg.clientWidth - left - right;
      this.height = svg.clientHeight - foot;
      this.column = this.width / n;
      this.back = element(svg, "g", { "aria-hidden": true });
      this.base = element(this.back, "line", { class: "base", x1: left, x2: left + this.width });
      this.bars = range(n).map((i) => this.#bar(i));
    }

    #bar(i) {
      const group = element(this.svg, "g", { role: "listitem" });
      const rect = element(group, "rect", { rx: 2 });
      return { group, rect, value: element(group, "text", { class: "value", x: this.centre(i) }) };
    }

    centre(i) {
      return this.left + (i + 0.5) * this.column;
    }

    /** Where a value of [lo, hi] stands, in pixels from the top. */
    at(value) {
      return ((this.hi - value) / (this.hi - this.lo)) * this.height;
    }

    /** Draws the bars; texts stand `gap` pixels beyond their ends. */
    draw(values, { lo, hi, classes, texts, gap = 5 }) {
      Object.assign(this, { lo, hi });
      const zero = this.at(0);
      const wide = Math.min(this.column * 0.62, 46);
      set(this.base, { y1: zero, y2: zero });
      this.bars.forEach(({ rect, value }, i) => {
        const end = this.at(values[i]);
        set(rect, {
          class: `bar ${classes[i]}`,
          x: this.centre(i) - wide / 2,
          width: wide,
          y: Math.min(zero, end),
          height: Math.abs(end - zero),
        });
        value.textContent = texts[i];
        set(value, { y: values[i] < 0 ? end + gap + 10 : end - gap });
      });
    }
  }

  let charts;

  function buildCharts() {
    const { n } = state;
    const margins = { left: 24, right: 52 };
    charts = {
      x: new Bars(byId("x"), n, { ...margins, foot: 18 }),
      y: new Bars(byId("y"), n, { ...margins, foot: 36 }),
      dk: new Bars(byId("dk"), n, { foot: 16 }),
      dlam: new Bars(byId("dlam"), n, { foot: 16 }),
    };
    buildThreshold(charts.x);
    charts.x.bars.forEach(buildHandle);
    for (const chart of Object.values(charts)) buildIndices(chart);
    for (const name of ["x", "y"]) buildTicks(charts[name]);
    charts.y.bars.forEach((bar, i) => {
      bar.glyph = element(bar.group, "text", {
        x: charts.y.centre(i),
        y: charts.y.height + 15,
        "aria-hidden": true,
      });
    });
  }

  function buildIndices(chart) {
    const y = chart.height + chart.foot - 3;
    for (const i of range(chart.n)) {
      element(chart.back, "text", { class: "index", x: chart.centre(i), y }).textContent = i + 1;
    }
  }

  function buildTicks(chart) {
    chart.ticks = range(2 * LIMIT + 1).map((i) => ({
      value: i - LIMIT,
      line: element(chart.back, "line", { class: "grid", x1: chart.left, x2: chart.left + chart.width }),
      text: element(chart.back, "text", { class: "tick", x: chart.left - 6 }),
    }));
    chart.back.append(chart.base);
  }

  function drawTicks(chart, shown) {
    for (const { value, line, text } of chart.ticks) {
      const y = chart.at(value);
      const display = shown(value) ? "" : "none";
      set(line, { y1: y, y2: y, display });
      set(text, { y: y + 4, display });
      text.textContent = minus(String(value));
    }
  }

  /* ---- The threshold in the picture of x ---- */

  const NAME_HEIGHT = 13;
  const isMagnitude = () => OPERATORS[state.operator].operator === "mag";
  const isInside = (value) => Math.abs(value) <= LIMIT * 1.2;

  function buildThreshold(chart) {
    const layer = element(chart.svg, "g", { "aria-hidden": true, "pointer-events": "none" });
    chart.svg.insertBefore(layer, chart.back.nextSibling);
    const span = { x: chart.left, width: chart.width };
    chart.bands = range(2).map(() => element(layer, "rect", { class: "band", ...span }));
    chart.limits = element(layer, "g", {});
  }

  /** The lines to draw, from the top: the threshold, and where entries become zero or whole. */
  function limits({ threshold, from, to }) {
    const main = { value: threshold, name: isMagnitude() ? "g" : "τ", kind: "main" };
    if (state.lam === 0) return [main];
    const whole = { value: to, name: isMagnitude() ? "g+λgᵖ⁻¹" : "τ+λ", kind: "end" };
    const lines = [whole, main];
    return state.operator === "two-sided" ? [...lines, { value: from, name: "τ−λ", kind: "end" }] : lines;
  }

  function drawThreshold(chart, result) {
    const edge = (value) => clamp(chart.at(value), 0, chart.height);
    const lines = limits(result);
    const sides = isMagnitude() ? [1, -1] : [1]; // magnitudes have the same again, mirrored
    chart.bands.forEach((band, i) => {
      const [a, b] = [result.from, result.to].map((value) => edge(sides[i] * value));
      set(band, i < sides.length ? { y: Math.min(a, b), height: Math.abs(a - b) } : { height: 0 });
    });
    chart.limits.replaceChildren();
    const right = chart.left + chart.width;
    for (const { value, kind } of lines.filter((line) => isInside(line.value))) {
      for (const y of sides.map((side) => edge(side * value))) {
        element(chart.limits, "line", { class: `limit ${kind}`, x1: chart.left, x2: right, y1: y, y2: y });
      }
    }
    const places = spread(lines.map(({ value }) => edge(value)), chart.height);
    lines.forEach(({ value, name }, i) => {
      const text = element(chart.limits, "text", { class: "limit-name", x: right + 4, y: places[i] + 4 });
      text.textContent = name + (isInside(value) ? "" : value > 0 ? " ↑" : " ↓");
    });
  }

  /** Places as near as possible to the given ones, from the top, where names do not overlap. */
  function spread(places, bottom) {
    const down = [];
    for (const y of places) down.push(Math.max(y, (down.at(-1) ?? -5) + NAME_HEIGHT));
    return down.map((y, i) => Math.min(y, bottom - NAME_HEIGHT * (down.length - 1 - i)));
  }

  /* ---- Bars of x that are moved ---- */

  function buildHandle(bar, i) {
    const chart = charts.x;
    const { group } = bar;
    set(group, {
      role: "slider",
      tabindex: 0,
      "aria-orientation": "vertical",
      "aria-label": `x${i + 1}`,
      "aria-valuemin": -LIMIT,
      "aria-valuemax": LIMIT,
    });
    bar.hit = element(group, "rect", {
      class: "hit",
      x: chart.left + i * chart.column + 1,
      y: 1,
      width: chart.column - 2,
      height: chart.height + chart.foot - 2,
      rx: 5,
    });
    bar.knob = element(group, "circle", { class: "knob", r: 7, cx: chart.centre(i) });
    bar.half = element(group, "path", { class: "knob-half" });
    group.onpointerdown = (event) => {
      if (event.button !== 0) return;
      group.setPointerCapture(event.pointerId);
      group.focus({ preventScroll: true });
      drag(event, i);
    };
    group.onpointermove = (event) => group.hasPointerCapture(event.pointerId) && drag(event, i);
    group.onkeydown = (event) => pressed(event, i);
  }

  function drag(event, i) {
    event.preventDefault();
    const chart = charts.x;
    const y = event.clientY - chart.svg.getBoundingClientRect().top;
    move(i, chart.hi - (y / chart.height) * (chart.hi - chart.lo));
  }

  const STEPS = {
    ArrowUp: 0.05,
    ArrowRight: 0.05,
    ArrowDown: -0.05,
    ArrowLeft: -0.05,
    PageUp: 0.5,
    PageDown: -0.5,
    Home: -Infinity,
    End: Infinity,
  };

  function pressed(event, i) {
    if (!(event.key in STEPS) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const step = event.shiftKey ? STEPS[event.key] / 5 : STEPS[event.key];
    move(i, state.x[i] + step);
  }

  function move(i, value) {
    state.x = [...state.x];
    state.x[i] = Math.round(clamp(value, -LIMIT, LIMIT) * 100) / 100;
    changed();
  }

  function drawHandle({ group, knob, half }, i, kind, y) {
    const chart = charts.x;
    const [x, end] = [chart.centre(i), chart.at(state.x[i])];
    set(group, {
      class: `handle ${kind}`,
      "aria-valuenow": state.x[i],
      "aria-valuetext": `${fixed(state.x[i], 2)}, y is ${fixed(y, 4)}, ${kind}`,
    });
    set(knob, { cy: end });
    set(half, { d: kind === "fractional" ? `M${x} ${end - 7}a7 7 0 0 0 0 14Z` : "" });
  }

  /* ---- The Jacobian ---- */

  let cells;
  let looked = null; // the cell that is pointed at or focused, as [i, j]

  function buildJacobian() {
    const grid = byId("jacobian");
    const { n } = state;
    const cell = (row, role, text = "") => {
      const made = document.createElement("div");
      made.setAttribute("role", role);
      made.textContent = text;
      row.append(made);
      return made;
    };
    const rows = range(n + 1).map(() => cell(grid, "row"));
    grid.replaceChildren(...rows);
    grid.style.gridTemplateColumns = `22px repeat(${n}, minmax(0, 1fr))`;
    cell(rows[0], "columnheader");
    for (const j of range(n)) cell(rows[0], "columnheader", `x${subscript(j)}`);
    cells = range(n).map((i) => {
      cell(rows[i + 1], "rowheader", `y${subscript(i)}`);
      return range(n).map((j) => listen(cell(rows[i + 1], "gridcell"), i, j));
    });
    looked = null;
    cells[0][0].tabIndex = 0;
  }

  function listen(cell, i, j) {
    cell.tabIndex = -1;
    cell.onpointerenter = () => look([i, j]);
    cell.onpointerleave = () => look(null);
    cell.onfocus = () => look([i, j]);
    cell.onblur = () => look(null);
    cell.onkeydown = (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const [row, column] = [i + step[0], j + step[1]].map((at) => clamp(at, 0, state.n - 1));
      cell.tabIndex = -1;
      cells[row][column].tabIndex = 0;
      cells[row][column].focus();
    };
    return cell;
  }

  function look(at) {
    looked = at;
    drawReadout();
  }

  function drawReadout() {
    const at = looked && `∂y${subscript(looked[0])} / ∂x${subscript(looked[1])}`;
    byId("readout").textContent = at
      ? `${at} = ${brief(shown.jacobian[looked[0]][looked[1]], 5)}`
      : "Point at a cell to read its value.";
  }

  function drawJacobian(jacobian) {
    const most = Math.max(...jacobian.flat().map(Math.abs));
    jacobian.forEach((row, i) =>
      row.forEach((value, j) => {
        const cell = cells[i][j];
        const strength = most > 0 ? Math.abs(value) / most : 0;
        cell.className = value > 0 ? "positive" : value < 0 ? "negative" : "none";
        cell.classList.toggle("strong", strength > 0.6);
        cell.style.setProperty("--strength", strength.toFixed(3));
        cell.setAttribute("aria-label", `dy${i + 1}/dx${j + 1} = ${brief(value, 5)}`);
        cell.textContent = state.n <= 7 ? brief(value, 2) : "";
      }),
    );
    byId("least").textContent = most > 0 ? brief(-most) : "0";
    byId("most").textContent = most > 0 ? `+${brief(most)}` : "0";
    drawReadout();
  }

  /* ---- Everything that follows from the state ---- */

  let shown; // what relaxed.js made of the state

  const entries = () => state.x.slice(0, state.n);

  function draw() {
    const { k, lam, p, operator } = state;
    shown = relaxed.evaluate({ ...OPERATORS[operator], x: entries(), k, lam, p });
    drawX(shown);
    drawY(shown);
    drawDerivative(charts.dk, shown.dk, "dk");
    drawDerivative(charts.dlam, shown.dlam, "dlam");
    drawJacobian(shown.jacobian);
    drawFacts(shown);
    drawControls();
    byId("python").textContent = python();
  }

  function drawX(result) {
    const x = entries();
    const chart = charts.x;
    const digits = chart.column < 34 ? 1 : 2;
    const texts = x.map((xi) => fixed(xi, digits));
    chart.draw(x, { lo: -LIMIT * 1.2, hi: LIMIT * 1.2, classes: result.kind, texts, gap: 12 });
    chart.bars.forEach((bar, i) => drawHandle(bar, i, result.kind[i], result.y[i]));
    drawTicks(chart, () => true);
    drawThreshold(chart, result);
  }

  function drawY({ y, kind }) {
    const chart = charts.y;
    const magnitude = isMagnitude();
    const digits = chart.column < 34 ? 1 : 2;
    const exact = (yi) => yi === 0 || yi === 1 || Math.abs(yi) < 0.01; // "0.00" would look like zero
    const texts = y.map((yi) => (exact(yi) ? brief(yi, 1) : fixed(yi, digits)));
    const limits = magnitude ? { lo: -LIMIT * 1.35, hi: LIMIT * 1.35 } : { lo: 0, hi: 1.2 };
    chart.draw(y, { ...limits, classes: kind, texts });
    drawTicks(chart, (value) => (magnitude ? value % LIMIT === 0 : value === 0 || value === 1));
    chart.bars.forEach(({ group, glyph }, i) => {
      group.setAttribute("aria-label", `y${i + 1} = ${fixed(y[i], 4)}, ${kind[i]}`);
      glyph.textContent = GLYPHS[kind[i]];
      set(glyph, { class: `glyph ${kind[i]}` });
    });
  }

  function drawDerivative(chart, values, name) {
    const most = Math.max(...values.map(Math.abs)) || 1;
    const up = values.some((value) => value > 0) ? most : 0;
    const down = values.some((value) => value < 0) ? -most : 0;
    const room = (0.45 * (up - down || most)) / (up && down ? 1 : 2); // for the numbers
    const limits = { lo: down && down - room, hi: up || !down ? (up || most) + room : 0 };
    const classes = values.map((value) => (value < 0 ? "negative" : "positive"));
    const texts = values.map((value) => (chart.column < 40 ? "" : brief(value, 2)));
    chart.draw(values, { ...limits, classes, texts, gap: 4 });
    byId(`${name}-most`).textContent = values.some(Boolean) ? `largest ${brief(most)}` : "all zero";
    chart.bars.forEach(({ group }, i) =>
      group.setAttribute("aria-label", `dy${i + 1}/${name} = ${brief(values[i], 5)}`),
    );
  }

  function drawFacts({ y, kind, threshold, from, to }) {
    const count = (test) => y.filter(test).length;
    byId("sum").textContent = fixed(y.reduce((a, b) => a + b, 0), 3);
    byId("nonzeros").textContent = `${count((yi) => yi !== 0)} of ${y.length}`;
    byId("fractional").textContent = count((_, i) => kind[i] === "fractional");
    byId("threshold-name").textContent = isMagnitude() ? "g" : "τ";
    byId("threshold").textContent = brief(threshold, 4);
    const x = isMagnitude() ? "|x|" : "x";
    byId("interval").textContent =
      state.lam === 0
        ? "hard: an entry is kept or dropped"
        : `fractional where ${brief(from)} < ${x} < ${brief(to)}`;
  }

  function python() {
    const { call, option } = OPERATORS[state.operator];
    const { k, lam } = state;
    const x = entries().map((xi) => (Number.isInteger(xi) ? xi.toFixed(1) : xi)); // x has floats
    return `st.${call}([${x.join(", ")}], k=${k}, lam=${lam}, p=${normName()}${option})`;
  }

  /** The name of p, as Python and the address write it. */
  function normName() {
    const known = Object.keys(NORMS).find((name) => NORMS[name] === state.p);
    return known || String(state.p);
  }

  /* ---- Controls ---- */

  // The slider of lam is logarithmic from 1e-3 to 1e2, and its first position is 0.
  const lamAt = (place) => (place === 0 ? 0 : Number((10 ** ((place - 1) / 20 - 3)).toPrecision(3)));
  const placeOf = (lam) => (lam === 0 ? 0 : 1 + Math.round(20 * (Math.log10(lam) + 3)));

  function drawControls() {
    const { n, k, lam, p } = state;
    const place = { n, k, lam: placeOf(lam), p };
    const text = { n, k, lam: lam === 0 ? "0 (hard)" : lam, p: normName() };
    byId("k").max = n;
    for (const name of ["k", "lam", "p", "n"]) {
      byId(name).value = place[name];
      byId(name).setAttribute("aria-valuetext", text[name]);
      document.querySelector(`output[for=${name}]`).textContent = text[name];
    }
    document.querySelector(`input[value=${state.operator}]`).checked = true;
    for (const chip of byId("norms").children) {
      chip.setAttribute("aria-pressed", NORMS[chip.textContent] === p);
    }
  }

  function chips(id, names, act) {
    for (const name of names) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.onclick = () => act(name);
      byId(id).append(button);
    }
  }

  function listenToControls() {
    chips("norms", Object.keys(NORMS).sort((a, b) => NORMS[a] - NORMS[b]), (name) => update({ p: NORMS[name] }));
    chips("presets", Object.keys(PRESETS), (name) => {
      load(PRESETS[name].state, PRESETS[name].note);
      remember();
    });
    const read = { k: Number, n: Number, lam: (place) => lamAt(Number(place)), p: Number };
    for (const [name, value] of Object.entries(read)) {
      byId(name).oninput = (event) => update({ [name]: value(event.target.value) });
    }
    for (const radio of document.querySelectorAll("input[name=operator]")) {
      radio.onchange = () => update({ operator: radio.value });
    }
    byId("share").onclick = share;
    addEventListener("hashchange", () => load(fromHash(location.hash) || START));
    new ResizeObserver(resized).observe(document.querySelector("main"));
  }

  function update(change) {
    Object.assign(state, change);
    state.k = Math.min(state.k, state.n);
    if ("operator" in change) byId("note").textContent = NOTES[state.operator];
    if ("n" in change) rebuild();
    changed();
  }

  /** Shows a state that comes from elsewhere, with as many bars as it has entries. */
  function load({ x, ...rest }, note) {
    Object.assign(state, rest, { x: [...x, ...SPARE.slice(x.length)], n: x.length });
    byId("note").textContent = note || NOTES[state.operator];
    rebuild();
  }

  /** Only another width asks for new bars, which would end a drag. */
  function resized() {
    const across = document.querySelector("main").clientWidth;
    if (across !== width) rebuild();
  }

  let width;

  function rebuild() {
    width = document.querySelector("main").clientWidth;
    const focused = document.activeElement.getAttribute("aria-label");
    buildCharts();
    if (!cells || cells.length !== state.n) buildJacobian();
    draw();
    if (/^x\d+$/.test(focused)) document.querySelector(`[aria-label=${focused}]`)?.focus();
  }

  /* ---- The state in the address ---- */

  function toHash() {
    const { k, lam, operator } = state;
    return `#x=${entries().join(",")}&k=${k}&lam=${lam}&p=${normName()}&operator=${operator}`;
  }

  /** The state that an address holds, or null if it holds none that can be shown. */
  function fromHash(hash) {
    const given = new URLSearchParams(hash.slice(1));
    const x = (given.get("x") || "").split(",").map(Number);
    const [k, lam] = ["k", "lam"].map((name) => Number(given.get(name) ?? NaN));
    const p = NORMS[given.get("p")] ?? Number(given.get("p") ?? NaN);
    const operator = given.get("operator");
    const fits =
      x.length >= 3 && x.length <= 12 && x.every((xi) => Math.abs(xi) <= LIMIT) &&
      k >= 0 && k <= x.length && (lam === 0 || (lam >= 1e-3 && lam <= 100)) &&
      p >= 1.1 && p <= 4 && Object.hasOwn(OPERATORS, operator);
    return fits ? { x, k, lam, p, operator } : null;
  }

  async function share() {
    const address = location.href.split("#")[0] + toHash();
    const say = (text) => {
      byId("share").textContent = text;
      setTimeout(() => (byId("share").textContent = "Copy a link to this"), 2000);
    };
    history.replaceState(null, "", toHash());
    try {
      await navigator.clipboard.writeText(address);
      say("Copied");
    } catch {
      say("Copy the address of this page"); // not every browser lets a file write the clipboard
    }
  }

  function changed() {
    draw();
    remember();
  }

  let settling;

  /** Puts the state into the address, but not at every step of a drag: browsers limit how often. */
  function remember() {
    clearTimeout(settling);
    settling = setTimeout(() => history.replaceState(null, "", toHash()), 300);
  }

  listenToControls();
  load(fromHash(location.hash) || START);
})();
