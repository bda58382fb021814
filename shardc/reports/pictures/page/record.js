/* The record: the embedded rows as objects, joined to one another, and figures read off them.

   Times are in seconds from the start of the step. A span is anything with `start` and `end`. */
"use strict";

const PHASES = ["forward", "backward", "optimizer"];

/** Colours, by name in page.css: each kind of memory has the colour of its use. */
const COLOURS = {
  forward: "forward",
  backward: "backward",
  optimizer: "optimizer",
  all_gather: "gather",
  reduce_scatter: "reduce",
  all_reduce: "all-reduce",
  all_to_all: "reduce",
  fetch_rows: "gather",
  return_rows: "reduce",
  segments: "segments",
  gradients: "reduce",
  activations: "forward",
  gathered: "gather",
};
const colourName = (kind) => COLOURS[kind] ?? "other";

/** Everything that the page shows. */
function readRecord() {
  const data = JSON.parse(document.getElementById("record").textContent);
  const ops = objects(data.ops).map(readOp);
  const collectives = objects(data.collectives).map((row, index) =>
    readCollective(row, index, data.lanes[index], ops[data.readers[index]]),
  );
  const memory = objects(data.memory).map((point) => ({ ...point, total: sum(point.held) }));
  ops.sort((a, b) => a.start - b.start);
  const record = { ...data, ops, collectives, memory };
  record.buckets = objects(data.buckets);
  record.findings = objects(data.findings);
  record.curve = objects(data.curve);
  record.stalls = readStalls(collectives, data.slack);
  record.phases = PHASES.map((name) => phaseOf(record, name)).filter((phase) => phase);
  record.units = unitRuns(record);
  record.peak = memory.reduce((a, b) => (b.total > a.total ? b : a), { total: 0, held: [] });
  record.end = Math.max(data.summary.step_seconds, memory.at(-1)?.seconds ?? 0, 1e-6);
  return record;
}

/** Rows that were embedded without their names. */
function objects({ columns, rows }) {
  return rows.map((row) => Object.fromEntries(columns.map((name, index) => [name, row[index]])));
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** An op as a span; `collectives` will be those it needs. */
const readOp = (op) => ({ ...op, end: op.start + op.seconds, collectives: [] });

/** A collective as a span, with the op that needs it as `reader`. */
function readCollective(row, index, lane, reader) {
  const verb = row.kind === "all_gather" ? "gather" : words(row.kind).replace("-scatter", "");
  const collective = { ...row, index, lane, reader, resumed: row.waited + row.exposed };
  const names = formatNames(row.buckets, 1);
  collective.labels = [`${verb} ${names}`, names, row.buckets[0], lastPart(row.buckets[0])];
  collective.title = `${words(row.kind)} of ${formatNames(row.buckets, 3)}`;
  reader?.collectives.push(collective);
  return collective;
}

/** Where compute stands still: spans with their collective. */
function readStalls(collectives, slack) {
  const exposed = collectives.filter((row) => row.exposed > slack);
  const stalls = exposed.map((row) => ({ start: row.waited, end: row.resumed, collective: row }));
  return stalls.sort((a, b) => a.start - b.start);
}

/** From the first to the last op or stall of a phase; null where it has none. */
function phaseOf({ ops, stalls }, name) {
  const spans = ops.filter((op) => op.phase === name);
  spans.push(...stalls.filter((stall) => stall.collective.phase === name));
  if (!spans.length) return null;
  const start = spans.reduce((least, span) => Math.min(least, span.start), Infinity);
  const end = spans.reduce((most, span) => Math.max(most, span.end), 0);
  return { name, start, end };
}

/** Stretches of ops that come from the same unit, as spans with its name; none if unknown. */
function unitRuns({ ops, buckets }) {
  const unitOf = unitFinder(new Set(buckets.map((bucket) => bucket.unit)));
  const runs = [];
  for (const op of ops) {
    const last = runs.at(-1);
    const name = unitOf(op.module) || (last?.phase === op.phase ? last.name : "");
    if (last && last.name === name && last.phase === op.phase) last.end = op.end;
    else runs.push({ name, phase: op.phase, start: op.start, end: op.end });
  }
  return runs.filter((run) => run.name);
}

/** A function from a module's name to that of the innermost unit around it. */
function unitFinder(units) {
  const known = new Map([["", ""]]);
  return (module) => {
    if (!known.has(module)) {
      let name = module;
      while (name && !units.has(name)) name = name.slice(0, Math.max(name.lastIndexOf("."), 0));
      known.set(module, name || (units.has("(root)") ? "(root)" : ""));
    }
    return known.get(module);
  };
}

/** The index of the first span that ends after a time; spans are in order and do not overlap. */
function firstAfter(spans, seconds) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].end > seconds) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The span at a time; of those that are closer than `reach`, the longest. */
function spanAt(spans, seconds, reach) {
  let best = null;
  for (let i = firstAfter(spans, seconds - reach); i < spans.length; i++) {
    const span = spans[i];
    if (span.start > seconds + reach) break;
    if (span.start <= seconds && span.end >= seconds && span.end - span.start > reach) return span;
    if (!best || span.end - span.start > best.end - best.start) best = span;
  }
  return best;
}

/** The index of the point of memory at a time: the last point until then, or the first. */
function memoryIndex(memory, seconds) {
  let low = 0;
  let high = memory.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (memory[middle].seconds <= seconds) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}
