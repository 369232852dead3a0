// Which words of two texts differ: Myers' shortest edit script (1986, figure 2), behind a common beginning and end.
const MOST_EDITS = 800;
const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

// Returns [kind, text] with kind "same", "removed" or "added".
const diffWords = (first, second) => {
  const a = words(first), b = words(second);
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = editScript(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const parts = [...a.slice(0, start).map((word) => ["same", word]), ...middle, ...a.slice(a.length - end).map((word) => ["same", word])];
  return tidied(parts);
};

// Words of a kind together; a lone space between two changes is part of both.
const tidied = (parts) => {
  const joined = [];
  let removed = "", added = "";
  const flush = () => {
    if (removed) joined.push(["removed", removed]);
    if (added) joined.push(["added", added]);
    removed = added = "";
  };
  parts.forEach(([kind, word], at) => {
    const between = (removed || added) && /^[^\S\n]+$/.test(word) && at + 1 < parts.length && parts[at + 1][0] !== "same";
    if (kind !== "added" && (kind === "removed" || between)) removed += word;
    if (kind !== "removed" && (kind === "added" || between)) added += word;
    if (kind !== "same" || between) return;
    flush();
    if (joined.length && joined[joined.length - 1][0] === "same") joined[joined.length - 1][1] += word;
    else joined.push(["same", word]);
  });
  flush();
  return joined;
};

const goesDown = (reach, k, edits) => k === -edits || (k !== edits && reach.get(k - 1) < reach.get(k + 1));

const editScript = (a, b) => {
  const replaced = () => [...a.map((word) => ["removed", word]), ...b.map((word) => ["added", word])];
  if (!a.length || !b.length) return replaced();
  const most = Math.min(a.length + b.length, MOST_EDITS), reach = new Map([[1, 0]]), trace = [];
  for (let edits = 0; edits <= most; edits += 1) {
    trace.push(new Map(reach));
    for (let k = -edits; k <= edits; k += 2) {
      let x = goesDown(reach, k, edits) ? reach.get(k + 1) : reach.get(k - 1) + 1, y = x - k;
      while (x < a.length && y < b.length && a[x] === b[y]) { x += 1; y += 1; }
      reach.set(k, x);
      if (x >= a.length && y >= b.length) return walkedBack(a, b, trace);
    }
  }
  return replaced(); // so different that word by word says nothing
};

const walkedBack = (a, b, trace) => {
  const parts = [];
  let x = a.length, y = b.length;
  for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
    const reach = trace[edits], k = x - y, down = goesDown(reach, k, edits);
    const from = down ? k + 1 : k - 1, fromX = reach.get(from), fromY = fromX - from;
    while (x > fromX && y > fromY) {
      parts.push(["same", a[x - 1]]);
      x -= 1;
      y -= 1;
    }
    if (edits > 0) parts.push(x === fromX ? ["added", b[fromY]] : ["removed", a[fromX]]);
    x = fromX;
    y = fromY;
  }
  return parts.reverse();
};

const diffView = (first, second) => el("div", { class: "block diff", dir: "auto" }, diffWords(first, second).map(([kind, part]) =>
  kind === "same" ? document.createTextNode(visible(part)) : el(kind === "added" ? "ins" : "del", { text: visible(part) })));
