import * as api from "./api";
import type { LayerInfo, Plan, SlideInfo } from "./api";
import { at, colour, grouped, make, scoreLines } from "./dom";
import { ramp } from "./levels";
import type { Panes } from "./panes";
import { isAttention, PatchList } from "./patches";
import { called } from "./readout";
import type { LayerState } from "./stage";
import { duration, workPlace } from "./working";

const AGREED = 1; // the id of pixels that are the same in both
const LONGEST_S = 60; // that anybody is asked to wait for one view

export function startingStates(info: SlideInfo): LayerState[] {
  const label = info.layers.some((layer) => layer.name.startsWith("Label"));
  return info.layers.map((layer) => ({
    on: layer.kind === "classes" && (!layer.live || (layer.of !== "" && !info.layers.some((each) => each.of === layer.of && each.name === "Prediction"))),
    opacity: layer.kind === "probabilities" ? 0.6 : layer.kind === "errors" ? 0.7 : label && layer.name.startsWith("Label") ? 1 : 0.45,
    form: label && layer.name.startsWith("Label") ? "outline" : "fill",
    hidden: new Set(layer.between.length ? [AGREED] : []), // where two predictions agree, the slide is seen
    channel: firstClass(layer),
  }));
}

// The background's probability says nothing that the others' don't.
const firstClass = (layer: LayerInfo) =>
  layer.kind === "probabilities" && layer.classes.length > 1 && /^(background|class 0)$/i.test(layer.classes[0]!.name) ? 1 : 0;

// The layers of a slide: on or off, opacity, filled or outlined, each class by itself; and the legend.
export class Panel {
  private boxes: HTMLInputElement[] = [];
  private states: LayerState[] = [];
  private info: SlideInfo | undefined;
  private gone = new Map<LayerInfo, number[]>(); // layers that made room for what shows errors or differences
  private lists = new Map<string, PatchList>(); // by what predicted
  private counted = new Map<string, Promise<api.Counts>>(); // by slide, layer and channel
  private slide = -1;
  private long: number | undefined; // seconds that the view would take

  constructor(private readonly stage: Panes) {}

  show(number: number, info: SlideInfo, states: LayerState[]): void {
    this.info = info;
    this.states = states;
    this.gone = new Map();
    if (number !== this.slide) {
      this.counted.clear();
    }
    this.slide = number;
    this.lists = new Map(info.patches.flatMap((of, which) => (this.stage.shows({ of }) ? [[of, new PatchList(this.stage, number, which, of)]] : [])));
    const panel = at("layers");
    const focused = panel.contains(document.activeElement) ? document.activeElement!.id : "";
    this.boxes = [];
    const about = [
      `${info.width.toLocaleString("en")} × ${info.height.toLocaleString("en")} px`,
      info.mpp === null ? "pixel size unknown" : `${Number(info.mpp.toPrecision(4))} µm/px`,
    ];
    panel.replaceChildren(
      make("h1", {}, info.name),
      make("p", { class: "about" }, about.join(" · "), ...scoreLines(info.scores)),
      ...drawnChannels(info.channels).map((line) => make("p", { class: "about" }, line)),
      ...info.problems.map((problem) => make("p", { class: "problem", role: "alert" }, problem)),
      workPlace(),
      ...info.layers.map((layer, index) => this.layer(layer, index)),
      ...this.grid(info.plans),
      ...[...this.lists.values()].map((list) => list.element),
      ...(info.layers.length
        ? []
        : [make("p", { class: "hint" }, "Nothing lies over this slide. Name masks with --mask, predictions with --predictions, or a model with --model.")]),
      make("p", { class: "hint" }, make("kbd", {}, "?"), " lists all keys"),
    );
    panel.hidden = false;
    document.getElementById(focused)?.focus();
    this.tellTooLong(this.long);
  }

  // Say that the view is not predicted by itself, and what to do.
  tellTooLong(seconds: number | undefined): void {
    this.long = seconds;
    document.body.classList.toggle("too-far", seconds !== undefined);
    for (const place of document.querySelectorAll<HTMLElement>(".far")) {
      const about = `To predict this view takes about ${duration(seconds ?? 0)} here. Zoom in, or predict the whole slide with “gigagrad predict”.`;
      const [text, button] = [place.querySelector("p")!, place.querySelector("button")!];
      if (text.textContent !== about) {
        text.textContent = about;
      }
      button.hidden = (seconds ?? 0) > LONGEST_S;
    }
  }

