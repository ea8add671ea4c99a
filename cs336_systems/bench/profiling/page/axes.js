// The scales, the phases and the mark at the peak, around the stack. Positions are relative to the page's `view`.

const MARGIN = { left: 104, right: 14, top: 26, bottom: 40 };

const across = (value, width) => MARGIN.left + (value - view.x0) / (view.x1 - view.x0) * width;
const upward = (bytes, height) => MARGIN.top + height - (bytes - view.y0) / (view.y1 - view.y0) * height;

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

function ticks(low, high, most, base) {
  const rough = (high - low) / most, power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const steps = base === 2 ? [1, 2] : [1, 2, 5, 10];
  const step = steps.map((s) => s * power).find((s) => s >= rough) || rough;
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(tick);
  return found;
}

function drawAxes(context, width, height) {
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = "#333";
  context.strokeStyle = "#00000022";
  context.textAlign = "right";
  for (const tick of ticks(view.y0, view.y1, 7, 2)) {
    const y = upward(tick, height);
    line(context, MARGIN.left, y, MARGIN.left + width, y);
    context.fillText(sizeText(tick), MARGIN.left - 6, y + 4);
  }
  context.textAlign = "center";
  for (const tick of ticks(view.x0, view.x1, 9, 10)) {
    const x = across(tick, width);
    line(context, x, MARGIN.top, x, MARGIN.top + height + 4);
    context.fillText(String(Number(tick.toPrecision(10))), x, MARGIN.top + height + 17);
  }
  const unit = element("by-event").checked ? "events of the allocator" : "time on the host (ms)";
  context.fillText(unit, MARGIN.left + width / 2, MARGIN.top + height + 34);
}

function drawPhases(context, width, height) {
  const shown = data.boundaries.map((moment) => across(position(moment), width));
  const inside = (x) => x >= MARGIN.left - 1 && x <= MARGIN.left + width + 1;
  context.strokeStyle = "#222";
  context.setLineDash([5, 4]);
  for (const x of shown.filter(inside)) line(context, x, MARGIN.top - 14, x, MARGIN.top + height);
  context.setLineDash([]);
  context.textAlign = "left";
  data.phases.forEach((name, k) => {
    if (!inside(shown[k])) return;
    const long = context.measureText(name).width, left = Math.min(shown[k] + 5, MARGIN.left + width - long);
    context.clearRect(left - 2, MARGIN.top - 20, long + 4, 15);
    context.fillText(name, left, MARGIN.top - 8);
  });
}

function drawPeak(context, width, height) {
  const x = across(position(peakMoment), width), y = upward(stack.total[peakMoment], height);
  if (x < MARGIN.left || x > MARGIN.left + width || y < MARGIN.top - 2 || y > MARGIN.top + height) return;
  context.fillStyle = "#b00020";
  context.fillText("\u25bc", x - 6, y - 2);
}

