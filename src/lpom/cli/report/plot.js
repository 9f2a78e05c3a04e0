// Curves in an SVG: a readout under the pointer, a part chosen by dragging, keys for both.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 12, top: 8, bottom: 38 };
const SMALLEST_DRAG = 8; // pixels; less is a click
const MARKED = 30; // with up to this many points in view, each gets a dot

/** An HTML element; text goes in as text, never as markup. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Four significant digits, or three and an exponent where that would be long. */
function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  }
  return String(Number(value.toPrecision(4)));
}

const percent = (value) => `${Number((100 * value).toFixed(2))} %`;
const percentOf = (decimals) => (value) => `${(100 * value).toFixed(decimals)} %`;

/** Round values at equal distances that cover [low, high]. */
function evenTicks(low, high, count, whole) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) {
    ticks.push(Number((k * step).toPrecision(12)));
  }
  return ticks;
}

/** Powers of ten, with twos and fives between them where there are few. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return evenTicks(low, high, 4, false);
  const every = Math.max(1, Math.ceil(decades / 6));
  const ticks = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
    if (decades > 2.5 && k % every) continue;
    for (const factor of decades > 2.5 ? [1] : [1, 2, 5]) {
      ticks.push(Number(`${factor}e${k}`));
    }
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

/**
 * One plot. `curves` is a list of {name, x, y, color, dash, width}; null in y leaves a hole. A curve
 * with `points` is dots without a line, one that is `plain` a line without dots.
 * Options: id, title, xLabel, log, whole (x counts something), format (of y), xFormat, mark (a y
 * to draw a line at). The x of a curve never falls.
 */
class Plot {
  constructor(options, curves) {
    this.options = { format: short, xFormat: short, ...options };
    this.hidden = new Set();
    this.zoom = null; // {x: [low, high], y: [low, high] or null}
    this.reset = make("button", { type: "button", hidden: "" }, "Show all");
    this.svg = draw("svg", { tabindex: 0, role: "img" });
    this.readout = make("div", { class: "readout", role: "status", hidden: "" });
    this.legend = make("ul", { class: "legend" });
    this.element = make(
      "figure", { class: "plot" },
      make("header", {}, make("h3", {}, options.title), this.reset),
      this.svg, this.readout, this.legend,
    );
    this.listen();
    this.show(curves);
    new ResizeObserver(() => this.render()).observe(this.svg);
  }

  /** Other curves in the same axes. */
  show(curves) {
    this.curves = curves;
    this.hidden.clear();
    this.zoom = null;
    const names = curves.map((curve) => curve.name).join(", ");
    this.svg.setAttribute("aria-label",
      `${this.options.title} against ${this.options.xLabel}: ${names}. ` +
      "Arrow keys read values, Escape shows all.");
    this.legend.replaceChildren(...curves.map((curve) => this.legendItem(curve)));
    this.render();
  }

  legendItem(curve) {
    const line = draw("line", { x1: 0, x2: 24, y1: 6, y2: 6, "stroke-width": 3,
      "stroke-dasharray": curve.dash || null, style: { stroke: curve.color } });
    const key = draw("svg", { viewBox: "0 0 24 12", class: "swatch", "aria-hidden": "true",
      style: { width: "1.5em", height: ".75em" } }, line);
    const button = make("button", { type: "button", "aria-pressed": "true" }, key, curve.name);
    button.addEventListener("click", () => {
      if (!this.hidden.delete(curve)) this.hidden.add(curve);
      button.setAttribute("aria-pressed", String(!this.hidden.has(curve)));
      this.render();
    });
    const highlight = (on) => {
      for (const [other, path] of this.paths) path.classList.toggle("faded", on && other !== curve);
    };
    button.addEventListener("pointerenter", () => highlight(true));
    button.addEventListener("pointerleave", () => highlight(false));
    return make("li", {}, button);
  }

  get visible() {
    return this.curves.filter((curve) => !this.hidden.has(curve));
  }

  drawable(y) {
    return y !== null && (!this.options.log || y > 0);
  }

  /** The ranges of both axes: what is zoomed to, or all there is. */
  ranges() {
    const x = this.zoom ? this.zoom.x : [Math.min(...this.curves.map((curve) => curve.x[0])),
      Math.max(...this.curves.map((curve) => curve.x.at(-1)))];
    if (x[0] === x[1]) x[1] = x[0] + 1;
    if (this.zoom && this.zoom.y) return { x, y: this.zoom.y };
    let low = Infinity, high = -Infinity;
    for (const curve of this.visible) {
      curve.y.forEach((y, k) => {
        if (this.drawable(y) && curve.x[k] >= x[0] && curve.x[k] <= x[1]) {
          low = Math.min(low, y);
          high = Math.max(high, y);
        }
      });
    }
    if (low > high) [low, high] = [1, 2];
    if (this.options.mark !== undefined && !this.zoom) {
      [low, high] = [Math.min(low, this.options.mark), Math.max(high, this.options.mark)];
    }
    if (this.options.log) return { x, y: [low / 1.15, high * 1.15] };
    const room = 0.05 * (high - low) || Math.abs(high) * 0.05 || 1;
    const top = this.options.format === percent ? Math.max(1, high) : Infinity;
    return { x, y: [low - room, Math.min(high + room, top)] };
  }

