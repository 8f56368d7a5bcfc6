// Help pages of this pack, known by their picture: tables that fit the side panel instead of being cut.
import { h } from "./elements.js";

const PAGE = '.node-help-content:has(img[src*="parallel-dit/docs/"])';

document.head.append(
  h(
    "style",
    { id: "pdit-help-style" },
    `${PAGE} table { table-layout: fixed; width: 100%; display: table; }
     ${PAGE} :is(th, td) { overflow-wrap: anywhere; white-space: normal; vertical-align: top; padding: 4px 6px; }
     ${PAGE} :is(th, td):first-child { width: 34%; padding-left: 0; }
     ${PAGE} td code { white-space: normal; }`,
  ),
);
