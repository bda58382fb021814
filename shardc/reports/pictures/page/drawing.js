/* The lanes of the timeline on the canvas.

   Every function here draws in a scene:
     context         the canvas, in CSS pixels
     record, axis    the record, and the part of the step that is shown
     left, right     where that part begins and ends on the canvas
     rows            the place of each row: { top, height }
     x(seconds)      the place of a moment
     colour(name)    a colour of page.css
     shown           the op and the collectives to point out
     pointer         where the mouse is: { x, y }, or null */
"use strict";

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
const SMALL_FONT = FONT.replace("12px", "11px");
const GAP = 1; // pixels between spans that are wide enough
const LEAST_STALL = 3; // pixels: a stall is never too short to be seen
const LEAST_LABEL = 16; // pixels

/** Draw only where the time axis is, not over the names of the lanes. */
function clipped(scene, draw) {
  const { context, left, right } = scene;
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, context.canvas.height);
  context.clip();
  draw(scene);
  context.restore();
}

/** The spans of a lane that are in view. */
function* inView(spans, axis) {
  for (let i = firstAfter(spans, axis.start); i < spans.length; i++) {
    if (spans[i].start > axis.end) return;
    yield spans[i];
  }
}

/** The pixels of a span in view: [left edge, width]. */
function pixels(scene, span) {
  const from = Math.max(scene.x(span.start), scene.left - 2);
  return [from, Math.min(scene.x(span.end), scene.right + 2) - from];
}

/** The first of some texts that fits, or as much of the end of the last as there is room for. */
function fitText(context, texts, width) {
  let measured = 0;
  for (const text of texts) {
    measured = context.measureText(text).width;
    if (measured <= width) return text;
  }
  const last = texts.at(-1);
  const room = Math.floor((last.length * width) / measured) - 2;
  return room < 5 ? "" : `…${last.slice(-room)}`;
}

function drawText(scene, text, x, y, colour, font = FONT) {
  const { context } = scene;
  context.font = font;
  context.fillStyle = scene.colour(colour);
  context.fillText(text, x, y);
}

/** The first of some labels that fits, in the middle of a span; returns it, or "". */
function drawLabel(scene, texts, span, row, colour, font = SMALL_FONT) {
  const [from, width] = pixels(scene, span);
  if (width < LEAST_LABEL) return "";
  const { context } = scene;
  context.font = font;
  const fitting = fitText(context, texts, width - 6);
  context.textAlign = "center";
  drawText(scene, fitting, from + (width - GAP) / 2, row.top + row.height / 2, colour, font);
  context.textAlign = "left";
  return fitting;
}

/** "layers.5" as "5". */
const lastPart = (name) => name.slice(name.lastIndexOf(".") + 1);

/** Filled spans. Those too narrow to tell apart are drawn as one. */
function drawSpans(scene, spans, row, colourOf) {
  const { context, axis } = scene;
  let narrow = null;
  const fill = (from, width, colour) => {
    context.fillStyle = scene.colour(colour);
    context.fillRect(from, row.top, width, row.height);
  };
  const finish = () => {
    if (narrow) fill(narrow.from, Math.max(narrow.to - narrow.from, 0.75), narrow.colour);
    narrow = null;
  };
  for (const span of inView(spans, axis)) {
    const [from, width] = pixels(scene, span);
    const colour = colourOf(span);
    if (width >= 3) {
      finish();
      fill(from, width - (width < 8 ? GAP / 2 : GAP), colour);
    } else if (narrow && narrow.colour === colour && from - narrow.to < 0.5) {
      narrow.to = from + width;
    } else {
      finish();
      narrow = { from, to: from + width, colour };
    }
  }
  finish();
}

// -- rows -----------------------------------------------------------------------------------

/** Forward, backward, optimizer: a band for each. */
function drawPhases(scene) {
  const { record, rows } = scene;
  drawSpans(scene, record.phases, rows.phases, (phase) => `${colourName(phase.name)}-soft`);
  for (const phase of inView(record.phases, scene.axis)) {
    drawLabel(scene, [phase.name], phase, rows.phases, "text", `600 ${FONT}`);
  }
}

/** Which unit of the model the ops below come from. */
function drawUnits(scene) {
  const { record, rows, axis } = scene;
  if (!rows.units) return;
  drawSpans(scene, record.units, rows.units, () => "track");
  for (const unit of inView(record.units, axis)) {
    drawLabel(scene, [unit.name, lastPart(unit.name)], unit, rows.units, "muted");
  }
}

function drawCompute(scene) {
  const { record, rows, axis } = scene;
  drawSpans(scene, record.ops, rows.compute, (op) => colourName(op.phase));
  for (const op of inView(record.ops, axis)) drawOpLabels(scene, op);
}

/** The op's name, and below it where it comes from; the name alone where that does not fit. */
function drawOpLabels(scene, op) {
  if (scene.x(op.end) - scene.x(op.start) < LEAST_LABEL) return;
  const { top, height } = scene.rows.compute;
  const lower = { top: top + height / 2 - 3, height: height / 2 };
  const upper = { top: top + 3, height: height / 2 };
  const drawn = drawLabel(scene, [op.module, lastPart(op.module)], op, lower, "on-colour");
  const place = drawn ? upper : { top, height };
  drawLabel(scene, [op.name], op, place, "on-colour", `600 ${SMALL_FONT}`);
}