  render() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !this.curves) return;
    const { log } = this.options, at = log ? Math.log : (v) => v;
    const area = { x: MARGIN.left, y: MARGIN.top,
      width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const { x, y } = this.ranges();
    this.area = area;
    this.toX = (v) => area.x + (v - x[0]) / (x[1] - x[0]) * area.width;
    this.toY = (v) => area.y + (at(y[1]) - at(v)) / (at(y[1]) - at(y[0])) * area.height;
    this.fromX = (p) => x[0] + (p - area.x) / area.width * (x[1] - x[0]);
    this.fromY = (p) => {
      const v = at(y[1]) - (p - area.y) / area.height * (at(y[1]) - at(y[0]));
      return log ? Math.exp(v) : v;
    };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const clip = `clip-${this.options.id}`;
    this.cursor = draw("g");
    this.paths = new Map(this.visible.map((curve) => [curve, this.path(curve, x)]));
    this.svg.replaceChildren(
      draw("clipPath", { id: clip }, draw("rect", { ...area, y: area.y - 4, height: area.height + 8,
        x: area.x - 4, width: area.width + 8 })),
      this.axes(x, y, height),
      draw("g", { "clip-path": `url(#${clip})` }, ...this.paths.values()),
      this.cursor,
    );
    this.reset.hidden = !this.zoom;
    this.readout.hidden = true;
  }

  axes(x, y, height) {
    const { area, options } = this, bottom = area.y + area.height;
    const group = draw("g", { class: "axes" });
    const yTicks = options.log ? logTicks(...y) : evenTicks(...y, area.height / 45, false);
    for (const tick of yTicks) {
      const at = this.toY(tick);
      group.append(
        draw("line", { class: "grid", x1: area.x, x2: area.x + area.width, y1: at, y2: at }),
        draw("text", { class: "y", x: area.x - 6, y: at + 4, "text-anchor": "end" },
          options.format(tick)));
    }
    for (const tick of evenTicks(...x, area.width / 70, options.whole)) {
      group.append(draw("text", { class: "x", x: this.toX(tick), y: bottom + 16,
        "text-anchor": "middle" }, short(tick)));
    }
    if (options.mark >= y[0] && options.mark <= y[1]) {
      const at = this.toY(options.mark);
      group.append(draw("line", { class: "mark", x1: area.x, x2: area.x + area.width,
        y1: at, y2: at }));
    }
    group.append(
      draw("line", { class: "grid", x1: area.x, x2: area.x + area.width, y1: bottom, y2: bottom }),
      draw("text", { x: area.x + area.width / 2, y: height - 4, "text-anchor": "middle" },
        options.xLabel));
    return group;
  }

  path(curve, range) {
    let line = "", pen = "M";
    const dots = [];
    curve.x.forEach((x, k) => {
      if (!this.drawable(curve.y[k])) {
        pen = "M";
        return;
      }
      const point = [this.toX(x), this.toY(curve.y[k])];
      line += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}${curve.points ? "h0" : ""}`;
      pen = curve.points ? "M" : "L";
      if (x >= range[0] && x <= range[1]) dots.push(point);
    });
    const group = draw("g", {}, draw("path", { class: curve.points ? "curve points" : "curve", d: line,
      "stroke-dasharray": curve.dash || null,
      style: { stroke: curve.color, strokeWidth: curve.width ?? "" } }));
    if (dots.length <= MARKED && !curve.points && !curve.plain) {
      group.append(...dots.map(([cx, cy]) => draw("circle", { cx, cy, r: 2.5,
        style: { fill: curve.color } })));
    }
    return group;
  }

  listen() {
    const { svg } = this;
    let start = null, box = null;
    const place = (event) => {
      const frame = svg.getBoundingClientRect();
      return { x: event.clientX - frame.left, y: event.clientY - frame.top };
    };
    const end = () => {
      if (box) box.remove();
      start = box = null;
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = place(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const here = place(event);
      if (start && Math.abs(here.x - start.x) >= SMALLEST_DRAG) {
        this.leave();
        if (!box) svg.append(box = draw("rect", { class: "selection" }));
        fill(box, this.selected(start, here), []);
      } else if (!box) this.read(this.fromX(here.x));
    });
    svg.addEventListener("pointerup", (event) => {
      const from = start, chosen = Boolean(box);
      end();
      if (chosen) this.zoomTo(this.selected(from, place(event)));
      else this.read(this.fromX(place(event).x));
    });
    svg.addEventListener("pointercancel", end);
    svg.addEventListener("pointerleave", (event) => {
      if (!start && event.pointerType === "mouse") this.leave();
    });
    svg.addEventListener("blur", () => this.leave());
    svg.addEventListener("dblclick", () => this.zoomOut());
    svg.addEventListener("keydown", (event) => this.key(event));
    this.reset.addEventListener("click", () => {
      this.zoomOut();
      svg.focus();
    });
  }

  /** The rectangle between two corners; as high as the plot if it was drawn nearly flat. */
  selected(a, b) {
    const { area } = this, flat = Math.abs(a.y - b.y) < 3 * SMALLEST_DRAG;
    const inside = (v, low, size) => Math.min(Math.max(v, low), low + size);
    const [x0, x1] = [a.x, b.x].map((v) => inside(v, area.x, area.width)).sort((p, q) => p - q);
    const [y0, y1] = flat ? [area.y, area.y + area.height]
      : [a.y, b.y].map((v) => inside(v, area.y, area.height)).sort((p, q) => p - q);
    return { x: x0, y: y0, width: x1 - x0, height: y1 - y0 };
  }

  zoomTo(box) {
    if (box.width < SMALLEST_DRAG) return;
    const whole = box.height === this.area.height;
    this.zoom = {
      x: [this.fromX(box.x), this.fromX(box.x + box.width)],
      y: whole ? null : [this.fromY(box.y + box.height), this.fromY(box.y)],
    };
    this.render();
  }

  zoomOut() {
    this.zoom = null;
    this.render();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      const { x } = this.ranges();
      const stops = [...new Set(this.visible.flatMap((curve) => curve.x))]
        .filter((v) => v >= x[0] && v <= x[1]).sort((a, b) => a - b);
      const now = this.readout.hidden ? -1 : stops.indexOf(this.readAt);
      const next = now < 0 ? (step > 0 ? 0 : stops.length - 1) : now + step;
      if (stops[next] !== undefined) this.read(stops[next]);
      event.preventDefault();
    } else if (event.key === "Escape") this.zoomOut();
  }

  /** Show every curve's value at its point nearest to x. */
  read(x) {
    const found = [];
    const range = this.ranges().x, slack = (range[1] - range[0]) * 1e-9;
    for (const curve of this.visible) {
      let best = -1;
      curve.x.forEach((v, k) => {
        if (this.drawable(curve.y[k]) && v >= range[0] - slack && v <= range[1] + slack &&
            (best < 0 || Math.abs(v - x) < Math.abs(curve.x[best] - x))) best = k;
      });
      if (best >= 0) found.push({ curve, x: curve.x[best], y: curve.y[best] });
    }
    if (!found.length) {
      this.leave();
      return;
    }
    const nearest = found.reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a)).x;
    const shown = this.options.whole ? found.filter((point) => point.x === nearest) : found;
    this.readAt = nearest;
    const at = this.toX(nearest), { area } = this;
    this.cursor.replaceChildren(
      draw("line", { class: "cursor", x1: at, x2: at, y1: area.y, y2: area.y + area.height }),
      ...shown.map((point) => draw("circle", { cx: this.toX(point.x), cy: this.toY(point.y), r: 4,
        style: { fill: point.curve.color } })));
    this.readout.replaceChildren(
      make("div", {}, this.options.xFormat(nearest)),
      make("table", {}, make("tbody", {}, ...shown.map((point) => make("tr", {},
        make("td", {}, make("span", { class: "swatch", style: { background: point.curve.color,
          height: ".5em" } })),
        make("td", {}, point.curve.name), make("td", {}, this.options.format(point.y)))))));
    this.readout.hidden = false;
    this.placeReadout(at);
  }

  /** Beside the cursor, on the side where there is room. */
  placeReadout(at) {
    const { readout } = this, outer = this.element.getBoundingClientRect();
    const inner = this.svg.getBoundingClientRect();
    const cursor = inner.left - outer.left + at, width = readout.offsetWidth + 14;
    const left = cursor + width <= outer.width ? cursor + 14 : cursor - width;
    readout.style.left = `${Math.max(4, left)}px`;
    readout.style.top = `${inner.top - outer.top + this.area.y}px`;
  }

  leave() {
    this.readout.hidden = true;
    this.cursor.replaceChildren();
  }
}
