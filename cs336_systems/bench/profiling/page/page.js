const stack = new Stack(data);
const count = data.sizes.length, moments = data.times_us.length;
const peakMoment = stack.total.indexOf(stack.total.reduce((a, b) => Math.max(a, b), 0));
let plot = {}; // the pixels, the allocation that each of them shows, and the settings that they were made with

const timeOf = (moment) => data.times_us[moment] / 1000;
const drawn = () => Math.round((count + 1) ** (element("detail").value / 1000)) - 1;
const kindOf = (item) => item < 0 ? -2 - item : data.kinds[item];

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

// The colours of a category, as the words that ImageData is made of.
function shades(color) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const word = (f, to) => [b, g, r].reduce((w, c) => (w << 8) | Math.round(c + (to - c) * f), 255);
  return { even: word(0, 0), odd: word(0.18, 255), edge: word(0.35, 0), rest: word(0.5, 255), hover: word(0.75, 0) };
}
const colors = data.categories.map((category) => shades(category.color));

// The moment drawn in each column of pixels: the one with the most memory, so that no peak is lost.
function columnMoments(width) {
  const chosen = new Int32Array(width), step = size("x") / width;
  let m = 0;
  while (m + 1 < moments && timeOf(m + 1) <= view.x[0]) m++;
  for (let column = 0; column < width; column++) {
    let best = m;
    while (m + 1 < moments && timeOf(m + 1) < view.x[0] + (column + 1) * step) {
      m++;
      if (stack.total[m] > stack.total[best]) best = m;
    }
    chosen[column] = best;
  }
  return chosen;
}

// Work out the content of each pixel.
function layOut(width, height, madeWith) {
  const words = new Uint32Array(width * height), items = new Int32Array(width * height).fill(-1);
  const chosen = columnMoments(width), scale = height / size("y");
  stack.begin(chosen[0], drawn());
  for (let column = 0; column < width; column++) {
    if (column && chosen[column] === chosen[column - 1]) {
      for (let at = column; at < words.length; at += width) { words[at] = words[at - 1]; items[at] = items[at - 1]; }
      continue;
    }
    stack.moveTo(chosen[column]);
    stack.rows(view.y[0], scale, height, (id, from, to) => {
      const shade = colors[kindOf(id)], fill = id < 0 ? shade.rest : id % 2 ? shade.odd : shade.even;
      for (let row = from; row < to; row++) {
        const at = (height - 1 - row) * width + column;
        words[at] = id >= 0 && to - from > 2 && row === to - 1 ? shade.edge : fill;
        items[at] = id;
      }
    });
  }
  plot = { width, height, words, items, madeWith };
  element("drawn").textContent = `${Math.min(drawn(), count).toLocaleString()} of ${count.toLocaleString()}`;
}

function draw(context) {
  const ratio = pixelRatio(), width = Math.round(plotWidth() * ratio), height = Math.round(plotHeight() * ratio);
  const settings = [width, height, drawn(), ...view.x, ...view.y].join(" ");
  if (plot.madeWith !== settings) layOut(width, height, settings);
  const image = context.createImageData(width, height), words = new Uint32Array(image.data.buffer);
  words.set(plot.words);
  if (hovered !== null) {
    const { hover } = colors[kindOf(hovered)];
    for (let at = 0; at < words.length; at++) if (plot.items[at] === hovered) words[at] = hover;
  }
  context.putImageData(image, Math.round(MARGIN.left * ratio), Math.round(MARGIN.top * ratio));
  drawTimes(context, "time on the host (ms)");
  drawSizes(context);
  drawPhases(context);
  drawPeak(context);
}

function drawSizes(context) {
  context.textAlign = "right";
  for (const tick of ticks(view.y, 7, 2)) {
    line(context, MARGIN.left, upward(tick), MARGIN.left + plotWidth(), upward(tick));
    context.fillText(sizeText(tick), MARGIN.left - 6, upward(tick) + 4);
  }
}

