// "Use all GPUs", the same for VAEs too, and "Use one GPU": in a loader's menu, the canvas' and the workflow's menu, and as commands.
import { app } from "../../../scripts/app.js";
import { allNodes, nodesIn, takers } from "./connections.js";
import { LOADERS, OURS } from "./loader_table.js";
import { showNotice } from "./notice.js";
import { obstacles, refusedNodes } from "./obstacles.js";
import { PARALLEL, canMove, directLinks, isLoader, moveVae } from "./parallel_vaes.js";
import { counterpart, fileOf, replaceLoaders } from "./replace_loaders.js";
import { say } from "./said.js";

// Which loaders change, as [node, type that takes its place], and what is said of those that do not.
// only: whether a node is meant; null for all whose MODEL is used.
export async function judgeLoaders(toOurs, only = null) {
  const refused = await refusedNodes();
  const [chosen, stays] = [[], []];
  for (const node of allNodes()) {
    const type = counterpart(node, toOurs);
    if (type === undefined || (only && !only(node))) continue;
    if (toOurs && !only && !takers(node, 0).length) continue;
    const reasons = toOurs ? whyNot(node, refused) : type ? [] : [say("noWayBack")];
    if (reasons.length) stays.push(...reasons.map((reason) => `${node.getTitle()} (${fileOf(node)}): ${reason}`));
    else chosen.push([node, type]);
  }
  return { chosen, stays };
}

function whyNot(node, refused) {
  const { ours, widgets } = LOADERS[node.type];
  const name = fileOf(node);
  // A file that is not there yet is offered for download by ours as by theirs.
  const unread = offers(node.type, widgets[0], name) && !offers(ours, OURS[ours].widgets[0], name);
  const found = obstacles(node, refused).map(([each, why]) => `${each.getTitle()}: ${why}`);
  return unread ? [say("notRead"), ...found] : found;
}

// Whether a type's list has it, as the server gave that; a type that is not installed has none.
function offers(type, widget, file) {
  const [kind, options] = LiteGraph.registered_node_types[type]?.nodeData.input.required[widget] ?? [[]];
  return (Array.isArray(kind) ? kind : options?.options)?.includes(file);
}

// vaes: whether VAEs of loaders go to all GPUs as well; all come back where all loaders do.
export async function convert(toOurs, only = null, vaes = false) {
  const meant = (node) => (vaes ? isLoader(node) : !toOurs && !only && node.type === PARALLEL);
  const vaesToMove = () => allNodes().filter((node) => meant(node) && canMove(node));
  const moved = vaesToMove().length;
  const { chosen, stays } = await judgeLoaders(toOurs, only);
  const title = say(vaes ? "useAllVae" : toOurs ? "useAll" : "useOne");
  const { dialog, toast } = app.extensionManager;
  const some = chosen.length + moved > 0;
  if (stays.length) {
    const message = say((toOurs ? "stays" : "keeps") + (some ? "Some" : "All"));
    const agreed = await dialog.confirm({ title, message, itemList: stays, type: some ? "default" : "info" });
    if (!agreed || !some) return;
  } else if (!some) {
    const detail = say(toOurs ? "nothingToDo" : "nothingBack");
    toast.add({ severity: "info", summary: title, detail, life: 5000 });
    return;
  }
  await inOneStep(async (tracker) => {
    await showInstead(tracker, replaceLoaders(chosen));
    vaesToMove().forEach(moveVae);
  });
  // Not as a toast, which would cover what ComfyUI says of files that are missing.
  const text = say(vaes ? "movedVae" : toOurs ? "moved" : "movedBack", { count: chosen.length, vaes: moved });
  showNotice("success", title, text);
}

// One step to undo.
async function inOneStep(change) {
  const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
  const note = () => (tracker.captureCanvasState ?? tracker.checkState).call(tracker);
  note();
  await change(tracker);
  note();
}

// As a redo of the frontend does it: the view and the pictures stay.
async function showInstead(tracker, workflow) {
  tracker.store();
  await tracker.updateState([workflow], tracker.undoQueue);
  tracker.restore();
  tracker.activeState = tracker.undoQueue.pop(); // what comes now is part of the step
}

const commands = [
  { id: "ParallelDiT.UseAllGpus", icon: "pi pi-microchip", label: "Use all GPUs", function: () => convert(true) },
  {
    id: "ParallelDiT.UseAllGpusVae", icon: "pi pi-microchip", label: "Use all GPUs, VAE too",
    function: () => convert(true, null, true),
  },
  { id: "ParallelDiT.UseOneGpu", icon: "pi pi-stop", label: "Use one GPU", function: () => convert(false) },
];

const menuEntry = (key, ...how) => ({ content: say(key), callback: () => convert(...how) });

function vaeEntries(node) {
  const parallel = node.type === PARALLEL;
  if (!parallel && (node.subgraph || !directLinks(node).length)) return [];
  return [{ content: say(parallel ? "vaeOnOne" : "vaeOnAll"), callback: () => inOneStep(() => moveVae(node)) }];
}

app.registerExtension({
  name: "ParallelDiT.UseAllGpus",
  commands,
  menuCommands: [{ path: ["Edit"], commands: commands.map((each) => each.id) }],
  getNodeMenuItems(node) {
    const inside = node.subgraph ? nodesIn(node.subgraph) : [node];
    const only = (each) => inside.includes(each);
    const holds = (types) => inside.some((each) => each.type in types);
    return [
      ...(holds(LOADERS) ? [menuEntry("useAll", true, only)] : []),
      ...(holds(OURS) ? [menuEntry("useOne", false, only)] : []),
      ...vaeEntries(node),
    ];
  },
  getCanvasMenuItems() {
    const withVaes = menuEntry("useAllVae", true, null, true);
    return [null, menuEntry("useAll", true), withVaes, menuEntry("useOne", false)];
  },
});
