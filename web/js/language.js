// The canvas' language, and a sentence of a table in it.
import { app } from "../../../scripts/app.js";

export const language = () => String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en").slice(0, 2);

// tables: language -> {key: sentence}, English where there is none; {name} in a sentence stands for a value.
export function inLanguage(tables, key, values) {
  const text = tables[language()]?.[key] ?? tables.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
