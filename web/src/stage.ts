import OpenSeadragon from "openseadragon";
import * as api from "./api";
import { at, grouped } from "./dom";
import { tileSource } from "./source";

export interface LayerState {
  on: boolean;
  opacity: number;
  form: "fill" | "outline";
  hidden: Set<number>;
  channel: number;
}

export interface Place {
  x: number; // of the middle, in pixels of level 0
  y: number;
  width: number; // of what is seen
}

export interface Square {
  x: number;
  y: number;
  side: number;
}

const SHARP = 0.6; // of its level, pixels of a live layer that a pixel of the screen shows at least

// The slide that is looked at, and what lies over it.
export class Stage {
  readonly viewer: OpenSeadragon.Viewer;
  private info: api.SlideInfo | undefined;
  private number = -1;
  private images: (OpenSeadragon.TiledImage | undefined)[] = [];
  private drawnLevels: (number | undefined)[] = []; // of live layers
  private states: LayerState[] = [];
  private pointer: { x: number; y: number } | undefined;
  private asked: AbortController | undefined;
  private waiting = 0;
  private placed = 0;
  private slow = 0;
  private grid = false;
  private square: Square | undefined;
  source = ""; // whose predictions it shows

  constructor(
    private readonly element: HTMLElement,
    private readonly lines: HTMLCanvasElement,
    private readonly first: boolean, // of two; it tells place, values and scale for both
    private readonly moved: (place: Place) => void,
    private readonly liveLacks: (lacks: boolean) => void,
    private readonly waits: (why: string) => void,
  ) {
    // OpenSeadragon brings a style sheet of its own, which the page's policy forbids, unless it finds this: an element
    // of no known kind.
    const known = document.createElementNS("urn:none", "style");
    known.setAttribute("data-openseadragon-mobile-css", "");
    document.head.append(known);
    this.viewer = new OpenSeadragon.Viewer({
      element,
      drawer: "canvas",
      showNavigationControl: false,
      showNavigator: first,
      navigatorPosition: "TOP_RIGHT",
      navigatorSizeRatio: 0.16,
      navigatorMaintainSizeRatio: false,
      keyboardNavEnabled: false,
      animationTime: 0.35,
      springStiffness: 9,
      blendTime: 0,
      immediateRender: false,
      maxZoomPixelRatio: 16,
      minZoomImageRatio: 0.6,
      visibilityRatio: 0.4,
      imageLoaderLimit: 6,
      timeout: 120000,
      imageSmoothingEnabled: true,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      preserveImageSizeOnResize: true,
    } as unknown as OpenSeadragon.Options);
    // The map in the corner shows the slide alone: layers would be asked for as a whole.
    const map = this.viewer.navigator as unknown as { addTiledImage: (options: { over?: boolean }) => void } | null;
    if (map) {
      const add = map.addTiledImage.bind(map);
      map.addTiledImage = (options) => {
        if (!options.over) {
          add(options);
        }
      };
    }
    this.viewer.canvas.setAttribute("role", "application");
    this.call("Slide");
    const changed = () => this.changed();
    this.viewer.addHandler("animation", changed);
    this.viewer.addHandler("animation-finish", changed);
    this.viewer.addHandler("resize", changed);
    this.viewer.addHandler("open", changed);
    element.addEventListener("pointermove", (event) => {
      const rect = element.getBoundingClientRect();
      const pointer = { x: event.clientX - rect.left, y: event.clientY - rect.top };
      this.point(pointer);
      this.other?.point(pointer, true);
    });
    element.addEventListener("pointerleave", () => {
      this.point(undefined);
      this.other?.point(undefined);
    });
  }

  private other: Stage | undefined;
  private leads = true;

  // Move in step with another stage of the same size: whichever somebody touched last leads.
  link(other: Stage): void {
    for (const [one, two] of [[this, other], [other, this]] as const) {
      one.other = two;
      for (const touch of ["canvas-press", "canvas-scroll", "canvas-pinch"] as const) {
        one.viewer.addHandler(touch, () => one.lead());
      }
      const follow = () => {
        if (one.leads && one.viewer.isOpen() && two.viewer.isOpen()) {
          two.viewer.viewport.zoomTo(one.viewer.viewport.getZoom(true), undefined, true);
          two.viewer.viewport.panTo(one.viewer.viewport.getCenter(true), true);
        }
      };
      one.viewer.addHandler("viewport-change", follow);
      two.viewer.addHandler("open", follow);
      two.viewer.addHandler("resize", follow);
    }
    this.lead();
  }

  lead(): void {
    this.leads = true;
    if (this.other) {
      this.other.leads = false;
    }
  }

