import type * as api from "./api";

export type Card = [label: string, value: string, note: string];
export type Facts = [label: string, value: string][];
export type Point = [step: number, value: number];

export interface Table {
  title: string;
  columns: string[];
  rows: string[][];
  note: string;
  bars: number[];
  tones: string[];
  numeric: boolean[];
}

// Pixels of a slide and of its layers, as addresses that hold them: colours, or class ids in grey. Probabilities are a
// picture for each class, all else is one.
export interface Pictured {
  info: api.SlideInfo;
  caption: string;
  alt: string;
  picture: string;
  layers: string[][];
}

// What `gigagrad report` writes into the page.
export interface Report {
  name: string;
  model: string;
  cards: Card[];
  step_cards: Card[];
  notes: string[];
  accumulated: number;
  loss: Record<"train" | "val", Point[]>;
  dice: Record<string, number>;
  memory: { step: number; measured: (number | null)[]; predicted: (number | null)[]; budget: (number | null)[] };
  classes: Table[];
  labelled: Table[];
  slides: Pictured[];
  attended: boolean;
  not_shown: number;
  plan: { title: string; facts: Facts; tables: Table[] } | null;
  plan_text: string;
  settings: Facts;
  environment: Facts;
  licences: string;
}

const data = document.getElementById("report-data");
export const report = data ? (JSON.parse(data.textContent!) as Report) : undefined;

const LINE_PX = 2;
const held = new Map<string, { width: number; ids: Uint8Array }>();
const canvas = document.createElement("canvas");

// Answer as the server would of what the report holds: no values under the pointer.
export async function answerOf(address: string): Promise<unknown> {
  if (address === "catalog") {
    return { slides: report!.slides.map(({ info }) => ({ name: info.name, folder: "", scores: info.scores })), runs: [], sources: [], live: false, works: false };
  }
  const [, number, rest] = /^slides\/(\d+)(\/pixel\/)?/.exec(address) ?? [];
  const slide = report!.slides[Number(number)];
  if (!slide || (!rest && address !== `slides/${number}`)) {
    throw new Error("A report does not hold this; gigagrad view shows it.");
  }
  await decoded(slide);
  return rest ? null : slide.info;
}

// Decode the class ids of a slide's layers, so that they can be drawn at once.
export async function decoded(slide: Pictured): Promise<void> {
  for (const [index, [picture = ""]] of slide.layers.entries()) {
    if (slide.info.layers[index]!.kind !== "probabilities" && !held.has(picture)) {
      const image = new Image();
      image.src = picture;
      await image.decode();
      const { width, height } = Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
      const pen = canvas.getContext("2d", { willReadFrequently: true })!;
      pen.drawImage(image, 0, 0);
      const pixels = pen.getImageData(0, 0, width, height).data;
      const ids = new Uint8Array(width * height);
      for (let at = 0; at < ids.length; at++) {
        ids[at] = pixels[4 * at]!;
      }
      held.set(picture, { width, ids });
    }
  }
}

// The address of a slide's picture (layer 0) or of a layer as its style says.
export function picture(slide: Pictured, layer: number, style: string): string {
  const query = new URLSearchParams(style);
  const known = layer ? slide.layers[layer - 1]![Number(query.get("channel"))]! : slide.picture;
  const found = layer ? held.get(known) : undefined;
  if (!found) {
    return known;
  }
  const hidden = new Set((query.get("hide") ?? "").split(",").map(Number));
  const colours = new Uint32Array(256);
  for (const { id, color: [red, green, blue] } of slide.info.layers[layer - 1]!.classes) {
    colours[id] = query.get("hide") && hidden.has(id) ? 0 : (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  }
  const { width, ids } = found;
  const image = new ImageData(width, ids.length / width);
  const pixels = new Uint32Array(image.data.buffer);
  const outlined = query.get("form") === "outline";
  for (let at = 0; at < ids.length; at++) {
    if (colours[ids[at]!] && (!outlined || isEdge(ids, width, at))) {
      pixels[at] = colours[ids[at]!]!;
    }
  }
  Object.assign(canvas, { width, height: image.height });
  canvas.getContext("2d", { willReadFrequently: true })!.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

function isEdge(ids: Uint8Array, width: number, at: number): boolean {
  const [id, x] = [ids[at]!, at % width];
  const differs = (other: number) => other >= 0 && other < ids.length && ids[other] !== id;
  for (let by = 1; by <= LINE_PX; by++) {
    if ((x >= by && differs(at - by)) || (x + by < width && differs(at + by)) || differs(at - by * width) || differs(at + by * width)) {
      return true;
    }
  }
  return false;
}
