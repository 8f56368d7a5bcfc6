// Help pages of this pack, known by their picture: each row of a table is a paragraph, which fits the side panel.
import { h } from "./elements.js";

const PAGE = '.node-help-content:has(img[src*="parallel-dit/docs/"])';

document.head.append(
  h(
    "style",
    { id: "pdit-help-style" },
    `${PAGE} :is(table, tbody, tr, td) { display: block; width: auto; }
     ${PAGE} thead { display: none; }
     ${PAGE} tr { margin: 10px 0; border: 0; }
     ${PAGE} td { padding: 1px 0; overflow-wrap: anywhere; white-space: normal; border: 0; text-align: left; }
     ${PAGE} td:first-child { font-weight: 600; }`,
  ),
);
