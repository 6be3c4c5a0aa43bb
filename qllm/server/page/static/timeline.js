// The moving timeline of the device's work. LS above, BE below; the height of a pass is its layer.

const KEEP_MS = 60_000; // length of the history
const LATE_MS = 350; // delay of the display, so that all data of a moment has arrived
const FRAMES_PER_S = 6; // more would use over a tenth of a core if no GPU draws
const GUTTER = 56; // px for the names of the tracks
const TOP = 20; // px above a track, for marks
const AXIS = 22;
const TRACKS = ["LS", "BE"];

// A colour of the style sheet, for a canvas.
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function readColours() {
  const names = ["LS", "BE"].map((track) => [track, colour(track.toLowerCase())]);
  const found = { ...Object.fromEntries(names) };
  for (const name of ["ink", "soft", "line", "grid", "well", "card"]) found[name] = colour(name);
  return found;
}

// The track of a class as the server names it: "LS", "BE" or "class 5".
export function trackOf(name) {
  return name === "BE" || Number(name.replace("class ", "")) >= 10 ? "BE" : "LS";
}

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.spanMs = 5000;
    this.heldAt = null; // the right edge, while the timeline is held
    this.slow = matchMedia("(prefers-reduced-motion: reduce)");
    this.clear();
    this.restyle();
    new ResizeObserver(() => { this.resize(); }).observe(canvas);
    canvas.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.pointerY = event.offsetY; });
    canvas.addEventListener("pointerleave", () => { this.pointer = null; });
    this.resize();
    this.tick();
  }

  // Forget everything, because another engine has another clock.
  clear() {
    this.runs = [];
    this.holds = [];
    this.marks = []; // [at, track, "arrived" or "first"]
    this.stops = []; // preemptions: [at, track, layer]
    this.parked = [];
    this.running = null;
    this.numLayers = 1;
    this.nowMs = 0;
    this.aheadMs = null; // engine's clock minus ours
    this.wallMs = 0; // wall clock minus the engine's
    this.isLive = false;
    this.hasWork = false;
  }

  restyle() {
    this.colours = readColours();
    this.hatches = Object.fromEntries(TRACKS.map((track) => [track, this.hatch(this.colours[track])]));
    this.isDirty = true;
  }

  hatch(stroke) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 7;
    const c = tile.getContext("2d");
    c.strokeStyle = stroke;
    c.lineWidth = 1.3;
    for (const x of [-7, 0, 7]) { c.moveTo(x - 1, 8); c.lineTo(x + 8, -1); }
    c.stroke();
    return c.createPattern(tile, "repeat");
  }

  resize() {
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const { clientWidth, clientHeight } = this.canvas;
    this.canvas.width = Math.max(1, Math.round(clientWidth * ratio));
    this.canvas.height = Math.max(1, Math.round(clientHeight * ratio));
    this.ratio = ratio;
    this.draw(); // at once: a resized canvas is black
  }

  // Take one message of the server.
  take(message) {
    if (message.entries === undefined) return;
    this.nowMs = message.now_ms;
    const ahead = message.now_ms - performance.now();
    // messages arrive late, never early: the largest difference is the true one, but clocks drift
    this.aheadMs = this.aheadMs === null ? ahead : Math.max(ahead, this.aheadMs - 1);
    const wall = 1000 * message.time_s - message.now_ms;
    if (Math.abs(wall - this.wallMs) > 50) this.wallMs = wall; // smaller changes would make the axis tremble
    this.numLayers = message.num_layers;
    this.parked = message.parked;
    this.running = message.running;
    for (const [what, at, ...rest] of message.entries) {
      if (what === "run") this.runs.push([at, ...rest]);
      else if (what === "held") this.holds.push([at, ...rest]);
      else if (what === "preempted") this.stops.push([at, rest[1], rest[2]]);
      else if (what === "arrived" || what === "first") this.marks.push([at, trackOf(rest[0]), what]);
    }
    if (this.runs.length || this.running || this.parked.length) this.hasWork = true;
    if (this.heldAt === null) this.forgetBefore(this.nowMs - KEEP_MS);
    this.isLive = true;
    this.isDirty = true;
  }

  forgetBefore(ms) {
    for (const list of ["runs", "holds"]) this[list] = this[list].filter((entry) => entry[1] > ms);
    for (const list of ["marks", "stops"]) this[list] = this[list].filter((entry) => entry[0] > ms);
  }

  hold(atMs) { this.heldAt = atMs; this.isDirty = true; }

  // Show the time around a moment, and stop moving.
  show(atMs) { this.hold(atMs + 0.6 * this.spanMs); }

  get edgeMs() {
    if (this.heldAt !== null) return this.heldAt;
    if (this.aheadMs === null) return this.nowMs;
    return performance.now() + this.aheadMs - LATE_MS;
  }

  tick() {
    const moves = this.isLive && this.hasWork && this.heldAt === null && !document.hidden;
    if (moves || this.isDirty) requestAnimationFrame(() => this.draw());
    setTimeout(() => this.tick(), 1000 / (this.slow.matches ? 1 : FRAMES_PER_S));
  }

  // -- drawing

  draw() {
    this.isDirty = false;
    const c = this.canvas.getContext("2d", { alpha: false });
    const width = this.canvas.width / this.ratio;
    const height = this.canvas.height / this.ratio;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = this.colours.card;
    c.fillRect(0, 0, width, height);
    const edge = this.edgeMs;
    const begin = edge - this.spanMs;
    const scale = (width - GUTTER) / this.spanMs;
    const trackHeight = (height - AXIS) / 2 - TOP;
    const bottoms = { LS: TOP + trackHeight, BE: 2 * (TOP + trackHeight) };
    const view = { c, width, edge, begin, scale, trackHeight, bottoms,
      x: (ms) => GUTTER + (ms - begin) * scale,
      y: (track, layer) => bottoms[track] - Math.max(0.04, Math.min(1, layer / this.numLayers)) * trackHeight };
    this.drawGrid(view, height);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width - GUTTER, height);
    c.clip();
    for (const [from, to, track, layer, isPreempted] of this.holds) {
      if (to > begin && from < edge) this.drawHold(view, from, to, track, layer, isPreempted);
    }
    for (const [since, track, layer, , , isPreempted] of this.parked) {
      if (since < edge) this.drawHold(view, since, edge, track, layer, isPreempted);
    }
    this.drawRuns(view);
    this.drawStops(view);
    this.drawMarks(view);
    c.restore();
    this.drawPointer(view);
  }

  drawGrid({ c, width, edge, begin, x, trackHeight, bottoms }, height) {
    const { soft, line, grid, ink } = this.colours;
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    const stepMs = [50, 100, 200, 500, 1000, 2000, 5000].find((ms) => ms * (width - GUTTER) / this.spanMs >= 90) || 10_000;
    c.textAlign = "center";
    for (let wall = Math.ceil((begin + this.wallMs) / stepMs) * stepMs; wall < edge + this.wallMs; wall += stepMs) {
      const at = x(wall - this.wallMs);
      c.fillStyle = grid;
      c.fillRect(Math.round(at), 6, 1, height - AXIS - 6);
      if (this.nowMs && at > GUTTER + 24 && at < width - 30) {
        const time = new Date(wall);
        const tail = stepMs < 1000 ? `.${String(time.getMilliseconds()).padStart(3, "0").slice(0, stepMs < 100 ? 2 : 1)}` : "";
        c.fillStyle = soft;
        c.fillText(time.toLocaleTimeString([], { hour12: false }) + tail, at, height - AXIS / 2);
      }
    }
    for (const track of TRACKS) {
      c.fillStyle = line;
      c.fillRect(GUTTER, bottoms[track], width - GUTTER, 1);
      c.textAlign = "right";
      c.fillStyle = this.colours[track];
      c.font = "600 14px system-ui, sans-serif";
      c.fillText(track, GUTTER - 10, bottoms[track] - trackHeight / 2);
      c.font = "11px system-ui, sans-serif";
      c.fillStyle = soft;
      c.fillText("0", GUTTER - 10, bottoms[track] - 5);
      c.fillText(String(this.numLayers), GUTTER - 10, bottoms[track] - trackHeight + 5);
    }
    c.fillStyle = ink;
  }

  drawHold({ c, x, y, bottoms }, from, to, track, layer, isPreempted) {
    const left = x(from);
    const top = y(track, Math.max(layer, 0.3 * this.numLayers));
    c.globalAlpha = isPreempted ? 0.55 : 0.25;
    c.fillStyle = this.hatches[track];
    c.fillRect(left, top, Math.max(1, x(to) - left), bottoms[track] - top);
    c.globalAlpha = 1;
  }

  drawRuns({ c, begin, edge, x, y, bottoms, trackHeight }) {
    for (const track of TRACKS) {
      const solid = new Path2D(); // one pass: its layers as a slope
      const many = new Path2D(); // small passes, drawn together
      const slopes = new Path2D();
      const bottom = bottoms[track];
      for (const [from, to, of, first, end, passes] of this.runs) {
        if (of !== track || to < begin || from > edge) continue;
        const left = x(from);
        const right = Math.max(x(to), left + 1.5);
        if (passes > 1 || right - left < 4) {
          (passes > 1 ? many : solid).rect(left, bottom - trackHeight, right - left, trackHeight);
          continue;
        }
        for (const path of [solid, slopes]) {
          path.moveTo(left, y(track, first));
          path.lineTo(right, y(track, end));
        }
        solid.lineTo(right, bottom);
        solid.lineTo(left, bottom);
        solid.closePath();
      }
      c.fillStyle = c.strokeStyle = this.colours[track];
      c.globalAlpha = 0.55;
      c.fill(many);
      c.globalAlpha = 0.72;
      c.fill(solid);
      c.globalAlpha = 1;
      c.lineWidth = 1.5;
      c.stroke(slopes);
    }
    if (this.running !== null && this.running[0] < edge) {
      const [since, track, first] = this.running;
      const left = x(since);
      c.fillStyle = this.colours[track];
      c.globalAlpha = 0.3;
      c.fillRect(left, y(track, first), x(edge) - left, bottoms[track] - y(track, first));
      c.globalAlpha = 1;
    }
  }

  // Draw a preemption from the stopped pass up to the track that it made room for.
  drawStops({ c, begin, edge, x, y, bottoms }) {
    c.strokeStyle = this.colours.ink;
    c.lineWidth = 1.2;
    c.beginPath();
    for (const [at, track, layer] of this.stops) {
      if (at < begin || at > edge) continue;
      const left = Math.round(x(at)) + 0.5;
      c.moveTo(left, y(track, layer));
      c.lineTo(left, track === "BE" ? bottoms.LS : bottoms.LS - 8);
    }
    c.stroke();
  }

  drawMarks({ c, begin, edge, x, bottoms, trackHeight }) {
    for (const [at, track, what] of this.marks) {
      if (at < begin || at > edge) continue;
      const left = x(at);
      const top = bottoms[track] - trackHeight - 5;
      c.fillStyle = this.colours[track];
      c.beginPath();
      if (what === "first") {
        c.fillStyle = this.colours.ink;
        c.arc(left, top - 3, 2.6, 0, 7);
      } else {
        c.moveTo(left, top);
        c.lineTo(left - 4, top - 8);
        c.lineTo(left + 4, top - 8);
      }
      c.fill();
    }
  }

  drawPointer(view) {
    if (this.pointer === null || this.pointer === undefined || this.pointer < GUTTER) return;
    const text = this.under(view);
    if (text === null) return;
    const { c, width } = view;
    c.font = "12px system-ui, sans-serif";
    const wide = c.measureText(text).width + 16;
    const left = Math.min(Math.max(this.pointer - wide / 2, GUTTER), width - wide);
    const top = this.pointerY > 60 ? this.pointerY - 34 : this.pointerY + 14;
    c.fillStyle = this.colours.ink;
    c.beginPath();
    c.roundRect(left, top, wide, 24, 6);
    c.fill();
    c.fillStyle = this.colours.card;
    c.textAlign = "left";
    c.fillText(text, left + 8, top + 12.5);
  }

  // A description of the thing under the pointer.
  under({ begin, scale, bottoms }) {
    const at = begin + (this.pointer - GUTTER) / scale;
    const slackMs = 2 / scale;
    const track = this.pointerY < bottoms.LS ? "LS" : "BE";
    const run = this.runs.find(([from, to, of]) => of === track && from - slackMs <= at && at <= to + slackMs);
    if (run) {
      const [from, to, , first, end, passes, rows, tokens] = run;
      const what = passes > 1 ? `${passes} passes` : `pass, layers ${first} to ${end} of ${this.numLayers}`;
      return `${track} ${what}: ${rows} ${rows === 1 ? "row" : "rows"}, ${tokens} tokens, ${(to - from).toFixed(1)} ms`;
    }
    const hold = this.holds.find(([from, to, of]) => of === track && from <= at && at <= to);
    if (hold) return `${track} pass parked ${Number.isInteger(hold[3]) ? "before" : "inside"} layer ${Math.floor(hold[3])} for ${(hold[1] - hold[0]).toFixed(1)} ms`;
    return null;
  }

  // A description of the timeline, for screen readers.
  text() {
    const since = this.nowMs - this.spanMs;
    const passes = { LS: 0, BE: 0 };
    for (const [, to, track, , , count] of this.runs) if (to > since) passes[track] += count;
    const stops = this.stops.filter(([at]) => at > since).length;
    const stopped = stops === 1 ? "1 preemption" : `${stops} preemptions`;
    return `In the last ${this.spanMs / 1000} s: passes of ${passes.LS} LS and of ${passes.BE} BE, whole or in part; ` +
      `${stopped}; ${this.parked.length} parked now.`;
  }
}
