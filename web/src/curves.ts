import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import * as api from "./api";
import { at, make } from "./dom";

export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const EVERY_MS = 2000;
const POWERS = Array.from({ length: 50 }, (_, at_) => 2 ** at_);
const WHOLE = Array.from({ length: 30 }, (_, at_) => [1, 2, 5][at_ % 3]! * 10 ** Math.floor(at_ / 3));

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
      const lines = splits.map((split, index) => ({
        label: split,
        stroke: COLOURS[index % COLOURS.length]!,
        points: { show: steps.length < 60 },
      }));
      const width = Math.min(900, place.clientWidth - 48);
      this.charts.set(name, plot(place, columns, lines, { title: name.replaceAll("_", " ").replace(/ bytes$/, ""), name, x: "slides seen", step: "slides", width }));
    }
  }
}

export interface Plot {
  name: string; // the last word of it is the unit
  title?: string;
  x: string; // what the first column counts
  step: string; // and in what
  width: number;
  height?: number;
  log?: boolean;
  from?: number; // where the values' axis begins at the latest
  scale?: number; // how many pixels are drawn for one, as paper needs
}

// Draw a line for each column but the first, which says where they are.
export function plot(place: HTMLElement, columns: uPlot.AlignedData, lines: uPlot.Series[], given: Plot): uPlot {
  const { name, log = false, scale = 1, from } = given;
  const stroke = getComputedStyle(place).color;
  const font = `${12 * scale}px system-ui, sans-serif`;
  const axis: uPlot.Axis = {
    stroke, font, labelFont: font, labelSize: 20 * scale, gap: 5 * scale, space: 60 * scale,
    grid: { stroke: "#88888833", width: scale }, ticks: { stroke: "#88888855", width: scale, size: 6 * scale },
  };
  const chart = new uPlot(
    {
      ...(given.title ? { title: given.title } : {}),
      width: given.width * scale,
      height: (given.height ?? 260) * scale,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(from === undefined ? {} : { range: (_, low, high) => [Math.min(from, low), high * 1.05] }) } },
      axes: [
        { ...axis, label: given.x, size: 32 * scale, incrs: WHOLE },
        { ...axis, space: 35 * scale, size: 70 * scale, ...(name.endsWith("bytes") ? { incrs: POWERS } : {}), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : worded(name, tick))) },
      ],
      series: [
        { label: given.step },
        ...lines.map((line) => ({
          value: (_: uPlot, value: number | null) => (value === null ? "–" : worded(name, value)),
          spanGaps: true,
          ...line,
          width: (line.width ?? 1.5) * scale,
          points: { ...line.points, size: (line.points?.size ?? 5) * scale },
        })),
      ],
    },
    columns,
    place,
  );
  chart.root.querySelector<HTMLElement>(".u-wrap")!.style.zoom = String(1 / scale);
  return chart;
}

// A number in the unit that the last word of its name says.
export function worded(name: string, value: number): string {
  if (name.endsWith("bytes")) {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.abs(value)) / 10)));
    const size = value / 1024 ** power;
    return `${Math.abs(size) < 100 ? Number(size.toPrecision(3)) : size.toFixed(0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }
  const shown = Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
  return name.endsWith("seconds") ? `${shown} s` : shown;
}
