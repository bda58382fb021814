/* The memory curve: bytes held at each moment, stacked by kind, with the peak marked. */
"use strict";

const HEADROOM = 1.15; // of the peak, for its label

/** Bytes to a place on the canvas. */
function memoryScale({ record, rows }) {
  const { top, height } = rows.memory;
  return (bytes) => top + height * (1 - bytes / (record.peak.total * HEADROOM));
}

/**
 * For each pixel of the axis the moment in it at which most is held: [{ x, held }]. A peak that
 * is narrower than a pixel is drawn all the same.
 */
function memoryColumns(scene) {
  const { record, axis, left, right } = scene;
  const { memory } = record;
  const width = axis.span / (right - left);
  let index = memoryIndex(memory, axis.start);
  const columns = [];
  for (let x = left; x < right; x++) {
    const until = axis.start + (x + 1 - left) * width;
    let most = memory[index];
    while (index + 1 < memory.length && memory[index + 1].seconds < until) {
      index += 1;
      if (memory[index].total > most.total) most = memory[index];
    }
    columns.push({ x, held: most.held });
  }
  return columns;
}

function drawMemory(scene) {
  const { context, record } = scene;
  const y = memoryScale(scene);
  const columns = memoryColumns(scene);
  let below = columns.map(() => 0);
  record.kinds.forEach((kind, index) => {
    const above = columns.map((column, i) => below[i] + column.held[index]);
    context.fillStyle = scene.colour(colourName(kind));
    fillBetween(context, columns, below.map(y), above.map(y));
    below = above;
  });
}

/** The area between two lines that are given by their height in each column. */
function fillBetween(context, columns, lower, upper) {
  context.beginPath();
  columns.forEach(({ x }, i) => {
    context.lineTo(x, upper[i]);
    context.lineTo(x + 1, upper[i]);
  });
  for (let i = columns.length - 1; i >= 0; i--) {
    context.lineTo(columns[i].x + 1, lower[i]);
    context.lineTo(columns[i].x, lower[i]);
  }
  context.fill();
}

/** The scale, left of the curve: at most four round sizes, in powers of two. */
function drawMemoryScale(scene) {
  const { context, record, rows, left, right } = scene;
  const y = memoryScale(scene);
  const step = 2 ** Math.ceil(Math.log2(record.peak.total / 4));
  drawText(scene, "memory", 0, rows.memory.top + 8, "text", `600 ${FONT}`);
  context.textAlign = "right";
  for (let bytes = 0; bytes <= record.peak.total; bytes += step) {
    context.fillStyle = scene.colour("grid");
    context.fillRect(left, Math.round(y(bytes)), right - left, 1);
    drawText(scene, formatBytes(bytes), left - 8, y(bytes), "muted", SMALL_FONT);
  }
  context.textAlign = "left";
}

function drawPeak(scene) {
  const { context, record, left, right } = scene;
  const { peak } = record;
  const [x, y] = [scene.x(peak.seconds), memoryScale(scene)(peak.total)];
  context.setLineDash([3, 4]);
  context.strokeStyle = scene.colour("muted");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(right, y);
  context.stroke();
  context.setLineDash([]);
  const text = `peak ${formatBytes(peak.total)}`;
  context.font = `600 ${SMALL_FONT}`;
  const half = context.measureText(text).width / 2 + 4;
  const middle = Math.min(Math.max(x, left + half), right - half);
  context.textAlign = "center";
  drawText(scene, text, middle, y - 12, "text", `600 ${SMALL_FONT}`);
  context.textAlign = "left";
  context.beginPath();
  context.arc(x, y, 4, 0, 2 * Math.PI);
  context.fillStyle = scene.colour("text");
  context.fill();
}
