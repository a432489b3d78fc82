import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import * as api from "./api";
import { at, make } from "./dom";

const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const EVERY_MS = 2000;

type Series = Map<string, Map<number, number | null>>; // by split, then by step

// The numbers of a run, drawn again as it writes more.
export class Curves {
  private read = 0;
  private timer = 0;
  private charts = new Map<string, uPlot>();
  private data = new Map<string, Series>();

  constructor(private readonly run: number, private readonly name: string) {}

  start(): void {
    const place = at("curves");
    place.hidden = false;
    place.replaceChildren(make("h1", {}, `Run ${this.name}`), make("p", { id: "curves-state", role: "status" }, "Reading …"));
    void this.more();
  }

  stop(): void {
    window.clearTimeout(this.timer);
    this.charts.forEach((chart) => chart.destroy());
    this.charts.clear();
    at("curves").hidden = true;
  }

  private async more(): Promise<void> {
    let wait = EVERY_MS;
    try {
      const found = await api.curves(this.run, this.read);
      if (found.begins) {
        this.data.clear();
      }
      this.read = found.next;
      wait = found.more ? 0 : EVERY_MS;
      for (const [split, name, step, value] of found.points) {
        const series = this.data.get(name) ?? new Map<string, Map<number, number | null>>();
        const points = series.get(split) ?? new Map<number, number | null>();
        points.set(step, value);
        series.set(split, points);
        this.data.set(name, series);
      }
      if (found.points.length || !this.charts.size) {
        this.draw();
      }
      const last = Math.max(0, ...[...this.data.values()].flatMap((series) => [...series.values()].flatMap((points) => [...points.keys()])));
      at("curves-state").textContent = this.data.size ? `${last.toLocaleString("en")} slides seen; read again every ${EVERY_MS / 1000} s` : "Nothing has been written yet";
    } catch (error) {
      at("curves-state").textContent = (error as Error).message;
    }
    this.timer = window.setTimeout(() => void this.more(), wait);
  }

  private draw(): void {
    const place = at("curves");
    for (const [name, series] of this.data) {
      const splits = [...series.keys()].sort();
      const steps = [...new Set(splits.flatMap((split) => [...series.get(split)!.keys()]))].sort((a, b) => a - b);
      const columns = [steps, ...splits.map((split) => steps.map((step) => series.get(split)!.get(step)))] as uPlot.AlignedData;
      const known = this.charts.get(name);
      if (known && known.series.length === columns.length) {
        known.setData(columns);
        continue;
      }
      known?.destroy();
      const ink = getComputedStyle(document.body).color;
      const axis = { stroke: ink, grid: { stroke: "#88888833" }, ticks: { stroke: "#88888855" } };
      const options: uPlot.Options = {
        title: name.replaceAll("_", " ").replace(/ bytes$/, ""),
        width: Math.min(900, place.clientWidth - 48),
        height: 260,
        scales: { x: { time: false } },
        axes: [{ ...axis, label: "slides seen" }, { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => worded(name, tick)) }],
        series: [
          { label: "slides" },
          ...splits.map((split, index) => ({
            label: split,
            stroke: COLOURS[index % COLOURS.length]!,
            value: (_: uPlot, value: number | null) => (value === null ? "–" : worded(name, value)),
            width: 1.5,
            spanGaps: true,
            points: { show: steps.length < 60 },
          })),
        ],
      };
      this.charts.set(name, new uPlot(options, columns, place));
    }
  }
}

// A number in the unit that the last word of its name says.
function worded(name: string, value: number): string {
  if (name.endsWith("bytes")) {
    return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(0)} MiB`;
  }
  return `${Number(value.toPrecision(5))}${name.endsWith("seconds") ? " s" : ""}`;
}
