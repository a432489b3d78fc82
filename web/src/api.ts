// What the server tells; every address is relative to the page's own, which holds the token. A report has no server: it
// holds what one would tell.

import { inflated, MARGIN_PX, padded } from "./levels";
import { answerOf, levelsOf, report } from "./recorded";

export interface Catalog {
  slides: { name: string; folder: string; scores: Record<string, number> }[];
  runs: string[];
  sources: string[]; // what predicted, where several did
  live: boolean;
  works: boolean; // something may be computed while the page is open
}

export interface Kind {
  id: number;
  name: string;
  color: [number, number, number];
}

export type Shape = [height: number, width: number];

export interface LayerInfo {
  name: string;
  kind: "classes" | "errors" | "probabilities";
  of: string; // one of the sources, or "" where it belongs to all or there is but one
  between: string[]; // the two sources that it compares
  live: boolean;
  levels: Shape[];
  part: [x: number, y: number, width: number, height: number] | null;
  classes: Kind[];
}

export interface SlideInfo {
  name: string;
  height: number;
  width: number;
  mpp: number | null;
  channels: string[];
  dtype: string;
  tile: number;
  levels: Shape[];
  colors: Kind["color"][]; // of class ids from 1 on, where a layer names none
  layers: LayerInfo[];
  problems: string[];
  plans: Plan[];
  patches: string[]; // the source of each prediction that says what it attended to
  scores: Record<string, number>;
}

// Tiles of each segment of a plan, and the crop that one is computed from: the server tells them in pixels of the fields
// that they are of, and this gives those of level 0; no segments where the plan is of slides of another shape. `exact`: it is the plan of the whole slide's prediction; null of a run's.
export interface Plan {
  of: string;
  shape: Shape;
  segments: { tile: Shape; crop: Shape }[];
  exact: boolean | null;
  seconds?: number; // that a tile of the last segment takes here, of what is predicted now
}

// What is computed now. Boxes are y0, x0, y1, x1 in pixels of level 0; `grid` is the height and width of all tiles of the
// segment, `far` says whether the first one is at the bottom and at the right.
export type Corners = [number, number, number, number];
export interface Work {
  of: string;
  slide: number | null;
  name: string;
  job?: string;
  done?: number;
  jobs?: number;
  detail?: string;
  phase?: string;
  segment?: number;
  segments?: number;
  tile?: number;
  tiles?: number;
  seconds_left?: number;
  boxes?: Corners[];
  crop?: Corners;
  grid?: Shape;
  far?: [boolean, boolean];
  patches?: [number, number];
}

export type Patch = [x: number, y: number, side: number, attention: number, rank: number];

export interface Patches {
  most: Patch[];
  least: Patch[];
  count: number;
}

export interface Chosen {
  patch: Patch;
  place: number; // in the order of attention, from 0
  count: number;
}

export interface Counts {
  shares: number[]; // of all pixels, by class id or by level of probability
  pixels: number;
  counted: number; // the share of pixels that were
}

export interface Values {
  pixel: (number | null)[]; // null is no finite number
  layers: Record<string, string>;
}

export type CurvePoint = [split: string, name: string, step: number, value: number | null];

export interface Curves {
  points: CurvePoint[];
  next: number;
  begins: boolean;
  more: boolean;
}

async function ask<T>(address: string, signal?: AbortSignal): Promise<T> {
  if (report) {
    return (await answerOf(address)) as T;
  }
  return (await (await answered(address, signal)).json()) as T;
}

async function answered(address: string, signal?: AbortSignal): Promise<Response> {
  const answer = await fetch(address, { signal: signal ?? null, credentials: "omit" });
  if (!answer.ok) {
    throw new Error((await answer.text()).trim() || `the server answers ${answer.status}`);
  }
  return answer;
}

const HELD = 128; // tiles, a quarter of a megabyte each: in other colours they are drawn at once
const held = new Map<string, Uint8Array>();

// The class ids or levels of probability of a layer's tile, if `outlined` with what is around it.
export async function levels(slide: number, layer: number, place: string, channel: number, outlined: boolean, signal?: AbortSignal): Promise<Uint8Array> {
  if (report) {
    const found = await levelsOf(report.slides[slide]!, layer, channel);
    return outlined ? padded(found, report.slides[slide]!.info.layers[layer]!.levels[0]!) : found;
  }
  const address = `slides/${slide}/${layer + 1}/${place}?channel=${channel}&margin=${outlined ? MARGIN_PX : 0}`;
  const found = held.get(address) ?? (await inflated((await answered(address, signal)).body!));
  held.delete(address);
  held.set(address, found); // the last one
  if (held.size > HELD) {
    held.delete(held.keys().next().value!);
  }
  return found;
}

export const catalog = () => ask<Catalog>("catalog");
export async function slide(number: number): Promise<SlideInfo> {
  const info = await ask<SlideInfo>(`slides/${number}`);
  return { ...info, plans: placed(info.plans as unknown as Told[], info) };
}

export async function live(number: number, info: SlideInfo): Promise<{ layers: LayerInfo[]; plans: Plan[]; problems: string[] }> {
  const found = await ask<{ layers: LayerInfo[]; plans: Told[]; problems: string[] }>(`slides/${number}/live`);
  return { ...found, plans: placed(found.plans, info) };
}

type Told = Omit<Plan, "segments"> & { segments: Record<"tile" | "shape" | "crop" | "read_shape", Shape>[] };

// Give tiles in pixels of a slide.
function placed(plans: Told[], { height, width }: SlideInfo): Plan[] {
  const scaled = (sides: Shape, [high, wide]: Shape): Shape => [(sides[0] * height) / high, (sides[1] * width) / wide];
  return plans.map((plan) => ({ ...plan, segments: plan.segments.map(({ tile, shape, crop, read_shape }) => {
    const [own, read] = [scaled(tile, shape), scaled(crop, read_shape)];
    return { tile: own, crop: [Math.max(read[0], own[0]), Math.max(read[1], own[1])] };
  }) }));
}

export const patches = (number: number, which: number) => ask<Patches>(`slides/${number}/patches/${which}`);
export const patch = (number: number, which: number, place: number) => ask<Chosen | null>(`slides/${number}/patches/${which}/${place}`);
export const patchAt = (number: number, which: number, y: number, x: number) => ask<Chosen | null>(`slides/${number}/patches/${which}/at/${y}/${x}`);
export const counts = (number: number, layer: number, channel: number) => ask<Counts>(`slides/${number}/${layer}/counts?channel=${channel}`);
export const now = () => ask<Work[]>("now");
export const square = (number: number, [x, y, side]: Patch) => `slides/${number}/square/${x}/${y}/${side}`;
export const thumbnail = (number: number) => report?.slides[number]!.picture ?? `slides/${number}/thumbnail`;
export const values = (number: number, y: number, x: number, live: boolean, signal: AbortSignal) =>
  ask<Values | null>(`slides/${number}/pixel/${y}/${x}${live ? "?live=1" : ""}`, signal);
export const curves = (run: number, start: number) => ask<Curves>(`runs/${run}/${start}`);
export const tile = (slide: number, place: string) => report?.slides[slide]!.picture ?? `slides/${slide}/0/${place}`;
