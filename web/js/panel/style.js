// The panel's style, in the colours of the theme that is chosen.
import { h } from "./elements.js";

const CSS = `
.pdit { padding: 12px; color: var(--input-text, var(--fg-color)); font-size: 13px; line-height: 1.45; height: 100%;
  overflow-y: auto; box-sizing: border-box; }
.pdit h3 { font-size: 12px; font-weight: 600; margin: 16px 0 6px; color: var(--descrip-text); }
.pdit p { margin: 4px 0; overflow-wrap: anywhere; }
.pdit .pdit-small { font-size: 12px; color: var(--descrip-text); }
.pdit-bar { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 10px; }
.pdit-item .pdit-bar { margin: 6px 0 0; }
.pdit button { font: inherit; color: inherit; background: var(--comfy-input-bg); border: 1px solid var(--border-color);
  border-radius: 6px; padding: 3px 9px; cursor: pointer; }
.pdit button:hover { border-color: var(--pdit-ours); }
.pdit button:focus-visible { outline: 2px solid var(--pdit-ours); outline-offset: 1px; }
.pdit button:disabled { opacity: 0.5; cursor: default; }
.pdit { --pdit-ours: #4a8fe0; --pdit-comfyui: #3fa37a; --pdit-others: #9a8f80; --pdit-rest: #8883;
  --pdit-line: var(--border-color, #8886); }
.pdit-memory { display: flex; height: 10px; border-radius: 5px; overflow: hidden; background: var(--pdit-rest); }
.pdit-memory > span { height: 100%; }
.pdit-key { display: inline-flex; align-items: center; gap: 4px; margin-right: 10px; font-size: 12px; }
.pdit-key i { width: 9px; height: 9px; border-radius: 2px; display: inline-block; }
.pdit-row { display: flex; gap: 8px; align-items: baseline; justify-content: space-between; flex-wrap: wrap; }
.pdit-row > .pdit-name { font-weight: 600; overflow-wrap: anywhere; }
.pdit-chip { font-size: 11px; border: 1px solid var(--pdit-line); border-radius: 9px; padding: 0 7px; }
.pdit-item { border: 1px solid var(--pdit-line); border-radius: 8px; padding: 8px; margin: 6px 0; }
.pdit svg { display: block; max-width: 100%; }
.pdit svg text { fill: currentColor; font-size: 10px; }
.pdit table { width: 100%; border-collapse: collapse; }
.pdit td { padding: 1px 0; } .pdit td:last-child { text-align: right; font-variant-numeric: tabular-nums; }
.pdit [role=alert] { color: var(--error-text, #e05252); }
`;

export function addStyle() {
  if (!document.getElementById("pdit-style")) document.head.append(h("style", { id: "pdit-style" }, CSS));
}
