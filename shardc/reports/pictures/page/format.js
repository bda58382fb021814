/* Figures as people read them, and elements with text. Sizes are in bytes, times in seconds. */
"use strict";

/** At most four digits that count, without trailing zeros: 12.34, 1234. */
const digits = (value) => String(Number(value.toPrecision(4)));

/** "1.5 MiB": powers of 1024, as in the text reports. */
function formatBytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${digits(count)} ${unit}`;
    count /= 1024;
  }
  return `${digits(count)} TiB`;
}

/** The unit for times of about this size: its name, and how many seconds it has. */
function timeUnit(seconds) {
  if (seconds >= 1) return ["s", 1];
  return seconds >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
}

/** "12.34 ms"; "0" for rests that sums of floats leave over. */
function formatSeconds(seconds) {
  if (Math.abs(seconds) < 1e-10) return "0";
  const [name, size] = timeUnit(Math.abs(seconds));
  return `${digits(seconds / size)} ${name}`;
}

/** "12%", "0.4%"; "99.9%" for a share just below one. */
function formatShare(part, whole) {
  const percent = whole > 0 ? (100 * part) / whole : 0;
  if (percent < 10) return `${Number(percent.toPrecision(2))}%`;
  return `${percent < 100 && percent > 99 ? Math.floor(percent * 10) / 10 : Math.round(percent)}%`;
}

/** "1,234,567". */
const formatCount = (count) => count.toLocaleString("en-US");

/** "1 rank", "8 ranks". */
const formatRanks = (count) => `${formatCount(count)} ${count === 1 ? "rank" : "ranks"}`;

/** "all_gather" as "all-gather". */
const words = (name) => name.replaceAll("_", "-");

/** The first few names of a list, and how many more there are. */
function formatNames(names, most) {
  const rest = names.length - most;
  return names.slice(0, most).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}

/**
 * A new element. Strings among the children become text, never HTML: names of the record may hold
 * anything.
 */
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** A legend's square in the colour of that name in page.css. */
function swatch(colour) {
  const made = element("i", { className: "swatch" });
  made.style.background = `var(--${colour})`;
  return made;
}
