"use strict";
// Moving and zooming in a canvas, its scale of time, and the text under the pointer. A page calls `start` with
// - limits: the whole range of its data, { x: [first ms, last ms], y: [low, high] };
// - least: the smallest range that can be shown, { x, y };
// - draw(context): draws the range `view`;
// - itemAt(x, y): the item drawn at a place of the canvas, or null; describe(item): its text.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const canvas = element("timeline"), tip = element("tip");
const MARGIN = { left: 104, right: 14, top: 26, bottom: 40 };
const view = { x: [0, 1], y: [0, 1] };
let page = null, hovered = null, dragged = null, isWaiting = false;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const pixelRatio = () => Math.min(window.devicePixelRatio || 1, 2);
const plotWidth = () => Math.max(1, canvas.clientWidth - MARGIN.left - MARGIN.right);
const plotHeight = () => Math.max(1, canvas.clientHeight - MARGIN.top - MARGIN.bottom);
const size = (axis) => view[axis][1] - view[axis][0];
const across = (ms) => MARGIN.left + (ms - view.x[0]) / size("x") * plotWidth();
const upward = (value) => MARGIN.top + plotHeight() - (value - view.y[0]) / size("y") * plotHeight();

function start(itsPage) {
  page = itsPage;
  showAll();
}

// Drawing

function redraw() {
  if (!isWaiting) requestAnimationFrame(() => { isWaiting = false; paint(); });
  isWaiting = true;
}

function paint() {
  const begun = performance.now(), ratio = pixelRatio(), context = canvas.getContext("2d");
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  page.draw(context);
  canvas.dataset.milliseconds = (performance.now() - begun).toFixed(1);
}

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function ticks([low, high], most, base) {
  const rough = (high - low) / most, power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 2 ? [1, 2] : [1, 2, 5, 10];
  const step = steps.map((s) => s * power).find((s) => s >= rough) || rough;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

function drawTimes(context, title) {
  const bottom = MARGIN.top + plotHeight();
  context.strokeStyle = "#00000022";
  context.fillStyle = "#333";
  context.textAlign = "center";
  for (const tick of ticks(view.x, 9, 10)) {
    line(context, across(tick), MARGIN.top, across(tick), bottom + 4);
    context.fillText(String(Number(tick.toPrecision(10))), across(tick), bottom + 17);
  }
  context.fillText(title, MARGIN.left + plotWidth() / 2, bottom + 34);
}

// Moving about

// Show `span` of an axis, within the limits and with a value at a part of the range, from 0 to 1.
function show(axis, span, value, part) {
  const [low, high] = page.limits[axis];
  const shown = clamp(span, Math.min(page.least[axis], high - low), high - low);
  const from = clamp(value - part * shown, low, high - shown);
  view[axis] = [from, from + shown];
  redraw();
}
const zoom = (axis, part, factor) => show(axis, size(axis) * factor, view[axis][0] + part * size(axis), part);
const move = (axis, part) => show(axis, size(axis), view[axis][0] + part * size(axis), 0);
const showAll = () => ["x", "y"].forEach((axis) => show(axis, Infinity, 0, 0));

function point(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const item = page.itemAt(x, y);
  tip.hidden = item === null;
  if (item !== null) {
    tip.textContent = page.describe(item);
    tip.style.left = `${clamp(x + 14, 0, Math.max(0, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 18}px`;
  }
  if (item !== hovered) redraw();
  hovered = item;
}

canvas.addEventListener("pointerdown", (event) => { dragged = event; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { dragged = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!dragged) return;
  move("x", (dragged.clientX - event.clientX) / plotWidth());
  move("y", (event.clientY - dragged.clientY) / plotHeight());
  dragged = event;
});
canvas.addEventListener("mousemove", (event) => { if (!dragged) point(event); });
canvas.addEventListener("mouseleave", () => { tip.hidden = true; hovered = null; redraw(); });
canvas.addEventListener("dblclick", showAll);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect(), factor = 1.0015 ** (event.deltaY || event.deltaX);
  if (event.shiftKey) zoom("y", clamp(1 - (event.clientY - box.top - MARGIN.top) / plotHeight(), 0, 1), factor);
  else zoom("x", clamp((event.clientX - box.left - MARGIN.left) / plotWidth(), 0, 1), factor);
}, { passive: false });
const KEYS = {
  ArrowLeft: () => move("x", -0.1), ArrowRight: () => move("x", 0.1),
  ArrowUp: () => move("y", 0.1), ArrowDown: () => move("y", -0.1),
  "+": () => zoom("x", 0.5, 0.7), "=": () => zoom("x", 0.5, 0.7), "-": () => zoom("x", 0.5, 1 / 0.7), 0: showAll,
};
canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
});
element("reset").addEventListener("click", showAll);
window.addEventListener("resize", redraw);

// The words around it, all of them set as text

function add(parent, tag, text) {
  const child = document.createElement(tag);
  child.textContent = text;
  parent.append(child);
  return child;
}

function addToLegend(color, text) {
  const entry = add(element("legend"), "li", "");
  add(entry, "i", "").style.background = color;
  entry.append(text);
}