  toggle(index: number): string {
    const box = this.boxes[index];
    if (!box) {
      return "";
    }
    box.checked = !box.checked;
    box.dispatchEvent(new Event("change"));
    box.closest("section")!.scrollIntoView({ block: "nearest" });
    return `${called(this.info!.layers[index]!)} ${box.checked ? "shown" : "hidden"}`;
  }

  toggleGrid(): string {
    const box = document.getElementById("grid") as HTMLInputElement | null;
    if (!box) {
      return "there is no plan for this slide";
    }
    box.click();
    return `tiles ${box.checked ? "shown" : "hidden"}`;
  }

  private grid(plans: Plan[]): HTMLElement[] {
    const shown = plans.filter((plan) => this.stage.shows(plan));
    if (!shown.length) {
      return [];
    }
    const box = make("input", { type: "checkbox", id: "grid", change: () => { section.classList.toggle("off", !box.checked); this.stage.showGrid(box.checked); } });
    box.checked = this.stage.showsGrid;
    const drawn = shown.find((plan) => plan.segments.length);
    const section = make(
      "section",
      { class: box.checked ? "layer" : "layer off", "aria-label": "Tiles of the plan" },
      make("h2", {}, box, make("label", { for: "grid" }, "Tiles of the plan"), make("kbd", {}, "t")),
      ...(drawn && drawn.segments.length > 1 ? [this.segments(drawn)] : []),
      ...shown.map((plan) => make("p", { class: "hint", ...(plan === drawn ? { id: "tiles" } : {}) }, ofPlan(plan, plan.segments.length - 1))),
    );
    return [section];
  }

  // The segments of a plan; their tiles differ.
  private segments(plan: Plan): HTMLElement {
    const last = plan.segments.length - 1;
    const select = make(
      "select",
      { id: "segment", change: () => { this.stage.showGrid(this.stage.showsGrid, Number(select.value)); at("tiles").textContent = ofPlan(plan, Number(select.value)); } },
      ...plan.segments.map((_, index) => make("option", { value: index }, index === last ? `${index + 1}, the last` : String(index + 1))),
    );
    select.value = String(last);
    return make("div", { class: "row" }, make("label", { for: "segment" }, "Segment"), select);
  }

  // Show the patch at a pixel, of the bag whose attention is shown; null where none is.
  patchAt(x: number, y: number, whatever = false): Promise<string> | null {
    const layers = this.info?.layers ?? [];
    const shown = layers.find((layer, index) => isAttention(layer) && this.stage.shows(layer) && (whatever || this.states[index]!.on));
    const list = shown && this.lists.get(shown.of);
    return list ? list.choose(x, y) : null;
  }

  // Colours of errors and differences mean something else than those of classes: both at once can't be read.
  private makeRoom(shown: LayerInfo, on: boolean): void {
    if (shown.kind === "errors" || shown.between.length) {
      const of = [shown.of, ...shown.between];
      const others = this.find((layer) => layer.kind !== "errors" && layer.name.startsWith("Predict") && of.includes(layer.of));
      const changed = on ? others.filter((index) => this.states[index]!.on) : this.gone.get(shown) ?? [];
      this.gone.set(shown, on ? changed : []);
      changed.forEach((index) => this.toggle(index));
    }
  }

  // Find the layers that a key stands for.
  find(test: (layer: LayerInfo) => boolean): number[] {
    return (this.info?.layers ?? []).flatMap((layer, index) => (this.stage.shows(layer) && test(layer) ? [index] : []));
  }

  fade(by: number): string {
    const shown = this.states.flatMap((state, index) => (state.on ? [index] : []));
    for (const index of shown) {
      const range = document.getElementById(`opacity-${index}`) as HTMLInputElement;
      range.value = String(Math.min(100, Math.max(0, Number(range.value) + by)));
      range.dispatchEvent(new Event("input"));
    }
    return shown.length ? `opacity ${Math.round(100 * this.states[shown[0]!]!.opacity)} %` : "no layer is shown";
  }

