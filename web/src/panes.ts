import type { LayerInfo, SlideInfo, Work } from "./api";
import { at, make } from "./dom";
import type { Square } from "./lines";
import { Stage, type LayerState, type Place } from "./stage";

// One view of a slide, or two in step, each with what another network predicted.
export class Panes {
  private readonly stages: [Stage, Stage];
  private shown: [number, SlideInfo, LayerState[]] | undefined;
  private two: boolean;

  constructor(
    private readonly sources: string[],
    moved: (place: Place) => void,
    tooLong: (seconds: number | undefined) => void,
    predicted: () => void,
    waits: (why: string) => void,
    private readonly changed: () => void,
    clicked: (x: number, y: number) => void,
  ) {
    const lacking: (number | undefined)[] = [undefined, undefined];
    const lacks = (index: number) => (seconds: number | undefined) => {
      lacking[index] = seconds;
      const found = lacking.filter((each) => each !== undefined);
      tooLong(found.length ? Math.max(...found) : undefined);
    };
    this.stages = [
      new Stage(at("stage"), at<HTMLCanvasElement>("grid-lines"), sources, true, moved, lacks(0), predicted, waits, clicked),
      new Stage(at("stage-2"), at<HTMLCanvasElement>("grid-lines-2"), sources, false, () => undefined, lacks(1), predicted, waits, clicked),
    ];
    this.stages[0].link(this.stages[1]);
    this.two = sources.length > 1;
    (sources.length > 1 ? ["Left", "Right"] : []).forEach((side, index) => {
      const select = make(
        "select",
        { id: `source-${index}`, "aria-label": `${side}: predictions of`, change: () => this.choose(index, select.value) },
        ...sources.map((name) => make("option", { value: name }, name)),
      );
      at(["pane", "pane-2"][index]!).append(make("div", { class: "source" }, select));
      select.value = sources[index]!;
      this.stages[index]!.source = select.value;
    });
    this.arrange();
  }

  private choose(index: number, source: string): void {
    const stage = this.stages[index]!;
    stage.source = source;
    this.arrange();
    this.shown?.[1].layers.forEach((_, layer) => this.draw(layer)); // what compares both changes in both
    this.changed();
  }

  private arrange(): void {
    at("pane-2").hidden = !this.two;
    this.stages.forEach((stage, index) => {
      const side = this.two ? ["left", "right"][index]! : "";
      const name = stage.source ? `Slide ${side} with predictions of ${stage.source}` : "Slide";
      stage.call(name.replace("  ", " "));
      at(["pane", "pane-2"][index]!).setAttribute("aria-label", name.replace("  ", " "));
    });
  }

  // Go from one view to two, or back.
  toggle(): string {
    if (this.sources.length < 2) {
      return "there is one prediction at most; name several runs or folders of predictions";
    }
    this.two = !this.two;
    this.arrange();
    if (this.two && this.shown) {
      this.stages[1].show(...this.shown);
    } else {
      this.stages[1].close();
    }
    this.changed();
    return this.two ? "two predictions side by side" : `predictions of ${this.stages[0].source} alone`;
  }

  show(number: number, info: SlideInfo, states: LayerState[], place?: Place): void {
    this.shown = [number, info, states];
    this.stages[0].show(number, info, states, place);
    if (this.two) {
      this.stages[1].show(number, info, states);
    }
  }

  // Predict views that take so long, too.
  wait(seconds: number): void {
    this.seen.forEach((stage) => stage.wait(seconds));
  }

  private get seen(): Stage[] {
    return this.two ? this.stages : [this.stages[0]];
  }

  get slide(): number {
    return this.stages[0].slide;
  }

  shows(layer: Pick<LayerInfo, "of"> & Partial<Pick<LayerInfo, "between">>): boolean {
    return this.seen.some((stage) => stage.shows(layer));
  }

  draw(layer: number): void {
    this.seen.forEach((stage) => stage.draw(layer));
  }

  setOpacity(layer: number): void {
    this.seen.forEach((stage) => stage.setOpacity(layer));
  }

  get showsGrid(): boolean {
    return this.stages[0].showsGrid;
  }

  showGrid(on: boolean, segment?: number): void {
    this.stages.forEach((stage) => stage.showGrid(on, segment));
  }

  mark(works: Work[]): void {
    this.seen.forEach((stage) => stage.mark(works));
  }

  // Draw a frame around a part of the slide.
  frame(square: Square): void {
    this.seen.forEach((stage) => stage.frame(square));
  }

  // Go to a part of the slide, and draw a frame around it.
  goTo(square: Square): void {
    this.frame(square);
    this.leading.go({ x: square.x + square.side / 2, y: square.y + square.side / 2, width: 6 * square.side });
  }

  // The view that keys move: the other one follows.
  get leading(): Stage {
    this.stages[0].lead();
    return this.stages[0];
  }
}
