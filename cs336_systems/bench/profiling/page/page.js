const data = JSON.parse(document.getElementById("data").textContent);
const stack = new Stack(data);
const element = (id) => document.getElementById(id);
const canvas = element("timeline"), tip = element("tip");
const count = data.sizes.length, moments = data.times_us.length;
const peakMoment = stack.total.indexOf(stack.total.reduce((a, b) => Math.max(a, b), 0));
const view = {}; // the shown part: x0 to x1 in ms or events, y0 to y1 in bytes
let plot = null; // the pixels, and which allocation each of them shows
let hovered = -1, scheduled = null, settling = 0, stride = 1;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const position = (moment) => element("by-event").checked ? moment : data.times_us[moment] / 1000;
const drawn = () => Math.round((count + 1) ** (element("detail").value / 1000)) - 1;

function sizeText(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(bytes) >= size) return `${(bytes / size).toFixed(2)} ${unit}`;
  }
  return `${bytes} bytes`;
}

function phaseAt(moment) {
  let k = 0;
  while (k + 1 < data.phases.length && data.boundaries[k + 1] <= moment) k++;
  return data.phases[k];
}

// Drawing

// The colours of a category: [other, one, shade of the edge], as the words that ImageData is made of.
function shades(color) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const word = (f, to) => [b, g, r].reduce((w, c) => (w << 8) | Math.round(c + (to - c) * f), 255);
  return { even: word(0, 0), odd: word(0.18, 255), edge: word(0.35, 0), rest: word(0.5, 255), hover: word(0.75, 0) };
}
const colors = data.categories.map((category) => shades(category.color));

// The moment drawn in each column of pixels: the one with the most memory, so that no peak is lost.
// While something moves, as many columns as `stride` says share one, so that a picture takes no longer than it may.
function columnMoments(width) {
  const chosen = new Int32Array(width), step = (view.x1 - view.x0) / width;
  let m = 0;
  while (m + 1 < moments && position(m + 1) <= view.x0) m++;
  for (let column = 0; column < width; column += stride) {
    let best = m;
    while (m + 1 < moments && position(m + 1) < view.x0 + (column + stride) * step) {
      m++;
      if (stack.total[m] > stack.total[best]) best = m;
    }
    chosen.fill(best, column, column + stride);
  }
  return chosen;
}

function drawStack(words, items, width, height) {
  const chosen = columnMoments(width), scale = height / (view.y1 - view.y0);
  stack.begin(chosen[0], drawn(), element("grouped").checked);
  for (let column = 0; column < width; column++) {
    if (column && chosen[column] === chosen[column - 1]) {
      for (let at = column; at < words.length; at += width) { words[at] = words[at - 1]; items[at] = items[at - 1]; }
      continue;
    }
    stack.moveTo(chosen[column]);
    stack.rows(view.y0, scale, height, (id, from, to) => {
      const shade = colors[id < 0 ? -2 - id : data.kinds[id]];
      const fill = id < 0 ? shade.rest : id % 2 ? shade.odd : shade.even;
      for (let row = from; row < to; row++) {
        const at = (height - 1 - row) * width + column;
        words[at] = id >= 0 && to - from > 2 && row === to - 1 ? shade.edge : fill;
        items[at] = id;
      }
    });
  }
}

// Work out the content of each pixel.
function layOut() {
  const begun = performance.now(), ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = Math.max(1, canvas.clientWidth - MARGIN.left - MARGIN.right);
  const height = Math.max(1, canvas.clientHeight - MARGIN.top - MARGIN.bottom);
  const columns = Math.round(width * ratio), rows = Math.round(height * ratio);
  plot = { width, height, ratio, columns, rows, words: new Uint32Array(columns * rows), items: new Int32Array(columns * rows) };
  plot.items.fill(-1);
  drawStack(plot.words, plot.items, columns, rows);
  element("drawn").textContent = `${Math.min(drawn(), count).toLocaleString()} of ${count.toLocaleString()}`;
  plot.milliseconds = (performance.now() - begun) * (stride === 1 ? 1 : stride);
  canvas.dataset.milliseconds = (performance.now() - begun).toFixed(1);
}

function paint() {
  const { ratio, width, height, columns, rows, items } = plot;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const words = new Uint32Array(image.data.buffer);
  words.set(plot.words);
  if (hovered !== -1) {
    const { hover } = colors[hovered < 0 ? -2 - hovered : data.kinds[hovered]];
    for (let at = 0; at < words.length; at++) if (items[at] === hovered) words[at] = hover;
  }
  context.putImageData(image, Math.round(MARGIN.left * ratio), Math.round(MARGIN.top * ratio));
  context.scale(ratio, ratio);
  drawAxes(context, width, height);
  drawPhases(context, width, height);
  drawPeak(context, width, height);
}

// Draw before the next frame; `moves` says that more is to come, so that it must not take long.
function redraw(moves = false) {
  stride = moves === true && plot && plot.milliseconds > 30 ? Math.ceil(plot.milliseconds / 30) : 1;
  clearTimeout(settling);
  if (stride > 1) settling = setTimeout(redraw, 200);
  schedule(() => { layOut(); paint(); });
}

function schedule(work) {
  if (scheduled === null) requestAnimationFrame(() => { const todo = scheduled; scheduled = null; todo(); });
  scheduled = scheduled && work === paint ? scheduled : work;
}

// Moving about

function showAll() {
  const end = position(moments - 1), top = stack.total[peakMoment] || 1;
  Object.assign(view, { x0: position(0), x1: Math.max(end, position(0) + 1e-3), y0: 0, y1: top * 1.06 });
  redraw();
}

