// Streams of steps, one above the other on one scale of time: a lane for computation, one for communication.

const LANE = 34, GAP = 6, TITLE = 26;
const end = Math.max(1e-3, ...data.steps.map((step) => step.totals.span_ms));
const lanes = data.steps.flatMap((step, s) => data.kinds.map((kind, k) => ({
  step, kind, pieces: step.pieces[kind.name],
  top: MARGIN.top + s * (TITLE + data.kinds.length * (LANE + GAP)) + TITLE + k * (LANE + GAP),
})));
const bottom = Math.max(...lanes.map((lane) => lane.top)) + LANE;
canvas.style.minHeight = canvas.style.height = `${bottom + MARGIN.bottom}px`;

const share = (part) => part === null ? "none" : `${(100 * part).toFixed(0)} %`;

function drawLane(context, lane) {
  const right = MARGIN.left + plotWidth();
  for (const piece of lane.pieces) {
    if (piece[2] < view.x[0] || piece[1] > view.x[1]) continue;
    const from = Math.max(MARGIN.left, across(piece[1])), width = Math.min(right, across(piece[2])) - from;
    context.fillStyle = hovered && hovered.piece === piece ? "#111" : lane.kind.color;
    context.fillRect(from, lane.top, Math.max(width - (width > 3 ? 0.5 : 0), 0.4), LANE);
  }
  context.fillStyle = "#333";
  context.textAlign = "right";
  context.fillText(lane.kind.name, MARGIN.left - 6, lane.top + LANE / 2 + 4);
}

function draw(context) {
  drawTimes(context, "ms from the first work of the step");
  lanes.forEach((lane) => drawLane(context, lane));
  context.textAlign = "left";
  context.font = "bold 13px system-ui, sans-serif";
  data.steps.forEach((step, s) => {
    context.fillText(`${step.name}: ${share(step.totals.overlapped)} of communication overlapped`,
      MARGIN.left, lanes[s * data.kinds.length].top - 8);
  });
}

// The piece of work under the pointer: the shortest, if several overlap.
function itemAt(x, y) {
  const lane = lanes.find((each) => y >= each.top && y <= each.top + LANE);
  if (!lane || x < MARGIN.left || x > MARGIN.left + plotWidth()) return null;
  const pixel = size("x") / plotWidth(), time = view.x[0] + (x - MARGIN.left) * pixel;
  const near = lane.pieces.filter((piece) => piece[1] <= time + pixel && piece[2] >= time - pixel);
  if (!near.length) return null;
  return { lane, piece: near.reduce((a, b) => b[2] - b[1] < a[2] - a[1] ? b : a) };
}

function describe({ lane, piece: [name, from, to] }) {
  return `${lane.step.names[name]}\n${lane.kind.name} of ${lane.step.name}\n` +
    `${((to - from) * 1000).toFixed(0)} us, from ${from.toFixed(3)} to ${to.toFixed(3)} ms`;
}

data.kinds.forEach((kind) => addToLegend(kind.color, kind.name));
for (const step of data.steps) {
  const row = add(element("steps"), "tr", ""), { span_ms, compute_ms, communication_ms, both_ms, overlapped } = step.totals;
  [step.name, ...[span_ms, compute_ms, communication_ms, both_ms].map((ms) => ms.toFixed(2)), share(overlapped)]
    .forEach((text) => add(row, "td", text));
}
start({ limits: { x: [0, end], y: [0, 1] }, least: { x: 1e-3, y: 1 }, draw, itemAt, describe });
