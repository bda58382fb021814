/* Tables that a click on a header sorts. */
"use strict";

/**
 * A table of rows.
 *
 * Each column has a `title`, a `value(row)` to sort by and, if the cell shows another text, a
 * `text(row)`; columns of figures are `numeric`; `mark(row)` may give a cell a class of page.css.
 * `choose(row)` is called when a row is clicked, or Enter pressed in it.
 */
class SortedTable {
  constructor(columns, rows, choose = null) {
    this.columns = columns;
    this.rows = rows.map((row) => ({ row, line: this.line(row, choose) }));
    this.body = element("tbody", {});
    this.headers = columns.map((column) => this.header(column));
    const head = element("thead", {}, element("tr", {}, ...this.headers));
    this.table = element("table", { className: choose ? "chosen-by-row" : "" }, head, this.body);
    this.body.append(...this.rows.map(({ line }) => line));
  }

  header(column) {
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => this.sort(column));
    return element("th", { scope: "col", className: column.numeric ? "numeric" : "" }, button);
  }

  line(row, choose) {
    const line = element("tr", {}, ...this.columns.map((column) => cell(column, row)));
    if (choose) {
      line.tabIndex = 0;
      line.addEventListener("click", () => this.choose(line, row, choose));
      line.addEventListener("keydown", (event) => {
        if (event.key === "Enter") this.choose(line, row, choose);
      });
    }
    return line;
  }

  choose(line, row, choose) {
    for (const other of this.body.children) other.classList.toggle("chosen", other === line);
    choose(row);
  }

  /** By this column; figures the largest first, and the other way round when asked again. */
  sort(column) {
    const header = this.headers[this.columns.indexOf(column)];
    const first = column.numeric ? "descending" : "ascending";
    const second = column.numeric ? "ascending" : "descending";
    const order = header.ariaSort === first ? second : first;
    for (const other of this.headers) other.ariaSort = other === header ? order : null;
    const sign = order === "ascending" ? 1 : -1;
    this.rows.sort((a, b) => sign * compare(column.value(a.row), column.value(b.row)));
    this.body.append(...this.rows.map(({ line }) => line));
  }
}

/** Numbers by size, texts by the numbers in them: layers.2 before layers.10. */
function compare(a, b) {
  if (typeof a === "number") return a - b;
  return a.localeCompare(b, "en", { numeric: true });
}

function cell(column, row) {
  const text = String((column.text ?? column.value)(row));
  const className = [column.numeric ? "numeric" : "", column.mark?.(row) || ""].join(" ").trim();
  return element("td", { className, title: text.length > 40 ? text : "" }, text);
}

const text = (title, value) => ({ title, value });
const figures = (title, value, format = formatCount, mark = null) => ({
  title,
  value,
  text: (row) => format(value(row)),
  numeric: true,
  mark,
});
const yesNo = (title, value) => text(title, (row) => (value(row) ? "yes" : "no"));

const COLLECTIVE_COLUMNS = [
  figures("#", (row) => row.index),
  text("phase", (row) => row.phase),
  text("kind", (row) => words(row.kind)),
  text("buckets", (row) => row.buckets.join(", ")),
  figures("ranks", (row) => row.ranks),
  figures("bytes", (row) => row.nbytes, formatBytes),
  figures("takes", (row) => row.seconds, formatSeconds),
  figures("starts at", (row) => row.start, formatSeconds),
  figures("hidden", (row) => row.hidden, formatSeconds),
  figures("exposed", (row) => row.exposed, formatSeconds, (row) => row.exposed > 0 && "exposed"),
  text("started before", (row) => row.before),
  text("needed by", (row) => row.needed_by),
];

const BUCKET_COLUMNS = [
  text("bucket", (row) => row.name),
  figures("tensors", (row) => row.tensors),
  figures("parameters", (row) => row.parameters),
  text("dtype", (row) => row.dtype),
  text("gathered as", (row) => row.gathered_dtype),
  figures("gathered bytes", (row) => row.nbytes, formatBytes),
  figures("padding", (row) => row.padding, (share) => `${(100 * share).toFixed(2)}%`),
  figures("segment", (row) => row.segment, formatBytes),
  yesNo("trained", (row) => row.trained),
  yesNo("resharded", (row) => row.reshard),
  yesNo("used", (row) => row.used),
];

const CURVE_COLUMNS = [
  figures("memory", (row) => row.nbytes, formatBytes),
  figures("step", (row) => row.seconds, formatSeconds),
  text("stay gathered", (row) => `${row.gathered} of ${row.buckets}`),
  figures("units ahead", (row) => row.ahead),
  figures("values on host", (row) => row.on_host, formatBytes),
  text("which", (row) => (row.on_host ? row.copied : "")),
  figures("state on host", (row) => row.states_on_host, formatBytes),
  text("computed again", (row) => row.again),
  text("that is", (row) => row.setting),
];

/** A table with room of its own to scroll in; a sentence where there are no rows. */
function showTable(id, columns, rows, choose) {
  if (!rows.length) {
    byId(id).append(element("p", { className: "card" }, "There are none."));
    return;
  }
  const { table } = new SortedTable(columns, rows, choose);
  byId(id).append(element("div", { className: "card scroll" }, table));
}
