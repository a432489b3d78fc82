import OpenSeadragon from "openseadragon";
import type { Shape } from "./api";

// A tile of a level as OpenSeadragon wants it, and what leaves it when it does not any more.
export interface Wanted {
  src: string;
  level: number; // as the server counts
  x: number;
  y: number;
  shape: Shape;
  signal: AbortSignal;
}

type Load = (signal: AbortSignal) => Promise<HTMLImageElement | HTMLCanvasElement>;

// Levels as the server has them: any sizes, the largest first. OpenSeadragon counts from the smallest.
export function tileSource(
  width: number,
  height: number,
  tile: number,
  levels: Shape[],
  url: (level: number, x: number, y: number) => string, // which tells tiles apart
  load: (wanted: Wanted) => ReturnType<Load>,
  transparent: boolean,
  requests: Requests,
): OpenSeadragon.TileSource {
  const last = levels.length - 1;
  const shape = (level: number) => levels[last - level]!;
  const source = new OpenSeadragon.TileSource({
    width,
    height,
    tileSize: tile,
    tileOverlap: 0,
    minLevel: 0,
    maxLevel: last,
  } as unknown as OpenSeadragon.TileSourceOptions);
  const shapeOf = (level: number, x: number, y: number): Shape => [Math.min(tile, shape(level)[0] - y * tile), Math.min(tile, shape(level)[1] - x * tile)];
  const tall = height / width;
  const { Point, Rect } = OpenSeadragon;
  Object.assign(source, {
    getLevelScale: (level: number) => shape(level)[1] / width,
    getNumTiles: (level: number) => new Point(Math.ceil(shape(level)[1] / tile), Math.ceil(shape(level)[0] / tile)),
    getTileAtPoint: (level: number, point: OpenSeadragon.Point) => {
      const [h, w] = shape(level);
      const cell = (share: number, size: number) =>
        Math.min(Math.max(Math.floor((share * size) / tile), 0), Math.ceil(size / tile) - 1);
      return new Point(cell(point.x, w), cell(point.y / tall, h));
    },
    getTileBounds: (level: number, x: number, y: number, isSource?: boolean) => {
      const [h, w] = shape(level);
      const [high, wide] = shapeOf(level, x, y);
      return isSource
        ? new Rect(0, 0, wide, high)
        : new Rect((x * tile) / w, ((y * tile) / h) * tall, wide / w, (high / h) * tall);
    },
    getTileUrl: (level: number, x: number, y: number) => url(last - level, x, y),
    hasTransparency: () => transparent,
    downloadTileStart: (job: Job) => {
      const { level, x, y } = job.tile;
      requests.add(job, (signal) => load({ src: job.src, level: last - level, x, y, shape: shapeOf(level, x, y), signal }));
    },
  });
  return source;
}

// A tile that OpenSeadragon wants.
interface Job {
  src: string;
  jobId: number | null;
  tile: { level: number; x: number; y: number; bounds: OpenSeadragon.Rect; loading: boolean; tiledImage: OpenSeadragon.TiledImage & { viewer: OpenSeadragon.Viewer } };
  finish: (data: HTMLImageElement | CanvasRenderingContext2D, request: null, type: string) => void;
  fail: (why: string) => void;
}

// Ask for a picture of the slide, until the signal says to leave it.
export function picture(address: string, signal: AbortSignal): Promise<HTMLImageElement> {
  const image = new Image();
  signal.addEventListener("abort", () => { image.src = ""; });
  return new Promise((done, fail) => {
    image.onload = () => done(image);
    image.onerror = () => fail(new Error("the server gives no picture"));
    image.src = address;
  });
}

// Asks for tiles, `most` at a time: the nearest to the middle of the view first, and only what will be in view when it
// has come to rest. OpenSeadragon would go on with all that it has begun.
export class Requests {
  private readonly waiting = new Map<Job, Load>();
  private readonly asked = new Map<Job, AbortController>();

  constructor(private readonly most: number) {}

  add(job: Job, load: Load): void {
    this.waiting.set(job, load);
    this.next();
  }

  // Leave what is not in view any more.
  prune(): void {
    for (const job of [...this.waiting.keys(), ...this.asked.keys()].filter((each) => !Number.isFinite(away(each)))) {
      this.asked.get(job)?.abort();
      this.waiting.delete(job);
      this.asked.delete(job);
      window.clearTimeout(job.jobId ?? undefined);
      job.jobId = null;
      job.tile.loading = false; // it is wanted again when it is in view again
    }
    this.next();
  }

  private next(): void {
    while (this.asked.size < this.most && this.waiting.size) {
      const [job, far] = [...this.waiting.keys()].map((each) => [each, away(each)] as const).reduce((one, other) => (other[1] < one[1] ? other : one));
      if (!Number.isFinite(far)) {
        return; // until the view moves
      }
      void this.ask(job, this.waiting.get(job)!);
    }
  }

  private async ask(job: Job, load: Load): Promise<void> {
    const leaving = new AbortController();
    this.waiting.delete(job);
    this.asked.set(job, leaving);
    try {
      const found = await load(leaving.signal);
      if (!leaving.signal.aborted) {
        const isImage = found instanceof HTMLImageElement;
        job.finish(isImage ? found : found.getContext("2d")!, null, isImage ? "image" : "context2d");
      }
    } catch (error) {
      if (!leaving.signal.aborted) {
        job.fail((error as Error).message);
      }
    }
    if (this.asked.get(job) === leaving) {
      this.asked.delete(job);
      this.next();
    }
  }
}

// How far a tile is from the middle of the view, where that comes to rest; infinite outside of it.
function away({ tile: { bounds, tiledImage } }: Job): number {
  const { world, viewport } = tiledImage.viewer;
  if (world.getIndexOfItem(tiledImage) < 0) {
    return Infinity;
  }
  const [item, seen] = [tiledImage.getBounds(), viewport.getBounds()];
  const x = item.x + (bounds.x + bounds.width / 2) * item.width - seen.x - seen.width / 2;
  const y = item.y + (bounds.y + bounds.height / 2) * item.width - seen.y - seen.height / 2;
  const outside = 2 * Math.abs(x) > seen.width + bounds.width * item.width || 2 * Math.abs(y) > seen.height + bounds.height * item.width;
  return outside ? Infinity : Math.hypot(x, y);
}
