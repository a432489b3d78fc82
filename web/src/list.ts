import * as api from "./api";
import { at, make, scoreLines } from "./dom";

// Slides with thumbnails, to be sorted by name and scores, and runs.
export class List {
  private order: number[] = [];
  private readonly buttons: HTMLElement[];
  private readonly runs: HTMLElement[];

  constructor(
    private readonly catalog: api.Catalog,
    openSlide: (number: number) => void,
    openRun: (number: number) => void,
  ) {
    this.order = catalog.slides.map((_, index) => index);
    const nav = at("list");
    nav.hidden = catalog.slides.length + catalog.runs.length < 2;
    const scores = [...new Set(catalog.slides.flatMap((slide) => Object.keys(slide.scores)))];
    const sorting = make(
      "select",
      { id: "sort", change: () => this.sort(sorting.value) },
      make("option", { value: "" }, "as given"),
      make("option", { value: "name" }, "name"),
      ...scores.flatMap((name) => [
        make("option", { value: `+${name}` }, `${name}, lowest first`),
        make("option", { value: `-${name}` }, `${name}, highest first`),
      ]),
    );
    this.runs = catalog.runs.map((name, index) =>
      make("li", {}, make("button", { type: "button", class: "run", click: () => openRun(index) }, make("span", {}, `Curves of ${name}`, make("small", {})))));
    this.buttons = catalog.slides.map((slide, index) => {
      const unread = () => picture.replaceWith(make("span", { class: "no-picture" }, "cannot be read"));
      const picture = make("img", { src: api.thumbnail(index), alt: "", loading: "lazy", decoding: "async", error: unread });
      return make(
        "li",
        {},
        make(
          "button",
          { type: "button", class: "slide", click: () => openSlide(index) },
          picture,
          make("span", {}, slide.name, make("small", {}, slide.folder), ...scoreLines(slide.scores), make("small", { class: "at-work" })),
        ),
      );
    });
    nav.replaceChildren(
      ...(this.runs.length ? [make("ul", {}, ...this.runs)] : []),
      ...(catalog.slides.length > 2 ? [make("div", { class: "row" }, make("label", { for: "sort" }, "Sort by"), sorting)] : []),
      make("ul", { id: "slides" }, ...this.buttons),
    );
  }

  private sort(by: string): void {
    const { slides } = this.catalog;
    const score = (index: number) => slides[index]!.scores[by.slice(1)] ?? Number.NaN;
    const sign = by.startsWith("-") ? -1 : 1;
    this.order = slides.map((_, index) => index);
    if (by === "name") {
      this.order.sort((a, b) => slides[a]!.name.localeCompare(slides[b]!.name, undefined, { numeric: true }));
    } else if (by) {
      this.order.sort((a, b) => (Number.isNaN(score(a)) ? 1 : Number.isNaN(score(b)) ? -1 : sign * (score(a) - score(b))));
    }
    at("slides").replaceChildren(...this.order.map((index) => this.buttons[index]!));
  }

  // Mark the slides and runs at which a job works.
  work(works: api.Work[]): void {
    this.buttons.forEach((slide, number) => {
      const at_work = works.some((work) => work.slide === number && work.job);
      slide.querySelector(".at-work")!.textContent = at_work ? "computed now" : "";
    });
    this.runs.forEach((run, number) => {
      const work = works.find((each) => each.of === this.catalog.runs[number]);
      run.querySelector("small")!.textContent = work?.job ? `${work.job}: ${work.name}` : "";
    });
  }

  mark(number: number): void {
    this.point(this.buttons[number]);
  }

  markRun(number: number): void {
    this.point(this.runs[number]);
  }

  private point(chosen: HTMLElement | undefined): void {
    for (const item of [...this.buttons, ...this.runs]) {
      item.firstElementChild!.removeAttribute("aria-current");
    }
    chosen?.firstElementChild!.setAttribute("aria-current", "true");
    chosen?.scrollIntoView({ block: "nearest" });
  }

  beside(number: number, by: number): number | undefined {
    return this.order[this.order.indexOf(number) + by];
  }
}
