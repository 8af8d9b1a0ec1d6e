// What a reader can do with the charts of a report: point at them, zoom, hide or smooth lines, show time for steps.
// charts.py draws the charts, which are visible without scripts. Points of a line have the values of the data as their
// coordinates, divided by a unit: a chart is zoomed by the view box of its plot, and tells what its points are at.
"use strict";
(() => {
  const X_NAME_WIDTH = 40;  // at the right end of the x axis, where no number stands

  const one = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const written = (value, digits = 4) => String(Number(value.toPrecision(digits))).replace("e+", "e");
  const points = (shape) => shape.getAttribute("points").split(" ").map((point) => point.split(",").map(Number));
  const ranges = new Map();  // of zoomed charts; linked charts have one range

  function reach(values) {
    const [low, high] = values.reduce(([low, high], it) => [Math.min(low, it), Math.max(high, it)], [Infinity, -Infinity]);
    const least = 1e-5 * Math.max(1, Math.abs(low), Math.abs(high));  // browsers can draw no smaller range
    const half = high - low > least ? 0 : Math.abs(low) / 2 || 0.5;
    return [low - half, high + half];
  }

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, size = 10 ** Math.floor(Math.log10(rough));
    const step = size * ([1, 2, 2.5, 5].find((factor) => size * factor >= rough) ?? 10);
    const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  }

  function nearest(line, x) {
    return line.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  }

  function heights(line, low, high) {  // values of a line in a range, also where the line enters and leaves the range
    return line.flatMap(([x, y], i) => {
      const [before, from] = line[i - 1] ?? [x, y];
      const crossed = [low, high].filter((end) => (before - end) * (x - end) < 0);
      const levels = crossed.map((end) => from + (end - before) / (x - before) * (y - from));
      return x >= low && x <= high ? [y, ...levels] : levels;
    });
  }

  class Chart {
    constructor(svg) {
      this.svg = svg;
      this.figure = svg.closest("figure");
      this.axis = one(".axis", svg);
      this.plot = one(".plot", svg);
      this.unit = Number(this.plot.dataset.unit);
      this.group = svg.dataset.linked ?? this;
      this.ticks = [...one(".ticks", svg).children];
      this.view = this.plot.getAttribute("viewBox");
      this.place(this.view);
      const inside = "<rect class='selection' visibility='hidden'/><line class='cross' visibility='hidden'/>";
      this.plot.firstElementChild.insertAdjacentHTML("beforeend", inside);
      this.cross = one(".cross", svg);
      this.selection = one(".selection", svg);
      this.readout = one(".readout", this.figure);
      svg.setAttribute("tabindex", "0");
      svg.addEventListener("pointermove", (event) => this.moved(event));
      svg.addEventListener("pointerleave", () => this.dragged === undefined && point(this, null));
      svg.addEventListener("pointerdown", (event) => this.pressed(event));
      svg.addEventListener("pointerup", (event) => this.released(event));
      svg.addEventListener("dblclick", () => zoom(this, null));
      svg.addEventListener("keydown", (event) => this.typed(event));
      svg.addEventListener("blur", () => point(this, null));
    }

    get curves() { return all(".curve:not(.left-out)", this.svg); }
    get range() { return ranges.get(this.group); }
    shape(curve) { return this.range && one(".zoomed", curve) || one(".whole", curve); }
    isInside(x) { return x >= this.x0 && x <= this.x1; }

    place(view) {
      const [x, y, width, height] = view.split(" ").map(Number);
      [this.x0, this.x1, this.y0, this.y1] = [x, x + width, -y - height, -y];
      this.plot.setAttribute("viewBox", view);
    }

    show() {  // the x range that was zoomed to, and the y range that the lines need which are not hidden
      this.svg.classList.toggle("is-zoomed", Boolean(this.range));
      const lines = this.curves.flatMap((curve) => all("[points]", this.shape(curve))).map(points);
      const [low, high] = this.range ?? reach(lines.flat().map(([x]) => x));
      const seen = lines.flatMap((line) => heights(line, low, high));
      if (!seen.length || !this.range && !one(".left-out", this.svg)) {
        this.place(this.view);
        one(".ticks", this.svg).replaceChildren(...this.ticks);
        return;
      }
      const levels = ticks(...reach([...seen, ...all(".level", this.svg).flatMap(points).map(([, y]) => y)]), 5);
      this.place(`${low} ${-levels.at(-1)} ${high - low} ${levels.at(-1) - levels[0]}`);
      const [left, top, width, height] = ["x", "y", "width", "height"].map((it) => this.plot[it].baseVal.value);
      const across = ticks(low, high, 6).map((value) => [value, (value - low) / (high - low) * width]);
      one(".ticks", this.svg).replaceChildren(
        ...levels.map((y) => this.tick("y", left, top + (this.y1 - y) / (this.y1 - this.y0) * height, y)),
        ...across.filter(([, x]) => x > -0.5 && x < width - X_NAME_WIDTH)
          .map(([value, x]) => this.tick("x", left + x, top + height, value)),
      );
    }

    tick(axis, x, y, value) {
      const tick = this.ticks.find((it) => it.classList.contains(axis)).cloneNode(true);
      tick.setAttribute("transform", `translate(${x} ${y})`);
      one("text", tick).textContent = axis === "x" ? written(value, 7) : written(value * this.unit);
      return tick;
    }

    // --- pointing at a place

    at(event) {
      const { left, width } = this.axis.getBoundingClientRect();
      return this.x0 + clamp((event.clientX - left) / width, 0, 1) * (this.x1 - this.x0);
    }

    point(x, isHere) {  // every linked chart marks the same place; the chart that is pointed at tells its values
      const isAway = x === null || !this.isInside(x);
      this.cross.setAttribute("visibility", isAway ? "hidden" : "visible");
      if (isHere) this.readout.hidden = isAway;
      if (isAway) return;
      for (const [name, value] of Object.entries({ x1: x, x2: x, y1: this.y0, y2: this.y1 })) {
        this.cross.setAttribute(name, value);
      }
      if (isHere) this.tell(x);
    }

    tell(x) {
      const place = document.createElement("b"), name = one(".name", this.svg).textContent;
      place.textContent = this.group === "time" ? `after ${written(x)} ${name}`
        : `${name} ${this.group === "step" ? Math.round(x) : written(x)}`;
      this.readout.replaceChildren(place, ...this.curves.flatMap((curve) => this.value(curve, x)));
      const figure = this.figure.getBoundingClientRect(), axis = this.axis.getBoundingClientRect();
      const along = axis.left - figure.left + (x - this.x0) / (this.x1 - this.x0) * axis.width;
      const isLeft = along < 0.55 * figure.width;
      this.readout.style.left = isLeft ? `${along + 12}px` : "";
      this.readout.style.right = isLeft ? "" : `${figure.width - along + 12}px`;
      this.here = x;
    }

    value(curve, x) {
      const inside = (shape) => points(shape).filter((it) => this.isInside(it[0]));
      const shape = this.shape(curve), line = inside(one(".line", shape));
      if (!line.length) return [];
      const [at, y] = nearest(line, x), smooth = one(".smooth", curve), band = one(".band", shape);
      const value = (y) => written(y * this.unit);
      const around = band ? points(band).filter((it) => it[0] === at).map((it) => value(it[1])).reverse() : [];
      const row = document.createElement("div");
      row.className = `key k${curve.dataset.colour}`;
      row.textContent = one("button.key", this.figure) ? `${curve.dataset.name} ` : "";
      row.textContent += smooth ? `${value(nearest(inside(smooth), x)[1])} (${value(y)})`
        : value(y) + (band ? ` (${around.join(" … ")})` : "");
      return [row];
    }

    moved(event) {
      const x = this.at(event);
      point(this, x);
      if (this.dragged === undefined) return;
      const [low, high] = [this.dragged, x].sort((a, b) => a - b);
      const box = { x: low, width: high - low, y: this.y0, height: this.y1 - this.y0, visibility: "visible" };
      for (const [name, value] of Object.entries(box)) this.selection.setAttribute(name, value);
    }

    pressed(event) {
      if (event.button !== 0 || event.pointerType === "touch") return;  // fingers scroll the page
      this.dragged = this.at(event);
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    }

    released(event) {
      if (this.dragged === undefined) return;
      const [low, high] = [this.dragged, this.at(event)].sort((a, b) => a - b);
      this.dragged = undefined;
      this.selection.setAttribute("visibility", "hidden");
      if ((high - low) / (this.x1 - this.x0) > 0.015) zoom(this, [low, high]);
    }

    typed(event) {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") zoom(this, null);
      if (!way || !this.curves.length) return;
      const line = points(one(".line", this.shape(this.curves[0]))).filter(([x]) => this.isInside(x));
      if (!line.length) return;
      const from = line.indexOf(nearest(line, this.here ?? this.x0));
      point(this, line[clamp(from + way, 0, line.length - 1)][0]);
      event.preventDefault();
    }
  }

  function linked(here) { return charts.filter((chart) => chart.group === here.group); }

  function point(here, x) {
    for (const chart of linked(here)) chart.point(x, chart === here);
  }

  function zoom(here, range) {
    if (range) ranges.set(here.group, range); else ranges.delete(here.group);
    for (const chart of linked(here)) chart.show();
    point(here, null);
    if (one("#unzoom")) one("#unzoom").hidden = !ranges.size;
  }

  function toggle(key) {
    for (const it of all("[data-key]").filter((it) => it.dataset.key === key)) {
      const isLeftOut = it.classList.toggle("left-out");
      if (it.matches("button")) it.setAttribute("aria-pressed", String(!isLeftOut));
    }
    for (const chart of charts) chart.show();
  }

  function smooth(curve, share) {  // each value becomes a weighted mean of itself and the values before it
    one(".smooth", curve)?.remove();
    if (!share) return;
    const line = all(".line", curve).at(-1), copy = line.cloneNode();
    let mean = 0, weight = 0;
    const means = points(line).map(([x, y]) => {
      mean = share * mean + (1 - share) * y;
      weight = share * weight + (1 - share);
      return `${x},${mean / weight}`;
    });
    copy.setAttribute("points", means.join(" "));
    copy.classList.add("smooth");
    curve.append(copy);
  }

  for (const figure of all("figure.chart")) {
    figure.insertAdjacentHTML("beforeend", "<div class='readout' hidden></div>");
  }
  const charts = all("figure.chart > svg").map((svg) => new Chart(svg));
  for (const controls of all(".controls")) controls.hidden = false;
  for (const key of all("button.key")) {
    key.disabled = false;
    key.setAttribute("aria-pressed", "true");
    key.addEventListener("click", () => toggle(key.dataset.key));
  }
  one("#smooth")?.addEventListener("input", (event) => {
    for (const curve of all(".smoothable")) smooth(curve, Number(event.target.value));
  });
  for (const choice of all("input[name=axis]")) {
    choice.addEventListener("change", () => { document.body.dataset.axis = choice.value; });
  }
  one("#unzoom")?.addEventListener("click", () => {
    for (const chart of charts) zoom(chart, null);
  });
})();
