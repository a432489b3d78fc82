import type uPlot from "uplot";
import "./report.css";
import { COLOURS, plot, worded, type Plot } from "./curves";
import { at, colour, grouped, make } from "./dom";
import type { LayerInfo } from "./api";
import { ramp } from "./levels";
import { start } from "./main";
import { startingStates } from "./panel";
import { type Card, type Facts, type Pictured, type Point, type Report, type Table } from "./recorded";
import { wholeLayer, type LayerState } from "./stage";

const MOST_DOTS = 40;
const PAPER_PX = 660; // width of a chart on paper
const MEASURED = "Loss and gradients of every parameter over a single image, measured on this machine.";
const PUBLISHED = " The published numbers are those of Remedios et al., MIDL 2023, for an image of the same size; their time includes validation.";

type Inside = (Node | string)[];

// The report as a document, above the page that shows its slides closely.
export function show(report: Report): void {
  const viewer = make("div", { id: "viewer" }, ...document.body.childNodes);
  const charts = new Charts();
  const article = make("main", { id: "report" }, ...sections(report, charts));
  document.body.classList.add("report");
  document.body.append(article, viewer);
  document.title = titleOf(report);
  charts.follow();
  openClosely(report, article, viewer);
}

const titleOf = (report: Report) => `${report.name} · gigagrad report`;

function sections(report: Report, charts: Charts): HTMLElement[] {
  const { train, val } = report.loss;
  const dice = Object.entries(report.dice).sort((one, two) => one[1] - two[1]);
  const found = [
    make(
      "header",
      {},
      make("p", {}, "gigagrad training report"),
      make("h1", {}, report.name),
      make("p", {}, `${report.model ? `${report.model}, trained` : "Trained"} on ${Number(report.settings["patch_size"]) ? "all patches of each slide: exact loss and gradients, none is left out" : "whole slides: exact loss and gradients, no patches"}.`),
      ...cards(report.cards),
      ...(report.notes.length ? [make("ul", { class: "notes" }, ...report.notes.map((note) => make("li", {}, note)))] : []),
    ),
  ];
  const add = (title: string, text: string, ...inside: Inside) => found.push(make("section", { "aria-label": title }, make("h2", {}, title), make("p", {}, text), ...inside));
  if (report.step_cards.length) {
    const compared = report.step_cards.some(([, , note]) => note.startsWith("published"));
    add("One whole training step", MEASURED + (compared ? PUBLISHED : ""), ...cards(report.step_cards));
    found.at(-1)!.className = "hero";
  }
  if (train.length || val.length || dice.length || report.classes.length) {
    const kept = val.length ? "The weights with the lowest validation loss are the ones that were kept." : "No slide was validated: the weights of the last epoch were kept.";
    const said = dice.length ? " Dice compares the full-resolution prediction with the true mask, pixel by pixel." : "";
    const shown = [train.length || val.length ? loss(report, charts) : "", dice.length ? dots(dice) : ""].filter(Boolean);
    const all = dice.length > MOST_DOTS ? [details("Dice of all slides", false, facts(dice.map(([name, value]) => [name, value.toFixed(4)])))] : [];
    add("Training", kept + said, make("div", { class: "split" }, ...shown), ...all, ...report.classes.map((each) => details("Test slides by class", true, table(each))));
  }
  const [slides, ...measures] = report.labelled;
  if (slides) {
    const text = "Scores of whole slides, or of the slides of a patient together, against their labels. Intervals are 95 %, over slides drawn again with replacement.";
    add("Test slides", text, make("div", { class: "split" }, ...measures.map((each) => make("div", { class: "box" }, make("h3", {}, each.title), table(each)))), details("Slide by slide", false, table(slides)));
  }
  if (report.slides.length) {
    const about = report.attended ? "The patches of the upper half by their attention on the slide, then those with most and with least. " : "The lowest Dice comes first. ";
    const rest = report.not_shown ? ` The other ${grouped(report.not_shown)} are in the prediction folder.` : "";
    add("Predictions", `${about}Choose a picture to look at it closely.${rest}`, ...pictures(report.slides));
  }
  if (report.memory.measured.some((value) => value !== null)) {
    const text = "Peak of the whole process in a step, those of validation among them, beside what the plan predicted before anything ran. A process tells how high it has been: a step without a dot stayed below an earlier one.";
    add("Memory", text, memory(report, charts));
  }
  if (report.plan || report.plan_text) {
    const text = "What a step does, decided before it starts. It is refused where it would not fit in the budget.";
    const { title, facts: said, tables } = report.plan ?? { title: "", facts: [], tables: [] };
    const drawn = [make("h3", {}, title), make("div", { class: "box" }, facts(said)), ...tables.flatMap((each) => [make("h3", {}, each.title), ...(each.rows.length || each.note ? [make("div", { class: "box" }, table(each))] : [])])];
    add("The plan", text, ...(report.plan ? drawn : [make("pre", { class: "box" }, report.plan_text)]));
  }
  const [settings, environment] = [listed(report.settings), listed(report.environment)];
  if (settings.length || environment.length) {
    const text = "All settings, as config.yaml of the run's folder has them for “gigagrad fit --config”, with the machine and the versions that they ran on.";
    const lists = ([["Settings", true, settings], ["Machine and versions", false, environment]] as const).filter(([, , found_]) => found_.length);
    add("The run", text, ...lists.map(([title, open, found_]) => details(title, open, facts(found_))));
  }
  const licences = details("Licences", false, make("pre", {}, report.licences));
  licences.id = "licences";
  found.push(make("footer", {}, "Made by gigagrad. This file is complete in itself and loads nothing from elsewhere.", licences));
  return found;
}

