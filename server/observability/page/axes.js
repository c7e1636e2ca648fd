// Computes the labels of the axes, and where lines break. Draws nothing.
import { timeOfDay } from "./words.js";

const HOUR = 3600;
const SHORTEST = 300; // seconds: the time axis covers at least this
const GAP = 3; // a step this many times the average is a gap without measurements

export const clock = (time) => timeOfDay(new Date(1000 * time), { hour: "2-digit", minute: "2-digit" });

// The start of the time axis: the first point, but at most an hour ago.
export const beginning = (time, now) => now - Math.min(HOUR, Math.max(SHORTEST, time.length ? now - time[0] : 0));

// Round times from `from` to `to`, at least `room` seconds apart.
export function times(from, to, room) {
  const step = [60, 120, 300, 600, 900].find((step) => step > room) ?? 1800;
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.floor(to / step) - first + 1 }, (_, i) => (first + i) * step);
}

// Round numbers from 0 to at least `greatest`; powers of two for bytes.
export function levels(greatest, binary) {
  const base = binary ? 2 ** Math.floor(Math.log2(greatest / 3)) : 10 ** Math.floor(Math.log10(greatest / 3));
  const step = (binary ? [1, 2, 4] : [1, 2, 2.5, 5, 10]).map((n) => n * base).find((n) => greatest / n <= 3.0001);
  return Array.from({ length: Math.ceil(greatest / step - 1e-9) + 1 }, (_, i) => i * step);
}

// A formatted value without trailing zeros, for an axis.
export function short(format, level) {
  if (format.name === "count") return new Intl.NumberFormat("en-US", { notation: "compact" }).format(level);
  return format(level).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");
}

// Splits the points [time, value] of a line into runs; a null or a gap ends a run.
export function runs(time, values) {
  const longest = (GAP * (time.at(-1) - time[0])) / (time.length - 1);
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    const joined = i > 0 && values[i - 1] !== null && time[i] - time[i - 1] <= longest;
    if (!joined) found.push([]);
    found.at(-1).push([time[i], value]);
  });
  return found;
}
