import * as api from "./api";
import { grouped, make } from "./dom";

const WORKING_MS = 500;
const IDLE_MS = 2000;

// What runs, predictions and the page's own networks compute now: asked again and again, and told in the panel.
export class Working {
  private works: api.Work[] = [];
  private slide = -1;
  private follow = false;
  private told = ""; // the works that the panel has parts for

  constructor(
    private readonly changed: (works: api.Work[]) => void,
    private readonly open: (slide: number, tile: api.Corners | undefined) => void,
    private readonly leaves: (tile: api.Corners) => boolean, // the view does not show it
  ) {}

  start(): void {
    void this.ask();
  }

  private async ask(): Promise<void> {
    if (!document.hidden) {
      try {
        this.works = await api.now();
      } catch {
        this.works = []; // the server has ended, or is busy
      }
      this.render();
      this.changed(this.works);
      this.keepUp();
    }
    window.setTimeout(() => void this.ask(), this.works.length ? WORKING_MS : IDLE_MS);
  }

  // Tell of a slide from now on.
  show(slide: number): void {
    this.slide = slide;
    this.told = "";
    this.render();
    this.changed(this.works);
  }

  // Go to the tile that is computed now, on another slide where it is there.
  goTo(): string {
    const work = this.works.find((each) => each.slide === this.slide && each.boxes) ?? this.works.find((each) => each.slide !== null);
    if (!work) {
      return "nothing is computed now";
    }
    this.open(work.slide!, work.boxes?.[0]);
    return `${work.of} is at ${work.name}`;
  }

  private keepUp(): void {
    const work = this.works.find((each) => each.job && each.slide !== null);
    if (this.follow && work) {
      const tile = work.boxes?.[0];
      if (work.slide !== this.slide) {
        this.open(work.slide!, undefined);
      } else if (tile && this.leaves(tile)) {
        this.open(work.slide, tile);
      }
    }
  }

  private render(): void {
    const place = document.getElementById("work");
    if (!place) {
      return;
    }
    const told = this.works.map((work) => `${work.of}/${work.slide}`).join("\n") || "none";
    if (told !== this.told) {
      this.told = told;
      place.hidden = !this.works.length;
      const box = make("input", { type: "checkbox", id: "follow", change: () => { this.follow = box.checked; this.keepUp(); } });
      box.checked = this.follow;
      const jobs = this.works.some((work) => work.job);
      place.replaceChildren(
        make("h2", {}, "Computed now"),
        ...this.works.map((work) => make("div", {},
          make("p", {}, ...(work.of ? [make("b", {}, work.of), " "] : []), make("span", { class: "now" })),
          ...(work.slide === null ? [] : [make("button", { type: "button", click: () => this.open(work.slide!, this.tileOf(work)) }, work.slide === this.slide ? "Go to the tile" : `Open ${work.name}`)]))),
        ...(jobs ? [make("label", { class: "row" }, box, "Follow from slide to slide")] : []),
      );
    }
    place.querySelectorAll(".now").forEach((each, index) => { each.textContent = words(this.works[index]!); });
  }

  private tileOf(work: api.Work): api.Corners | undefined {
    return this.works.find((each) => each.of === work.of)?.boxes?.[0];
  }
}

// What is computed, for a person: the job, the slide, the tile, a line each.
export function words(work: api.Work): string {
  const detail = work.detail ? ` (${work.detail})` : "";
  const job = work.job ? `${work.job}: ${grouped(work.done ?? 0)} of ${grouped(work.jobs ?? 0)} slides done${detail}` : "";
  const left = work.seconds_left ? `, about ${duration(work.seconds_left)} left` : "";
  const patches = work.patches ? `patches ${grouped(work.patches[0] + 1)} to ${grouped(work.patches[1])}` : "";
  const step = work.job && work.tiles ? `tile ${grouped((work.tile ?? 0) + 1)} of the step's ${grouped(work.tiles)}${left}` : "";
  const tile = work.phase === undefined ? [] : [`${work.phase}, segment ${(work.segment ?? 0) + 1} of ${work.segments}`, step, patches];
  return [job, work.name, ...tile].filter(Boolean).join("\n");
}

export function duration(seconds: number): string {
  return seconds < 90 ? `${Math.max(1, Math.round(seconds))} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const workPlace = () => make("section", { id: "work", "aria-label": "Computed now", hidden: true });

export const middleOf = ([y0, x0, y1, x1]: api.Corners) => ({ x: (x0 + x1) / 2, y: (y0 + y1) / 2, side: Math.max(y1 - y0, x1 - x0) });
