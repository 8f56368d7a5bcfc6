// Sentences of the canvas side in the artist's language.
import { app } from "../../../scripts/app.js";

const WORDS = {
  en: {
    useAll: "Use all GPUs",
    useOne: "Use one GPU",
    nothingToDo: "No loader here whose place ours could take.",
    nothingBack: "No loader of Parallel DiT here.",
    staysSome: "These stay on one GPU; the others move to all GPUs:",
    staysAll: "All of these stay on one GPU:",
    keepsSome: "These stay as they are; the others move to one GPU:",
    keepsAll: "All of these stay as they are:",
    notRead: "Parallel Loader does not read this file",
    noWayBack: "no single loader of ComfyUI gives all that is connected",
    moved: "Loaders on all GPUs now: {count}. Ctrl+Z undoes it.",
    movedBack: "Loaders on one GPU now: {count}. Ctrl+Z undoes it.",
    obstacle: "Will not run on all GPUs",
    obstacleFix: "Take it out, or choose Use one GPU in the menu of the loader.",
    showLog: "Show log",
    goTo: "Go to node",
    close: "Close",
    noLog: "No pool has written a log yet.",
    error: "Parallel DiT",
  },
  zh: {
    useAll: "使用所有 GPU",
    useOne: "使用一个 GPU",
    nothingToDo: "这里没有可以替换的加载器。",
    nothingBack: "这里没有 Parallel DiT 的加载器。",
    staysSome: "以下仍在一个 GPU 上，其余的改用所有 GPU：",
    staysAll: "以下全部仍在一个 GPU 上：",
    keepsSome: "以下保持不变，其余的改用一个 GPU：",
    keepsAll: "以下全部保持不变：",
    notRead: "Parallel Loader 不能读取此文件",
    noWayBack: "ComfyUI 没有单个加载器能给出所有已连接的输出",
    moved: "{count} 个加载器现在使用所有 GPU。Ctrl+Z 可撤销。",
    movedBack: "{count} 个加载器现在使用一个 GPU。Ctrl+Z 可撤销。",
    obstacle: "无法在所有 GPU 上运行",
    obstacleFix: "请移除它，或在加载器的菜单中选择“使用一个 GPU”。",
    showLog: "查看日志",
    goTo: "转到节点",
    close: "关闭",
    noLog: "进程池还没有写入日志。",
    error: "Parallel DiT",
  },
  ja: {
    useAll: "すべての GPU を使う",
    useOne: "GPU を 1 枚使う",
    nothingToDo: "置き換えられるローダーがここにはありません。",
    nothingBack: "Parallel DiT のローダーがここにはありません。",
    staysSome: "次のものは 1 枚の GPU のままです。ほかはすべての GPU に移ります：",
    staysAll: "次のものはすべて 1 枚の GPU のままです：",
    keepsSome: "次のものは変わりません。ほかは 1 枚の GPU に移ります：",
    keepsAll: "次のものはすべて変わりません：",
    notRead: "Parallel Loader はこのファイルを読めません",
    noWayBack: "接続された出力をすべて出す ComfyUI のローダーがありません",
    moved: "{count} 個のローダーがすべての GPU を使います。Ctrl+Z で元に戻せます。",
    movedBack: "{count} 個のローダーが 1 枚の GPU を使います。Ctrl+Z で元に戻せます。",
    obstacle: "すべての GPU では実行できません",
    obstacleFix: "取り除くか、ローダーのメニューで「GPU を 1 枚使う」を選んでください。",
    showLog: "ログを見る",
    goTo: "ノードへ移動",
    close: "閉じる",
    noLog: "プールはまだログを書いていません。",
    error: "Parallel DiT",
  },
};

// A sentence; {name} in it stands for a value.
export function say(key, values = {}) {
  const locale = String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en").slice(0, 2);
  const text = (WORDS[locale] ?? WORDS.en)[key];
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
