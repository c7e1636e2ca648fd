// A small line chart over time, drawn as SVG. The pointer or the arrow keys select a point to read.
import { beginning, clock, levels, runs, short, times } from "./axes.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 8, top: 10, bottom: 20 }; // pixels around the lines, for the labels of the axes
const LABEL = 70; // pixels between two labels of the time axis

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export class Chart {
  // format: turns a value into text. least: minimum top of the axis. lines: [name in the series, label].
  constructor(parent, { title, format, least, lines }) {
    Object.assign(this, { title, format, least, lines, series: null, now: 0, chosen: null });
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = title;
    this.reading = document.createElement("span");
    this.reading.className = "reading";
    caption.append(name, this.reading);
    this.svg = draw("svg", { role: "img", tabindex: 0 });
    figure.append(caption, this.svg);
    parent.append(figure);
    new ResizeObserver(() => this.redraw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.choose(this.nearest(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
  }

  show(series, now) {
    Object.assign(this, { series, now });
    this.redraw();
  }

  // index: the point to read; null for the newest.
  choose(index) {
    this.chosen = index;
    this.redraw();
  }

  press(event) {
    const last = this.series ? this.series.time.length - 1 : -1;
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.min(last, Math.max(0, (this.chosen ?? last) + by)));
  }

  nearest(x) {
    if (!this.series?.time.length) return null;
    const distances = this.series.time.map((time) => Math.abs(this.x(time) - x));
    return distances.indexOf(Math.min(...distances));
  }

  redraw() {
    if (!this.series) return;
    const { time } = this.series;
    const values = this.lines.flatMap(([name]) => this.series[name]).filter((value) => value !== null);
    const marks = levels(Math.max(this.least, ...values), this.format.name === "bytes");
    this.fit(beginning(time, this.now), marks.at(-1));
    this.svg.replaceChildren(
      ...marks.flatMap((mark) => this.level(mark)),
      ...this.clocks(),
      ...this.lines.flatMap(([name], line) => runs(time, this.series[name]).flatMap((run) => this.curve(run, line))),
      ...(values.length ? [] : [this.nothing()]),
      ...(this.chosen !== null && this.chosen < time.length ? this.cursor() : []),
    );
    this.read(Math.min(this.chosen ?? Infinity, time.length - 1));
  }

  // Sets the ranges of the axes: x from `from` to now, y from 0 to `top`.
  fit(from, top) {
    const { clientWidth: width, clientHeight: height } = this.svg;
    Object.assign(this, { from, top, right: width - MARGIN.right, bottom: height - MARGIN.bottom });
  }

  x(time) {
    return MARGIN.left + ((time - this.from) / (this.now - this.from)) * (this.right - MARGIN.left);
  }

  y(value) {
    return this.bottom - (value / this.top) * (this.bottom - MARGIN.top);
  }

  level(mark) {
    const y = this.y(mark);
    return [
      draw("line", { x1: MARGIN.left, x2: this.right, y1: y, y2: y, class: mark === 0 ? "base" : "grid" }),
      draw("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, short(this.format, mark)),
    ];
  }

  clocks() {
    const room = (LABEL * (this.now - this.from)) / (this.right + MARGIN.right);
    return times(this.from, this.now, room)
      .map((time) => [this.x(time), clock(time)])
      .filter(([x]) => x > MARGIN.left + 10 && x < this.right - 10)
      .map(([x, text]) => draw("text", { x, y: this.bottom + 16, "text-anchor": "middle" }, text));
  }

  // Draws one run: a dot for a single point, otherwise a line, with the area below it if it is the chart's only line.
  curve(run, line) {
    const points = run.map(([time, value]) => [this.x(time), this.y(value)]);
    if (points.length === 1) return [this.dot(...points[0], 2, line)];
    const path = `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
    const curve = draw("path", { d: path, class: `curve curve-${line}` });
    if (this.lines.length > 1) return [curve];
    const closed = `${path}L${points.at(-1)[0]} ${this.bottom}L${points[0][0]} ${this.bottom}Z`;
    return [draw("path", { d: closed, class: "area" }), curve];
  }

  dot(x, y, r, line) {
    return draw("circle", { cx: x, cy: y, r, class: `dot-${line}` });
  }

  nothing() {
    const x = (MARGIN.left + this.right + MARGIN.right) / 2;
    return draw("text", { x, y: this.y(0.75 * this.top), "text-anchor": "middle" }, "no data yet");
  }

  cursor() {
    const x = this.x(this.series.time[this.chosen]);
    const line = draw("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.bottom, class: "cursor" });
    const dots = this.lines.flatMap(([name], i) => {
      const value = this.series[name][this.chosen];
      return value === null ? [] : [this.dot(x, this.y(value), 3, i)];
    });
    return [line, ...dots];
  }

  // Shows the values at a point, with its time if it was chosen, also to screen readers.
  read(index) {
    const time = index >= 0 && this.chosen !== null ? [clock(this.series.time[index])] : [];
    const values = this.lines.map(([name, label]) => {
      const value = this.format(index >= 0 ? this.series[name][index] : null);
      return label ? `${label} ${value}` : value;
    });
    this.reading.replaceChildren(
      ...time.flatMap((text) => [text, this.lines.length > 1 ? " " : " · "]),
      ...values.flatMap((text, i) => [...this.swatch(i), text]),
    );
    const words = [...time, ...values].join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${words}. Use the arrow keys to read earlier values.`);
  }

  // The colour sample of a line, if there is more than one line.
  swatch(line) {
    if (this.lines.length < 2) return [];
    const made = document.createElement("i");
    made.className = `swatch-${line}`;
    return [made];
  }
}
