/* Step time against memory: the curve as a line of marks, usual settings as circles. */
"use strict";

const CURVE = { width: 900, narrowest: 340, height: 300, left: 84, right: 24, top: 16, bottom: 40 };

/** An SVG element with these attributes and children. */
function drawn(name, attributes, ...children) {
  const made = document.createElementNS(byId("curve").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** From figures to places: the least of `values` is at `from`, the most at `to`. */
function scaleOf(values, from, to) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  return (value) => from + ((value - least) / (most - least || 1)) * (to - from);
}

function curveTitle(row) {
  const stay = row.buckets === 1 ? "bucket stays" : "buckets stay";
  const kept = `${row.gathered} of ${row.buckets} ${stay} gathered`;
  const figures = [formatBytes(row.nbytes), formatSeconds(row.seconds)];
  const copied = row.on_host ? `${formatBytes(row.on_host)} saved on the host (${row.copied})` : "";
  const state = row.states_on_host ? `${formatBytes(row.states_on_host)} of state there` : "";
  const parts = [row.setting, ...figures, kept, copied, state, `computed again: ${row.again}`];
  return parts.filter((part) => part).join(" \u00b7 ");
}

/** A mark with its tooltip. */
function curveMark(row, x, y) {
  const attributes = row.setting
    ? { r: 5, fill: "none", stroke: "var(--muted)", "stroke-width": 2 }
    : { r: 4, fill: "var(--gather)" };
  const title = drawn("title", {}, curveTitle(row));
  return drawn("circle", { cx: x(row.nbytes), cy: y(row.seconds), ...attributes }, title);
}

/** Four lines across with their times, four memory sizes below. */
function curveScales(rows, x, y) {
  const marks = [];
  const between = (values, share) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return least + (most - least) * share;
  };
  for (const share of [0, 1 / 3, 2 / 3, 1]) {
    const seconds = between(rows.map((row) => row.seconds), share);
    const nbytes = between(rows.map((row) => row.nbytes), share);
    const line = { x1: CURVE.left, x2: CURVE.width - CURVE.right, y1: y(seconds), y2: y(seconds) };
    const text = { fill: "var(--muted)", "font-size": 12 };
    const [beside, below] = [CURVE.left - 8, CURVE.height - 12];
    marks.push(
      drawn("line", { ...line, stroke: "var(--grid)" }),
      drawn("text", { ...text, x: beside, y: y(seconds) + 4, "text-anchor": "end" },
        formatSeconds(seconds)),
      drawn("text", { ...text, x: x(nbytes), y: below, "text-anchor": "middle" },
        formatBytes(nbytes)),
    );
  }
  return marks;
}

function showCurve({ curve }) {
  if (!curve.length) return;
  byId("curve-section").hidden = false;
  // On a narrow page the picture is narrower, and its texts are as large as on a wide one.
  const room = byId("curve").clientWidth;
  CURVE.width = Math.min(CURVE.width, Math.max(CURVE.narrowest, room));
  byId("curve").setAttribute("viewBox", `0 0 ${CURVE.width} ${CURVE.height}`);
  const { width, height, left, right, top, bottom } = CURVE;
  const x = scaleOf(curve.map((row) => row.nbytes), left + 24, width - right - 24);
  const y = scaleOf(curve.map((row) => row.seconds), height - bottom, top + 8);
  const points = curve.filter((row) => !row.setting);
  const line = points.map((row) => `${x(row.nbytes)},${y(row.seconds)}`).join(" ");
  byId("curve").append(
    ...curveScales(curve, x, y),
    drawn("polyline", { points: line, fill: "none", stroke: "var(--gather)" }),
    ...curve.map((row) => curveMark(row, x, y)),
  );
  showTable("curve-rows", CURVE_COLUMNS, curve);
}
