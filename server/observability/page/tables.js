// The tables of runs, which are namespaces: their speed-up, and their contents in the index.
import { element } from "./elements.js";
import { bytes, count, percent, ratio, times } from "./words.js";

const at = (id) => document.getElementById(id);

class Rows {
  // id: of the table's parent, which is hidden while there are no rows. head: heading of the first column. name: returns
  // the first cell of a row. columns: [heading, function from a row to a text or to lines of text].
  constructor(id, { head, name, columns }) {
    Object.assign(this, { place: at(id), name, columns });
    this.body = this.place.querySelector("tbody");
    this.place.querySelector("thead tr").append(...[head, ...columns.map(([title]) => title)].map((title) => {
      const column = element("th", "", title);
      column.scope = "col";
      return column;
    }));
  }

  show(rows) {
    this.place.hidden = !rows.length;
    this.body.replaceChildren(...rows.map((row) => this.row(row)));
  }

  row(row) {
    const name = element("th", "", element("span", "", ...this.name(row)));
    name.scope = "row";
    return element("tr", "", name, ...this.columns.map(([title, show]) => {
      const [figure, ...below] = [show(row)].flat();
      const cell = element("td", "", element("span", "", figure, ...below.map((text) => element("small", "", text))));
      cell.dataset.column = title;
      return cell;
    }));
  }
}

// The figure of the last ten minutes, above the one since the start.
const both = (format, name) => ({ gains }) => [format(gains.recent[name]), format(gains.totals[name])];

export const gained = new Rows("gained", {
  head: "Run",
  name: ({ name, why_not_more: why }) => [name, ...(why ? [element("small", "", `Main limit: ${why}`)] : [])],
  columns: [
    ["Speed-up", both(times, "speedup")],
    ["Tokens per step", both(ratio, "tokens_per_step")],
    ["Acceptance rate", both(percent, "acceptance")],
    ["Empty drafts", both(percent, "empty")],
    ["Cache hit rate", both(percent, "known")],
    ["Verify cost", ({ verify_cost: cost }) => ratio(cost)],
  ],
});

const ofShare = (format, name) => (tenant) => {
  const most = tenant[`${name}_share`];
  return most === null ? format(tenant[name]) : [format(tenant[name]), `of ${format(most)}`];
};

export const tenants = new Rows("tenants", {
  head: "Tenant",
  name: ({ name, refusals }) => [name, ...(refusals ? [element("small", "", `${count(refusals)} requests refused`)] : [])],
  columns: [
    ["Memory", ofShare(bytes, "index")],
    ["Store", ofShare(bytes, "store")],
    ["Namespaces", ofShare(count, "namespaces")],
    ["Sessions", ofShare(count, "sessions")],
  ],
});

export const held = new Rows("held", {
  head: "Namespace",
  name: ({ name }) => [name],
  columns: [
    ["Sessions", (n) => count(n.sessions)],
    ["Problems", (n) => count(n.problems)],
    ["Responses", (n) => count(n.history_responses)],
    ["Tokens", (n) => count(n.history_tokens)],
    ["Memory", (n) => (n.bytes ? bytes(n.bytes) : "–")],
    ["Newest epoch", (n) => count(n.newest_epoch)],
  ],
});