function cards(found: Card[]): HTMLElement[] {
  const each = ([label, value, note]: Card) => make("div", { class: "card" }, make("dt", {}, label), make("dd", {}, value, ...(note ? [make("small", {}, note)] : [])));
  return found.length ? [make("dl", { class: "cards" }, ...found.map(each))] : [];
}

function details(title: string, open: boolean, inside: Node): HTMLElement {
  return make("details", { open }, make("summary", {}, title), inside);
}

function facts(found: Facts): HTMLElement {
  const rows = found.map(([label, value]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, value)));
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("tbody", {}, ...rows)));
}

// Values by their names, whose last words say the units.
function listed(values: Record<string, unknown>, before = ""): Facts {
  const isGroup = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);
  const words = (name: string, value: unknown): string => {
    if (Array.isArray(value) && value.length) {
      return value.map((each) => words(name, each)).join(", ");
    }
    return typeof value === "number" ? worded(name, value) : typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "") || "-";
  };
  return Object.entries(values).flatMap(([name, value]): Facts => (isGroup(value) ? listed(value, `${before}${name}: `) : [[before + name, words(name, value)]]));
}

function table({ columns, rows, numeric, tones, bars, note }: Table): HTMLElement {
  const kind = (column: number) => ({ class: numeric[column] ? "num" : undefined });
  const bar = (share: number) => {
    const length = make("i", {});
    length.style.width = `${100 * share}%`;
    return make("td", { class: "bar", "aria-hidden": "true" }, length);
  };
  const head = columns.map((name, column) => make("th", { scope: "col", ...kind(column) }, name));
  const body = rows.map((row, index) =>
    make("tr", { class: tones[index] || undefined }, ...row.map((cell, column) => make("td", kind(column), cell)), ...(bars.length ? [bar(bars[index]!)] : [])));
  const whole = make("table", { class: "narrow" }, make("thead", {}, make("tr", {}, ...head, ...(bars.length ? [make("td", {})] : []))), make("tbody", {}, ...body));
  return make("div", {}, ...(rows.length ? [make("div", { class: "scroll", tabindex: 0 }, whole)] : []), ...(note ? [make("p", { class: "note" }, note)] : []));
}

