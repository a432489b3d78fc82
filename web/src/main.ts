import * as api from "./api";
import { Curves } from "./curves";
import { at, make } from "./dom";
import { List } from "./list";
import { Panel, startingStates } from "./panel";
import { Panes } from "./panes";
import type { LayerState, Place } from "./stage";
import { middleOf, Working } from "./working";

const KEYS: [keys: string, does: string][] = [
  ["arrows", "move the slide"],
  ["+ and −", "zoom in and out"],
  ["0", "show the whole slide"],
  ["a", "show pixels at their actual size"],
  ["1 to 9", "show or hide a layer"],
  ["l", "show or hide labels"],
  ["p", "show or hide predictions"],
  ["e", "show or hide errors"],
  ["d", "show or hide where two predictions differ"],
  ["h", "hide all layers while it is held"],
  ["o", "fill or outline classes"],
  ["t", "show or hide the tiles of the plan"],
  ["w", "go to the tile that is computed now"],
  ["i", "the patch in the middle, and its attention"],
  ["c", "two predictions side by side, or one"],
  ["[ and ]", "fade layers out and in"],
  ["g", "go to a position"],
  ["n and b", "next slide, slide before"],
  ["f", "full screen"],
  ["?", "this list"],
  ["Esc", "close what is open"],
];

let message = 0;

function tell(text: string, stays = false): void {
  const place = at("message");
  window.clearTimeout(message);
  place.textContent = text;
  place.hidden = !text;
  if (text && !stays) {
    message = window.setTimeout(() => { place.hidden = true; }, 2500);
  }
}

function help(): void {
  const dialog = at<HTMLDialogElement>("help");
  dialog.replaceChildren(
    make("h2", { id: "help-title" }, "Keys"),
    make("table", {}, make("tbody", {}, ...KEYS.map(([keys, does]) => make("tr", {}, make("th", { scope: "row" }, ...keys.split(/( and )/).map((key) => (key === " and " ? key : make("kbd", {}, key)))), make("td", {}, does))))),
    make("p", {}, "Tab goes from the list of slides to the slide, the zoom buttons and the layers. ", make("a", { href: document.getElementById("licences") ? "#licences" : "licences.txt" }, "Licences")),
    make("form", { method: "dialog" }, make("button", { autofocus: true }, "Close")),
  );
  dialog.showModal();
  dialog.scrollTop = 0; // the button that has the focus is at the end
}

// Where it is, in the address: reloading, and the browser's back, come back to it.
function remembered(): { slide: number; place: Place | undefined } {
  const found = new URLSearchParams(location.hash.slice(1));
  const [slide, x, y, width] = ["slide", "x", "y", "width"].map((name) => Number.parseFloat(found.get(name) ?? "")) as [number, number, number, number];
  const place = [x, y, width].every(Number.isFinite) && width > 0 ? { x, y, width } : undefined;
  return { slide: Number.isInteger(slide) ? slide : 0, place };
}

