// Numbers as text, with units that a line break cannot split off. null is a missing figure: its divisor is 0.
const NONE = "–";
const plain = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1, notation: "compact" });

export function percent(share) {
  if (share === null) return NONE;
  if (share > 0 && share < 0.0005) return "<\u00a00.1\u00a0%";
  return `${(100 * share).toFixed(share > 0 && share < 0.9995 ? 1 : 0)}\u00a0%`;
}

export const ratio = (value) => (value === null ? NONE : value.toFixed(2));
export const times = (value) => (value === null ? NONE : `${value.toFixed(2)}\u00a0×`);
export const count = (value) => (value === null ? NONE : value < 1e7 ? plain.format(value) : short.format(value));

export function milliseconds(seconds) {
  if (seconds === null) return NONE;
  const value = 1000 * seconds;
  return `${value >= 10 || value === 0 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)}\u00a0ms`;
}

export function bytes(value) {
  if (value === null) return NONE;
  const unit = value >= 2 ** 30 ? 3 : value >= 2 ** 20 ? 2 : value >= 2 ** 10 ? 1 : 0;
  const number = value / 1024 ** unit;
  return `${number >= 100 || Number.isInteger(number) ? number.toFixed(0) : number.toFixed(1)}\u00a0${["B", "KiB", "MiB", "GiB"][unit]}`;
}

export const timeOfDay = (date, parts = {}) => date.toLocaleTimeString([], { hourCycle: "h23", ...parts });

export function duration(seconds) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0\u00a0s";
  const [[unit, size], [next, smaller] = [null, 1]] = parts.slice(first, first + 2);
  const rest = Math.floor((seconds % size) / smaller);
  return `${Math.floor(seconds / size)}\u00a0${unit}${next && rest ? ` ${rest}\u00a0${next}` : ""}`;
}
