// A status as DOM: devices with memory, models, the plan, seconds per step, the time line.
import { bar, h, table } from "../elements.js";
import { inWords, readTable, say } from "../said.js";
import { bytes, seconds } from "./numbers.js";
import { planTable } from "./plan_table.js";
import { timeline } from "./timeline.js";

const OWNERS = { pool: "var(--pdit-ours)", comfyui: "var(--pdit-comfyui)", others: "var(--pdit-others)" };

const heading = (key) => h("h3", {}, say(key));
const small = (text) => h("p", { class: "pdit-small" }, text);
const chip = (key, attributes = {}) => h("span", { class: "pdit-chip", ...attributes }, say(key));
const row = (name, right) => h("div", { class: "pdit-row" }, h("span", { class: "pdit-name" }, name), right);

// Whose memory is taken: a bar, and the same in words.
function memory(title, kind, taken, total, exact) {
  const owners = Object.entries(OWNERS);
  return h(
    "div",
    { class: "pdit-item" },
    row(title, h("span", { class: "pdit-small" }, `${kind}${say("of", { total: bytes(total) })}`)),
    bar(
      "pdit-memory",
      owners.map(([name, colour]) => [colour, taken[name] / total]),
      owners.map(([name, colour]) => [colour, `${say(name)} ${bytes(taken[name])}`]),
    ),
    exact ? null : small(say("inexact")),
  );
}

const gpu = (each) => memory(`GPU ${each.index}`, `${each.name}, `, each, each.total, each.exact);

function host(pool, { total, available, comfyui }) {
  const others = Math.max(total - available - pool.host_bytes - comfyui, 0);
  const title = say("cpuRanks", { count: pool.ranks.length || pool.devices.length });
  return memory(title, "", { pool: pool.host_bytes, comfyui, others }, total, true);
}

function model(each, pool, act) {
  const button = (action) =>
    h(
      "button",
      {
        title: say(`${action}Tip`), "aria-label": `${say(action)}: ${each.name}`,
        "data-key": `${action} ${pool.name} ${each.name}`, disabled: action === "park" && each.state === "parked",
        onclick: () => act(action, { pool: pool.name, model: each.name }),
      },
      say(action),
    );
  return h(
    "div",
    { class: "pdit-item" },
    row(each.name, chip(each.state)),
    small(`${each.dtype}, ${each.family}, ${say("each", { size: bytes(each.bytes_per_rank) })}`),
    h("div", { class: "pdit-bar" }, button("park"), button("unload")),
  );
}

function doing({ what, done, total }) {
  const far = !total ? "" : what === "weights" ? ` ${bytes(done)} / ${bytes(total)}` : ` ${done} / ${total}`;
  return what === "job" ? null : h("p", { role: "status" }, `${say(what === "start" ? "starting" : what)}${far}`);
}

function speed({ step_seconds, one_gpu_seconds, speedup, details }) {
  const measured = (count) => say("measured", { seconds: seconds(count) });
  const rows = [];
  if (step_seconds) rows.push([say("now"), measured(step_seconds)]);
  if (one_gpu_seconds && speedup) rows.push([say("oneGpu"), measured(one_gpu_seconds)]);
  if (details?.step_seconds) rows.push([say("predicted"), seconds(details.step_seconds)]);
  if (details?.one_gpu_seconds && !speedup)
    rows.push([`${say("oneGpu")}, ${say("predicted")}`, seconds(details.one_gpu_seconds)]);
  if (!rows.length) return null;
  return [heading("speed"), table(rows), speedup ? h("p", {}, say("times", { factor: speedup.toFixed(2) })) : null];
}

// In English until the table is there, which is at once where it was asked for before.
function paragraph(said, attributes = {}) {
  const made = h("p", attributes, said[0]);
  readTable().then((words) => (made.textContent = inWords(said, words)));
  return made;
}

function poolView(pool, status, act) {
  const named = (number) => (pool.kind === "cuda" ? `GPU ${number}` : say("rank", { number }));
  return [
    row(pool.name, chip(pool.state, { role: "status" })),
    pool.doing ? doing(pool.doing) : null,
    pool.error_said ? paragraph(pool.error_said, { role: "alert" }) : null,
    pool.kind === "cpu" ? host(pool, status.host) : null,
    heading("models"),
    pool.models.length ? pool.models.map((each) => model(each, pool, act)) : small(say("noModel")),
    heading("plan"),
    pool.details ? planTable(pool.details, pool.devices.map(named)) : small(say("noRun")),
    pool.plan_said ? paragraph(pool.plan_said) : null,
  ];
}

export function view(status, act) {
  const [run] = status.runs;
  return [
    status.notes.map((each) => paragraph(each, { role: "note" })),
    status.gpus.length ? heading("devices") : null,
    status.gpus.map(gpu),
    status.pools.length ? status.pools.map((pool) => poolView(pool, status, act)) : h("p", {}, say("noPool")),
    run ? speed(run) : null,
    status.timeline.length ? [heading("timeline"), timeline(status.timeline)] : null,
  ];
}
