// What a reader can do with the charts of a report: point at them, zoom, hide lines, smooth them, see them over time.
// The pictures themselves come from charts.py and are there without scripts. A changed chart is drawn again here, in the
// same way and with the same measures, which the page carries.
"use strict";
(() => {
  const { width: WIDTH, height: HEIGHT, left: LEFT, right: RIGHT, top: TOP, bottom: BOTTOM, name: NAME, points: POINTS } =
    JSON.parse(document.body.dataset.measures);
  const SVG = "http://www.w3.org/2000/svg";

  const one = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const clocks = JSON.parse(document.body.dataset.clocks);  // of each run: steps, and the seconds they had taken
  const state = { byTime: false, range: null, smooth: 0, left: new Set() };

  // --- numbers -------------------------------------------------------------------------------------------------------

  function short(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
    const text = value.toFixed(clamp(2 - Math.floor(Math.log10(size)), 0, 4));
    return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  }

  function clockUnit(seconds) {
    return seconds < 120 ? [1, "seconds"] : seconds < 7200 ? [60, "minutes"] : [3600, "hours"];
  }

  function duration(seconds) {
    const [unit, name] = clockUnit(seconds);
    return `${short(seconds / unit)} ${name}`;
  }

  function widened(low, high) {
    if (high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high))) return [low, high];
    if (low >= 0 && low <= 1) return [0, 1];
    return [low - Math.abs(low) / 2, high + Math.abs(low) / 2];
  }

  function reach(values) {
    return values.reduce(([low, high], it) => [Math.min(low, it), Math.max(high, it)], [Infinity, -Infinity]);
  }

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(rough));
    const step = size * ([1, 2, 2.5, 5].find((factor) => size * factor >= rough) ?? 10);
    const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  }

  function nearest(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= value) low = middle; else high = middle;
    }
    return value - sorted[low] <= sorted[high] - value ? low : high;
  }

  function secondsAt(run, step) {  // between steps that the clock has, in proportion
    const [steps, seconds] = clocks[run];
    const after = steps.findIndex((it) => it >= step);
    if (after < 0) return seconds.at(-1);
    if (after === 0) return seconds[0];
    const part = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
    return seconds[after - 1] + part * (seconds[after] - seconds[after - 1]);
  }

  // --- charts --------------------------------------------------------------------------------------------------------

  function averaged(line) {  // of its last values, the newer the more, free of the pull of the first one
    let mean = 0, weight = 0;
    return line.y.map((value) => {
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  }

  function thinned(points) {
    const size = Math.ceil(points.length / POINTS);
    if (size < 2) return points;
    return Array.from({ length: Math.ceil(points.length / size) }, (_, i) => {
      const group = points.slice(i * size, (i + 1) * size);
      const mean = (name) => group.reduce((sum, it) => sum + it[name], 0) / group.length;
      const [low, high] = reach(group.flatMap((it) => [it.low, it.high]));
      return { x: mean("x"), y: mean("y"), low, high };
    });
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.svg = one("svg", figure);
      this.data = JSON.parse(figure.dataset.chart);
      this.ofSteps = this.data.x === "step" && clocks.some(([steps]) => steps.length > 1);
      this.times = this.data.lines.map((line) => this.ofSteps && line.x.map((step) => secondsAt(line.run, step)));
      this.range = null;
      figure.tabIndex = 0;
      this.readout = figure.appendChild(Object.assign(document.createElement("div"), { className: "readout" }));
      this.readout.hidden = true;
      for (const [n, key] of all("button.key", figure).entries()) {
        key.disabled = false;
        key.addEventListener("click", () => toggle(this.nameOf(this.data.lines[n])));
      }
      this.svg.addEventListener("pointermove", (event) => this.moved(event));
      this.svg.addEventListener("pointerleave", () => this.dragged === undefined && point(this, null));
      this.svg.addEventListener("pointerdown", (event) => this.pressed(event));
      this.svg.addEventListener("pointerup", (event) => this.released(event));
      this.svg.addEventListener("dblclick", () => zoom(this, null));
      figure.addEventListener("keydown", (event) => this.typed(event));
      figure.addEventListener("blur", () => point(this, null));
    }

    get byTime() { return state.byTime && this.ofSteps; }
    get shown() { return this.ofSteps ? state.range : this.range; }  // charts of steps are zoomed together
    nameOf(line) { return this.data.shared ? line.name : `${this.data.title}/${line.name}`; }
    xs(n) { return this.byTime ? this.times[n] : this.data.lines[n].x; }

    lines() {  // those that are to be seen, and their points within the range
      return this.data.lines.map((line, n) => {
        if (state.left.has(this.nameOf(line))) return null;
        const xs = this.xs(n), [low, high] = this.shown ?? [-Infinity, Infinity];
        const smooth = state.smooth > 0 && !line.low && !line.marked && averaged(line);
        const points = xs.map((x, i) => {
          const raw = line.y[i];
          return { x, y: smooth ? smooth[i] : raw, raw, low: line.low?.[i] ?? raw, high: line.high?.[i] ?? raw };
        });
        const inside = points.filter((it) => it.x >= low && it.x <= high);
        return { line, smooth: Boolean(smooth), points: inside };
      }).filter((it) => it?.points.length);
    }

    draw() {
      const lines = this.lines();
      for (const [n, key] of all("button.key", this.figure).entries()) {
        key.setAttribute("aria-pressed", String(!state.left.has(this.nameOf(this.data.lines[n]))));
      }
      if (!lines.length) { this.seen = []; this.svg.replaceChildren(); return; }
      const points = lines.flatMap((it) => it.points);
      const edges = points.flatMap((it) => [it.low, it.high]);
      if (this.data.level !== null) edges.push(this.data.level - this.data.room, this.data.level + this.data.room);
      [this.x0, this.x1] = this.shown ?? widened(...reach(points.map((it) => it.x)));
      const levels = ticks(...widened(...reach(edges)), 5);
      [this.y0, this.y1] = [levels[0], levels.at(-1)];
      this.svg.replaceChildren();
      this.axes(levels);
      for (const { line, smooth, points } of lines) this.line(line, smooth, points);
      this.cross = this.add("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
      const height = HEIGHT - TOP - BOTTOM;
      this.selection = this.add("rect", { class: "selection", y: TOP, height, visibility: "hidden" });
      this.seen = lines;
    }

    px(x) { return LEFT + (x - this.x0) / (this.x1 - this.x0) * (WIDTH - LEFT - RIGHT); }
    py(y) { return HEIGHT - BOTTOM - (y - this.y0) / (this.y1 - this.y0) * (HEIGHT - TOP - BOTTOM); }
    at(event) {
      const box = this.svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * WIDTH;
      return this.x0 + (clamp(px, LEFT, WIDTH - RIGHT) - LEFT) / (WIDTH - LEFT - RIGHT) * (this.x1 - this.x0);
    }

    add(tag, attributes, text = "") {
      const element = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) {
        element.setAttribute(name, typeof value === "number" ? Math.round(value * 10) / 10 : value);
      }
      element.textContent = text;
      return this.svg.appendChild(element);
    }

    axes(levels) {
      const right = WIDTH - RIGHT, bottom = HEIGHT - BOTTOM;
      for (const level of levels) {
        this.add("line", { class: "grid", x1: LEFT, x2: right, y1: this.py(level), y2: this.py(level) });
        this.add("text", { class: "tick", x: LEFT - 6, y: this.py(level) + 3.5, "text-anchor": "end" }, short(level));
      }
      const [unit, name] = this.byTime ? clockUnit(this.x1) : [1, this.data.x];
      for (const tick of ticks(this.x0 / unit, this.x1 / unit, 6)) {
        const x = this.px(tick * unit);
        if (x < LEFT - 0.5 || x >= right - NAME) continue;
        this.add("text", { class: "tick", x, y: bottom + 16, "text-anchor": "middle" }, short(tick));
      }
      this.add("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom });
      this.add("text", { class: "tick", x: right, y: bottom + 16, "text-anchor": "end" }, name);
      if (this.data.level !== null) {
        const y = this.py(this.data.level);
        this.add("line", { class: "level", x1: LEFT, x2: right, y1: y, y2: y });
      }
    }

    line(line, smooth, points) {
      const path = (of, name) => of.map((it) => `${this.px(it.x).toFixed(1)},${this.py(it[name]).toFixed(1)}`);
      const few = thinned(points);
      if (smooth) {
        const unsmoothed = thinned(points.map((it) => ({ ...it, y: it.raw })));
        this.add("polyline", { class: `line raw l${line.colour}`, points: path(unsmoothed, "y").join(" ") });
      } else if (few.length < points.length || line.low) {
        const around = [...path(few, "high"), ...path(few, "low").reverse()];
        this.add("polygon", { class: `band b${line.colour}`, points: around.join(" ") });
      }
      this.add("polyline", { class: `line l${line.colour}`, points: path(few, "y").join(" ") });
      if (line.marked || points.length === 1) {
        const dot = `dot d${line.colour}`;
        for (const it of points) this.add("circle", { class: dot, cx: this.px(it.x), cy: this.py(it.y), r: 3 });
      }
    }

    // --- pointing at a place

    point(x, isHere) {  // every chart of steps shows the same place; the one that is pointed at says what is there
      const away = x === null || !this.seen?.length || x < this.x0 || x > this.x1;
      this.cross?.setAttribute("visibility", away ? "hidden" : "visible");
      this.readout.hidden = away || !isHere;
      if (away) return;
      for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.px(x));
      if (isHere) this.tell(x);
    }

    tell(x) {
      const rows = this.seen.map(({ line, smooth, points }) => {
        const it = points[nearest(points.map((point) => point.x), x)];
        const spread = line.low ? ` (${short(it.low)} … ${short(it.high)})` : smooth ? ` (${short(it.raw)})` : "";
        const row = document.createElement("div");
        row.className = `key k${line.colour}`;
        row.textContent = `${this.data.lines.length > 1 ? line.name + " " : ""}${short(it.y)}${spread}`;
        return row;
      });
      const place = document.createElement("b");
      const told = this.ofSteps ? String(Math.round(x)) : short(x);
      place.textContent = this.byTime ? `after ${duration(x)}` : `${this.data.x} ${told}`;
      this.readout.replaceChildren(place, ...rows);
      const share = this.px(x) / WIDTH;
      this.readout.style.left = share < 0.55 ? `${share * 100 + 3}%` : "";
      this.readout.style.right = share < 0.55 ? "" : `${(1 - share) * 100 + 3}%`;
      this.here = x;
    }

    moved(event) {
      if (!this.seen?.length) return;
      const x = this.at(event);
      point(this, x);
      if (this.dragged === undefined) return;
      const [left, right] = [this.dragged, x].sort((a, b) => a - b).map((it) => this.px(it));
      this.selection.setAttribute("x", left);
      this.selection.setAttribute("width", right - left);
      this.selection.setAttribute("visibility", "visible");
    }

    pressed(event) {
      if (!this.seen?.length || event.button !== 0 || event.pointerType === "touch") return;  // fingers scroll the page
      this.dragged = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    }

    released(event) {
      if (this.dragged === undefined) return;
      const [low, high] = [this.dragged, this.at(event)].sort((a, b) => a - b);
      this.dragged = undefined;
      this.selection.setAttribute("visibility", "hidden");
      if (this.px(high) - this.px(low) > 6) zoom(this, [low, high]);
    }

    typed(event) {
      if (!this.seen?.length) return;
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoom(this, null);
      if (!way) return;
      const xs = this.seen[0].points.map((it) => it.x), from = this.here ?? this.x0;
      point(this, xs[clamp(nearest(xs, from) + way, 0, xs.length - 1)]);
      event.preventDefault();
    }
  }

  const charts = all("figure[data-chart]").map((figure) => new Chart(figure));

  function draw(which = charts) {
    for (const chart of which) chart.draw();
    const reset = one("#unzoom");
    if (reset) reset.hidden = !state.range && !charts.some((chart) => chart.range);
  }

  function point(here, x) {
    for (const chart of here.ofSteps ? charts.filter((it) => it.ofSteps) : [here]) chart.point(x, chart === here);
  }

  function zoom(here, range) {
    if (here.ofSteps) state.range = range; else here.range = range;
    draw(here.ofSteps ? charts.filter((it) => it.ofSteps) : [here]);
  }

  function toggle(name) {
    if (!state.left.delete(name)) state.left.add(name);
    draw();
  }

  for (const controls of all(".controls")) controls.hidden = false;
  one("#smooth")?.addEventListener("input", (event) => {
    state.smooth = Number(event.target.value);
    draw();
  });
  for (const choice of all("input[name=axis]")) {
    choice.addEventListener("change", () => {
      state.byTime = choice.value === "time";
      state.range = null;
      draw();
    });
  }
  one("#unzoom")?.addEventListener("click", () => {
    state.range = null;
    for (const chart of charts) chart.range = null;
    draw();
  });
  draw();
})();
