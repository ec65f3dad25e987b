// Puts the run's data on the page. Text of the run is only ever set as text.

const run = JSON.parse(document.getElementById("run").textContent);
const byId = id => document.getElementById(id);
const metric = name => run.metrics[name] || [];
const setting = path => path.split(".").reduce((node, key) => node && node[key], (run.about || {}).settings);

function header() {
  const about = run.about;
  byId("title").textContent = about.project ? `${about.project} / ${about.experiment}` : run.folder;
  document.title = `${byId("title").textContent} – verl_digen`;
  const versions = Object.entries(about.versions || {}).map(([name, version]) => `${name} ${version}`);
  const parts = [about.started && `started ${about.started}`, `page of ${run.written}`, ...versions];
  byId("subtitle").textContent = parts.filter(Boolean).join(" · ");
  for (const figure of run.figures) {
    const card = make(byId("figures"), "div", {class: "figure"});
    make(card, "div", {class: "title"}, figure.title);
    make(card, "div", {class: "value"}, figure.value);
    make(card, "div", {class: "note"}, figure.note);
  }
}

function notes() {
  for (const text of run.findings) make(byId("findings"), "li", {}, text);
  byId("warnings").textContent = run.warnings.join("\n");
  for (const text of run.missing) make(byId("missing"), "li", {}, text);
  if (run.findings.length || run.warnings.length) byId("notes").classList.add("some");
  else make(byId("findings"), "li", {class: "quiet"}, "None.");
}

function slider(id, output, items, label, show) {
  const input = byId(id);
  input.max = Math.max(0, items.length - 1);
  const update = () => { const item = items[Number(input.value)]; byId(output).textContent = label(item); show(item); };
  input.addEventListener("input", update);
  input.value = input.max;
  update();
}

function samples() {
  if (!run.grids.length) { byId("samples").remove(); return; }
  slider("grid-slider", "grid-step", run.grids, grid => `step ${grid.step}`, grid => { byId("grid").src = grid.src; });
}

function timelines() {
  if (!run.traces.length) { byId("timeline").remove(); return; }
  slider("trace-slider", "trace-step", run.traces, trace => `step ${trace.step}`,
    trace => timelinePlot(byId("timeline-plot"), trace, run.colours));
}

function chart(title, about, names, reference) {
  const lines = names.map(([name, label]) => ({name: label || name, points: metric(name)})).filter(line => line.points.length);
  if (lines.length) lineChart(byId("charts"), title, about, lines, reference);
}

function matching(pattern, label) {
  return Object.keys(run.metrics).filter(name => pattern.test(name)).map(name => [name, name.replace(pattern, label)]);
}

function quality() {
  const groups = new Map();
  for (const item of run.quality) {
    const group = item.metric + "/" + item.key.split("_")[0];
    groups.set(group, [...(groups.get(group) || []), item]);
  }
  for (const items of groups.values()) {
    const [first] = items, name = items.length > 1 ? first.key.split("_")[0] : first.key;
    const reference = first.real === null ? null : {value: first.real, name: "real digits"};
    lineChart(byId("charts"), `${name} (${first.metric})`, "validation metric: nothing is trained on it",
      items.map(item => ({name: item.key, points: item.points})), reference);
  }
}

function curves() {
  const clip = setting("actor_rollout_ref.actor.clip_ratio");
  chart("Reward", "of the training samples, with SDE noise", [["reward/mean", "mean"], ["reward/group_std_mean", "std in a group"]]);
  chart("Validation", "ODE samples with fixed noise", matching(/^val-core\/(.*)\/mean@\d+$/, "$1"));
  quality();
  chart("KL", "to the initial policy, before β", [["actor/kl", "KL"]]);
  chart("Change of the policy", "(log-prob − old)² / 2", [["actor/approx_kl", "approx KL"]]);
  chart("Clip fraction", "cells outside the clip range", [["actor/clip_high", "above"], ["actor/clip_low", "below"]]);
  chart("Gradient norm", "before clipping", [["actor/grad_norm", "gradient norm"]]);
  chart("Log-prob gap", "Trainer against rollout", [["actor/log_prob_gap_max", "largest"], ["actor/log_prob_gap_mean", "mean"]],
    clip && metric("actor/log_prob_gap_max").some(p => p[1] > 0.01 * clip) ? {value: clip, name: "clip range"} : null);
  chart("Learning rate", "", [["actor/lr", "lr"]]);
  chart("Step time, s", "what the driver waits for", [["timing_s/step", "step"], ["timing_s/gen", "generation"],
    ["timing_s/update_actor", "training"], ["timing_s/update_weights", "publish"]]);
  chart("Bubbles, device-seconds", "devices without work, by cause", matching(/^bubble\/(.*)_s$/, "$1").map(([n, l]) => [n, l.replaceAll("_", " ")]));
  chart("Utilisation", "share of the step in which a pool works", [["perf/utilisation_generator", "Generator"], ["perf/utilisation_trainer", "Trainer"]]);
  chart("Samples per second", "", [["perf/samples_per_s", "samples/s"]]);
  chart("Peak memory, GB", "", [["perf/peak_memory_trainer_gb", "Trainer"], ["perf/peak_memory_generator_gb", "Generator"]]);
  if (!byId("charts").children.length) byId("curves").remove();
}

function anyMetric() {
  const names = Object.keys(run.metrics);
  if (!names.length) { byId("any").remove(); return; }
  for (const name of names) make(byId("metric"), "option", {value: name}, name);
  const update = () => {
    byId("any-chart").replaceChildren();
    if (metric(byId("metric").value).length) lineChart(byId("any-chart"), byId("metric").value, "", [{name: byId("metric").value, points: metric(byId("metric").value)}], null);
  };
  byId("metric").addEventListener("input", update);
  update();
}

function table(id, rows) {
  byId(id).replaceChildren();
  for (const cells of rows) { const row = make(byId(id), "tr"); for (const cell of cells) make(row, "td", {}, cell); }
}

function flat(node, prefix) {
  if (node === null || typeof node !== "object" || Array.isArray(node) || !Object.keys(node).length)
    return [[prefix, typeof node === "string" ? node : JSON.stringify(node)]];
  return Object.entries(node).flatMap(([key, value]) => flat(value, prefix ? `${prefix}.${key}` : key));
}

function settings() {
  if (!run.about.settings) { byId("plan").remove(); byId("settings").remove(); return; }
  table("plan-table", run.about.plan);
  const all = flat(run.about.settings, "");
  const update = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = all.filter(row => words.every(word => row.join(" ").toLowerCase().includes(word)));
    byId("filter-count").textContent = `${shown.length} of ${all.length}`;
    table("settings-table", shown);
  };
  byId("filter").addEventListener("input", update);
  byId("filter").value = "trainer.v1.digen";
  update();
}

header(); notes(); samples(); curves(); timelines(); anyMetric(); settings();
for (const section of document.querySelectorAll("section")) make(byId("nav"), "a", {href: "#" + section.id}, section.querySelector("h2").textContent);