// A dot for each slide, on the mean and a band of one standard deviation to either side.
function dots(found: [name: string, dice: number][]): HTMLElement {
  const values = found.map(([, value]) => value);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const sd = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1));
  const low = Math.max(0, Math.floor(20 * Math.min(values[0]!, mean - sd) - 0.5) / 20);
  const place = (value: number) => `${(100 * Math.min(1, Math.max(0, (value - low) / (1 - low)))).toFixed(2)}%`;
  const list = make("ol", { class: "dots" }, ...found.slice(0, MOST_DOTS).map(([name, value]) => {
    const dot = make("i", {});
    dot.style.left = place(value);
    return make("li", {}, make("span", { title: name }, name), make("span", { class: "track", "aria-hidden": "true" }, dot), make("b", {}, value.toFixed(4)));
  }));
  for (const [name, value] of Object.entries({ "--from": mean - sd, "--mean": mean, "--to": mean + sd })) {
    list.style.setProperty(name, place(value));
  }
  const spread = values.length > 1 ? ` (line), standard deviation ${sd.toFixed(4)} (band)` : "";
  const rest = found.length > MOST_DOTS ? ` The ${MOST_DOTS} lowest of ${grouped(found.length)} are shown.` : "";
  return make("figure", { class: "box" }, make("h3", {}, "Dice by slide"), list, make("p", { class: "note" }, `From ${low.toFixed(2)} to 1. Mean ${mean.toFixed(4)}${spread}.${rest}`));
}

function loss(report: Report, charts: Charts): HTMLElement {
  const { train, val } = report.loss;
  const slides = report.accumulated > 1;
  const window_ = Math.max(1, Math.floor(train.length / 25));
  const mean: Point[] = train.slice(window_ - 1).map(([step], at_) => [step, train.slice(at_, at_ + window_).reduce((sum, [, value]) => sum + value, 0) / window_]);
  const best = val.reduce<Point | undefined>((least, point) => (least && least[1] <= point[1] ? least : point), undefined);
  const [first, second] = [COLOURS[0]!, COLOURS[1]!];
  const points = { show: train.length === 1, fill: first }; // one has no line
  const lines: [Point[], uPlot.Series][] = [
    [train, { label: "train", stroke: window_ > 1 ? `${first}59` : first, width: 1.2, points }],
    ...(window_ > 1 ? [[mean, { label: `train, mean of ${window_}`, stroke: first, points }] as [Point[], uPlot.Series]] : []),
    ...(val.length ? [[val, { label: "validation", stroke: second, points: { show: true, fill: second } }] as [Point[], uPlot.Series]] : []),
  ];
  const values = [...train, ...val].map(([, value]) => value);
  const [least, most] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const unit = slides ? "slides seen" : "training step";
  const told = `Loss by ${unit}, from ${(train[0] ?? val[0])![1].toPrecision(4)} at first to ${(train.at(-1) ?? val.at(-1))![1].toPrecision(4)}${best ? `; lowest validation loss ${best[1].toPrecision(4)} at ${best[0]}` : ""}`;
  return charts.figure("Loss", told, lines.filter(([each]) => each.length), { name: "loss", x: unit, step: slides ? "slides" : "step", log: least > 0 && most > 30 * least });
}

function memory(report: Report, charts: Charts): HTMLElement {
  const { step, measured, predicted, budget } = report.memory;
  const points = (values: (number | null)[]): Point[] => values.flatMap((value, index) => (value === null ? [] : [[index * step + 1, value] as Point]));
  const lines: [Point[], uPlot.Series][] = [
    [points(predicted), { label: "predicted", stroke: "#888888", dash: [4, 3], points: { show: false } }],
    [points(measured), { label: "measured, where it is the highest so far", stroke: COLOURS[0]!, width: 0, paths: () => null, points: { show: true, fill: COLOURS[0]!, size: 6 } }],
    [points(budget), { label: "budget", stroke: COLOURS[1]!, points: { show: false } }],
  ];
  const most = points(measured).reduce((least, [, value]) => Math.max(least, value), 0);
  const told = `Peak memory by step: ${Math.round(most / 2 ** 20)} MiB at most`;
  return charts.figure("Peak memory by step", told, lines.filter(([each]) => each.length), { name: "bytes", x: "step, of training or validation", step: "step", from: 0 });
}

