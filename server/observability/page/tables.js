// The tables of runs, which are namespaces: what drafts gain there, and what the index holds.
import { element } from "./elements.js";
import { bytes, count, percent, ratio, times } from "./words.js";

const at = (id) => document.getElementById(id);

class Rows {
  // id: of the table's place, which is hidden while there are no rows. head: of the first column. name: its cell.
  // columns: [heading, what to show of a row: text, or lines of text].
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

// A figure of the last ten minutes, above that since the start.
const both = (format, name) => ({ gains }) => [format(gains.recent[name]), format(gains.totals[name])];

export const gained = new Rows("gained", {
  head: "Run",
  name: ({ name, why_not_more: why }) => [name, ...(why ? [element("small", "", `Why not more? ${why}`)] : [])],
  columns: [
    ["Speed-up", both(times, "speedup")],
    ["Tokens per step", both(ratio, "tokens_per_step")],
    ["Accepted", both(percent, "acceptance")],
    ["Empty drafts", both(percent, "empty")],
    ["Known problems", both(percent, "known")],
    ["Verify cost", ({ verify_cost: cost }) => ratio(cost)],
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
