/* The time axis that all rows of the timeline share: the part of the step that is shown. */
"use strict";

class TimeAxis {
  /** `length` is the whole step in seconds; `changed` is called when another part is shown. */
  constructor(length, changed) {
    this.length = length;
    this.least = Math.min(length, Math.max(length * 1e-7, 1e-9));
    this.changed = changed;
    this.start = 0;
    this.end = length;
  }

  get span() {
    return this.end - this.start;
  }

  get isWhole() {
    return this.span >= this.length * (1 - 1e-9);
  }

  /** Show this part, as much of it as there is. */
  show(start, end) {
    const span = Math.min(Math.max(end - start, this.least), this.length);
    this.start = Math.min(Math.max(start, 0), this.length - span);
    this.end = this.start + span;
    this.changed();
  }

  /** Show `factor` times as much; the moment `at` stays where it is on the screen. */
  zoom(factor, at = (this.start + this.end) / 2) {
    const span = Math.min(Math.max(this.span * factor, this.least), this.length);
    const start = at - ((at - this.start) / this.span) * span;
    this.show(start, start + span);
  }

  pan(seconds) {
    this.show(this.start + seconds, this.end + seconds);
  }

  reset() {
    this.show(0, this.length);
  }
}

/** Round times on the axis, at most `most` of them, as [{ seconds, label }]. */
function axisTicks(axis, most) {
  const rough = axis.span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * (1 - 1e-9));
  const [unit, size] = timeUnit(axis.end);
  const decimals = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(axis.start / step); i * step <= axis.end; i++) {
    ticks.push({ seconds: i * step, label: `${((i * step) / size).toFixed(decimals)} ${unit}` });
  }
  return ticks;
}
