import * as api from "./api";
import type { LayerInfo, Plan, SlideInfo } from "./api";
import { at, colour, grouped, make } from "./dom";
import type { Panes } from "./panes";
import { called, type LayerState } from "./stage";

const VIRIDIS = ["#440154", "#472c7a", "#3b518b", "#2c718e", "#21908d", "#27ad81", "#5cc863", "#aadc32", "#fde725"];

export function startingStates(info: SlideInfo): LayerState[] {
  const label = info.layers.some((layer) => layer.name.startsWith("Label"));
  return info.layers.map((layer) => ({
    on: layer.kind === "classes" && (!layer.live || (layer.of !== "" && !info.layers.some((each) => each.of === layer.of && each.name === "Prediction"))),
    opacity: layer.kind === "probabilities" ? 0.6 : layer.kind === "errors" ? 0.7 : label && layer.name.startsWith("Label") ? 1 : 0.45,
    form: label && layer.name.startsWith("Label") ? "outline" : "fill",
    hidden: new Set<number>(),
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
  private gone = new Map<string, number[]>(); // by source, layers that made room for errors

  constructor(private readonly stage: Panes) {}

  show(number: number, info: SlideInfo, states: LayerState[]): void {
    this.info = info;
    this.states = states;
    this.gone = new Map();
    const panel = at("layers");
    this.boxes = [];
    const about = [
      `${info.width.toLocaleString("en")} × ${info.height.toLocaleString("en")} px`,
      info.mpp === null ? "pixel size unknown" : `${Number(info.mpp.toPrecision(4))} µm/px`,
      ...Object.entries(info.scores).map(([name, value]) => `${name} ${value.toFixed(4)}`),
    ];
    panel.replaceChildren(
      make("h1", {}, info.name),
      make("p", { class: "about" }, about.join(" · ")),
      ...info.problems.map((problem) => make("p", { class: "problem", role: "alert" }, problem)),
      ...info.layers.map((layer, index) => this.layer(layer, index)),
      ...this.grid(info.plans),
      ...info.patches.flatMap((of, which) => (this.stage.shows({ of }) ? [this.patches(number, of, which)] : [])),
      ...(info.layers.length
        ? []
        : [make("p", { class: "hint" }, "Nothing lies over this slide. Name masks with --mask, predictions with --predictions, or a model with --model.")]),
      make("p", { class: "hint" }, make("kbd", {}, "?"), " lists all keys"),
    );
    panel.hidden = false;
  }

  toggle(index: number): string {
    const box = this.boxes[index];
    if (!box) {
      return "";
    }
    box.checked = !box.checked;
    box.dispatchEvent(new Event("change"));
    return `${called(this.info!.layers[index]!)} ${box.checked ? "shown" : "hidden"}`;
  }

  toggleGrid(): string {
    const box = document.getElementById("grid") as HTMLInputElement | null;
    if (!box) {
      return "no network predicts here";
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
    const sides = (shape: readonly number[]) => shape.map((side) => Math.round(side).toLocaleString("en")).join(" × ");
    const section = make(
      "section",
      { class: box.checked ? "layer" : "layer off", "aria-label": "Tiles of the plan" },
      make("h2", {}, box, make("label", { for: "grid" }, "Tiles of the plan"), make("kbd", {}, "t")),
      ...shown.map((plan) => {
        const from = plan.crop ? `computed from ${sides(plan.crop)} px, the dashed box around the one under the pointer` : "computed from activations that the plan saves";
        const bits = plan.exact ? "Each pixel has the bits of the whole slide's prediction." : "They are of a plan that shows them at once; the whole slide's prediction may be rounded otherwise in its last digits.";
        return make("p", { class: "hint" }, `${plan.of ? `${plan.of}: ` : ""}${sides(plan.tile)} px each; ${from}. ${bits}`);
      }),
    );
    return [section];
  }

  // The patches that a model of bags attended to most and least; each is a way to its place.
  private patches(number: number, of: string, which: number): HTMLElement {
    const section = make("section", { class: "layer", "aria-label": of ? `Patches by attention (${of})` : "Patches by attention" }, make("h2", {}, "Patches by attention", ...(of ? [make("small", {}, of)] : [])));
    const listed = (title: string, patches: api.Patch[]) =>
      patches.length ? [make("h3", {}, title), make("ul", { class: "patches" }, ...patches.map((patch) => this.patch(number, patch)))] : [];
    void api.patches(number, which).then(
      ({ most, least, count }) => section.append(...listed("Most", most), ...listed("Least", least), make("p", { class: "hint" }, `of ${grouped(count)} patches`)),
      (error: Error) => section.append(make("p", { class: "problem", role: "alert" }, error.message)),
    );
    return section;
  }

  private patch(number: number, patch: api.Patch): HTMLElement {
    const [x, y, side, attention, rank] = patch;
    const name = `Go to the patch at ${grouped(x)}, ${grouped(y)} px: attention ${attention.toPrecision(3)}, more than ${Math.floor(100 * rank)} % of the patches`;
    const go = () => {
      document.querySelectorAll(".patches [aria-current]").forEach((each) => each.removeAttribute("aria-current"));
      button.setAttribute("aria-current", "true");
      this.stage.goTo({ x, y, side });
    };
    const button = make(
      "button",
      { type: "button", "aria-label": name, title: name, click: go },
      make("img", { src: api.square(number, patch), alt: "", loading: "lazy", decoding: "async" }),
      make("small", {}, attention.toPrecision(2)),
    );
    return make("li", {}, button);
  }

  // Colours of errors mean something else than those of classes: both at once can't be read.
  private makeRoom(shown: LayerInfo, on: boolean): void {
    if (shown.kind === "errors") {
      const others = this.find((layer) => layer.kind !== "errors" && layer.name.startsWith("Predict") && layer.of === shown.of);
      const changed = on ? others.filter((index) => this.states[index]!.on) : this.gone.get(shown.of) ?? [];
      this.gone.set(shown.of, on ? changed : []);
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
    const draw = () => this.stage.draw(index);
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
      ...(layer.live ? [make("p", { class: "far" }, "Zoom in: it is computed for what is in view.")] : []),
      ...(layer.kind === "probabilities" ? this.shares(layer, index, draw) : this.kinds(layer, index, draw)),
    );
    return section;
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
    const ramp = make("div", { class: "ramp", role: "img", "aria-label": "Colours from probability 0, clear and violet, over 0.5, green, to 1, yellow" });
    ramp.style.background = `linear-gradient(90deg, transparent, transparent 0%, ${VIRIDIS.map((each, at_) => `${at_ < 2 ? each + (at_ ? "80" : "00") : each} ${(100 * at_) / 8}%`).join(", ")})`;
    rows.push(ramp, make("div", { class: "row ends", "aria-hidden": "true" }, make("span", {}, "0"), make("span", {}, "0.5"), make("span", {}, "1")));
    return rows;
  }
}

export function keyOf(layer: LayerInfo, index: number): string {
  if (layer.kind === "errors") {
    return "e";
  }
  return index < 9 ? String(index + 1) : "";
}
