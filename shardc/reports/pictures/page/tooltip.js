/* The item under the mouse, in words: a box near the pointer. */
"use strict";

/** Fill the box and put it beside a place { x, y } in the window; hide it without content. */
function showTooltip(content, { x, y } = {}) {
  const box = byId("tooltip");
  box.hidden = !content;
  if (!content) return;
  const rows = content.rows.filter(([, value]) => value !== "");
  const list = rows.flatMap(([name, value, colour]) => [
    element("dt", {}, ...(colour ? [swatch(colour)] : []), name),
    element("dd", {}, value),
  ]);
  box.replaceChildren(element("strong", {}, content.title), element("dl", {}, ...list));
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const left = x + 16 + width < innerWidth ? x + 16 : x - 16 - width;
  const top = Math.min(y + 16, innerHeight - height - 4);
  box.style.left = `${Math.max(left, 4)}px`;
  box.style.top = `${Math.max(top, 4)}px`;
}

const between = (start, end) => `${formatSeconds(start)} to ${formatSeconds(end)}`;

function describeOp(op) {
  return {
    title: op.name,
    rows: [
      ["module", op.module],
      ["phase", op.phase],
      ["takes", formatSeconds(op.seconds)],
      ["runs", between(op.start, op.end)],
      ["waits for", formatNames(op.collectives.map((row) => row.title), 3)],
    ],
  };
}

function describeCollective(row) {
  return {
    title: row.title,
    rows: [
      ["phase", row.phase],
      ["size", `${formatBytes(row.nbytes)} among ${formatRanks(row.ranks)}`],
      ["takes", formatSeconds(row.seconds)],
      ["on the wire", between(row.start, row.end)],
      ["hidden", `${formatSeconds(row.hidden)} (${formatShare(row.hidden, row.seconds)})`],
      ["exposed", formatSeconds(row.exposed)],
      ["started", `${formatSeconds(row.issued)}${row.before ? `, before ${row.before}` : ""}`],
      ["needed by", row.needed_by],
    ],
  };
}

function describeStall({ start, end, collective }) {
  return {
    title: `compute waits ${formatSeconds(end - start)}`,
    rows: [
      ["for", collective.title],
      ["which is needed by", collective.needed_by],
      ["stands still", between(start, end)],
    ],
  };
}

function describeMemory(point, seconds, kinds) {
  const parts = kinds.map((kind, i) => [kind, formatBytes(point.held[i]), colourName(kind)]);
  return {
    title: `${formatBytes(point.total)} held`,
    rows: [...parts.reverse(), ["at", formatSeconds(seconds)], ["after", point.where]],
  };
}
