// Our texts in the artist's language, by the sentences that they were made of: as nodes/spoken.py, with the same tables.
import { app } from "../../../scripts/app.js";

// The canvas' language.
export const language = () => String(app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en").slice(0, 2);

const tables = { en: Promise.resolve({}) };

// Promise of {English sentence: sentence} in the canvas' language.
export function readTable() {
  return (tables[language()] ??= fetch(new URL(`../said/${language()}.json`, import.meta.url)).then(
    (answer) => (answer.ok ? answer.json() : {}),
    () => ({}), // the server has gone
  ));
}

// data: [text, template, values] as parallel_runtime/said.py makes it, or a string, which stays as it is.
// shown: (name, value) -> what stands in the place of a value; null for the value itself.
export function inWords(data, table, shown = () => null) {
  if (typeof data === "string") return data;
  const [, template, values] = data;
  const sentence = table[template] ?? template;
  const put = (name, value) => shown(name, value) ?? inWords(value, table, shown);
  if (Array.isArray(values)) return joined(values.map((value, index) => put(index, value)), sentence);
  return sentence.replace(/\{(\w+)\}/g, (all, name) => (Object.hasOwn(values, name) ? put(name, values[name]) : all));
}

// Sentences have no space between them behind a full stop that brings its own.
const joined = ([first = "", ...rest], between) =>
  rest.reduce((text, part) => text + (between === " " && /[。：]$/.test(text) ? "" : between) + part, first);

// [[name, value]] of all values, and of the values in them.
export function valuesOf(data) {
  if (typeof data === "string") return [];
  return Object.entries(data[2]).flatMap(([name, value]) => [[name, value], ...valuesOf(value)]);
}
