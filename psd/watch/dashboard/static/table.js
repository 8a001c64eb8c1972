// A table whose rows stay while their numbers change, sorted by any column.

import { h, keep, setAttribute, setText } from "./dom.js";

export class Table {
  // columns: {name, word?, value(item), text(item), fill?(cell, item), sort?}. name of the whole, for those who hear it.
  constructor(name, columns, { key, away = () => false }) {
    Object.assign(this, { columns, key, away });
    this.order = { column: 0, isUp: true };
    this.items = [];
    this.heads = columns.map((column, index) => {
      const button = h("button", { type: "button", onclick: () => this.sortBy(index) }, column.name);
      return h("th", { scope: "col", role: "columnheader", class: classOf(column) }, button);
    });
    // Roles, because on a narrow screen rows are drawn as cards, and browsers then do not take them for rows.
    this.body = h("tbody", { role: "rowgroup" });
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
      h("table", { role: "table" }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...this.heads)), this.body));
  }

  sortBy(index) {
    const isSame = this.order.column === index;
    this.order = { column: index, isUp: isSame ? !this.order.isUp : Boolean(this.columns[index].word) || index === 0 };
    this.update(this.items);
  }

  update(items) {
    this.items = items;
    const { column, isUp } = this.order;
    const value = this.columns[column].value;
    const sorted = [...items].sort((a, b) => compare(value(a), value(b)) * (isUp ? 1 : -1));
    this.heads.forEach((head, index) => {
      if (index === column) setAttribute(head, "aria-sort", isUp ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    keep(this.body, sorted, this.key, () => this.makeRow(), (row, item) => this.fillRow(row, item));
  }

  makeRow() {
    return h("tr", { role: "row" }, ...this.columns.map((column, index) => h(index ? "td" : "th", {
      class: classOf(column), scope: index ? null : "row", role: index ? "cell" : "rowheader", "data-name": column.name,
    })));
  }

  fillRow(row, item) {
    row.classList.toggle("away", this.away(item));
    this.columns.forEach((column, index) => {
      const cell = row.children[index];
      if (column.fill) column.fill(cell, item);
      else setText(cell, column.text ? column.text(item) : String(column.value(item)));
    });
  }
}

const classOf = (column) => [column.word ? "word" : "", column.cut ? "cut" : "", column.keep ? "keep" : ""].join(" ").trim() || null;

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

// A link in a cell.
export function link(cell, href, text) {
  let anchor = cell.firstElementChild;
  if (!anchor) { anchor = h("a"); cell.append(anchor); }
  setAttribute(anchor, "href", href);
  setText(anchor, text);
}

export function tag(cell, text, kind) {
  let mark = cell.firstElementChild;
  if (!mark) { mark = h("span"); cell.append(mark); }
  setAttribute(mark, "class", `tag ${kind}`);
  setText(mark, text);
}

// A share as a number and a bar.
export function meter(cell, value, { warn = 0.1, bad = 0.3 } = {}) {
  if (!cell.firstElementChild) cell.append(h("span", { class: "meter" }, h("b"), h("span", {}, h("i"))));
  const [number, bar] = cell.firstElementChild.children;
  setText(number, `${Math.round(value * 100)}%`);
  setAttribute(cell.firstElementChild, "data-is", value >= bad ? "bad" : value >= warn ? "warn" : "good");
  bar.firstElementChild.style.width = `${Math.min(100, value * 100)}%`;
}
