import * as api from "./api";
import { grouped, make } from "./dom";
import type { Panes } from "./panes";

// The patches of a bag by attention: those with most and with least, and any one that somebody chooses.
export class PatchList {
  readonly element: HTMLElement;
  private readonly detail = make("div", { class: "chosen", role: "group", "aria-label": "Chosen patch", hidden: true });
  private place = 0;

  constructor(private readonly stage: Panes, private readonly slide: number, private readonly which: number, of: string) {
    this.element = make("section", { class: "layer", "aria-label": of ? `Patches by attention (${of})` : "Patches by attention" },
      make("h2", {}, "Patches by attention", ...(of ? [make("small", {}, of)] : [])),
      make("p", { class: "hint" }, "Click the map for the patch there, or press ", make("kbd", {}, "i"), " for the one in the middle."),
      this.detail);
    void api.patches(slide, which).then(
      ({ most, least, count }) => this.element.append(
        ...this.listed("Most", most, (index) => index), ...this.listed("Least", least, (index) => count - 1 - index), make("p", { class: "hint" }, `of ${grouped(count)} patches`)),
      (error: Error) => this.element.append(make("p", { class: "problem", role: "alert" }, error.message)),
    );
  }

  private listed(title: string, patches: api.Patch[], place: (index: number) => number): HTMLElement[] {
    const items = patches.map((patch, index) => this.item(patch, place(index)));
    return items.length ? [make("h3", {}, title), make("ul", { class: "patches" }, ...items)] : [];
  }

  private item(patch: api.Patch, place: number): HTMLElement {
    const [x, y, , attention, rank] = patch;
    const name = `Go to the patch at ${grouped(x)}, ${grouped(y)} px: attention ${attention.toPrecision(3)}, more than ${Math.floor(100 * rank)} % of the patches`;
    return make("li", {}, make(
      "button",
      { type: "button", "aria-label": name, title: name, "data-place": place, click: () => void this.step(place) },
      make("img", { src: api.square(this.slide, patch), alt: "", loading: "lazy", decoding: "async" }),
      make("small", {}, attention.toPrecision(3)),
    ));
  }

  // Show the patch that holds a pixel; the view stays where it is.
  async choose(x: number, y: number): Promise<string> {
    const found = await api.patchAt(this.slide, this.which, y, x);
    if (!found) {
      return "no patch of the bag is there";
    }
    this.show(found);
    const [left, top, side] = found.patch;
    this.stage.frame({ x: left, y: top, side });
    return "";
  }

  // Show the patch at a place of the order, and go there.
  private async step(place: number): Promise<void> {
    const found = await api.patch(this.slide, this.which, place);
    if (found) {
      this.show(found);
      const [x, y, side] = found.patch;
      this.stage.goTo({ x, y, side });
    }
  }

  private show({ patch, place, count }: api.Chosen): void {
    const [x, y, , attention, rank] = patch;
    this.place = place;
    if (this.detail.hidden) { // its buttons stay, so that they keep the focus
      const button = (name: string, act: () => void) => make("button", { type: "button", click: act }, name);
      this.detail.replaceChildren(
        make("img", { alt: "", decoding: "async" }),
        make("p", { role: "status" }),
        make("div", { class: "row" }, button("Higher", () => void this.step(this.place - 1)), button("Lower", () => void this.step(this.place + 1)), button("Go to it", () => void this.step(this.place))),
      );
      this.detail.hidden = false;
    }
    const [higher, lower] = this.detail.querySelectorAll("button");
    const ends = [[higher!, place === 0, "the highest"], [lower!, place === count - 1, "the lowest"]] as const;
    for (const [button, end, which] of ends) {
      button.setAttribute("aria-label", end ? `This patch has ${which} attention` : `Patch with the next ${button.textContent!.toLowerCase()} attention`);
      button.setAttribute("aria-disabled", String(end));
    }
    this.detail.querySelector("img")!.src = api.square(this.slide, patch);
    const told = [`x ${grouped(x)}, y ${grouped(y)} px`, `attention ${attention.toPrecision(3)}`, `rank ${grouped(place + 1)} of ${grouped(count)}`, `more than ${Math.floor(1000 * rank) / 10} % of the patches`];
    this.detail.querySelector("p")!.textContent = told.join("\n");
    document.querySelectorAll(".patches [aria-current]").forEach((each) => each.removeAttribute("aria-current"));
    this.element.querySelector(`[data-place="${place}"]`)?.setAttribute("aria-current", "true");
    this.detail.scrollIntoView({ block: "nearest" });
  }
}

export const isAttention = (layer: api.LayerInfo) => layer.name.startsWith("Attention");
