/* The top of the page: the step in one sentence, its key figures, and the findings. */
"use strict";

const byId = (id) => document.getElementById(id);

function showHeading(record) {
  document.title = `${record.model}, ${formatRanks(record.world_size)}: shardc`;
  byId("model").textContent = record.model;
  const ranks = formatRanks(record.world_size);
  const copies = record.copies > 1 ? `, ${record.copies} copies of the model` : "";
  const step = formatSeconds(record.summary.step_seconds);
  const share = record.world_size === 1 ? "holds" : "share";
  const shared = record.copies > 1 ? `${ranks} ${share} each bucket` : ranks;
  byId("setup").textContent = `${shared}${copies} · times for ${record.profile} · ${step} a step`;
  const chips = Object.entries(record.settings).map(([name, value]) =>
    element("li", {}, element("span", {}, name), " ", element("b", {}, String(value))),
  );
  byId("settings").append(...chips);
}

/** The step in one sentence. */
function verdict({ summary, collectives, slack }) {
  const { step_seconds: step, exposed_seconds: exposed, wire_seconds: wire } = summary;
  const takes = `A step takes ${formatSeconds(step)}.`;
  if (!collectives.length) return `${takes} Nothing is communicated.`;
  if (exposed <= slack) return `${takes} All communication is hidden behind compute.`;
  const hidden = formatShare(Math.max(wire - exposed, 0), wire);
  const longer = `${formatSeconds(exposed)} longer (${formatShare(exposed, step)})`;
  const share = `${hidden} of the communication is hidden behind compute`;
  return `${takes} ${share}; the rest makes the step ${longer}.`;
}

/** One key figure: a name, the figure, and its parts. */
function figure(name, value, note, ...more) {
  const texts = [
    element("h3", {}, name),
    element("p", { className: "value" }, value),
    element("p", { className: "note" }, note),
  ];
  return element("article", { className: "card" }, ...texts, ...more);
}

/** A bar of parts [colour, size], which fill it together. */
function partsBar(parts) {
  const bar = element("div", { className: "parts" });
  const whole = sum(parts.map(([, size]) => Math.max(size, 0)));
  for (const [colour, size] of parts.filter(([, size]) => size > 0)) {
    const part = element("span", {});
    part.style.flexGrow = (1000 * size) / whole;
    part.style.background = `var(--${colour})`;
    bar.append(part);
  }
  return bar;
}

function showFigures(record) {
  const { summary } = record;
  const { step_seconds: step, compute_seconds: compute, wire_seconds: wire } = summary;
  const exposed = Math.max(summary.exposed_seconds, 0);
  const inStep = (seconds) => `${formatShare(seconds, step)} of the step`;
  const count = record.stalls.length;
  const stalls = count === 1 ? "1 stall" : `${count} stalls`;
  const bars = {
    step: partsBar([["forward", compute], ["stall", exposed]]),
    compute: partsBar([["forward", compute], ["track", step - compute]]),
    wire: partsBar([["gather", wire - exposed], ["stall", Math.min(exposed, wire)]]),
    exposed: partsBar([["stall", exposed], ["track", step - exposed]]),
  };
  const sent = `a rank sends ${formatBytes(summary.sent_bytes)}`;
  const perSecond = Math.round(record.tokens / step).toLocaleString("en");
  const speed = record.tokens ? `${perSecond} tokens/s a rank` : "compute + exposed";
  const used = summary.flops_used;
  const computing = used ? `${formatShare(used, 1)} of peak FLOPs` : inStep(compute);
  byId("figures").append(
    figure("Step", formatSeconds(step), speed, bars.step),
    figure("Compute", formatSeconds(compute), computing, bars.compute),
    figure("On the wire", formatSeconds(wire), sent, bars.wire),
    figure("Exposed", formatSeconds(exposed), `${inStep(exposed)}, ${stalls}`, bars.exposed),
    peakFigure(record),
  );
}

function peakFigure({ summary, kinds }) {
  const parts = kinds.map((kind) => [kind, summary.peak_parts[kind]]);
  const rows = parts.map(([kind, size]) =>
    element("li", {}, swatch(colourName(kind)), kind, element("b", {}, formatBytes(size))),
  );
  const where = summary.peak_at ? `after ${summary.peak_at}` : "held at once by a rank";
  const bar = partsBar(parts.map(([kind, size]) => [colourName(kind), size]));
  const list = element("ul", {}, ...rows);
  const tile = figure("Peak memory", formatBytes(summary.peak_bytes), where, list, bar);
  tile.classList.add("peak");
  return tile;
}

function showFindings({ findings }) {
  const place = byId("findings");
  if (!findings.length) {
    const text = "Nothing to change: no problem was found in this step.";
    place.append(element("p", { className: "card fine" }, text));
  }
  for (const { kind, what, advice } of findings) {
    const badge = element("span", { className: "badge" }, kind.replaceAll("_", " "));
    const texts = [element("p", { className: "what" }, what), element("p", {}, advice)];
    place.append(element("article", { className: "card finding" }, badge, ...texts));
  }
}
