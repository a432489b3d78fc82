import type * as api from "./api";
import { inflated } from "./levels";

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

// A slide, as an address that holds its picture, and the levels of its layers: deflated, in base64. Probabilities have
// some for each class, all else once.
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
  settings: Record<string, unknown>;
  environment: Record<string, unknown>;
  licences: string;
}

const data = document.getElementById("report-data");
export const report = data ? (JSON.parse(data.textContent!) as Report) : undefined;

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
  return rest ? null : slide.info;
}

const held = new Map<string, Promise<Uint8Array>>();

// The class ids of a layer, or the levels of a class's probability.
export function levelsOf(slide: Pictured, layer: number, channel: number): Promise<Uint8Array> {
  const data = slide.layers[layer]![channel]!;
  const bytes = () => Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const found = held.get(data) ?? inflated(new Blob([bytes()]).stream());
  held.set(data, found);
  return found;
}
