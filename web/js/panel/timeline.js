// The time line of the last prompt: what took how long, and what is left for ComfyUI's other nodes.
import { bar } from "../elements.js";
import { seconds } from "./numbers.js";
import { say } from "../said.js";

const COLOURS = {
  starting: "#c77d3a", load: "#8a6fc9", weights: "#b05cab", measuring: "#5f8f9e", compile: "#c9a227",
  step: "var(--pdit-ours)", rest: "var(--pdit-rest)",
};
const colourOf = (what) => COLOURS[what] ?? "#888"; // that of all waits

// Parts in order, gaps between them as "rest"; neighbours of a kind are one.
function parts(spans) {
  const joined = [];
  let until = spans[0].begin;
  const add = (what, begin, end) => {
    const last = joined.at(-1);
    if (last?.what === what) last.end = end;
    else if (end > begin) joined.push({ what, begin, end });
  };
  for (const span of spans) {
    const what = span.what === "start" ? "starting" : span.what;
    if (span.begin - until > 0.05) add("rest", until, span.begin);
    add(what, Math.max(span.begin, until), span.end);
    until = Math.max(until, span.end);
  }
  return joined;
}

export function timeline(spans) {
  const found = parts(spans);
  if (!found.length) return null;
  const all = Math.max(found.at(-1).end - found[0].begin, 1e-3);
  const totals = {};
  for (const { what, begin, end } of found) totals[what] = (totals[what] ?? 0) + end - begin;
  return bar(
    "pdit-timeline",
    found.map(({ what, begin, end }) => [colourOf(what), (end - begin) / all, `${say(what)}: ${seconds(end - begin)}`]),
    Object.entries(totals).map(([what, took]) => [colourOf(what), `${say(what)} ${seconds(took)}`]),
  );
}
