// An error of ours, wherever it was raised: on the node at fault, and one sentence with a way to the log.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { allNodes } from "./connections.js";
import { h } from "./elements.js";
import { clearFaults, goTo, markFault, nodesOfPath, withOutside } from "./fault_marks.js";
import { OURS } from "./loader_table.js";
import { hideNotice, showNotice } from "./notice.js";
import { BYPASS, NEVER, obstacles, refusedNodes } from "./obstacles.js";
import { inWords, readTable, say, valuesOf } from "./said.js";

const REFUSED = "The workers cannot carry {what}."; // a sentence of the pack's own, as its code

let warned = []; // nodes that the warning on the page names
let failed = false; // the prompt, maybe before its warning was ready

// {node: why} of nodes that stand against the pool on the way of our loaders' MODELs.
async function knownObstacles() {
  const refused = await refusedNodes();
  const loaders = allNodes().filter(({ type, mode }) => type in OURS && mode !== NEVER && mode !== BYPASS);
  return new Map(loaders.flatMap((loader) => obstacles(loader, refused)));
}

// What an error says, with the artist's titles in the place of nodes and of what other packs made, and those nodes.
function inArtistsWords(data, table) {
  const named = (name, value) => {
    if (name === "node") return allNodes().filter((node) => [node.type, node.constructor.title].includes(value));
    // A function or class of another pack, which only its nodes that change a MODEL can have put there.
    const pack = value?.[2]?.pack;
    return pack ? allNodes().filter((node) => packOf(node) === pack) : [];
  };
  const text = inWords(data, table, (name, value) => {
    const [first] = named(name, value);
    return first ? `“${first.getTitle()}”` : null;
  });
  return { text, named: valuesOf(data).flatMap(([name, value]) => named(name, value)) };
}

// Of a node that changes a MODEL.
function packOf(node) {
  const changes = [node.inputs, node.outputs].every((slots) => slots.some((each) => each.type === "MODEL"));
  const [kind, pack] = String(node.constructor.nodeData?.python_module).split(".");
  return changes && kind === "custom_nodes" ? pack : null;
}

// What an error was made of: [text, sentence, values].
async function madeOf(text) {
  const options = { method: "POST", body: JSON.stringify({ text }) };
  const answer = await api.fetchApi("/parallel_dit/error", options).catch(() => null); // the server has gone
  return answer?.ok ? answer.json() : [text, text, {}];
}

async function showError({ node_id, exception_type, exception_message }) {
  if (!String(exception_type).startsWith("parallel_runtime.errors.")) return;
  const data = await madeOf(String(exception_message ?? "").trim());
  const { text, named } = inArtistsWords(data, await readTable());
  const refused = data[1] === REFUSED || valuesOf(data).some(([, value]) => value?.[1] === REFUSED);
  const guilty = named.length || !refused ? named : [...(await knownObstacles()).keys()];
  const places = guilty.map(withOutside);
  if (!places.length) places.push(nodesOfPath(node_id));
  failed = true;
  // What was foreseen is said once, by the error.
  if (places.some((nodes) => warned.includes(nodes.at(-1)))) hideNotice("warning");
  clearFaults();
  places.forEach((nodes) => markFault(nodes, text));
  const node = places[0].at(-1);
  const title = `${say("error")}: ${node ? node.title : node_id}`;
  const buttons = [{ text: say("showLog"), press: showLog }];
  if (node) buttons.push({ text: say("goTo"), press: () => goTo(node) });
  showNotice("error", title, text, buttons);
}

async function showLog(box) {
  const answer = await api.fetchApi("/parallel_dit/log");
  const text = answer.ok ? (await answer.json()).text : "";
  const shown = box.querySelector("pre") ?? box.insertBefore(h("pre"), box.querySelector("button"));
  shown.textContent = text || say("noLog");
  shown.scrollTop = shown.scrollHeight;
}

async function warnOfObstacles() {
  const found = await knownObstacles();
  if (!found.size || failed) return;
  const lines = [...found].map(([node, why]) => say("obstacleOf", { node: node.getTitle(), why }));
  warned = [...found.keys()];
  found.forEach((why, node) => markFault(withOutside(node), why));
  const text = `${lines.join(" ")} ${say("obstacleFix")}`;
  showNotice("warning", say("obstacle"), text, [{ text: say("goTo"), press: () => goTo(warned[0]) }]);
}

app.registerExtension({
  name: "ParallelDiT.Errors",
  setup() {
    api.addEventListener("execution_error", ({ detail }) => showError(detail));
    const { queuePrompt } = api;
    api.queuePrompt = function (...values) {
      for (const kind of ["error", "warning"]) hideNotice(kind);
      clearFaults();
      [warned, failed] = [[], false];
      warnOfObstacles();
      return queuePrompt.apply(this, values);
    };
  },
});
