// Bytes and seconds for people.

export function bytes(count) {
  const gib = count / 2 ** 30;
  return gib >= 0.95 ? `${gib.toFixed(1)} GiB` : `${Math.round(count / 2 ** 20)} MiB`;
}

export function seconds(count) {
  if (count < 0.1) return `${(count * 1000).toFixed(1)} ms`;
  return count < 1 ? `${Math.round(count * 1000)} ms` : `${count.toFixed(count < 10 ? 2 : 1)} s`;
}
