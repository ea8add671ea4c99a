"use strict";
// A click on a column's name sorts its table by it; another click, the other way round.
const number = (text) => (/^[-+]?[\d.]/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN);

function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1; // what is no number comes last
  return Number.isNaN(x) ? a.localeCompare(b) : x - y;
}

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells];
  const down = heads[column].ariaSort === "ascending";
  const body = table.tBodies[0];
  const text = (row) => row.cells[column].textContent.trim();
  const rows = [...body.rows].sort((a, b) => compare(text(a), text(b)));
  body.append(...(down ? rows.reverse() : rows));
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
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