  switchForm(): string {
    const classes = this.find((layer) => layer.kind !== "probabilities").filter((index) => this.states[index]!.on);
    for (const index of classes) {
      const select = document.getElementById(`form-${index}`) as HTMLSelectElement;
      select.value = select.value === "fill" ? "outline" : "fill";
      select.dispatchEvent(new Event("change"));
    }
    return classes.length ? `${this.states[classes[0]!]!.form === "fill" ? "filled" : "outlined"}` : "no classes are shown";
  }

  private layer(layer: LayerInfo, index: number): HTMLElement {
    const state = this.states[index]!;
    const count = make("p", { class: "count", role: "status" });
    const counted = () => void this.count(layer, index, count);
    const draw = () => { this.stage.draw(index); counted(); };
    const box = make("input", { type: "checkbox", id: `layer-${index}`, change: () => { state.on = box.checked; section.classList.toggle("off", !state.on); draw(); this.makeRoom(layer, state.on); } });
    box.checked = state.on;
    this.boxes[index] = box;
    const opacity = make("input", {
      type: "range", id: `opacity-${index}`, min: 0, max: 100, step: 5, "aria-label": `Opacity of ${called(layer)}`,
      input: () => { state.opacity = Number(opacity.value) / 100; this.stage.setOpacity(index); },
    });
    opacity.value = String(Math.round(state.opacity * 100));
    const key = keyOf(layer, index);
    const section = make(
      "section",
      { class: state.on ? "layer" : "layer off", "aria-label": called(layer), hidden: !this.stage.shows(layer) },
      make("h2", {}, box, make("label", { for: `layer-${index}` }, layer.name, ...(layer.of ? [" ", make("small", {}, layer.of)] : [])), make("kbd", {}, key)),
      make("div", { class: "row" }, make("label", { for: `opacity-${index}` }, "Opacity"), opacity),
      ...(layer.live ? [make("div", { class: "far" }, make("p", {}), make("button", { type: "button", click: () => this.stage.wait(1.2 * this.long!) }, "Predict it now"))] : []),
      ...(layer.between.length ? [make("p", { class: "hint" }, layer.between.join(" and "))] : []),
      ...(layer.kind === "probabilities" ? this.shares(layer, index, draw) : this.kinds(layer, index, draw)),
      ...(isCounted(layer) ? [count] : []),
    );
    if (state.on) {
      counted();
    }
    return section;
  }

  // Say how many pixels are wrong or differ.
  private async count(layer: LayerInfo, index: number, place: HTMLElement): Promise<void> {
    const state = this.states[index]!;
    if (!state.on || !isCounted(layer)) {
      return;
    }
    const key = `${this.slide}/${index + 1}/${state.channel}`;
    const asked = this.counted.get(key) ?? api.counts(this.slide, index + 1, state.channel);
    this.counted.set(key, asked);
    place.textContent ||= "Counting …";
    try {
      place.textContent = ofCounts(layer, await asked);
    } catch (error) {
      this.counted.delete(key);
      place.textContent = (error as Error).message;
    }
  }

  private kinds(layer: LayerInfo, index: number, draw: () => void): HTMLElement[] {
    const state = this.states[index]!;
    const form = make(
      "select",
      { id: `form-${index}`, change: () => { state.form = form.value as LayerState["form"]; draw(); } },
      make("option", { value: "fill" }, "filled"),
      make("option", { value: "outline" }, "outlined"),
    );
    form.value = state.form;
    const classes = layer.classes.map((kind) => {
      const box = make("input", {
        type: "checkbox",
        change: () => { if (box.checked) { state.hidden.delete(kind.id); } else { state.hidden.add(kind.id); } draw(); },
      });
      box.checked = !state.hidden.has(kind.id);
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.backgroundColor = colour(kind.color);
      return make("li", {}, make("label", {}, box, swatch, kind.name));
    });
    return [
      make("div", { class: "row" }, make("label", { for: `form-${index}` }, "Classes are"), form),
      make("ul", { class: "legend" }, ...classes),
    ];
  }

