import OpenSeadragon from "openseadragon";
import type { Shape } from "./api";

// Levels as the server has them: any sizes, the largest first. OpenSeadragon counts from the smallest.
export function tileSource(
  width: number,
  height: number,
  tile: number,
  levels: Shape[],
  url: (level: number, x: number, y: number) => string,
  transparent: boolean,
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
      const wide = Math.min(tile, w - x * tile);
      const high = Math.min(tile, h - y * tile);
      return isSource
        ? new Rect(0, 0, wide, high)
        : new Rect((x * tile) / w, ((y * tile) / h) * tall, wide / w, (high / h) * tall);
    },
    getTileUrl: (level: number, x: number, y: number) => url(last - level, x, y),
    hasTransparency: () => transparent,
  });
  return source;
}
