// A status as DOM: devices with memory, models, the plan, seconds per step, the time line.
import { h } from "./elements.js";
import { inWords, readTable } from "../said.js";
import { bytes, seconds } from "./numbers.js";
import { planTable } from "./plan_table.js";
import { timeline } from "./timeline.js";
import { say as word } from "../words.js";

const OWNERS = { pool: "var(--pdit-ours)", comfyui: "var(--pdit-comfyui)", others: "var(--pdit-others)" };

function key(name, size, colour) {
  return h("span", { class: "pdit-key" }, h("i", { style: `background:${colour}` }), `${word(name)} ${bytes(size)}`);
}

// Whose memory is taken: a bar, and the same in words.
function memory(title, kind, parts, total, exact) {
  const owners = Object.entries(OWNERS);
  return h(
    "div",
    { class: "pdit-item" },
    h(
      "div",
      { class: "pdit-row" },
      h("span", { class: "pdit-name" }, title),
      h("span", { class: "pdit-small" }, `${kind}${word("of", { total: bytes(total) })}`),
    ),
    h(
      "div",
      {
        class: "pdit-memory", role: "img",
        "aria-label": owners.map(([name]) => `${word(name)} ${bytes(parts[name])}`).join(", "),
      },
      owners.map(([name, colour]) => h("span", { style: `width:${((100 * parts[name]) / total).toFixed(1)}%;background:${colour}` })),
    ),
    h("div", {}, owners.map(([name, colour]) => key(name, parts[name], colour))),
    exact ? null : h("p", { class: "pdit-small" }, word("inexact")),
  );
}

function gpu(each) {
  return memory(`GPU ${each.index}`, `${each.name}, `, each, each.total, each.exact);
}

function host(pool, taken) {
  const parts = { pool: pool.host_bytes, comfyui: taken.comfyui };
  parts.others = Math.max(taken.total - taken.available - parts.pool - parts.comfyui, 0);
  return memory(word("cpuRanks", { count: pool.ranks.length || pool.devices.length }), "", parts, taken.total, true);
}

function model(each, pool, act) {
  const button = (action) =>
    h(
      "button",
      {
        type: "button", title: word(`${action}Tip`), "aria-label": `${word(action)}: ${each.name}`,
        "data-key": `${action} ${pool.name} ${each.name}`, disabled: action === "park" && each.state === "parked",
        onclick: () => act(action, { pool: pool.name, model: each.name }),
      },
      word(action),
    );
  return h(
    "div",
    { class: "pdit-item" },
    h("div", { class: "pdit-row" }, h("span", { class: "pdit-name" }, each.name), h("span", { class: "pdit-chip" }, word(each.state))),
    h("p", { class: "pdit-small" }, `${each.dtype}, ${each.family}, ${word("each", { size: bytes(each.bytes_per_rank) })}`),
    h("div", { class: "pdit-bar" }, button("park"), button("unload")),
  );
}

function doing(pool) {
  if (!pool.doing) return null;
  const { what, done, total } = pool.doing;
  const far = !total ? "" : what === "weights" ? ` ${bytes(done)} / ${bytes(total)}` : ` ${done} / ${total}`;
  return what === "job" ? null : h("p", { role: "status" }, `${word(what === "start" ? "starting" : what)}${far}`);
}

function speed(run, details) {
  const rows = [];
  if (run?.step_seconds) rows.push([word("now"), word("measured", { seconds: seconds(run.step_seconds) })]);
  if (run?.one_gpu_seconds && run.speedup) rows.push([word("oneGpu"), word("measured", { seconds: seconds(run.one_gpu_seconds) })]);
  if (details?.step_seconds) rows.push([word("predicted"), seconds(details.step_seconds)]);
  if (details?.one_gpu_seconds && !run?.speedup) rows.push([`${word("oneGpu")}, ${word("predicted")}`, seconds(details.one_gpu_seconds)]);
  if (!rows.length) return null;
  const table = h("table", {}, h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value)))));
  return [table, run?.speedup ? h("p", {}, word("times", { factor: run.speedup.toFixed(2) })) : null];
}

// In English until the table is there, which is at once where it was asked for before.
function paragraph(said, attributes = {}) {
  const made = h("p", attributes, said[0]);
  readTable().then((table) => (made.textContent = inWords(said, table)));
  return made;
}

function poolView(pool, status, act) {
  const names = pool.kind === "cuda" ? pool.devices.map((number) => `GPU ${number}`) : pool.devices.map((number) => word("rank", { number }));
  return [
    h("div", { class: "pdit-row" }, h("span", { class: "pdit-name" }, pool.name), h("span", { class: "pdit-chip", role: "status" }, word(pool.state))),
    doing(pool),
    pool.error_said ? paragraph(pool.error_said, { role: "alert" }) : null,
    pool.kind === "cpu" ? host(pool, status.host) : null,
    h("h3", {}, word("models")),
    pool.models.length ? pool.models.map((each) => model(each, pool, act)) : h("p", { class: "pdit-small" }, word("noModel")),
    h("h3", {}, word("plan")),
    pool.details ? planTable(pool.details, names) : h("p", { class: "pdit-small" }, word("noRun")),
    pool.plan_said ? paragraph(pool.plan_said) : null,
  ];
}

export function view(status, act, width) {
  const run = status.runs[0];
  const measured = speed(run, run?.details);
  return [
    status.notes.map((each) => paragraph(each, { role: "note" })),
    status.gpus.length ? h("h3", {}, word("devices")) : null,
    status.gpus.map(gpu),
    status.pools.length ? status.pools.map((pool) => poolView(pool, status, act)) : h("p", {}, word("noPool")),
    measured ? [h("h3", {}, word("speed")), measured] : null,
    status.timeline.length ? [h("h3", {}, word("timeline")), timeline(status.timeline, width)] : null,
  ].flat(Infinity);
}
