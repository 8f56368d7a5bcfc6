// Our texts in the artist's language: words of the canvas side by their keys in web/words, and what Python says by the
// sentences that it was made of in web/said, as nodes/spoken.py does it.
import { app } from "../../../scripts/app.js";

// The canvas' language.
const language = () => String(app.extensionManager.setting.get("Comfy.Locale")).slice(0, 2);

async function read(folder, name) {
  const file = new URL(`../${folder}/${name}.json`, import.meta.url);
  const answer = await fetch(file).catch(() => null); // the server has gone
  return answer?.ok ? answer.json() : {};
}

const [en, zh, ja] = await Promise.all(["en", "zh", "ja"].map((name) => read("words", name)));
const WORDS = { en, zh, ja };

// A sentence of the canvas side; {name} in it stands for a value.
export function say(key, values = {}) {
  const text = WORDS[language()]?.[key] ?? en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const tables = { en: Promise.resolve({}) };

// Promise of {English sentence: sentence} in the canvas' language.
export const readTable = () => (tables[language()] ??= read("said", language()));

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