  // Name it for those who do not see it.
  call(name: string): void {
    this.viewer.canvas.setAttribute("aria-label", `${name}: arrow keys move it, plus and minus zoom, question mark lists all keys`);
  }

  // The pointer is here, in pixels of the element; a cross shows the place where it is in the `other` one.
  private point(at_: { x: number; y: number } | undefined, other = false): void {
    this.pointer = at_;
    const cross = this.element.parentElement!.querySelector<HTMLElement>(".cross")!;
    cross.hidden = !other;
    if (at_) {
      cross.style.translate = `${at_.x}px ${at_.y}px`;
    }
    if (this.grid) {
      this.drawLines();
    }
    this.read();
  }

  // Layers that belong to no source are everybody's.
  shows(layer: { of: string }): boolean {
    return !layer.of || layer.of === this.source;
  }

  close(): void {
    this.info = undefined;
    this.number = -1;
    this.viewer.close();
  }

  get slide(): number {
    return this.number;
  }

  show(number: number, info: api.SlideInfo, states: LayerState[], place?: Place): void {
    const first = this.number !== number;
    this.number = number;
    this.info = info;
    this.states = states;
    this.images = [];
    this.drawnLevels = [];
    this.square = undefined;
    this.viewer.close();
    const source = tileSource(info.width, info.height, info.tile, info.levels, (level, x, y) =>
      api.tile(number, 0, level, x, y, ""), false);
    this.viewer.addOnceHandler("open", () => {
      // The panel that has come beside it has made it smaller, which the viewer has not seen yet.
      this.viewer.viewport.resize(new OpenSeadragon.Point(this.element.clientWidth, this.element.clientHeight));
      this.viewer.viewport.goHome(true);
      if (place && first) {
        this.go(place, true);
      }
      info.layers.forEach((_, index) => this.draw(index));
      this.changed();
    });
    window.clearTimeout(this.slow);
    this.slow = window.setTimeout(() => this.waits("The file has no small level: it is decoded once for an overview …"), 1500);
    this.viewer.addOnceHandler("tile-drawn", () => {
      window.clearTimeout(this.slow);
      this.waits("");
    });
    this.viewer.open(source as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  // Draw a layer anew, as its state is now.
  draw(index: number): void {
    const info = this.info;
    if (!info) {
      return;
    }
    const layer = info.layers[index]!;
    const state = this.states[index]!;
    const old = this.images[index];
    const live = layer.live ? this.liveLevel(layer) : undefined;
    this.images[index] = undefined;
    this.drawnLevels[index] = live;
    if (!state.on || !this.shows(layer) || (layer.live && live === undefined)) {
      if (old) {
        this.viewer.world.removeItem(old);
      }
      return;
    }
    const [x, y, width, height] = layer.part ?? [0, 0, info.width, info.height];
    const style = styleOf(layer, state);
    const number = this.number;
    const levels = live === undefined ? layer.levels : [layer.levels[live]!];
    const source = tileSource(width, height, info.tile, levels, (level, column, row) =>
      api.tile(number, index + 1, live ?? level, column, row, style), true);
    this.viewer.addTiledImage({
      tileSource: source,
      x: x / info.width,
      y: y / info.width,
      width: width / info.width,
      opacity: state.opacity,
      over: true,
      index: 1 + this.images.slice(0, index).filter(Boolean).length,
      success: (event: { item: OpenSeadragon.TiledImage }) => {
        if (this.number !== number || this.info !== info || this.states[index] !== state) {
          this.viewer.world.removeItem(event.item);
          return;
        }
        const newer = this.images[index];
        if (newer) {
          this.viewer.world.removeItem(newer);
        }
        this.images[index] = event.item;
        if (layer.live) {
          window.clearTimeout(this.slow);
          this.slow = window.setTimeout(() => this.waits("The network is computing …"), 1500);
          event.item.addOnceHandler("fully-loaded-change", () => {
            window.clearTimeout(this.slow);
            this.waits("");
          });
        }
        if (old && layer.live) {
          event.item.addOnceHandler("fully-loaded-change", () => this.viewer.world.removeItem(old));
        } else if (old) {
          this.viewer.world.removeItem(old);
        }
      },
    } as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  get showsGrid(): boolean {
    return this.grid;
  }

  showGrid(on: boolean): void {
    this.grid = on;
    this.drawLines();
  }

  // Draw a frame around a part of the slide.
  frame(square: Square): void {
    this.square = square;
    this.drawLines();
  }

  private drawLines(): void {
    const canvas = this.lines;
    const seen = this.place();
    const plan = this.grid ? this.info?.plans.find((each) => this.shows(each)) : undefined;
    canvas.hidden = !seen || !(plan || this.square);
    if (canvas.hidden) {
      return;
    }
    const [wide, high] = [this.element.clientWidth, this.element.clientHeight];
    const dense = window.devicePixelRatio;
    canvas.width = wide * dense;
    canvas.height = high * dense;
    const pen = canvas.getContext("2d")!;
    const scale = wide / seen!.width;
    const [left, top] = [seen!.x - seen!.width / 2, seen!.y - high / scale / 2];
    pen.setTransform(dense * scale, 0, 0, dense * scale, -left * dense * scale, -top * dense * scale);
    if (this.square) {
      const { x, y, side } = this.square;
      for (const [colour, times] of [["#ffffff", 6], ["#d55e00", 3]] as const) {
        pen.lineWidth = times / scale;
        pen.strokeStyle = colour;
        pen.strokeRect(x, y, side, side);
      }
    }
    if (plan) {
      this.drawGrid(plan, pen, scale, left, top);
    }
  }

  // The tiles of the plan, and what the one under the pointer is computed from.
  private drawGrid(plan: api.Plan, pen: CanvasRenderingContext2D, scale: number, left: number, top: number): void {
    const info = this.info!;
    const [wide, high] = [this.element.clientWidth, this.element.clientHeight];
    const [height, width] = plan.tile;
    if (Math.min(height, width) * scale < 6) {
      return; // nothing but lines
    }
    const right = Math.min(left + wide / scale, info.width);
    const bottom = Math.min(top + high / scale, info.height);
    pen.beginPath();
    for (let x = Math.max(0, Math.floor(left / width)) * width; x <= right; x += width) {
      pen.moveTo(x, Math.max(0, top));
      pen.lineTo(x, bottom);
    }
    for (let y = Math.max(0, Math.floor(top / height)) * height; y <= bottom; y += height) {
      pen.moveTo(Math.max(0, left), y);
      pen.lineTo(right, y);
    }
    for (const [colour, times] of [["#ffffffcc", 3], ["#1a1a1a", 1]] as const) {
      pen.lineWidth = times / scale;
      pen.strokeStyle = colour;
      pen.stroke();
    }
    const crop = plan.crop;
    if (this.pointer && crop) {
      const [x, y] = [left + this.pointer.x / scale, top + this.pointer.y / scale];
      const [haloY, haloX] = crop.map((side, axis) => (side - plan.tile[axis]!) / 2) as [number, number];
      const [x0, y0] = [Math.floor(x / width) * width, Math.floor(y / height) * height];
      pen.lineWidth = 2 / scale;
      pen.strokeStyle = "#d55e00";
      pen.setLineDash([8 / scale, 5 / scale]);
      pen.strokeRect(x0 - haloX, y0 - haloY, width + 2 * haloX, height + 2 * haloY);
    }
  }

  setOpacity(index: number): void {
    this.images[index]?.setOpacity(this.states[index]!.opacity);
  }

  // Predictions are computed for what is in view, at the one level that is drawn; none where that would be much.
  private liveLevel(layer: api.LayerInfo): number | undefined {
    const seen = this.place();
    if (!seen || !this.info) {
      return undefined;
    }
    const share = seen.width / this.info.width;
    const screen = this.element.clientWidth * window.devicePixelRatio;
    const enough = layer.levels.flatMap(([, width], level) => (width * share >= SHARP * screen ? [level] : []));
    const level = enough.length ? enough[enough.length - 1]! : 0;
    const finer = level === layer.levels.length - 1 && layer.levels[level]![1] * share > 2 * SHARP * screen;
    return finer ? undefined : level;
  }

  place(): Place | undefined {
    const item = this.viewer.world.getItemAt(0);
    if (!item || !this.info) {
      return undefined;
    }
    const bounds = this.viewer.viewport.getBounds(true);
    const size = this.info.width;
    return { x: (bounds.x + bounds.width / 2) * size, y: (bounds.y + bounds.height / 2) * size, width: bounds.width * size };
  }

  go(place: Place, now = false): void {
    const size = this.info!.width;
    const tall = this.element.clientHeight / Math.max(1, this.element.clientWidth);
    const width = place.width / size;
    const bounds = new OpenSeadragon.Rect(place.x / size - width / 2, place.y / size - (width * tall) / 2, width, width * tall);
    this.viewer.viewport.fitBounds(bounds, now);
  }

  pan(dx: number, dy: number): void {
    const by = new OpenSeadragon.Point(dx * this.element.clientWidth, dy * this.element.clientHeight);
    this.viewer.viewport.panBy(this.viewer.viewport.deltaPointsFromPixels(by));
    this.viewer.viewport.applyConstraints();
  }

  zoom(factor: number): void {
    this.viewer.viewport.zoomBy(factor);
    this.viewer.viewport.applyConstraints();
  }

  whole(): void {
    this.viewer.viewport.goHome();
  }

  actualSize(): void {
    const seen = this.place();
    if (seen) {
      this.go({ ...seen, width: this.element.clientWidth });
    }
  }

  private changed(): void {
    const seen = this.place();
    const info = this.info;
    if (!seen || !info) {
      return;
    }
    const ratio = this.element.clientWidth / seen.width; // of screen pixels to the slide's
    this.smooth(ratio < 2);
    if (this.first) {
      at("zoom").textContent = info.mpp
      ? `${grouped(ratio, ratio < 1 ? 3 : 1)} × (${grouped(info.mpp / ratio, 3)} µm a screen pixel)`
      : `${grouped(ratio, ratio < 1 ? 3 : 1)} ×`;
      drawScale(ratio, info.mpp);
    }
    let lacking = false;
    const late: number[] = [];
    info.layers.forEach((layer, index) => {
      if (layer.live && this.states[index]?.on && this.shows(layer)) {
        const level = this.liveLevel(layer);
        lacking ||= level === undefined;
        if (level !== this.drawnLevels[index]) {
          late.push(index);
        }
      }
    });
    window.clearTimeout(this.placed);
    if (late.length) {
      this.placed = window.setTimeout(() => late.forEach((index) => this.draw(index)), 60);
    }
    this.liveLacks(lacking);
    this.drawLines();
    this.moved(seen);
    this.read();
  }

  private smoothed = true;

  private smooth(on: boolean): void {
    if (on !== this.smoothed) {
      this.smoothed = on;
      this.viewer.drawer.setImageSmoothingEnabled(on);
      this.viewer.forceRedraw();
    }
  }

  // Tell where the pointer is, or the middle of the view where there is none, and what is stored there.
  private read(): void {
    const info = this.info;
    if (!this.first || !info || !this.viewer.world.getItemAt(0)) {
      return;
    }
    const at_ = this.pointer ?? { x: this.element.clientWidth / 2, y: this.element.clientHeight / 2 };
    const point = this.viewer.viewport.pointFromPixel(new OpenSeadragon.Point(at_.x, at_.y), true);
    const x = Math.floor(point.x * info.width);
    const y = Math.floor(point.y * info.width);
    const um = info.mpp ? ` · ${grouped(x * info.mpp, 1)}, ${grouped(y * info.mpp, 1)} µm` : "";
    at("place").textContent = `${this.pointer ? "" : "middle: "}x ${grouped(x)}, y ${grouped(y)} px${um}`;
    window.clearTimeout(this.waiting);
    this.asked?.abort();
    if (x < 0 || y < 0 || x >= info.width || y >= info.height) {
      at("values").textContent = "";
      return;
    }
    this.waiting = window.setTimeout(() => void this.readValues(x, y, info), 40);
  }

  private async readValues(x: number, y: number, info: api.SlideInfo): Promise<void> {
    const asked = (this.asked = new AbortController());
    try {
      const live = info.layers.some((layer, index) => layer.live && (this.images[index] ?? this.other?.images[index]));
      const found = await api.values(this.number, y, x, live, asked.signal);
      if (found && !asked.signal.aborted) {
        const pixel = found.pixel.map((value, index) => `${info.channels[index] ?? index + 1} ${short(value)}`).join(", ");
        const drawn = ([layer]: [string, string]) => Number(this.states[Number(layer) - 1]?.on ?? false); // these first
        const over = Object.entries(found.layers).sort((one, two) => drawn(two) - drawn(one)).map(([layer, text]) => `${called(info.layers[Number(layer) - 1]!)}: ${text}`);
        at("values").textContent = [pixel, ...over].join(" · ");
      }
    } catch (error) {
      if (!asked.signal.aborted) {
        at("values").textContent = String((error as Error).message);
      }
    }
  }
}

export const called = (layer: api.LayerInfo) => (layer.of ? `${layer.name} (${layer.of})` : layer.name);

export function styleOf(layer: api.LayerInfo, state: LayerState): string {
  const words: string[] = [];
  if (layer.kind === "probabilities") {
    words.push(...(state.channel ? [`channel=${state.channel}`] : []));
  } else {
    words.push(...(state.form === "outline" ? ["form=outline"] : []));
    words.push(...(state.hidden.size ? [`hide=${[...state.hidden].sort((a, b) => a - b).join(",")}`] : []));
  }
  return words.join("&");
}

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
