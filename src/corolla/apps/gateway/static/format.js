// Numbers and times as people read them.

const wholeNumbers = new Intl.NumberFormat("en");

export function ms(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const milliseconds = seconds * 1000;
  if (milliseconds < 0.05) return "0 ms";
  if (milliseconds < 10) return `${milliseconds.toFixed(1)} ms`;
  if (milliseconds < 1000) return `${milliseconds.toFixed(0)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export function speed(tokensPerSecond) {
  if (!tokensPerSecond) return "–";
  return tokensPerSecond < 100 ? tokensPerSecond.toFixed(1) : wholeNumbers.format(Math.round(tokensPerSecond));
}

export function count(number, noun) {
  return `${wholeNumbers.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function whole(number) {
  return wholeNumbers.format(number);
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

/** `just now`, `3 min ago`, `2 h ago`, or the date. */
export function ago(secondsSinceEpoch, now = Date.now() / 1000) {
  const passed = Math.max(0, now - secondsSinceEpoch);
  if (passed < 10) return "just now";
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  if (passed < 3600) return `${Math.floor(passed / 60)} min ago`;
  if (passed < 86400) return `${Math.floor(passed / 3600)} h ago`;
  return new Date(secondsSinceEpoch * 1000).toLocaleDateString();
}

/** Half-open `"4:6"` as people count blocks: `4–5`. */
export function blocks(span) {
  const [start, end] = span.split(":").map(Number);
  return end - start === 1 ? `${start}` : `${start}–${end - 1}`;
}

/** `[4, 5, 9]` as `4–5, 9`. */
export function blockList(numbers) {
  const runs = [];
  for (const number of numbers) {
    const last = runs.at(-1);
    if (last && last[1] === number) last[1] = number + 1;
    else runs.push([number, number + 1]);
  }
  return runs.map(([start, end]) => blocks(`${start}:${end}`)).join(", ");
}

/** `blocks 4–5` or `block 4`. */
export function namedBlocks(numbers) {
  return `${numbers.length === 1 ? "block" : "blocks"} ${blockList(numbers)}`;
}

/** A server as people call it: its name, or the end of its id. */
export function serverName(server) {
  return server.name || `…${server.peer.slice(-8)}`;
}