// Charts follow the width of their places and the page's colours, and are drawn finely for paper.
class Charts {
  private readonly draws: ((paper: boolean) => void)[] = [];

  figure(title: string, told: string, lines: [Point[], uPlot.Series][], given: Omit<Plot, "width">): HTMLElement {
    const place = make("div", { role: "img", "aria-label": told });
    const steps = [...new Set(lines.flatMap(([points]) => points.map(([step]) => step)))].sort((a, b) => a - b);
    const columns = [steps, ...lines.map(([points]) => { const known = new Map(points); return steps.map((step) => known.get(step)); })] as uPlot.AlignedData;
    let chart: uPlot | undefined;
    let room = 0;
    const draw = (paper: boolean) => {
      chart?.destroy();
      room = place.clientWidth;
      chart = plot(place, columns, lines.map(([, series]) => series), { ...given, ...(paper ? { width: PAPER_PX, height: 200, scale: 3 } : { width: Math.max(200, room) }) });
    };
    this.draws.push(draw);
    // Of the place, as the window stays as wide where the page begins to scroll.
    new ResizeObserver(() => { if (chart && room !== place.clientWidth && !document.documentElement.classList.contains("paper")) draw(false); }).observe(place);
    return make("figure", { class: "box" }, make("h3", {}, title), place);
  }

  follow(): void {
    const draw = (paper: boolean) => {
      document.documentElement.classList.toggle("paper", paper);
      this.draws.forEach((each) => each(paper));
    };
    draw(false);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(false));
    window.addEventListener("beforeprint", () => draw(true));
    window.addEventListener("afterprint", () => draw(false));
  }
}

// Slides with their layers over them, which are switched for all of them at once.
function pictures(slides: Pictured[]): HTMLElement[] {
  const drawn = slides.map((slide, index) => new Picture(slide, index));
  const shares = new Map<string, string>(); // layers of several classes' probabilities, with the class to begin with
  const named = new Map<string, { box: HTMLInputElement; colours: Map<string, string>; outlined: boolean; kind: LayerInfo["kind"] }>();
  for (const { slide, states } of drawn) {
    for (const [index, layer] of slide.info.layers.entries()) {
      const { on, form } = states[index]!;
      const box = make("input", { type: "checkbox", checked: on, change: () => change(layer.name) });
      const known = named.get(layer.name) ?? { box, colours: new Map<string, string>(), outlined: form === "outline", kind: layer.kind };
      named.set(layer.name, known);
      layer.classes.forEach((kind) => known.colours.set(kind.name, colour(kind.color)));
      if (layer.kind === "probabilities" && layer.classes.length > 1) {
        shares.set(layer.name, layer.classes[states[index]!.channel]!.name);
      }
    }
  }
  // The class whose probabilities are drawn, of all slides.
  const choice = (name: string, kinds: string[]) => {
    const select = make(
      "select",
      { "aria-label": `${name} of`, change: () => drawn.forEach((each) => each.choose(name, select.value)) },
      ...kinds.map((kind) => make("option", { value: kind }, kind)),
    );
    select.value = shares.get(name)!;
    select.dispatchEvent(new Event("change"));
    return select;
  };
  const change = (name: string) => {
    const { checked } = named.get(name)!.box;
    const room = named.get("Prediction")?.box; // colours of errors mean something else than those of classes
    if (name === "Errors" && room && checked === room.checked) {
      room.click();
    }
    drawn.forEach((each) => each.switch(name, checked));
  };
  const rows = [...named].map(([name, { box, colours, outlined, kind }]) => {
    const scale = make("span", { class: "ramp", role: "img", "aria-label": "from 0, clear, to 1, yellow" });
    scale.style.background = ramp();
    const swatches = [...colours].map(([kind, found]) => {
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      Object.assign(swatch.style, outlined ? { border: `3px solid ${found}` } : { background: found });
      return make("span", { class: "kind" }, swatch, kind);
    });
    const kinds = [...colours.keys()];
    return make("div", {}, make("label", {}, box, name), ...(shares.has(name) ? [choice(name, kinds)] : []), ...(kind === "probabilities" ? ["0 ", scale, " 1"] : swatches));
  });
  const legend = rows.length ? [make("fieldset", { class: "box" }, make("legend", {}, "Over the slides"), ...rows)] : [];
  return [...legend, make("div", { class: "pictures" }, ...drawn.map((each) => each.element))];
}