function drawPhases(context) {
  const right = MARGIN.left + plotWidth();
  const shown = data.boundaries.map((moment) => across(timeOf(moment)));
  const inside = (x) => x >= MARGIN.left - 1 && x <= right + 1;
  context.strokeStyle = "#222";
  context.setLineDash([5, 4]);
  for (const x of shown.filter(inside)) line(context, x, MARGIN.top - 14, x, MARGIN.top + plotHeight());
  context.setLineDash([]);
  context.textAlign = "left";
  data.phases.forEach((name, k) => {
    if (!inside(shown[k])) return;
    const long = context.measureText(name).width, left = Math.min(shown[k] + 5, right - long);
    context.clearRect(left - 2, MARGIN.top - 20, long + 4, 15);
    context.fillText(name, left, MARGIN.top - 8);
  });
}

function drawPeak(context) {
  const x = across(timeOf(peakMoment)), y = upward(stack.total[peakMoment]);
  const inside = x >= MARGIN.left && x <= MARGIN.left + plotWidth() && y >= MARGIN.top - 2 && y <= MARGIN.top + plotHeight();
  context.fillStyle = "#b00020";
  if (inside) context.fillText("\u25bc", x - 6, y - 2);
}

// The allocation under the pointer, as a number of `Stack.rows`

function itemAt(x, y) {
  const ratio = pixelRatio();
  const column = Math.floor((x - MARGIN.left) * ratio), row = Math.floor((y - MARGIN.top) * ratio);
  const inside = column >= 0 && column < plot.width && row >= 0 && row < plot.height;
  const item = inside ? plot.items[row * plot.width + column] : -1;
  return item === -1 ? null : item;
}

function describe(item) {
  const category = data.categories[kindOf(item)].name;
  if (item < 0) return `${category}: smaller allocations, summed\n(the slider decides how many are drawn one by one)`;
  const start = data.starts[item], end = data.ends[item];
  const from = start === 0 ? "before the recording" : `${timeOf(start).toFixed(3)} ms (${phaseAt(start)})`;
  const to = end >= moments ? "after it" : `${timeOf(end).toFixed(3)} ms (${phaseAt(end)})`;
  const text = data.texts[data.labels[item]] || "(from before the recording, or without a stack)";
  return `${sizeText(data.sizes[item])}, ${category}\nfrom ${from} to ${to}\n${text}`;
}

function zoomTo(item) {
  const from = timeOf(data.starts[item]), to = timeOf(Math.min(data.ends[item], moments - 1));
  const beside = Math.max((to - from) * 0.1, 1e-2);
  hovered = item;
  show("x", to - from + 2 * beside, from - beside, 0);
  canvas.scrollIntoView({ block: "nearest" });
}

element("summary").textContent = data.peak;
data.warnings.forEach((warning) => add(element("warnings"), "li", `Warning: ${warning}`));
data.categories.forEach((category, kind) => {
  let bytes = 0;
  for (let i = 0; i < count; i++) {
    if (data.kinds[i] === kind && data.starts[i] <= peakMoment && peakMoment < data.ends[i]) bytes += data.sizes[i];
  }
  addToLegend(category.color, `${category.name}: ${sizeText(bytes)} at the peak`);
});
for (const i of stack.bySize.slice(0, 10)) {
  const row = add(element("largest"), "tr", ""), [, alive, ...code] = describe(i).split("\n");
  const button = add(add(row, "td", ""), "button", sizeText(data.sizes[i]));
  button.type = "button";
  button.addEventListener("click", () => zoomTo(i));
  [data.categories[data.kinds[i]].name, alive, code.join("\n")].forEach((text) => add(row, "td", text));
}
element("detail").value = Math.ceil(1000 * Math.log(data.detail + 1) / Math.log(count + 1 || 2));
element("detail").addEventListener("input", redraw);
const first = timeOf(0), last = Math.max(timeOf(moments - 1), first + 1e-3);
const limits = { x: [first, last], y: [0, (stack.total[peakMoment] || 1) * 1.06] };
start({ limits, least: { x: 1e-3, y: 512 }, draw, itemAt, describe });
