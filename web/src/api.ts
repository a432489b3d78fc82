// What the server tells; every address is relative to the page's own, which holds the token.

export interface Catalog {
  slides: { name: string; folder: string; scores: Record<string, number> }[];
  runs: string[];
  sources: string[]; // what predicted, where several did
  live: boolean;
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
  layers: LayerInfo[];
  problems: string[];
  plans: Plan[];
  patches: string[]; // the source of each prediction that says what it attended to
  scores: Record<string, number>;
}

// Tiles of a plan's last segment, and the largest crop of the slide that one is computed from, in pixels of level 0; null
// where they are computed from fields that the plan keeps.
export interface Plan {
  of: string;
  tile: Shape;
  crop: Shape | null;
  exact: boolean; // it is the plan of the whole slide's prediction
}

export type Patch = [x: number, y: number, side: number, attention: number, rank: number];

export interface Patches {
  most: Patch[];
  least: Patch[];
  count: number;
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
  const answer = await fetch(address, { signal: signal ?? null, credentials: "omit" });
  if (!answer.ok) {
    throw new Error((await answer.text()).trim() || `the server answers ${answer.status}`);
  }
  return (await answer.json()) as T;
}

export const catalog = () => ask<Catalog>("catalog");
export const slide = (number: number) => ask<SlideInfo>(`slides/${number}`);
export const live = (number: number) => ask<{ layers: LayerInfo[]; plans: Plan[]; problems: string[] }>(`slides/${number}/live`);
export const patches = (number: number, which: number) => ask<Patches>(`slides/${number}/patches/${which}`);
export const square = (number: number, [x, y, side]: Patch) => `slides/${number}/square/${x}/${y}/${side}`;
export const thumbnail = (number: number) => `slides/${number}/thumbnail`;
export const values = (number: number, y: number, x: number, live: boolean, signal: AbortSignal) =>
  ask<Values | null>(`slides/${number}/pixel/${y}/${x}${live ? "?live=1" : ""}`, signal);
export const curves = (run: number, start: number) => ask<Curves>(`runs/${run}/${start}`);
export const tile = (slide: number, layer: number, level: number, x: number, y: number, style: string) =>
  `slides/${slide}/${layer}/${level}/${x}/${y}${style && `?${style}`}`;
