"use strict";
// A click on a column's name sorts its table by it; another click, the other way round.
const number = (text) => (/^[-+]?[\d.]/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN);
const isNone = (text) => text === "-" || text.startsWith("out of memory") || text === "failed";

// What is no number comes last, either way. Names, such as those of sizes, keep the order in which they first stood.
function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const sign = heads[column].ariaSort === "ascending" ? -1 : 1;
  const body = table.tBodies[0];
  const text = (row) => row.cells[column].textContent.trim();
  const told = (row) => !isNone(text(row));
  table.written ??= [...body.rows];
  const rows = table.written.filter(told);
  const places = new Map([...new Set(rows.map(text))].map((each, at) => [each, at]));
  const value = rows.some((row) => Number.isNaN(number(text(row)))) ? (row) => places.get(text(row)) : (row) => number(text(row));
  rows.sort((a, b) => sign * (value(a) - value(b)));
  body.append(...rows, ...table.written.filter((row) => !told(row)));
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
}

for (const table of document.querySelectorAll("table")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(table, column));
    head.append(button);
  });
}

const contents = document.querySelector("nav details");
contents.addEventListener("click", (event) => {
  if (event.target.closest("a")) contents.open = false; // it would cover what it leads to
});
