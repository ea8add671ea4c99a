// Streams of steps, one above the other on one scale of time: a lane for computation, one for communication.

const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const canvas = element("timeline"), tip = element("tip");
const LANE = 34, GAP = 6, TITLE = 26;
const end = Math.max(1e-3, ...data.steps.map((step) => step.totals.span_ms));
const view = { x0: 0, x1: end };
let hovered = null, waiting = false, dragged = null;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const plotWidth = () => Math.max(1, canvas.clientWidth - MARGIN.left - MARGIN.right);
const lanes = data.steps.flatMap((step, s) => data.kinds.map((kind, k) => ({
  step, kind, pieces: step.pieces[kind.name],
  top: MARGIN.top + s * (TITLE + data.kinds.length * (LANE + GAP)) + TITLE + k * (LANE + GAP),
})));
const bottom = Math.max(...lanes.map((lane) => lane.top)) + LANE;
canvas.style.minHeight = canvas.style.height = `${bottom + MARGIN.bottom}px`;

function drawLane(context, lane, width) {
  const scale = width / (view.x1 - view.x0);
  context.fillStyle = lane.kind.color;
  for (const piece of lane.pieces) {
    if (piece[2] < view.x0 || piece[1] > view.x1) continue;
    const from = Math.max(0, (piece[1] - view.x0) * scale), to = Math.min(width, (piece[2] - view.x0) * scale);
    const chosen = hovered && hovered.piece === piece;
    if (chosen) context.fillStyle = "#111";
    context.fillRect(MARGIN.left + from, lane.top, Math.max(to - from - (to - from > 3 ? 0.5 : 0), 0.4), LANE);
    if (chosen) context.fillStyle = lane.kind.color;
  }
  context.fillStyle = "#333";
  context.textAlign = "right";
  context.fillText(lane.kind.name, MARGIN.left - 6, lane.top + LANE / 2 + 4);
}

function paint() {
  const begun = performance.now(), ratio = window.devicePixelRatio || 1, width = plotWidth();
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "12px system-ui, sans-serif";
  context.strokeStyle = "#00000022";
  context.fillStyle = "#333";
  context.textAlign = "center";
  for (const tick of ticks(view.x0, view.x1, 9, 10)) {
    const x = across(tick, width);
    line(context, x, MARGIN.top, x, bottom + 4);
    context.fillText(String(Number(tick.toPrecision(10))), x, bottom + 17);
  }
  context.fillText("ms from the first work of the step", MARGIN.left + width / 2, bottom + 34);
  lanes.forEach((lane) => drawLane(context, lane, width));
  context.textAlign = "left";
  context.font = "bold 13px system-ui, sans-serif";
  data.steps.forEach((step, s) => {
    context.fillText(`${step.name}: ${share(step.totals.overlapped)} of communication overlapped`,
      MARGIN.left, lanes[s * data.kinds.length].top - 8);
  });
  canvas.dataset.milliseconds = (performance.now() - begun).toFixed(1);
}

function redraw() {
  if (!waiting) requestAnimationFrame(() => { waiting = false; paint(); });
  waiting = true;
}

const share = (part) => part === null ? "none" : `${(100 * part).toFixed(0)} %`;

// Moving about

function show(from, span) {
  const least = Math.min(1e-3, end);
  span = clamp(span, least, end);
  view.x0 = clamp(from, 0, end - span);
  view.x1 = view.x0 + span;
  redraw();
}
const showAll = () => show(0, end);
const move = (part) => show(view.x0 + part * (view.x1 - view.x0), view.x1 - view.x0);
function zoom(around, factor) {
  const span = clamp((view.x1 - view.x0) * factor, Math.min(1e-3, end), end);
  show(around - (around - view.x0) * span / (view.x1 - view.x0), span);
}

// The piece of work under the pointer: the shortest, if several overlap

function pieceAt(x, y) {
  const lane = lanes.find((each) => y >= each.top && y <= each.top + LANE);
  if (!lane || x < MARGIN.left || x > MARGIN.left + plotWidth()) return null;
  const pixel = (view.x1 - view.x0) / plotWidth(), time = view.x0 + (x - MARGIN.left) * pixel;
  const near = lane.pieces.filter((piece) => piece[1] <= time + pixel && piece[2] >= time - pixel);
  if (!near.length) return null;
  return { lane, piece: near.reduce((a, b) => b[2] - b[1] < a[2] - a[1] ? b : a) };
}

function point(event) {
  const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  hovered = pieceAt(x, y);
  tip.hidden = hovered === null;
  if (hovered) {
    const { lane, piece: [name, from, to] } = hovered;
    tip.textContent = `${lane.step.names[name]}\n${lane.kind.name} of ${lane.step.name}\n` +
      `${((to - from) * 1000).toFixed(0)} us, from ${from.toFixed(3)} to ${to.toFixed(3)} ms`;
    tip.style.left = `${clamp(x + 14, 0, Math.max(0, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 18}px`;
  }
  redraw();
}

canvas.addEventListener("pointerdown", (event) => { dragged = event; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { dragged = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!dragged) return;
  move((dragged.clientX - event.clientX) / plotWidth());
  dragged = event;
});
canvas.addEventListener("mousemove", (event) => { if (!dragged) point(event); });
canvas.addEventListener("mouseleave", () => { tip.hidden = true; hovered = null; redraw(); });
canvas.addEventListener("dblclick", showAll);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const part = clamp((event.clientX - canvas.getBoundingClientRect().left - MARGIN.left) / plotWidth(), 0, 1);
  zoom(view.x0 + part * (view.x1 - view.x0), 1.0015 ** (event.deltaY || event.deltaX));
}, { passive: false });
const middle = () => (view.x0 + view.x1) / 2;
const KEYS = {
  ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), 0: showAll,
  "+": () => zoom(middle(), 0.7), "=": () => zoom(middle(), 0.7), "-": () => zoom(middle(), 1 / 0.7),
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

for (const kind of data.kinds) {
  const entry = add(element("legend"), "li", "");
  add(entry, "i", "").style.background = kind.color;
  entry.append(kind.name);
}
for (const step of data.steps) {
  const row = add(element("steps"), "tr", ""), { span_ms, compute_ms, communication_ms, both_ms, overlapped } = step.totals;
  [step.name, ...[span_ms, compute_ms, communication_ms, both_ms].map((ms) => ms.toFixed(2)), share(overlapped)]
    .forEach((text) => add(row, "td", text));
}
showAll();
