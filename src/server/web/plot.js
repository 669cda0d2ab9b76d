/* A plot of a few lines over time: axes, a legend with the present values, values under the pointer or the arrow keys,
 * and the same as a table. Samples are {t: seconds, ...}; a line is broken where its value is null. */
import { h, svg } from "./common.js";

const HEIGHT = 176;
const LEFT = 46;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 22;

/* The least of 1, 2, 2.5, 5 times a power of ten that is no less than x. */
function niceStep(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 2.5, 5, 10].find((m) => m * power >= x * 0.9999) * power;
}

function ago(seconds) {
  if (!seconds) return "now";
  return seconds < 60 ? `${seconds} s ago` : `${seconds / 60} min ago`;
}

export class Plot {
  /* series: [{name, value(sample)}]; format writes a value; most, if given, is the top of the axis at least. */
  constructor({ title, hint, series, format, most = 0 }) {
    Object.assign(this, { title, series, format, most, samples: [], span: 300, at: null });
    this.lines = series.map((_, i) => svg("path", { class: `series s${i}` }));
    this.area = series.length === 1 ? svg("path", { class: "area" }) : null;
    this.grid = svg("g");
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.drawing = svg("svg", { "aria-hidden": "true" }, this.grid, ...(this.area ? [this.area] : []), ...this.lines, this.cursor);
    this.tip = h("div", { class: "tip", hidden: true });
    this.now = series.map(() => h("b", {}, "-"));
    this.chart = h("div", { class: "chart", tabIndex: 0, role: "img" }, this.drawing, this.tip);
    this.head = h("tr", {}, h("th", { scope: "col" }, "Time"), series.map((s) => h("th", { scope: "col" }, s.name)));
    this.rows = h("tbody");
    this.table = h("details", { ontoggle: () => this.fillTable() }, h("summary", {}, "As a table"),
      h("div", { class: "table-scroll", tabIndex: 0, role: "group", "aria-label": `${title}, table` }, h("table", {}, h("thead", {}, this.head), this.rows)));
    const key = (i) => svg("svg", { "aria-hidden": "true", viewBox: "0 0 24 10" }, svg("path", { class: `series s${i}`, d: "M2 5H22" }));
    this.el = h("section", { class: "plot", "aria-label": title }, h("h2", {}, title), hint ? h("p", { class: "hint" }, hint) : null,
      h("ul", { class: "legend" }, series.map((s, i) => h("li", {}, key(i), s.name, this.now[i]))), this.chart, this.table);
    this.chart.addEventListener("pointermove", (e) => this.point(e.clientX - this.chart.getBoundingClientRect().left));
    this.chart.addEventListener("pointerleave", () => this.showAt(null));
    this.chart.addEventListener("blur", () => this.showAt(null));
    this.chart.addEventListener("keydown", (e) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e6, End: 1e6 }[e.key];
      if (!step || !this.samples.length) return;
      e.preventDefault();
      const last = this.samples.length - 1;
      const from = this.at ? this.samples.indexOf(this.at) : last + 1;
      this.showAt(this.samples[Math.max(0, Math.min(last, from + step))]);
    });
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  text(sample, i) {
    const v = sample ? this.series[i].value(sample) : null;
    return v === null || v === undefined || !Number.isFinite(v) ? "-" : this.format(v);
  }

  /* Shows the samples of the last span seconds; the last one is now. */
  update(samples, span) {
    const end = samples.length ? samples[samples.length - 1].t : 0;
    this.span = span;
    this.samples = samples.filter((s) => s.t >= end - span);
    const last = this.samples[this.samples.length - 1];
    this.now.forEach((el, i) => (el.textContent = this.text(last, i)));
    this.chart.setAttribute("aria-label", `${this.title}, now: ${this.series.map((s, i) => `${s.name} ${this.text(last, i)}`).join(", ")}. ` +
      "Arrow keys go through the values; a table is below.");
    if (this.at && !this.samples.includes(this.at)) this.at = null;
    this.draw();
    if (this.table.open && performance.now() - (this.filledAt || 0) > 5000) this.fillTable();
  }

  draw() {
    const width = this.chart.clientWidth;
    if (!width) return;
    const list = this.samples;
    const end = list.length ? list[list.length - 1].t : 0;
    const values = list.flatMap((s) => this.series.map((one) => one.value(s))).filter((v) => Number.isFinite(v));
    const step = niceStep(Math.max(this.most, ...values, 1e-9) / 4);
    const top = step * 4;
    this.x = (t) => LEFT + (1 - (end - t) / this.span) * (width - LEFT - RIGHT);
    const y = (v) => TOP + (1 - v / top) * (HEIGHT - TOP - BOTTOM);
    const grid = [];
    for (let i = 0; i <= 4; i++) {
      const at = Math.round(y(step * i)) + 0.5;
      grid.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
        svg("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.format(step * i)));
    }
    for (let i = 0; i <= 2; i++) {
      const back = (this.span * (2 - i)) / 2;
      grid.push(svg("text", { x: this.x(end - back), y: HEIGHT - 5, "text-anchor": ["start", "middle", "end"][i] }, ago(back)));
    }
    this.grid.replaceChildren(...grid);
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.series.forEach((one, i) => {
      const parts = [];
      for (const s of list) {
        const v = one.value(s);
        if (Number.isFinite(v)) {
          const p = `${this.x(s.t).toFixed(1)},${y(v).toFixed(1)}`;
          if (parts[parts.length - 1]) parts[parts.length - 1].push(p);
          else parts.push([p]);
        } else {
          parts.push(null);
        }
      }
      const runs = parts.filter(Boolean);
      this.lines[i].setAttribute("d", runs.map((r) => "M" + r.join("L") + (r.length === 1 ? "h.1" : "")).join(""));
      if (this.area) {
        const base = y(0);
        this.area.setAttribute("d", runs.map((r) => `M${r[0].split(",")[0]},${base}L${r.join("L")}V${base}z`).join(""));
      }
    });
    if (this.at) this.showAt(this.at);
  }

  point(px) {
    if (!this.samples.length || !this.x) return;
    let best = this.samples[0];
    for (const s of this.samples) if (Math.abs(this.x(s.t) - px) < Math.abs(this.x(best.t) - px)) best = s;
    this.showAt(best);
  }

  showAt(sample) {
    this.at = sample;
    this.tip.hidden = !sample;
    this.cursor.setAttribute("visibility", sample ? "visible" : "hidden");
    if (!sample) return;
    const x = this.x(sample.t);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    const text = this.series.map((s, i) => `${s.name} ${this.text(sample, i)}`).join(", ");
    this.tip.textContent = `${new Date(sample.clock).toLocaleTimeString()}: ${text}`;
    const room = this.chart.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = Math.max(0, Math.min(room, x - this.tip.offsetWidth / 2)) + "px";
    if (document.activeElement === this.chart) document.getElementById("announcer").textContent = this.tip.textContent;
  }

  fillTable() {
    if (!this.table.open) return;
    this.filledAt = performance.now();
    const every = Math.max(1, Math.ceil(this.samples.length / 60));
    const rows = this.samples.filter((_, i) => (this.samples.length - 1 - i) % every === 0).reverse();
    this.rows.replaceChildren(...rows.map((s) => h("tr", {}, h("th", { scope: "row" }, new Date(s.clock).toLocaleTimeString()),
      this.series.map((_, i) => h("td", {}, this.text(s, i))))));
  }
}
