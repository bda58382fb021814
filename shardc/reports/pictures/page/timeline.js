/* The timeline: its layout, the item under the mouse, and how the view is moved. */
"use strict";

const NAMES_WIDTH = 118; // pixels left of the axis, for the names of the rows
const EDGE = 8; // pixels right of the axis
const REACH = 3; // pixels by which the mouse may miss a narrow span

class Timeline {
  constructor(canvas, record) {
    this.canvas = canvas;
    this.record = record;
    this.axis = new TimeAxis(record.end, () => this.changed());
    this.lanes = lanesOf(record.collectives);
    this.rows = layoutRows(record, this.lanes.length);
    this.bottom = Math.max(...Object.values(this.rows).map((row) => row.top + row.height));
    this.colours = new Map();
    this.selected = null; // a collective that stays pointed out
    this.hovered = null; // the item under the mouse: { kind, item }
    this.pointer = null;
    this.waiting = false;
    this.onchange = () => {};
    canvas.style.height = `${this.bottom + 6}px`;
    this.listen();
  }

  // -- drawing ------------------------------------------------------------------------------

  changed() {
    this.onchange();
    this.redraw();
  }

  /** Draw with the next frame, once however often it was asked for. */
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const scene = this.scene();
    drawTicks(scene);
    drawNames(scene);
    clipped(scene, (inside) => {
      drawPhases(inside);
      drawUnits(inside);
      drawCompute(inside);
      drawStalls(inside);
      drawCommunication(inside);
      if (inside.rows.memory) drawMemory(inside);
    });
    if (scene.rows.memory) {
      drawMemoryScale(scene);
      clipped(scene, drawPeak);
    }
    clipped(scene, drawShown);
    drawCursor(scene);
  }

  /** A blank canvas, at the resolution of the screen, and the scene to be drawn on it. */
  scene() {
    const { canvas, axis } = this;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.textBaseline = "middle";
    context.font = SMALL_FONT;
    const [left, right] = [NAMES_WIDTH, Math.max(width - EDGE, NAMES_WIDTH + 50)];
    const x = (seconds) => left + ((seconds - axis.start) / axis.span) * (right - left);
    const { record, rows, lanes, bottom, pointer } = this;
    const colour = (name) => this.colour(name);
    const shown = this.shown();
    return { context, record, axis, left, right, rows, lanes, bottom, pointer, x, colour, shown };
  }

  colour(name) {
    if (!this.colours.has(name)) {
      const style = getComputedStyle(document.documentElement);
      this.colours.set(name, style.getPropertyValue(`--${name}`).trim());
    }
    return this.colours.get(name);
  }

  /** The items to point out, for the item under the mouse or else selected: { op, collectives }. */
  shown() {
    const { kind, item } = this.hovered ?? {};
    if (kind === "op") return { op: item, collectives: item.collectives };
    const collective = { collective: item, stall: item?.collective }[kind] ?? this.selected;
    return { op: collective?.reader ?? null, collectives: collective ? [collective] : [] };
  }

  // -- moving -------------------------------------------------------------------------------

  get pixelSeconds() {
    return this.axis.span / Math.max(this.canvas.clientWidth - NAMES_WIDTH - EDGE, 50);
  }

  secondsAt(x) {
    return this.axis.start + (x - NAMES_WIDTH) * this.pixelSeconds;
  }

  /** Point a collective out, and show the time from its start to the end of its reader. */
  select(collective) {
    this.selected = collective;
    const start = Math.min(collective.issued, collective.start, collective.waited);
    const end = Math.max(collective.end, collective.resumed, collective.reader?.end ?? 0);
    const margin = (end - start) * 0.25;
    this.axis.show(start - margin, end + margin);
  }

  /** Go to the stall after (direction 1) or before (-1) the one selected; around at the ends. */
  goToStall(direction) {
    const { stalls } = this.record;
    const current = stalls.findIndex((stall) => stall.collective === this.selected);
    const next = current < 0 && direction < 0 ? stalls.length - 1 : current + direction;
    this.select(stalls[(next + stalls.length) % stalls.length].collective);
  }

  reset() {
    this.selected = null;
    this.axis.reset();
  }

  // -- mouse and keys -----------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colours.clear();
      this.redraw();
    });
  }

  /** Up zooms in, down out; sideways moves. Down scrolls the page if the whole step is shown. */
  wheel(event) {
    const lines = event.deltaMode === 1 ? 16 : 1;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.axis.pan(sideways * lines * this.pixelSeconds);
    } else if (event.deltaY > 0 && this.axis.isWhole) {
      return;
    } else {
      const pixels = Math.max(-300, Math.min(300, event.deltaY * lines));
      this.axis.zoom(Math.exp(pixels * 0.002), this.secondsAt(event.offsetX));
    }
    event.preventDefault();
  }

  key(event) {
    const { axis } = this;
    const actions = {
      "+": () => axis.zoom(0.5),
      "=": () => axis.zoom(0.5),
      "-": () => axis.zoom(2),
      ArrowLeft: () => axis.pan(-axis.span / 8),
      ArrowRight: () => axis.pan(axis.span / 8),
      0: () => this.reset(),
      Escape: () => this.reset(),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    actions[event.key]();
    event.preventDefault();
  }

  move(event) {
    const dragged = event.buttons === 1;
    const moved = dragged && this.pointer ? this.pointer.x - event.offsetX : 0;
    if (moved) this.axis.pan(moved * this.pixelSeconds);
    this.pointer = { x: event.offsetX, y: event.offsetY };
    this.hovered = dragged ? null : this.at(this.pointer);
    showTooltip(this.hovered && this.describe(this.hovered), this.tooltipPlace(event));
    this.redraw();
  }

  /** Beside the mouse, but below the lanes, so that the lines between them can be seen. */
  tooltipPlace({ clientX, clientY }) {
    const lanes = this.canvas.getBoundingClientRect().top + this.rows.ticks.top - 12;
    return { x: clientX, y: Math.max(clientY, lanes) };
  }

  leave() {
    this.pointer = this.hovered = null;
    showTooltip(null);
    this.redraw();
  }

  // -- the item under the mouse -------------------------------------------------------------

  /** The op, stall, collective or moment of memory at a place: { kind, item }, or null. */
  at({ x, y }) {
    if (x < NAMES_WIDTH || x > this.canvas.clientWidth - EDGE) return null;
    const [seconds, reach] = [this.secondsAt(x), REACH * this.pixelSeconds];
    const { compute, communication, memory } = this.rows;
    if (isIn(compute, y)) {
      const stall = spanAt(this.record.stalls, seconds, reach);
      if (stall) return { kind: "stall", item: stall };
      return found("op", spanAt(this.record.ops, seconds, reach));
    }
    if (isIn(communication, y)) {
      const lane = this.lanes[Math.floor((y - communication.top) / communication.lane)];
      return found("collective", spanAt(lane ?? [], seconds, reach));
    }
    return memory && isIn(memory, y) ? { kind: "memory", item: seconds } : null;
  }

  describe({ kind, item }) {
    if (kind === "op") return describeOp(item);
    if (kind === "stall") return describeStall(item);
    if (kind === "collective") return describeCollective(item);
    const { memory, kinds } = this.record;
    return describeMemory(memory[memoryIndex(memory, item)], item, kinds);
  }
}

const found = (kind, item) => (item ? { kind, item } : null);
const isIn = (row, y) => y >= row.top && y < row.top + row.height;

/** The collectives of each lane, in order of time. */
function lanesOf(collectives) {
  const lanes = [];
  for (const row of collectives) (lanes[row.lane] ??= []).push(row);
  lanes.forEach((lane) => lane.sort((a, b) => a.start - b.start));
  return lanes;
}

/** The place of each row on the canvas, in pixels from its top. */
function layoutRows(record, lanes) {
  const rows = {};
  let top = 0;
  const add = (name, height, gap, more) => {
    rows[name] = { top, height, ...more };
    top += height + gap;
  };
  add("phases", 22, 4);
  if (record.units.length) add("units", 18, 0);
  top += 10;
  add("compute", 46, 30);
  add("communication", 31 * Math.max(lanes, 1), 6, { lane: 31 });
  add("ticks", 20, 8);
  if (record.peak.total) add("memory", 180, 0);
  return rows;
}