async function begin(): Promise<void> {
  const catalog = await api.catalog();
  const states = new Map<number, LayerState[]>();
  let curves: Curves | undefined;
  let remembering = 0;
  const stage = new Panes(
    catalog.sources,
    (place) => {
      window.clearTimeout(remembering);
      remembering = window.setTimeout(() => {
        const round = (value: number) => Math.round(value * 10) / 10;
        history.replaceState(null, "", `#slide=${stage.slide}&x=${round(place.x)}&y=${round(place.y)}&width=${round(place.width)}`);
      }, 300);
    },
    (seconds) => panel.tellTooLong(seconds),
    () => void pace(),
    (why) => tell(why, true),
    () => showPanel(),
    (x, y) => void panel.patchAt(x, y)?.then((told) => tell(told)),
  );
  let current: [number, api.SlideInfo, LayerState[]] | undefined;
  const panel = new Panel(stage);

  function showPanel(): void {
    if (current) {
      panel.show(...current);
      working.show(current[0]);
    }
  }

  // Take over what a tile has taken last.
  async function pace(): Promise<void> {
    const [number, info] = current!;
    const { plans } = await api.live(number, info);
    info.plans.forEach((plan) => { plan.seconds = plans.find((each) => each.of === plan.of && plan.seconds !== undefined)?.seconds ?? plan.seconds; });
  }

  function openRun(number: number): void {
    curves?.stop();
    document.body.classList.add("curves");
    at("layers").hidden = true;
    list.markRun(number);
    curves = new Curves(number, catalog.runs[number]!);
    curves.start();
  }

  async function openSlide(number: number, place?: Place): Promise<void> {
    curves?.stop();
    curves = undefined;
    document.body.classList.remove("curves");
    list.mark(number);
    tell("Opening …", true);
    try {
      const info = await api.slide(number);
      const own = states.get(number) ?? startingStates(info);
      states.set(number, own);
      document.title = `${info.name} · gigagrad view`;
      current = [number, info, own];
      showPanel();
      tell("");
      stage.show(number, info, own, place);
      if (catalog.live) {
        void addLive(number, info, own);
      }
    } catch (error) {
      tell((error as Error).message, true);
    }
  }

  // The network is captured and planned for the slide's size, while the slide is there to be seen already.
  async function addLive(number: number, info: api.SlideInfo, own: LayerState[]): Promise<void> {
    try {
      const found = await api.live(number, info);
      info.layers.push(...found.layers);
      info.plans.push(...found.plans);
      info.problems.push(...found.problems);
    } catch (error) {
      info.problems.push((error as Error).message);
    }
    const before = own.length;
    own.push(...startingStates(info).slice(before));
    if (stage.slide === number && !curves) {
      showPanel();
      own.slice(before).forEach((_, index) => stage.draw(before + index));
      stage.showGrid(stage.showsGrid); // of plans that were not there before
    }
  }

  const working = new Working(
    (works) => { stage.mark(works); list.work(works); },
    (number, tile) => {
      const place = tile && stage.leading.around(middleOf(tile));
      if (stage.slide !== number || curves) {
        void openSlide(number, place);
      } else if (place) {
        stage.leading.go(place);
      }
    },
    (tile) => !stage.leading.sees(middleOf(tile)),
  );

  const list = new List(catalog, (number) => void openSlide(number), openRun);
  const sides = catalog.sources.length > 1 ? [["◫", "Two predictions side by side, or one", () => tell(stage.toggle())] as [string, string, () => void]] : [];
  at("tools").append(
    ...([...sides, ["+", "Zoom in", () => stage.leading.zoom(1.5)], ["−", "Zoom out", () => stage.leading.zoom(1 / 1.5)], ["⤢", "Show the whole slide", () => stage.leading.whole()], ["1:1", "1:1, pixels at their actual size", () => stage.leading.actualSize()], ["?", "List all keys", help]] as [string, string, () => void][])
      .map(([sign, name, act]) => make("button", { type: "button", "aria-label": name, title: name, click: act }, sign)),
  );

  function toggle(found: number[]): void {
    tell(found.map((index) => panel.toggle(index)).join(", ") || "there is no such layer");
  }

  function goTo(): void {
    const dialog = at<HTMLDialogElement>("help");
    const field = make("input", { id: "go-x", type: "number", required: true });
    const other = make("input", { id: "go-y", type: "number", required: true });
    const seen = stage.leading.place();
    field.value = String(Math.round(seen?.x ?? 0));
    other.value = String(Math.round(seen?.y ?? 0));
    dialog.replaceChildren(
      make("h2", { id: "help-title" }, "Go to a position"),
      make("form", { method: "dialog", submit: () => stage.leading.go({ x: Number(field.value), y: Number(other.value), width: seen?.width ?? 1000 }) },
        make("p", {}, make("label", { for: "go-x" }, "x, px "), field),
        make("p", {}, make("label", { for: "go-y" }, "y, px "), other),
        make("button", {}, "Go")),
      make("form", { method: "dialog" }, make("button", {}, "Cancel")),
    );
    dialog.showModal();
  }

  let held: number[] | undefined;
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) && (target as HTMLInputElement).type !== "checkbox";
    if (event.ctrlKey || event.metaKey || event.altKey || typing || at<HTMLDialogElement>("help").open) {
      return;
    }
    if (curves && !"nbfw?".includes(event.key)) {
      return; // its keys are the browser's: arrows scroll it
    }
    const step = event.shiftKey ? 0.05 : 0.2;
    const acts: Record<string, () => void> = {
      ArrowLeft: () => stage.leading.pan(-step, 0),
      ArrowRight: () => stage.leading.pan(step, 0),
      ArrowUp: () => stage.leading.pan(0, -step),
      ArrowDown: () => stage.leading.pan(0, step),
      "+": () => stage.leading.zoom(1.5),
      "=": () => stage.leading.zoom(1.5),
      "-": () => stage.leading.zoom(1 / 1.5),
      "0": () => stage.leading.whole(),
      a: () => stage.leading.actualSize(),
      l: () => toggle(panel.find((layer) => layer.name.startsWith("Label"))),
      p: () => toggle(panel.find((layer) => layer.name.startsWith("Predict"))),
      e: () => toggle(panel.find((layer) => layer.kind === "errors" && !layer.between.length)),
      d: () => toggle(panel.find((layer) => layer.between.length > 0 && layer.kind === "errors")),
      w: () => tell(working.goTo()),
      i: () => {
        const middle = stage.leading.middle;
        const told = middle && panel.patchAt(...middle, true);
        if (told) {
          void told.then((text) => tell(text));
        } else {
          tell("there is no map of attention here");
        }
      },
      o: () => tell(panel.switchForm()),
      c: () => tell(stage.toggle()),
      t: () => tell(panel.toggleGrid()),
      "[": () => tell(panel.fade(-10)),
      "]": () => tell(panel.fade(10)),
      g: goTo,
      n: () => { const next = list.beside(stage.slide, 1); if (next !== undefined) { void openSlide(next); } },
      b: () => { const before = list.beside(stage.slide, -1); if (before !== undefined) { void openSlide(before); } },
      f: () => void (document.fullscreenElement ? document.exitFullscreen() : at("main").requestFullscreen()),
      "?": help,
      h: () => {
        if (!held) {
          held = panel.find(() => true).filter((index) => states.get(stage.slide)![index]!.on);
          held.forEach((index) => panel.toggle(index));
        }
      },
    };
    for (let number = 1; number <= 9; number++) {
      acts[String(number)] = () => toggle([number - 1]);
    }
    const act = acts[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
  document.addEventListener("keyup", (event) => {
    if (event.key === "h" && held) {
      held.forEach((index) => panel.toggle(index));
      held = undefined;
    }
  });

  if (catalog.works) {
    working.start();
  }
  const go = async () => {
    const { slide, place } = remembered();
    await openSlide(Math.min(slide, catalog.slides.length - 1), place);
  };
  window.addEventListener("hashchange", () => location.hash.startsWith("#slide=") && void go());
  if (catalog.slides.length) {
    await go();
  } else {
    openRun(0);
  }
}

export const start = () => begin().catch((error: Error) => tell(error.message, true));
