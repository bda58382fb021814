/* Put the page together. */
"use strict";

const record = readRecord();
const timeline = new Timeline(byId("timeline"), record);

/** The colours of the items of the timeline. */
function showLegend() {
  const kinds = new Set(record.collectives.map((row) => row.kind));
  const entries = record.phases.map(({ name }) => [name, colourName(name)]);
  if (record.stalls.length) entries.push(["stall", "stall"]);
  for (const kind of kinds) entries.push([words(kind), colourName(kind)]);
  const items = entries.map(([name, colour]) => element("li", {}, swatch(colour), name));
  byId("legend").append(...items);
  const memory = record.kinds.map((kind) => element("li", {}, swatch(colourName(kind)), kind));
  if (record.peak.total) byId("memory-legend").append("memory:", ...memory);
}

function showRange() {
  const { axis } = timeline;
  byId("range").textContent = axis.isWhole ? "" : between(axis.start, axis.end);
}

function listenToButtons() {
  const actions = {
    "zoom-in": () => timeline.axis.zoom(0.5),
    "zoom-out": () => timeline.axis.zoom(2),
    reset: () => timeline.reset(),
    "previous-stall": () => timeline.goToStall(-1),
    "next-stall": () => timeline.goToStall(1),
  };
  for (const [id, action] of Object.entries(actions)) byId(id).addEventListener("click", action);
  byId("stall-buttons").hidden = !record.stalls.length;
}

function showCollective(collective) {
  timeline.select(collective);
  byId("timeline-section").scrollIntoView({ block: "nearest" });
}

showHeading(record);
byId("verdict").textContent = verdict(record);
showFigures(record);
showFindings(record);
showLegend();
listenToButtons();
timeline.onchange = showRange;
showCurve(record);
showTable("collectives", COLLECTIVE_COLUMNS, record.collectives, showCollective);
showTable("buckets", BUCKET_COLUMNS, record.buckets);
