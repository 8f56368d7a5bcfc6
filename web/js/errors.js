// An error of ours, wherever it was raised: on the node at fault, and one sentence with a way to the log.
import { api } from "../../../scripts/api.js";
import { app } from "../../../scripts/app.js";
import { clearFaults, goTo, markFault, nodesOfPath, withOutside } from "./fault_marks.js";
import { OURS } from "./loader_table.js";
import { defaultTitle, titleOf } from "./node_names.js";
import { hideNotice, showNotice } from "./notice.js";
import { obstacles } from "./obstacles.js";
import { refusedNodes } from "./refused_nodes.js";
import { sentences } from "./sentences.js";
import { say } from "./words.js";
import { Connections } from "./workflow_graphs.js";

const NEVER = 2;
const BYPASS = 4;
const REFUSED = "The pool cannot carry";

let warned = []; // nodes that the warning on the page names
let failed = false; // the prompt, maybe before its warning was ready

// [{graph, node, why}] of nodes that stand against the pool on the way of our loaders' MODELs.
export async function knownObstacles(workflow) {
  const refused = await refusedNodes();
  const connections = new Connections(workflow);
  const found = new Map();
  for (const graph of connections.graphs)
    for (const loader of graph.nodes) {
      if (!OURS[loader.type] || loader.mode === NEVER || loader.mode === BYPASS) continue;
      for (const each of obstacles(connections, graph, loader, refused)) found.set(each.node, each);
    }
  return [...found.values()].map((each) => ({ ...each, graph: graphOf(connections, each.node) }));
}

const graphOf = (connections, node) => connections.graphs.find((graph) => graph.nodes.includes(node));

// What an error says, with the artist's titles in the place of types, and the nodes that it speaks of.
export function inArtistsWords(message, workflow) {
  const connections = new Connections(workflow);
  const named = [];
  const cause = message.split(". ")[0]; // what follows says what to do, and may name other nodes
  let text = message.trim();
  for (const graph of connections.graphs)
    for (const node of graph.nodes) {
      const ours = node.type in OURS || node.type.startsWith("Parallel");
      const pack = packOf(node);
      if (pack && hasWord(cause, `of ${pack}`)) {
        // A function or class of another pack, which only its nodes that change a MODEL can have put there.
        named.push({ graph, node });
        text = text.replace(new RegExp(`\\w+ of ${pack}\\b`), `“${titleOf(node)}”`);
        continue;
      }
      const name = ours ? defaultTitle(node.type) : node.type;
      if (!hasWord(message, name)) continue;
      if (!ours && hasWord(cause, name)) named.push({ graph, node });
      if (titleOf(node) !== name) text = text.replace(wordOf(name), `“${titleOf(node)}”`);
    }
  return { text, named };
}

// Of a node that changes a MODEL.
function packOf(node) {
  const changes = [node.inputs, node.outputs].every((slots) => slots?.some((each) => each.type === "MODEL"));
  const [kind, pack] = String(LiteGraph.registered_node_types[node.type]?.nodeData?.python_module).split(".");
  return changes && kind === "custom_nodes" ? pack : null;
}

const wordOf = (name) => new RegExp(`(?<![\\w“])${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}(?![\\w”])`, "g");
const hasWord = (text, name) => name.length > 3 && wordOf(name).test(text);

async function showError({ node_id, exception_type, exception_message }) {
  if (!String(exception_type).startsWith("parallel_runtime.errors.")) return;
  const workflow = app.rootGraph.serialize();
  const { text: english, named } = inArtistsWords(exception_message ?? "", workflow);
  const text = await sentences(english);
  const guilty = named.length || !exception_message?.startsWith(REFUSED) ? named : await knownObstacles(workflow);
  const places = guilty.map(({ graph, node }) => withOutside(graph.id ?? app.rootGraph.id, node.id));
  if (!places.length) places.push(nodesOfPath(node_id));
  failed = true;
  // What was foreseen is said once, by the error.
  if (places.some((nodes) => warned.includes(nodes.at(-1)))) hideNotice("warning");
  clearFaults();
  places.forEach((nodes) => markFault(nodes, text));
  const node = places[0].at(-1);
  const title = `${say("error")}: ${node ? node.title : node_id}`;
  const buttons = [{ text: say("showLog"), press: showLog }];
  if (node) buttons.push({ text: say("goTo"), press: () => goTo(places[0]) });
  showNotice("error", title, text, buttons);
}

async function showLog(box) {
  const answer = await api.fetchApi("/parallel_dit/log");
  const text = answer.ok ? (await answer.json()).text : "";
  const shown = box.querySelector("pre") ?? box.insertBefore(document.createElement("pre"), box.querySelector("button"));
  shown.textContent = text || say("noLog");
  shown.scrollTop = shown.scrollHeight;
}

async function warnOfObstacles() {
  const workflow = app.rootGraph.serialize();
  const found = await knownObstacles(workflow);
  if (!found.length || failed) return;
  const lines = found.map(({ node, why }) => say("obstacleOf", { node: titleOf(node), why }));
  const places = found.map(({ graph, node }) => withOutside(graph.id ?? app.rootGraph.id, node.id));
  warned = places.map((nodes) => nodes.at(-1));
  places.forEach((nodes, index) => markFault(nodes, found[index].why));
  const text = `${lines.join(" ")} ${say("obstacleFix")}`;
  showNotice("warning", say("obstacle"), text, [{ text: say("goTo"), press: () => goTo(places[0]) }]);
}

// Calls it before a prompt goes to the server, which the frontend of ComfyUI 0.8.0 does not announce.
function beforeQueueing(act) {
  let announced = false;
  api.addEventListener("promptQueueing", () => {
    announced = true;
    act();
  });
  const { queuePrompt } = api;
  api.queuePrompt = function (...values) {
    if (!announced) act();
    return queuePrompt.apply(this, values);
  };
}

app.registerExtension({
  name: "ParallelDiT.Errors",
  setup() {
    api.addEventListener("execution_error", ({ detail }) => showError(detail));
    beforeQueueing(() => {
      for (const kind of ["error", "warning"]) hideNotice(kind);
      clearFaults();
      [warned, failed] = [[], false];
      warnOfObstacles();
    });
  },
});