/** Stalls stand out: striped, in the colour of warnings, and a little higher than the lane. */
function drawStalls(scene) {
  const { context, record, rows, axis } = scene;
  const { top, height } = rows.compute;
  for (const stall of inView(record.stalls, axis)) {
    const [from, width] = pixels(scene, stall);
    const shown = Math.max(width - GAP, LEAST_STALL);
    context.fillStyle = scene.colour("stall");
    context.fillRect(from, top - 4, shown, height + 8);
    drawStripes(scene, from, top - 4, shown, height + 8);
    drawStallLabel(scene, stall);
  }
}

function drawStripes(scene, left, top, width, height) {
  const { context } = scene;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = scene.colour("stripe");
  context.lineWidth = 3;
  context.beginPath();
  for (let x = left - (left % 9) - height; x < left + width; x += 9) {
    context.moveTo(x, top + height);
    context.lineTo(x + height, top);
  }
  context.stroke();
  context.restore();
}

function drawStallLabel(scene, stall) {
  const texts = [`stall ${formatSeconds(stall.end - stall.start)}`, "stall", ""];
  drawLabel(scene, texts, stall, scene.rows.compute, "on-stall", `600 ${SMALL_FONT}`);
}

function drawCommunication(scene) {
  scene.lanes.forEach((spans, lane) => {
    const row = laneRow(scene.rows.communication, lane);
    drawSpans(scene, spans, row, (span) => colourName(span.kind));
    for (const span of inView(spans, scene.axis)) {
      drawLabel(scene, span.labels, span, row, "on-colour");
    }
  });
}

/** The place of one of the lanes for communication: several where transfers overlap. */
const laneRow = (row, lane) => ({ top: row.top + lane * row.lane, height: row.lane - 3 });

// -- around them ----------------------------------------------------------------------------

/** The names of the rows, left of them. */
function drawNames(scene) {
  const names = { units: "unit", compute: "compute", communication: "communication" };
  for (const [key, name] of Object.entries(names)) {
    const row = scene.rows[key];
    if (!row) continue;
    const strong = key !== "units";
    const font = strong ? `600 ${FONT}` : SMALL_FONT;
    drawText(scene, name, 0, row.top + row.height / 2, strong ? "text" : "muted", font);
  }
}

function drawTicks(scene) {
  const { context, rows, axis, left, right, bottom } = scene;
  context.textAlign = "center";
  for (const tick of axisTicks(axis, (right - left) / 110)) {
    const x = Math.round(scene.x(tick.seconds)) + 0.5;
    context.fillStyle = scene.colour("grid");
    context.fillRect(x - 0.5, rows.compute.top - 4, 1, bottom - rows.compute.top);
    const half = context.measureText(tick.label).width / 2 + 2;
    const middle = Math.min(Math.max(x, left + half), right - half);
    const y = rows.ticks.top + rows.ticks.height / 2;
    context.fillStyle = scene.colour("surface");
    context.fillRect(middle - half, rows.ticks.top, 2 * half, rows.ticks.height);
    drawText(scene, tick.label, middle, y, "muted", SMALL_FONT);
  }
  context.textAlign = "left";
}

/** The items that are pointed out: an op, collectives, and the ways between them. */
function drawShown(scene) {
  const { collectives, op } = scene.shown;
  for (const collective of collectives) {
    drawWay(scene, collective);
    drawFrame(scene, collective, laneRow(scene.rows.communication, collective.lane));
  }
  if (op) drawFrame(scene, op, scene.rows.compute);
}

function drawFrame(scene, span, row) {
  const { context } = scene;
  const [from, width] = pixels(scene, span);
  context.strokeStyle = scene.colour("text");
  context.lineWidth = 2;
  context.strokeRect(from - 1, row.top - 1, Math.max(width, 2) + 1, row.height + 2);
}

/** Lines from where a collective is issued to it, and from its end to where compute needs it. */
function drawWay(scene, collective) {
  const upper = scene.rows.compute.top + scene.rows.compute.height;
  const lower = laneRow(scene.rows.communication, collective.lane).top;
  const needed = collective.reader ? collective.reader.start : collective.resumed;
  drawCurve(scene, [collective.issued, upper], [collective.start, lower], [4, 3]);
  drawCurve(scene, [collective.end, lower], [needed, upper], []);
}

function drawCurve(scene, [fromSeconds, fromY], [toSeconds, toY], dashes) {
  const { context } = scene;
  const [from, to, middle] = [scene.x(fromSeconds), scene.x(toSeconds), (fromY + toY) / 2];
  context.strokeStyle = scene.colour("text");
  context.lineWidth = 1.5;
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(from, fromY);
  context.bezierCurveTo(from, middle, to, middle, to, toY);
  context.stroke();
  context.setLineDash([]);
  context.beginPath();
  context.arc(to, toY, 3, 0, 2 * Math.PI);
  context.fillStyle = scene.colour("text");
  context.fill();
}

/** A line through all rows where the mouse is, with its time. */
function drawCursor(scene) {
  const { context, pointer, rows, left, right, bottom } = scene;
  if (!pointer || pointer.x < left || pointer.x > right) return;
  context.fillStyle = scene.colour("cursor");
  context.fillRect(Math.round(pointer.x), rows.phases.top, 1, bottom - rows.phases.top);
}
