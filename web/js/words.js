// Words and sentences of the canvas side in the artist's language, of web/words.
import { language } from "./said.js";

async function read(name) {
  const answer = await fetch(new URL(`../words/${name}.json`, import.meta.url)).catch(() => null); // the server has gone
  return [name, answer?.ok ? await answer.json() : {}];
}

const WORDS = Object.fromEntries(await Promise.all(["en", "zh", "ja"].map(read)));

// A sentence; {name} in it stands for a value.
export function say(key, values = {}) {
  const text = WORDS[language()]?.[key] ?? WORDS.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
