// The four charts over time: uPlot, a point per second, the last three minutes.
/* global uPlot */

import { colour } from "./timeline.js";

const KEEP_S = 180;
const LEAST_S = 30; // least time shown, even on a new page
const MAX_DOTS = 1500;

function axes(values) {
  const stroke = colour("soft");
  const grid = { stroke: colour("grid"), width: 1 };
  const few = values === decades ? { filter: onlyDecades } : {}; // fewer labels and grid lines
  const font = "11px system-ui, sans-serif";
  const clock = (_, ticks) => ticks.map((s) => new Date(1000 * s).toLocaleTimeString([], { hour12: false }));
  return [
    { stroke, grid, font, ticks: { show: false }, values: clock, space: 80, size: 26 },
    { stroke, grid: { ...grid, ...few }, font, ticks: { show: false }, size: 46, space: 28, values, ...few },
  ];
}

const line = (name, of, more) => ({ label: name, stroke: colour(of), width: 2, points: { show: false }, ...more });
const dots = (name, of) => ({ label: name, stroke: colour(of), paths: () => null, points: { show: true, size: 5, fill: colour(of) } });
const short = (value) => (value === null ? "" : value >= 1e4 ? `${value / 1e3}k` : String(+value.toPrecision(3)));
const plain = (_, ticks) => ticks.map(short);
const decades = (_, ticks) => ticks.map(short);
const onlyDecades = (_, ticks) => ticks.map((v) => (["1", "2", "5"].includes(v.toExponential(6).replace(/\.?0*e.*/, "")) ? v : null));

export class Charts {
  constructor(nodes) {
    this.nodes = nodes; // by name
    this.points = []; // per second: [time, LS tokens/s, BE tokens/s, waiting, running, parked, KV %]
    this.ttfts = []; // [time, LS, BE]
    this.plots = {};
    this.make();
    if (!this.failed) new ResizeObserver(() => { this.resize(); }).observe(nodes.rate.parentElement.parentElement);
  }

  // If the library fails, the rest of the page still runs, and reports it.
  make() {
    try {
      this.makePlots();
    } catch (error) {
      this.failed = true;
      this.plots = {};
      for (const node of Object.values(this.nodes)) node.textContent = `No chart: ${error.message}.`;
    }
  }

  makePlots() {
    for (const plot of Object.values(this.plots)) plot.destroy();
    const from0 = { range: (_, min, max) => [0, Math.max(max || 0, 1) * 1.15] };
    const kinds = {
      ttft: [[dots("LS", "ls"), dots("BE", "be")], { distr: 3, range: (_, min, max) => (min === null ? [1, 1000] : [10 ** Math.floor(Math.log10(Math.max(min, 0.01))), 10 ** Math.ceil(Math.log10(Math.max(max, 0.02)) + 0.01)]) }, decades],
      rate: [[line("LS", "ls"), line("BE", "be")], from0, plain],
      queue: [[line("waiting", "soft", { dash: [2, 3] }), line("running", "good"), line("parked", "be", { dash: [7, 4] })], from0, plain],
      kv: [[line("KV", "accent", { fill: colour("well") })], { range: [0, 100] }, plain],
    };
    for (const [name, [series, y, values]] of Object.entries(kinds)) {
      const node = this.nodes[name];
      this.plots[name] = new uPlot({
        width: Math.max(100, node.clientWidth), height: 150, legend: { show: false }, cursor: { show: false },
        padding: [6, 26, 0, 0], scales: { x: { time: true, range: () => this.window }, y }, axes: axes(values),
        series: [{}, ...series],
      }, [[], ...series.map(() => [])], node);
    }
    this.draw();
  }

  get window() {
    const end = this.points.length ? this.points[this.points.length - 1][0] : Date.now() / 1000;
    const first = this.points.length ? this.points[0][0] : end;
    return [Math.max(end - KEEP_S, Math.min(first, end - LEAST_S)), end];
  }

  resize() {
    for (const [name, plot] of Object.entries(this.plots)) {
      const width = this.nodes[name].clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: 150 });
    }
  }

  ttft(atS, track, ms) { this.ttfts.push(track === "LS" ? [atS, ms, null] : [atS, null, ms]); }

  point(values) {
    this.points.push(values);
    const since = values[0] - KEEP_S;
    while (this.points.length && this.points[0][0] < since) this.points.shift();
    this.ttfts = this.ttfts.filter(([at]) => at >= since).slice(-MAX_DOTS).sort((a, b) => a[0] - b[0]);
    if (!document.hidden && !this.failed) this.draw();
  }

  draw() {
    const column = (i) => this.points.map((point) => point[i]);
    this.plots.ttft.setData([0, 1, 2].map((i) => this.ttfts.map((dot) => dot[i])));
    this.plots.rate.setData([column(0), column(1), column(2)]);
    this.plots.queue.setData([column(0), column(3), column(4), column(5)]);
    this.plots.kv.setData([column(0), column(6)]);
  }
}