  private shares(layer: LayerInfo, index: number, draw: () => void): HTMLElement[] {
    const state = this.states[index]!;
    const rows: HTMLElement[] = [];
    if (layer.classes.length > 1) {
      const select = make(
        "select",
        { id: `channel-${index}`, change: () => { state.channel = Number(select.value); draw(); } },
        ...layer.classes.map((kind, channel) => make("option", { value: channel }, kind.name)),
      );
      select.value = String(state.channel);
      rows.push(make("div", { class: "row" }, make("label", { for: `channel-${index}` }, "Of"), select));
    }
    const scale = make("div", { class: "ramp", role: "img", "aria-label": `Colours of ${layer.name}: from 0, clear and violet, over 0.5, green, to 1, yellow` });
    scale.style.background = ramp();
    rows.push(scale, make("div", { class: "row ends", "aria-hidden": "true" }, make("span", {}, "0"), make("span", {}, "0.5"), make("span", {}, "1")));
    return rows;
  }
}

export function keyOf(layer: LayerInfo, index: number): string {
  if (layer.kind === "errors") {
    return layer.between.length ? "d" : "e";
  }
  return index < 9 ? String(index + 1) : "";
}

const isCounted = (layer: LayerInfo) => !layer.live && (layer.kind === "errors" || layer.between.length > 0);

const percent = (share: number) => `${Number((100 * share).toPrecision(3))} %`;

// How many pixels are wrong, or differ, in words.
function ofCounts(layer: LayerInfo, { shares, pixels, counted }: api.Counts): string {
  const about = counted === 1 ? "" : ` Counted in tiles drawn at random, ${percent(counted)} of the slide.`;
  const sum = (first: number, last: number) => shares.slice(first, last).reduce((total, share) => total + share, 0);
  if (layer.kind === "probabilities") {
    const mean = shares.reduce((total, share, level) => total + (share * level) / 255, 0);
    return `Mean difference ${mean.toPrecision(3)}; more than 0.1 in ${percent(sum(26, 256))} of all pixels, more than 0.5 in ${percent(sum(128, 256))}.${about}`;
  }
  const [wrong, either] = [sum(2, 5), sum(1, 5)];
  const found = layer.between.length ? "either finds a class" : "there is or was found a class";
  const said = layer.between.length ? "They differ in" : "It is wrong in";
  return `${said} ${percent(wrong)} of all pixels, ${counted === 1 ? "" : "about "}${grouped(Math.round(wrong * pixels))} px${either ? `; in ${percent(wrong / either)} of those where ${found}` : ""}.${about}`;
}

// The tiles of a segment of a plan, in words.
function ofPlan(plan: Plan, index: number): string {
  const of = plan.of ? `${plan.of}: ` : "";
  const sides = (shape: readonly number[]) => shape.map((side) => Math.round(side).toLocaleString("en")).join(" × ");
  const segment = plan.segments[index];
  if (!segment) {
    return `${of}planned for slides of ${sides(plan.shape)} px; others have plans of their own, which are seen while they are computed.`;
  }
  const bits = plan.exact === null ? " While the run is at this slide, the tiles of the segment that it computes are drawn." : plan.exact ? " Each pixel has the bits of the whole slide's prediction." : " They are of a plan that shows them at once; the whole slide's prediction may be rounded otherwise in its last digits.";
  return `${of}${sides(segment.tile)} px each; computed from ${sides(segment.crop)} px, the dashed box around the one under the pointer.${bits}`;
}

// Say of stains and bands which are drawn, and in which colour; nothing of what is in grey or in its own colours.
function drawnChannels(names: string[]): string[] {
  const colours = ["red", "green", "blue"];
  if (names.length === 1 || names.join() === colours.join()) {
    return [];
  }
  const [drawn, others] = names.length < 3 ? [names.slice(0, 1), names.slice(1)] : [names.slice(0, 3).map((name, at) => `${name} in ${colours[at]}`), names.slice(3)];
  return [`Drawn: ${drawn.join(", ")}.${others.length ? ` Not drawn: ${others.join(", ")}.` : ""}`];
}
