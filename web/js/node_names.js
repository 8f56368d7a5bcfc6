// How a saved node is called on the canvas.

export const defaultTitle = (type) => LiteGraph.registered_node_types[type]?.title ?? type;

export const titleOf = (node) => node.title || defaultTitle(node.type);

// Choices of a type's list, as the server gave them; null where it has none of that name.
export function choicesOf(type, name) {
  const inputs = LiteGraph.registered_node_types[type]?.nodeData?.input ?? {};
  const spec = inputs.required?.[name] ?? inputs.optional?.[name];
  if (!spec) return null;
  return Array.isArray(spec[0]) ? spec[0] : (spec[1]?.options ?? null);
}