class Picture {
  readonly states: LayerState[];
  readonly element: HTMLElement;
  private readonly over: HTMLImageElement[];

  constructor(readonly slide: Pictured, private readonly number: number) {
    const { info, caption, alt } = slide;
    this.states = startingStates(info);
    this.over = info.layers.map((layer, index) => {
      const image = make("img", { alt: "", hidden: true });
      const [x, y, width, height] = layer.part ?? [0, 0, info.width, info.height];
      Object.assign(image.style, { left: `${(100 * x) / info.width}%`, top: `${(100 * y) / info.height}%`, width: `${(100 * width) / info.width}%`, height: `${(100 * height) / info.height}%`, opacity: String(this.states[index]!.opacity) });
      return image;
    });
    const stack = make("span", { class: "stack" }, make("img", { src: slide.picture, alt }), ...this.over);
    stack.style.setProperty("--ratio", String(info.width / info.height));
    const inside = slide.picture ? [make("a", { href: `#slide=${number}`, "aria-label": `Look at ${info.name} closely` }, stack)] : [];
    this.element = make("figure", { class: "picture" }, ...inside, make("figcaption", {}, info.name, make("span", {}, caption)));
    info.layers.forEach((_, index) => void this.draw(index));
  }

  switch(name: string, on: boolean): void {
    this.slide.info.layers.forEach((layer, index) => {
      if (layer.name === name) {
        this.states[index]!.on = on;
        void this.draw(index);
      }
    });
  }

  // Show the probabilities of a class; nothing where a network does not know it.
  choose(name: string, kind: string): void {
    this.slide.info.layers.forEach((layer, index) => {
      if (layer.name === name) {
        this.states[index]!.channel = layer.classes.findIndex((each) => each.name === kind);
        this.over[index]!.removeAttribute("src");
        void this.draw(index);
      }
    });
  }

  private async draw(index: number): Promise<void> {
    const [image, state] = [this.over[index]!, this.states[index]!];
    const { channel } = state;
    image.hidden = !state.on || channel < 0;
    if (!image.hidden && !image.src) {
      const canvas = await wholeLayer(this.number, this.slide.info, index, state);
      if (state.channel === channel) {
        image.src = canvas.toDataURL();
      }
    }
  }
}

// The page that looks at slides lies over the report while the address names one.
function openClosely(report: Report, article: HTMLElement, viewer: HTMLElement): void {
  let begun = false;
  let from: Element | null = null;
  const close = () => {
    history.pushState(null, "", location.href.split("#")[0]);
    follow();
  };
  const follow = () => {
    const open = location.hash.startsWith("#slide=");
    const opens = open && !document.body.classList.contains("closely");
    if (opens) {
      from = document.activeElement;
    }
    document.body.classList.toggle("closely", open);
    article.inert = open;
    viewer.inert = !open;
    if (open && !begun) {
      begun = true;
      at("tools").prepend(make("button", { type: "button", "aria-label": "Back to the report", title: "Back to the report (Esc)", click: close }, "✕"));
      void start();
    }
    if (opens) {
      (at("tools").firstElementChild as HTMLElement).focus();
    }
    if (!open) {
      document.title = titleOf(report);
      (from as HTMLElement | null)?.focus({ preventScroll: true });
    }
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  window.addEventListener(
    "keydown",
    (event) => {
      if (viewer.inert) {
        event.stopPropagation(); // its keys are the page's
      } else if (event.key === "Escape" && !at<HTMLDialogElement>("help").open) {
        close();
      }
    },
    true,
  );
  follow();
}