function zoom(axis, around, factor) {
  const [low, high] = [`${axis}0`, `${axis}1`];
  const least = axis === "x" ? 1e-3 : 512;
  if ((view[high] - view[low]) * factor < least) return;
  view[low] = around + (view[low] - around) * factor;
  view[high] = around + (view[high] - around) * factor;
  move(0, 0);
}

// Move by parts of the shown range, and stay within the data.
function move(dx, dy) {
  const limits = { x: [position(0), Math.max(position(moments - 1), position(0) + 1e-3)], y: [0, (stack.total[peakMoment] || 1) * 1.06] };
  for (const [axis, part] of [["x", dx], ["y", dy]]) {
    const [low, high] = limits[axis];
    const span = Math.min(view[`${axis}1`] - view[`${axis}0`], high - low);
    const from = clamp(view[`${axis}0`] + part * span, low, high - span);
    view[`${axis}0`] = from;
    view[`${axis}1`] = from + span;
  }
  redraw(true);
}

function zoomTo(i) {
  const from = position(data.starts[i]), to = position(Math.min(data.ends[i], moments - 1));
  const around = Math.max((to - from) * 0.1, 1e-2);
  Object.assign(view, { x0: from - around, x1: to + around });
  hovered = i;
  move(0, 0);
  canvas.scrollIntoView({ block: "nearest" });
}

// The allocation under the pointer

function describe(item) {
  if (item < -1) {
    const category = data.categories[-2 - item].name;
    return `${category}: smaller allocations, summed\n(the slider decides how many are drawn one by one)`;
  }
  const start = data.starts[item], end = data.ends[item], last = end >= moments;
  const from = start === 0 ? "before the recording" : `${(data.times_us[start] / 1000).toFixed(3)} ms (${phaseAt(start)})`;
  const to = last ? "after it" : `${(data.times_us[end] / 1000).toFixed(3)} ms (${phaseAt(end)})`;
  const text = data.texts[data.labels[item]] || "(from before the recording, or without a stack)";
  return `${sizeText(data.sizes[item])}, ${data.categories[data.kinds[item]].name}\nfrom ${from} to ${to}\n${text}`;
}

function point(event) {
  if (!plot) return;
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  const column = Math.floor((x - MARGIN.left) * plot.ratio), row = Math.floor((y - MARGIN.top) * plot.ratio);
  const inside = column >= 0 && column < plot.columns && row >= 0 && row < plot.rows;
  const item = inside ? plot.items[row * plot.columns + column] : -1;
  tip.hidden = item === -1;
  if (item !== -1) {
    tip.textContent = describe(item);
    tip.style.left = `${clamp(x + 14, 0, Math.max(0, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 18}px`;
  }
  if (item !== hovered) { hovered = item; schedule(paint); }
}

let dragged = null;
canvas.addEventListener("pointerdown", (event) => { dragged = event; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { dragged = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!dragged) return;
  move((dragged.clientX - event.clientX) / plot.width, (event.clientY - dragged.clientY) / plot.height);
  dragged = event;
});
canvas.addEventListener("mousemove", (event) => { if (!dragged) point(event); });
canvas.addEventListener("mouseleave", () => { tip.hidden = true; hovered = -1; schedule(paint); });
canvas.addEventListener("dblclick", showAll);
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = canvas.getBoundingClientRect(), factor = 1.0015 ** (event.deltaY || event.deltaX);
  const part = clamp((event.clientX - box.left - MARGIN.left) / plot.width, 0, 1);
  const height = clamp(1 - (event.clientY - box.top - MARGIN.top) / plot.height, 0, 1);
  if (event.shiftKey) zoom("y", view.y0 + height * (view.y1 - view.y0), factor);
  else zoom("x", view.x0 + part * (view.x1 - view.x0), factor);
}, { passive: false });

const middle = () => (view.x0 + view.x1) / 2;
const KEYS = {
  ArrowLeft: () => move(-0.1, 0), ArrowRight: () => move(0.1, 0), ArrowUp: () => move(0, 0.1), ArrowDown: () => move(0, -0.1),
  "+": () => zoom("x", middle(), 0.7), "=": () => zoom("x", middle(), 0.7), "-": () => zoom("x", middle(), 1 / 0.7), 0: showAll,
};
canvas.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
});
element("detail").addEventListener("input", () => redraw(true));
element("grouped").addEventListener("change", () => redraw());
element("by-event").addEventListener("change", showAll);
element("reset").addEventListener("click", showAll);
window.addEventListener("resize", () => redraw());

// The words around it, all of them set as text

function add(parent, tag, text) {
  const child = document.createElement(tag);
  child.textContent = text;
  parent.append(child);
  return child;
}

element("summary").textContent = data.peak;
data.warnings.forEach((warning) => add(element("warnings"), "li", `Warning: ${warning}`));
data.categories.forEach((category, kind) => {
  let bytes = 0;
  for (let i = 0; i < count; i++) {
    if (data.kinds[i] === kind && data.starts[i] <= peakMoment && peakMoment < data.ends[i]) bytes += data.sizes[i];
  }
  const entry = add(element("legend"), "li", "");
  add(entry, "i", "").style.background = category.color;
  entry.append(`${category.name}: ${sizeText(bytes)} at the peak`);
});
for (const i of stack.bySize.slice(0, 10)) {
  const row = add(element("largest"), "tr", ""), [, ...rest] = describe(i).split("\n");
  const button = add(add(row, "td", ""), "button", sizeText(data.sizes[i]));
  button.type = "button";
  button.addEventListener("click", () => zoomTo(i));
  [data.categories[data.kinds[i]].name, rest[0], rest.slice(1).join("\n")].forEach((text) => add(row, "td", text));
}
element("detail").value = Math.ceil(1000 * Math.log(data.detail + 1) / Math.log(count + 1 || 2));
showAll();
