import OpenSeadragon from "openseadragon";
import * as api from "./api";
import { coloursOf, drawn } from "./levels";
import { Lines, type Square, type View } from "./lines";
import { Readout } from "./readout";
import { picture, Requests, tileSource } from "./source";

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

const CRISP = 2; // from so many pixels of the screen on, one of a picture is seen as it is: a patch does not melt into others
const SHARP = 0.6; // of its level, pixels of a live layer that a pixel of the screen shows at least
const PATIENT_S = 0.8; // of computing for a view that nobody has asked for; the rest of a second brings the pictures
const CLOSE_PATIENT_S = 10; // the same where pixels are as large as the screen's, and zooming in helps little
const AT_REST = 1.1; // a view that zooms is as good as there
const REQUESTS = 6;
const LIVE_REQUESTS = 3; // one is computed, others are drawn and on their way; the slide's tiles do not wait for them

// The slide that is looked at, and what lies over it.
export class Stage {
  readonly viewer: OpenSeadragon.Viewer;
  private info: api.SlideInfo | undefined;
  private number = -1;
  private images: (OpenSeadragon.TiledImage | undefined)[] = [];
  private drawings: symbol[] = []; // the last one of each layer; what comes of others comes too late
  private drawnLevels: (number | undefined)[] = []; // of live layers
  private older: OpenSeadragon.TiledImage[][] = []; // of live layers, shown until the newer one is there
  private patience = PATIENT_S;
  private readonly requests = new Requests(REQUESTS);
  private readonly liveRequests = new Requests(LIVE_REQUESTS);
  private states: LayerState[] = [];
  private slow = 0;
  private readonly lines: Lines;
  private readonly readout = new Readout();
  source = ""; // whose predictions it shows

  constructor(
    private readonly element: HTMLElement,
    canvas: HTMLCanvasElement,
    private readonly sources: string[],
    private readonly first: boolean, // of two; it tells place, values and scale for both
    private readonly moved: (place: Place) => void,
    private readonly tooLong: (seconds: number | undefined) => void, // a view would take, if it would
    private readonly predicted: () => void, // all of a view
    private readonly waits: (why: string) => void,
    clicked: (x: number, y: number) => void,
  ) {
    this.lines = new Lines(canvas);
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
      navigatorOpacity: 1, // or the slide shows through
      navigatorMaintainSizeRatio: false,
      keyboardNavEnabled: false,
      animationTime: 0.35,
      springStiffness: 9,
      blendTime: 0,
      immediateRender: false,
      maxZoomPixelRatio: 16,
      minZoomImageRatio: 0.6,
      visibilityRatio: 0.4,
      imageLoaderLimit: 0, // ours are in requests
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
    this.viewer.addHandler("tile-drawing", ({ tiledImage, context }) => { context.imageSmoothingEnabled = this.pixelOf(tiledImage) < CRISP; });
    this.viewer.addHandler("canvas-click", (event) => {
      const spot = this.spot(event.position);
      if (event.quick && spot) {
        clicked(...spot);
      }
    });
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
      for (const each of [one, two]) { // a window that changes gives both another zoom, one after the other
        each.viewer.addHandler("resize", () => requestAnimationFrame(follow));
      }
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
    this.lines.pointer = at_;
    const cross = this.element.parentElement!.querySelector<HTMLElement>(".cross")!;
    cross.hidden = !other;
    if (at_) {
      cross.style.translate = `${at_.x}px ${at_.y}px`;
    }
    if (this.lines.grid) {
      this.drawLines();
    }
    this.read();
  }

  // Layers that belong to no source are everybody's; what compares two belongs to those that are chosen.
  shows({ of, between = [] }: { of: string; between?: string[] }): boolean {
    const chosen = [this.source, this.other?.source];
    return (!of || of === this.source || !this.sources.includes(of)) && between.every((each) => chosen.includes(each));
  }

  // Return the pixel of level 0 that is at a place of the screen.
  private spot(place: { x: number; y: number }): [x: number, y: number] | undefined {
    if (!this.info || !this.viewer.world.getItemAt(0)) {
      return undefined;
    }
    const point = this.viewer.viewport.pointFromPixel(new OpenSeadragon.Point(place.x, place.y), true);
    return [Math.floor(point.x * this.info.width), Math.floor(point.y * this.info.width)];
  }

  // The pixel in the middle.
  get middle(): [x: number, y: number] | undefined {
    return this.spot({ x: this.element.clientWidth / 2, y: this.element.clientHeight / 2 });
  }

  close(): void {
    this.info = undefined;
    this.drawings = [];
    this.number = -1;
    this.viewer.close();
  }

  get slide(): number {
    return this.number;
  }

