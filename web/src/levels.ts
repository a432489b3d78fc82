// Class ids and levels of probability, a byte each, as the server tells them and reports hold them; drawn in colours.

import type { LayerInfo, Shape } from "./api";
import { make } from "./dom";

type Colour = readonly [red: number, green: number, blue: number];

const LINE_PX = 3;
export const MARGIN_PX = LINE_PX + 1; // around a tile, where other regions begin
const IGNORED = 255;
const EDGE = packed([20, 20, 24], 1); // inside of a line, which is so seen over a filled class of its colour
const SEEN_FROM = 0.25; // probabilities from here on are opaque, and smaller ones the fainter the smaller they are
// Matplotlib's colour map viridis (CC0) at nine places: as even in grey as in colours.
const VIRIDIS: Colour[] = [
  [68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37],
];
export const ofShares = Uint32Array.from({ length: 256 }, (_, level) => shareColour(level / 255));

function packed([red, green, blue]: Colour, opacity: number): number {
  return ((Math.round(255 * opacity) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

function shareColour(share: number): number {
  const at = share * (VIRIDIS.length - 1);
  const [one, two] = [VIRIDIS[Math.floor(at)]!, VIRIDIS[Math.ceil(at)]!];
  const mixed = one.map((value, channel) => Math.round(value + (at % 1) * (two[channel]! - value)));
  return packed(mixed as unknown as Colour, Math.min(1, share / SEEN_FROM));
}

// The colours of 256 ids or levels: those of a layer's classes, the usual ones of others; nothing of what is hidden.
export function coloursOf(layer: LayerInfo, hidden: Set<number>, usual: Colour[]): Uint32Array {
  if (layer.kind === "probabilities") {
    return ofShares;
  }
  const colours = new Uint32Array(256);
  usual.forEach((colour, index) => { colours[index + 1] = packed(colour, 1); });
  layer.classes.forEach(({ id, color }) => { colours[id] = packed(color, 1); });
  [0, IGNORED, ...hidden].forEach((id) => { colours[id] = 0; });
  return colours;
}

// Draw levels: filled, or if `outlined` of each region the pixels near another one, of levels with pixels around them.
export function drawn(levels: Uint8Array, [height, width]: Shape, colours: Uint32Array, outlined: boolean): HTMLCanvasElement {
  const margin = outlined ? MARGIN_PX : 0;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const stride = width + 2 * margin;
  for (let y = 0, at = 0; y < height; y++) {
    for (let from = (y + margin) * stride + margin, end = from + width; from < end; from++, at++) {
      const colour = colours[levels[from]!]!;
      pixels[at] = colour && outlined ? lineColour(levels, from, stride, colour) : colour;
    }
  }
  const canvas = make("canvas", { width, height });
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}

function lineColour(levels: Uint8Array, at: number, stride: number, colour: number): number {
  const id = levels[at]!;
  for (let by = 1; by <= MARGIN_PX; by++) {
    if (levels[at - by] !== id || levels[at + by] !== id || levels[at - by * stride] !== id || levels[at + by * stride] !== id) {
      return by <= LINE_PX ? colour : EDGE;
    }
  }
  return 0;
}

// Put background around a whole picture.
export function padded(levels: Uint8Array, [height, width]: Shape): Uint8Array {
  const stride = width + 2 * MARGIN_PX;
  const found = new Uint8Array(stride * (height + 2 * MARGIN_PX));
  for (let y = 0; y < height; y++) {
    found.set(levels.subarray(y * width, (y + 1) * width), (y + MARGIN_PX) * stride + MARGIN_PX);
  }
  return found;
}

export async function inflated(data: ReadableStream<Uint8Array<ArrayBuffer>>): Promise<Uint8Array> {
  return new Uint8Array(await new Response(data.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer());
}

// The colours of probabilities from 0 to 1, for a legend.
export const ramp = () => `linear-gradient(90deg, ${Array.from({ length: 33 }, (_, part) => {
  const colour = ofShares[Math.round((255 * part) / 32)]!;
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255} / ${(colour >>> 24) / 255})`;
}).join(", ")})`;
