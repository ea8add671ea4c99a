"use strict";
// A click on a column's name sorts the table by that column. Another click reverses the order.
const number = (text) => (/^[-+]?[\d.]/.test(text) ? parseFloat(text.replaceAll(",", "")) : NaN);
const isNone = (text) => text === "-" || text.startsWith("out of memory") || text === "failed";

// Cells without a number come last in either order. Names, such as sizes, keep the order of their first appearance.
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

// The contents stand open beside the text where there is room, and are folded above it where there is none.
const wide = matchMedia("(min-width: 72rem)");
const fold = () => { document.querySelector("nav details").open = wide.matches; };
wide.addEventListener("change", fold);
fold();

// The contents mark the problem that is being read.
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(target.id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "0px 0px -80% 0px" });
for (const heading of document.querySelectorAll("h2, h3")) seen.observe(heading);
