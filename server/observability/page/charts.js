// A small line chart over time: axes with units, a reading under the pointer or the arrow keys.
import { timeOfDay } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 52, right: 8, top: 10, bottom: 20 };
const HOUR = 3600;
const SHORTEST = 300; // seconds that the axis of time shows at least
const GAP = 3; // as many times the usual distance between points: nothing was measured

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round numbers from 0 to at least the greatest; of bytes in powers of two.
function ticks(greatest, least, binary) {
  const top = Math.max(greatest, least);
  const base = binary ? 2 ** Math.floor(Math.log2(top / 3)) : 10 ** Math.floor(Math.log10(top / 3));
  const step = (binary ? [1, 2, 4] : [1, 2, 2.5, 5, 10]).map((n) => n * base).find((n) => top / n <= 3.0001);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, i) => i * step);
}

const clock = (time) => timeOfDay(new Date(1000 * time), { hour: "2-digit", minute: "2-digit" });

export class Chart {
  constructor(parent, { title, format, least, lines }) {
    Object.assign(this, { title, format, least, lines, series: null, now: 0, chosen: null });
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = title;
    this.reading = document.createElement("span");
    this.reading.className = "reading";
    caption.append(name, this.reading);
    this.svg = draw("svg", { role: "img", tabindex: 0 });
    this.figure.append(caption, this.svg);
    parent.append(this.figure);
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

  x(time) {
    const share = (time - this.from) / (this.now - this.from);
    return MARGIN.left + share * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    return this.height - MARGIN.bottom - (value / this.top) * (this.height - MARGIN.top - MARGIN.bottom);
  }

  redraw() {
    if (!this.series) return;
    const { time } = this.series;
    ({ clientWidth: this.width, clientHeight: this.height } = this.svg);
    this.from = this.now - Math.min(HOUR, Math.max(SHORTEST, time.length ? this.now - time[0] : 0));
    this.spacing = time.length > 1 ? (time[time.length - 1] - time[0]) / (time.length - 1) : Infinity;
    const values = this.lines.flatMap(([name]) => this.series[name]).filter((value) => value !== null);
    const marks = ticks(Math.max(0, ...values), this.least, this.format.name === "bytes");
    this.top = marks[marks.length - 1];
    const inside = [...marks.map((mark) => this.level(mark)).flat(), ...this.times()];
    this.lines.forEach(([name], i) => inside.push(...this.curve(this.series[name], i)));
    if (!values.length) {
      const place = { x: (this.width + MARGIN.left) / 2, y: this.y(0.75 * this.top), "text-anchor": "middle" };
      inside.push(draw("text", place, "nothing yet"));
    }
    if (this.chosen !== null && this.chosen < time.length) inside.push(...this.cursor());
    this.svg.replaceChildren(...inside);
    this.read(Math.min(this.chosen ?? Infinity, time.length - 1));
  }

  level(mark) {
    const y = this.y(mark);
    const kind = mark === 0 ? "base" : "grid";
    return [
      draw("line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y, class: kind }),
      draw("text", { x: MARGIN.left - 8, y: y + 4, "text-anchor": "end" }, this.short(mark)),
    ];
  }

  // The same words as elsewhere, without digits that say nothing on an axis.
  short(mark) {
    if (this.format.name !== "count") return this.format(mark).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
    return new Intl.NumberFormat("en-US", { notation: "compact" }).format(mark);
  }

  times() {
    const steps = [60, 120, 300, 600, 900].filter((step) => ((this.now - this.from) / step) * 70 < this.width);
    const step = steps[0] ?? 1800;
    const drawn = [];
    for (let time = Math.ceil(this.from / step) * step; time <= this.now; time += step) {
      const x = this.x(time);
      if (x > MARGIN.left + 10 && x < this.width - 18) {
        drawn.push(draw("text", { x, y: this.height - 4, "text-anchor": "middle" }, clock(time)));
      }
    }
    return drawn;
  }

  curve(values, number) {
    const parts = []; // broken where there is no value
    let part = null;
    values.forEach((value, i) => {
      if (value === null) part = null;
      else {
        if (part === null || this.series.time[i] - this.series.time[i - 1] > GAP * this.spacing) parts.push((part = []));
        part.push([this.x(this.series.time[i]), this.y(value)]);
      }
    });
    return parts.flatMap((points) => {
      const path = `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;
      const line = points.length > 1
        ? draw("path", { d: path, class: `curve curve-${number}` })
        : draw("circle", { cx: points[0][0], cy: points[0][1], r: 2, class: `dot-${number}` });
      if (this.lines.length > 1 || points.length < 2) return [line];
      const closed = `${path}L${points[points.length - 1][0]} ${this.y(0)}L${points[0][0]} ${this.y(0)}Z`;
      return [draw("path", { d: closed, class: "area" }), line];
    });
  }

  cursor() {
    const x = this.x(this.series.time[this.chosen]);
    const drawn = [draw("line", { x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom, class: "cursor" })];
    this.lines.forEach(([name], i) => {
      const value = this.series[name][this.chosen];
      if (value !== null) drawn.push(draw("circle", { cx: x, cy: this.y(value), r: 3, class: `dot-${i}` }));
    });
    return drawn;
  }

  // Shows the values at a point, with its time if it was chosen, and says the same to a screen reader.
  read(index) {
    const time = index >= 0 && this.chosen !== null ? [clock(this.series.time[index])] : [];
    const values = this.lines.map(([name, label]) => {
      const value = this.format(index >= 0 ? this.series[name][index] : null);
      return label ? `${label} ${value}` : value;
    });
    this.reading.replaceChildren(
      ...time.flatMap((text) => [text, " · "]),
      ...values.flatMap((text, i) => [...this.swatch(i), text]),
    );
    const words = [...time, ...values].join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${words}. Arrow keys read earlier times.`);
  }

  // The colour of a line, where there is more than one.
  swatch(line) {
    if (this.lines.length < 2) return [];
    const made = document.createElement("i");
    made.className = `swatch-${line}`;
    return [made];
  }
}
