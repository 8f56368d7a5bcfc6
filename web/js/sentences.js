// Texts of the server in the artist's language: nodes/sentences.py has the tables. What cannot be asked stays English.
import { api } from "../../../scripts/api.js";
import { language } from "./language.js";

const known = new Map(); // language and text -> promise of the translation

// Promise of the text in the canvas' language.
export function sentences(text) {
  if (language() === "en" || !text) return Promise.resolve(text);
  const key = `${language()} ${text}`;
  if (!known.has(key)) known.set(key, ask(text));
  return known.get(key);
}

async function ask(text) {
  try {
    const answer = await api.fetchApi("/parallel_dit/sentences", { method: "POST", body: JSON.stringify([text]) });
    return answer.ok ? (await answer.json())[0] : text;
  } catch {
    return text; // the server has gone
  }
}