  show(number: number, info: api.SlideInfo, states: LayerState[], place?: Place): void {
    this.number = number;
    this.info = info;
    this.states = states;
    this.images = [];
    this.drawings = [];
    this.drawnLevels = [];
    this.older = [];
    this.lines.square = undefined;
    this.lines.works = [];
    this.lines.segment = -1;
    this.viewer.close();
    const source = tileSource(info.width, info.height, info.tile, info.levels, (level, x, y) => api.tile(number, `${level}/${x}/${y}`),
      (job) => picture(job.src, job.signal), false, this.requests);
    this.viewer.addOnceHandler("open", () => {
      // The panel that has come beside it has made it smaller, which the viewer has not seen yet.
      this.viewer.viewport.resize(new OpenSeadragon.Point(this.element.clientWidth, this.element.clientHeight));
      this.viewer.viewport.goHome(true);
      if (place) {
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
    const drawing = (this.drawings[index] = Symbol());
    const old = this.images[index];
    const live = layer.live ? this.liveLevel(layer) : undefined;
    this.images[index] = undefined;
    this.drawnLevels[index] = live;
    const older = [...(this.older[index] ?? []), ...(old ? [old] : [])];
    const remove = () => {
      older.splice(0).forEach((each) => this.viewer.world.removeItem(each));
      this.liveRequests.prune();
    };
    this.older[index] = older;
    if (layer.live) {
      this.tellWhatLacks();
    }
    if (!state.on || !this.shows(layer) || (layer.live && live === undefined)) {
      remove();
      return;
    }
    const [x, y, width, height] = layer.part ?? [0, 0, info.width, info.height];
    const number = this.number;
    const colours = coloursOf(layer, state.hidden, info.colors);
    const outlined = isOutlined(layer, state);
    const style = styleOf(layer, state);
    const channel = state.channel;
    const levels = live === undefined ? layer.levels : [layer.levels[live]!];
    const source = tileSource(width, height, info.tile, levels, (level, column, row) => `${number}/${index}/${live ?? level}/${column}/${row}/${style}`,
      async ({ level, x: column, y: row, shape, signal }) =>
        drawn(await api.levels(number, index, `${live ?? level}/${column}/${row}`, channel, outlined, signal), shape, colours, outlined),
      true, layer.live ? this.liveRequests : this.requests);
    this.viewer.addTiledImage({
      tileSource: source,
      x: x / info.width,
      y: y / info.width,
      width: width / info.width,
      opacity: state.opacity,
      over: true,
      index: 1 + this.images.slice(0, index).filter(Boolean).length,
      success: (event: { item: OpenSeadragon.TiledImage }) => {
        if (this.drawings[index] !== drawing) {
          this.viewer.world.removeItem(event.item);
          return;
        }
        this.images[index] = event.item;
        if (!layer.live) {
          remove();
          return;
        }
        const computing = () => {
          window.clearTimeout(this.slow);
          this.slow = window.setTimeout(() => this.waits("The network is computing …"), 1500);
        };
        computing();
        event.item.addHandler("fully-loaded-change", ({ fullyLoaded }) => {
          if (this.images[index] !== event.item) {
            return;
          }
          if (!fullyLoaded) {
            computing();
            return;
          }
          window.clearTimeout(this.slow);
          this.waits("");
          remove();
          this.predicted();
        });
      },
    } as unknown as OpenSeadragon.TileSourceSpecifier);
  }

  get showsGrid(): boolean {
    return this.lines.grid;
  }

  showGrid(on: boolean, segment = this.lines.segment): void {
    this.lines.grid = on;
    this.lines.segment = segment;
    this.drawLines();
  }

  // Draw a frame around a part of the slide.
  frame(square: Square): void {
    this.lines.square = square;
    this.drawLines();
  }

  // Mark what is computed now.
  mark(works: api.Work[]): void {
    const before = this.lines.works.length;
    this.lines.works = works.filter((work) => work.slide === this.number && this.shows(work));
    if (before || this.lines.works.length) {
      this.drawLines();
    }
  }

  private drawLines(): void {
    const seen = this.place();
    const [wide, high] = [this.element.clientWidth, this.element.clientHeight];
    const scale = seen ? wide / seen.width : 1;
    const view: View | undefined = seen && { left: seen.x - seen.width / 2, top: seen.y - high / scale / 2, scale, wide, high };
    this.lines.plan = this.info?.plans.find((each) => each.segments.length && this.shows(each));
    this.lines.draw(this.info, view);
  }

  setOpacity(index: number): void {
    this.images[index]?.setOpacity(this.states[index]!.opacity);
  }

  // Predictions are computed for what will be in view, at the one level that is drawn; none where that takes long.
  private liveLevel(layer: api.LayerInfo): number | undefined {
    const level = this.levelFor(layer);
    if (level === undefined) {
      return undefined;
    }
    const close = this.place(false)!.width <= this.element.clientWidth * window.devicePixelRatio;
    return this.seconds(level, layer) > Math.max(this.patience, close ? CLOSE_PATIENT_S : 0) ? undefined : level;
  }

  private levelFor(layer: api.LayerInfo): number | undefined {
    const seen = this.place(false);
    if (!seen || !this.info) {
      return undefined;
    }
    const share = seen.width / this.info.width;
    const screen = this.element.clientWidth * window.devicePixelRatio;
    return Math.max(0, layer.levels.filter(([, width]) => width * share >= SHARP * screen).length - 1);
  }

  // The networks that predict now, here and beside it.
  private get networks(): string[] {
    return this.liveLayers.flatMap((index) => [this.info!.layers[index]!.of, ...this.info!.layers[index]!.between]);
  }

  // How long they take for what will be in view: for each tile of their plans that it meets, as whole tiles of the page.
  private seconds(level: number, { levels }: api.LayerInfo): number {
    const [info, seen] = [this.info!, this.place(false)!];
    const side = (info.tile * info.width) / levels[level]![1];
    const tall = (seen.width * this.element.clientHeight) / this.element.clientWidth;
    const met = (middle: number, size: number, whole: number, tile: number) => {
      const first = Math.floor(Math.max(0, middle - size / 2) / side) * side;
      const last = Math.min(whole, Math.ceil((middle + size / 2) / side) * side);
      return last > first ? Math.ceil(last / tile) - Math.floor(first / tile) : 0;
    };
    const networks = [...this.networks, ...(this.other?.viewer.isOpen() ? this.other.networks : [])];
    const plans = info.plans.filter((plan) => plan.seconds && plan.segments.length && networks.includes(plan.of));
    return plans.reduce((total, { segments, seconds }) => {
      const [high, wide] = segments[segments.length - 1]!.tile;
      return total + seconds! * met(seen.y, tall, info.height, high) * met(seen.x, seen.width, info.width, wide);
    }, 0);
  }

  // Predict views that take so long, too.
  wait(seconds: number): void {
    this.patience = Math.max(this.patience, seconds);
    this.changed();
  }

  place(now = true): Place | undefined {
    const item = this.viewer.world.getItemAt(0);
    if (!item || !this.info) {
      return undefined;
    }
    const bounds = this.viewer.viewport.getBounds(now);
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

  // The place of a part of the slide with its surroundings.
  around({ x, y, side }: Square): Place {
    return { x, y, width: Math.max(4 * side, this.element.clientWidth) };
  }

  // Say whether the middle of a part of the slide is in view.
  sees({ x, y }: Square): boolean {
    const seen = this.place();
    const high = seen ? (seen.width * this.element.clientHeight) / this.element.clientWidth : 0;
    return seen !== undefined && Math.abs(x - seen.x) < seen.width / 2 && Math.abs(y - seen.y) < high / 2;
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
    if (this.first) {
      this.readout.scale(ratio, info.mpp);
    }
    const zooms = seen.width / this.place(false)!.width;
    for (const index of this.liveLayers) {
      const level = this.liveLevel(info.layers[index]!);
      if (level !== this.drawnLevels[index] && (level === undefined || (zooms < AT_REST && zooms > 1 / AT_REST))) {
        this.draw(index);
      }
    }
    this.requests.prune();
    this.liveRequests.prune();
    this.tellWhatLacks();
    this.drawLines();
    this.moved(seen);
    this.read();
  }

  // Layers that are on and predicted now.
  private get liveLayers(): number[] {
    return (this.info?.layers ?? []).flatMap((layer, index) => (layer.live && this.states[index]?.on && this.shows(layer) ? [index] : []));
  }

  private tellWhatLacks(): void {
    const lacking = this.liveLayers.map((index) => this.info!.layers[index]!).filter((layer) => this.liveLevel(layer) === undefined);
    this.tooLong(lacking.length ? Math.max(...lacking.map((layer) => this.seconds(this.levelFor(layer) ?? 0, layer))) : undefined);
  }

  // How many pixels of the screen show one of a layer, or of the slide.
  private pixelOf(image: OpenSeadragon.TiledImage): number {
    const { width, layers } = this.info!;
    const layer = layers[this.images.indexOf(image)];
    const ratio = this.element.clientWidth / this.place()!.width;
    return layer ? (ratio * (layer.part?.[2] ?? width)) / layer.levels[0]![1] : ratio;
  }

  // Tell where the pointer is, or the middle of the view where there is none, and what is stored there.
  private read(): void {
    const pointer = this.lines.pointer;
    const spot = pointer ? this.spot(pointer) : this.middle;
    if (this.first && this.info && spot) {
      const live = this.info.layers.some((layer, index) => layer.live && (this.images[index] ?? this.other?.images[index]));
      this.readout.tell(this.number, this.info, ...spot, !pointer, live, (layer) => this.states[layer]?.on ?? false);
    }
  }
}

const isOutlined = (layer: api.LayerInfo, state: LayerState) => state.form === "outline" && layer.kind !== "probabilities";

// What tells the pictures of a layer apart.
const styleOf = (layer: api.LayerInfo, state: LayerState) => [state.channel, isOutlined(layer, state), ...[...state.hidden].sort()].join(",");

// A layer as its state says, as a whole: reports have one tile of each.
export async function wholeLayer(slide: number, info: api.SlideInfo, index: number, state: LayerState): Promise<HTMLCanvasElement> {
  const layer = info.layers[index]!;
  const outlined = isOutlined(layer, state);
  const levels = await api.levels(slide, index, "0/0/0", state.channel, outlined);
  return drawn(levels, layer.levels[0]!, coloursOf(layer, state.hidden, info.colors), outlined);
}
