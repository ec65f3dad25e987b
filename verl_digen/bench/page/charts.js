"use strict";
// Line charts and a timeline as plain SVG.

const PALETTE = ["#3b6fb6", "#d1495b", "#3a9a6b", "#e09f3e", "#8d6cab", "#3aa6b9", "#9a6a4f", "#6b7785"];
const SVG = "http://www.w3.org/2000/svg";

function make(parent, name, attributes, text) {
  const node = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

// Round numbers that cover [low, high], about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= raw - 1e-12 * raw);
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) out.push(i * step);
  return out;
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8)) + "px";
}

function hideTip() { document.getElementById("tip").hidden = true; }

// lines: [{name, points: [[step, value], ...]}]; reference: {value, name} or null
function lineChart(parent, title, about, lines, reference) {
  const width = 380, height = 190, left = 50, right = 10, top = 8, bottom = 24;
  const box = make(parent, "div", {class: "chart"});
  make(box, "h3", {}, title);
  if (about) make(box, "p", {class: "about"}, about);
  const svg = make(box, "svg:svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  const steps = [...new Set(lines.flatMap(line => line.points.map(p => p[0])))].sort((a, b) => a - b);
  const values = lines.flatMap(line => line.points.map(p => p[1])).concat(reference ? [reference.value] : []);
  let low = Math.min(...values), high = Math.max(...values);
  if (low >= 0 && low < 0.6 * high) low = 0;
  const shares = low >= 0 && high <= 1 && high > 0.5 && low < 0.5;
  if (shares) { low = 0; high = 1; }
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const pad = Math.abs(high) * 0.1 || 1; high += pad; if (low !== 0) low -= pad; }
  else if (!shares) { const pad = 0.06 * (high - low); high += pad; if (low !== 0) low -= pad; }
  const first = steps[0], last = Math.max(steps[steps.length - 1], first + 1);
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => top + (high - value) / (high - low) * (height - top - bottom);
  for (const tick of ticks(low, high, 4)) {
    make(svg, "svg:line", {class: "grid-line", x1: left, x2: width - right, y1: y(tick), y2: y(tick)});
    make(svg, "svg:text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, short(tick));
  }
  for (const tick of ticks(first, last, 6).filter(Number.isInteger))
    make(svg, "svg:text", {x: x(tick), y: height - 6, "text-anchor": "middle"}, tick);
  if (reference) make(svg, "svg:line", {class: "reference", x1: left, x2: width - right, y1: y(reference.value), y2: y(reference.value)});
  lines.forEach((line, i) => {
    const color = PALETTE[i % PALETTE.length];
    make(svg, "svg:polyline", {class: "series", stroke: color, points: line.points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ")});
    if (line.points.length <= 30)
      for (const p of line.points) make(svg, "svg:circle", {cx: x(p[0]), cy: y(p[1]), r: 2.4, fill: color});
  });
  const legend = make(box, "div", {class: "legend"});
  if (lines.length > 1)
    lines.forEach((line, i) => {
      const entry = make(legend, "span");
      make(entry, "i", {style: `background:${PALETTE[i % PALETTE.length]}`});
      entry.append(line.name);
    });
  if (reference) make(legend, "span", {}, `dashed: ${reference.name} ${short(reference.value)}`);
  const cursor = make(svg, "svg:line", {class: "cursor", y1: top, y2: height - bottom});
  const tables = lines.map(line => new Map(line.points));
  svg.addEventListener("mousemove", event => {
    const frame = svg.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width * width;
    const step = steps.reduce((best, s) => Math.abs(x(s) - at) < Math.abs(x(best) - at) ? s : best, steps[0]);
    cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step)); cursor.style.visibility = "visible";
    const rows = lines.map((line, i) => tables[i].has(step) ? `${line.name}: ${short(tables[i].get(step))}` : null).filter(Boolean);
    showTip(event, [`step ${step}`, ...rows].join("\n"));
  });
  svg.addEventListener("mouseleave", () => { cursor.style.visibility = "hidden"; hideTip(); });
  return box;
}

// trace: {rows: [{row, spans: [[name, category, start, seconds, detail]]}]}
function timelinePlot(parent, trace, colours) {
  parent.replaceChildren();
  const width = 1140, left = 96, right = 12, lane = 26, bottom = 26;
  const height = trace.rows.length * lane + bottom;
  const svg = make(parent, "svg:svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `timeline of step ${trace.step}`});
  const end = Math.max(1e-9, ...trace.rows.flatMap(row => row.spans.map(s => s[2] + s[3])));
  const x = seconds => left + Math.max(0, seconds) / end * (width - left - right);
  for (const tick of ticks(0, end, 8)) {
    make(svg, "svg:line", {class: "grid-line", x1: x(tick), x2: x(tick), y1: 0, y2: height - bottom});
    make(svg, "svg:text", {x: x(tick), y: height - 8, "text-anchor": "middle"}, `${short(tick)} s`);
  }
  const used = new Set();
  trace.rows.forEach((row, index) => {
    make(svg, "svg:text", {class: "row-name", x: left - 8, y: index * lane + 17, "text-anchor": "end"}, row.row);
    const ordered = [...row.spans].sort((a, b) => (a[1] === "work") - (b[1] === "work"));
    for (const [name, category, start, seconds, detail] of ordered) {
      const bubble = category !== "work";
      const bar = make(svg, "svg:rect", {
        class: bubble ? "bubble" : "span", x: x(start), y: index * lane + (bubble ? 9 : 4),
        width: Math.max(1, x(start + seconds) - x(start)), height: bubble ? 8 : lane - 8, rx: 2,
      });
      if (!bubble) { used.add(name); bar.setAttribute("fill", colours[name] || colours[""]); }
      const text = [name, detail, `${short(start)} s + ${short(seconds)} s`].filter(Boolean).join("\n");
      bar.addEventListener("mousemove", event => showTip(event, text));
      bar.addEventListener("mouseleave", hideTip);
    }
  });
  const legend = make(parent, "div", {class: "legend"});
  for (const name of used) {
    const entry = make(legend, "span");
    make(entry, "i", {style: `background:${colours[name] || colours[""]}`});
    entry.append(name);
  }
  const entry = make(legend, "span");
  make(entry, "i", {style: "background:var(--line)"});
  entry.append("a device without work (point at it for the cause)");
}
