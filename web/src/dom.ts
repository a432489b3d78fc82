// Elements are made by hand: nothing that a file says is ever read as HTML.

type Given = Record<string, string | number | boolean | EventListener | undefined>;

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  given: Given = {},
  ...inside: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") {
      element.addEventListener(name, value);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== undefined && value !== false) {
      element.setAttribute(name, String(value));
    }
  }
  element.append(...inside);
  return element;
}

export function at<T extends HTMLElement = HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

// A line for each score: what it is of, and its value.
export const scoreLines = (scores: Record<string, number>) =>
  Object.entries(scores).map(([name, value]) => make("small", { class: "score" }, make("span", {}, name), " ", make("span", {}, value.toFixed(4))));

export const colour = (rgb: readonly number[]) => `rgb(${rgb.join(" ")})`;

export const grouped = (value: number, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
