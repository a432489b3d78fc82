import * as api from "./api";
import { at, grouped } from "./dom";

const SETTLED_MS = 40;

// The foot of the page: the place of the pointer, what is stored there, and the scale.
export class Readout {
  private asked: AbortController | undefined;
  private waiting = 0;

  // Tell a place in pixels of level 0 and, once the pointer stays there, what is stored. `drawn` says whether a layer is.
  tell(slide: number, info: api.SlideInfo, x: number, y: number, middle: boolean, live: boolean, drawn: (layer: number) => boolean): void {
    const um = info.mpp ? ` · ${grouped(x * info.mpp, 1)}, ${grouped(y * info.mpp, 1)} µm` : "";
    at("place").textContent = `${middle ? "middle: " : ""}x ${grouped(x)}, y ${grouped(y)} px${um}`;
    window.clearTimeout(this.waiting);
    this.asked?.abort();
    if (x < 0 || y < 0 || x >= info.width || y >= info.height) {
      at("values").textContent = "";
      return;
    }
    this.waiting = window.setTimeout(() => void this.read(slide, info, x, y, live, drawn), SETTLED_MS);
  }

  private async read(slide: number, info: api.SlideInfo, x: number, y: number, live: boolean, drawn: (layer: number) => boolean): Promise<void> {
    const asked = (this.asked = new AbortController());
    try {
      const found = await api.values(slide, y, x, live, asked.signal);
      if (found && !asked.signal.aborted) {
        const pixel = found.pixel.map((value, index) => `${info.channels[index] ?? index + 1} ${short(value)}`).join(", ");
        const first = ([layer]: [string, string]) => Number(drawn(Number(layer) - 1)); // those that are seen
        const over = Object.entries(found.layers).sort((one, two) => first(two) - first(one)).map(([layer, text]) => `${called(info.layers[Number(layer) - 1]!)}: ${text}`);
        at("values").textContent = [pixel, ...over].join(" · ");
      }
    } catch (error) {
      if (!asked.signal.aborted) {
        at("values").textContent = String((error as Error).message);
      }
    }
  }

  // Tell how many pixels of the screen show one of the slide.
  scale(ratio: number, mpp: number | null): void {
    const times = `${grouped(ratio, ratio < 1 ? 3 : 1)} ×`;
    at("zoom").textContent = mpp ? `${times} (${grouped(mpp / ratio, 3)} µm a screen pixel)` : times;
    drawScale(ratio, mpp);
  }
}

export const called = (layer: api.LayerInfo) => (layer.of ? `${layer.name} (${layer.of})` : layer.name);

const short = (value: number | null) => (value === null ? "no number" : Number.isInteger(value) ? String(value) : value.toPrecision(5));

// A bar of a round length, about a seventh of the view.
function drawScale(ratio: number, mpp: number | null): void {
  const bar = at("scale");
  const unit = mpp ?? 1;
  const most = (180 / ratio) * unit;
  const power = 10 ** Math.floor(Math.log10(most));
  const length = ([5, 2, 1].find((times) => times * power <= most) ?? 1) * power;
  bar.style.width = `${(length / unit) * ratio}px`;
  const text = mpp === null ? `${grouped(length)} px` : length >= 1e6 ? `${length / 1e6} m` : length >= 1000 ? `${length / 1000} mm` : `${Number(length.toPrecision(2))} µm`;
  (bar.firstElementChild as HTMLElement).textContent = text;
}
