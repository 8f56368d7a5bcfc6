// "Use all GPUs", the same for VAEs too, and "Use one GPU": in a loader's menu, the canvas' and the workflow's menu, and as commands.
import { app } from "../../../scripts/app.js";
import { LOADERS, OURS } from "./loader_table.js";
import { choicesOf, defaultTitle, titleOf } from "./node_names.js";
import { showNotice } from "./notice.js";
import { isUsed, obstacles, refusedNodes } from "./obstacles.js";
import { counterpart, fileOf, replaceLoaders } from "./replace_loaders.js";
import { say } from "./words.js";
import { Connections } from "./workflow_graphs.js";
import { PARALLEL, putBehindLoaders, takeAllAway, vaeSlot } from "./workflow_vaes.js";

// Which loaders of a saved workflow change, and what is said of those that do not.
// only: whether (graph, node) is meant; null for all whose MODEL is used.
export async function judgeLoaders(workflow, toOurs, only = null) {
  const refused = await refusedNodes();
  const connections = new Connections(workflow);
  const [chosen, stays] = [[], []];
  for (const graph of connections.graphs)
    for (const node of graph.nodes) {
      const type = counterpart(node, toOurs);
      if (type === undefined || (only && !only(graph, node))) continue;
      if (toOurs && !only && !isUsed(connections, graph, node)) continue;
      const reasons = toOurs ? whyNot(connections, graph, node, refused) : type ? [] : [say("noWayBack")];
      if (reasons.length) stays.push(...reasons.map((reason) => `${titleOf(node)} (${fileOf(node)}): ${reason}`));
      else chosen.push({ graph, node });
    }
  return { chosen, stays };
}

function whyNot(connections, graph, node, refused) {
  const { ours, widgets } = LOADERS[node.type];
  const name = fileOf(node);
  // A file that is not there yet is offered for download by ours as by theirs.
  const unread = choicesOf(node.type, widgets[0])?.includes(name) && !choicesOf(ours, OURS[ours].widgets[0])?.includes(name);
  const found = obstacles(connections, graph, node, refused).map((each) => `${titleOf(each.node)}: ${each.why}`);
  return unread ? [say("notRead"), ...found] : found;
}

const SECONDS_SHOWN = 5;

// vaes: whether VAEs of loaders go to all GPUs as well; all come back where all loaders do.
export async function convert(toOurs, only = null, vaes = false) {
  const workflow = app.rootGraph.serialize();
  const moveVaes = vaes ? putBehindLoaders : toOurs || only ? () => 0 : takeAllAway;
  const { chosen, stays } = await judgeLoaders(workflow, toOurs, only);
  const title = say(vaes ? "useAllVae" : toOurs ? "useAll" : "useOne");
  const toast = (severity, detail) =>
    app.extensionManager.toast.add({ severity, summary: title, detail, life: 5000 });
  const ask = (message, itemList, type = "default") =>
    app.extensionManager.dialog.confirm({ title, message, itemList, type });
  const moved = moveVaes(structuredClone(workflow));
  const some = chosen.length + moved > 0;
  if (!some && !stays.length) return toast("info", say(toOurs ? "nothingToDo" : "nothingBack"));
  if (stays.length) {
    const message = say((toOurs ? "stays" : "keeps") + (some ? "Some" : "All"));
    if (!(await ask(message, stays, some ? "default" : "info")) || !some) return;
  }
  replaceLoaders(workflow, chosen, toOurs, defaultTitle);
  moveVaes(workflow);
  await showInstead(workflow);
  // Not as a toast, which would cover what ComfyUI says of files that are missing.
  const text = say(vaes ? "movedVae" : toOurs ? "moved" : "movedBack", { count: chosen.length, vaes: moved });
  showNotice("success", title, text, [], SECONDS_SHOWN);
}

// As a redo of the frontend does it, so that it is one step to undo; the view and the pictures stay.
async function showInstead(workflow) {
  const active = app.extensionManager.workflow?.activeWorkflow;
  const tracker = active?.changeTracker;
  if (!tracker?.updateState) return app.loadGraphData(workflow, false, false, active);
  (tracker.captureCanvasState ?? tracker.checkState).call(tracker);
  tracker.store();
  await tracker.updateState([workflow], tracker.undoQueue);
  tracker.redoQueue.length = 0;
  tracker.restore();
  // What the nodes add to themselves when they are made is part of this step.
  tracker.activeState = structuredClone(app.rootGraph.serialize());
}

const commands = [
  { id: "ParallelDiT.UseAllGpus", icon: "pi pi-microchip", label: "Use all GPUs", function: () => convert(true) },
  {
    id: "ParallelDiT.UseAllGpusVae", icon: "pi pi-microchip", label: "Use all GPUs, VAE too",
    function: () => convert(true, null, true),
  },
  { id: "ParallelDiT.UseOneGpu", icon: "pi pi-stop", label: "Use one GPU", function: () => convert(false) },
];

// A subgraph and those inside of it, by their ids.
function nestedIn(subgraph, found = new Map()) {
  if (found.has(subgraph.id)) return found;
  found.set(subgraph.id, subgraph);
  for (const node of subgraph.nodes) if (node.isSubgraphNode?.()) nestedIn(node.subgraph, found);
  return found;
}

const menuEntry = (toOurs, only) => ({
  content: say(toOurs ? "useAll" : "useOne"),
  callback: () => convert(toOurs, only),
});

// One VAE goes to all GPUs, or comes back.
async function moveVae(move, only) {
  const workflow = app.rootGraph.serialize();
  move(workflow, only);
  await showInstead(workflow);
}

function vaeEntries(node, only) {
  if (node.type === PARALLEL) return [{ content: say("vaeOnOne"), callback: () => moveVae(takeAllAway, only) }];
  if (vaeSlot(node) < 0 || node.isSubgraphNode?.()) return [];
  const direct = node.getOutputNodes(vaeSlot(node))?.some((taker) => taker.type !== PARALLEL);
  return direct ? [{ content: say("vaeOnAll"), callback: () => moveVae(putBehindLoaders, only) }] : [];
}

app.registerExtension({
  name: "ParallelDiT.UseAllGpus",
  commands,
  menuCommands: [{ path: ["Edit"], commands: commands.map((each) => each.id) }],
  getNodeMenuItems(node) {
    const one = (graph, each) => graph.id === node.graph.id && String(each.id) === String(node.id);
    const vaes = vaeEntries(node, one);
    if (node.type in LOADERS) return [menuEntry(true, one), ...vaes];
    if (node.type in OURS) return [menuEntry(false, one), ...vaes];
    if (!node.isSubgraphNode?.()) return vaes;
    const inside = nestedIn(node.subgraph);
    const holds = (types) => [...inside.values()].some((graph) => graph.nodes.some((each) => each.type in types));
    const within = (graph) => inside.has(graph.id);
    return [...(holds(LOADERS) ? [menuEntry(true, within)] : []), ...(holds(OURS) ? [menuEntry(false, within)] : [])];
  },
  getCanvasMenuItems() {
    const withVaes = { content: say("useAllVae"), callback: () => convert(true, null, true) };
    return [null, menuEntry(true), withVaes, menuEntry(false)];
  },
});
