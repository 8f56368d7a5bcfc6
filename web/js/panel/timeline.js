// The time line of the last prompt: what took how long, and what is left for ComfyUI's other nodes.
import { h } from "./elements.js";
import { seconds } from "./numbers.js";
import { say as word } from "../words.js";

const COLOURS = {
  starting: "#c77d3a", load: "#8a6fc9", weights: "#b05cab", measuring: "#5f8f9e", compile: "#c9a227",
  step: "var(--pdit-ours)", turn: "#888", cancelled: "#888", pause: "#888", rest: "var(--pdit-rest)",
};

// Parts in order, gaps between them as "rest"; neighbours of a kind are one.
export function parts(spans) {
  const joined = [];
  let until = spans.length ? spans[0].begin : 0;
  const add = (what, begin, end) => {
    const last = joined.at(-1);
    if (last?.what === what) Object.assign(last, { end, count: last.count + 1 });
    else if (end > begin) joined.push({ what, begin, end, count: 1 });
  };
  for (const span of spans) {
    const what = span.what === "start" ? "starting" : span.what;
    if (span.begin - until > 0.05) add("rest", until, span.begin);
    add(what, Math.max(span.begin, until), span.end);
    until = Math.max(until, span.end);
  }
  return joined;
}

export function timeline(spans, width) {
  const found = parts(spans);
  if (!found.length) return null;
  const [begin, end] = [found[0].begin, found.at(-1).end];
  const scale = width / Math.max(end - begin, 1e-3);
  const totals = {};
  for (const part of found) totals[part.what] = (totals[part.what] ?? 0) + part.end - part.begin;
  const label = Object.entries(totals).map(([what, took]) => `${word(what)} ${seconds(took)}`);
  const bar = h(
    "svg",
    { width, height: 18, role: "img", "aria-label": label.join(", ") },
    found.map((part) =>
      h(
        "rect",
        {
          x: (part.begin - begin) * scale, y: 0, width: Math.max((part.end - part.begin) * scale, 1), height: 18,
          fill: COLOURS[part.what] ?? "#888",
        },
        h("title", {}, `${word(part.what)}: ${seconds(part.end - part.begin)}`),
      ),
    ),
  );
  const keys = Object.entries(totals).map(([what, took]) =>
    h("span", { class: "pdit-key" }, h("i", { style: `background:${COLOURS[what] ?? "#888"}` }), `${word(what)} ${seconds(took)}`),
  );
  return h("div", {}, bar, h("p", {}, keys));
}
