import type { Corners, Plan, Shape, SlideInfo, Work } from "./api";

export interface Square {
  x: number;
  y: number;
  side: number;
}

// What is seen: the place of its top left pixel, and pixels of the screen for one of the slide.
export interface View {
  left: number;
  top: number;
  scale: number;
  wide: number; // pixels of the screen
  high: number;
}

const MARK = "#d55e00";
const LEAST = 12; // pixels of the screen: a tile that is smaller is marked so large

// Lines over a slide: the frame of a patch, the tiles of a plan, and those that are being computed.
export class Lines {
  square: Square | undefined;
  works: Work[] = [];
  plan: Plan | undefined;
  segment = -1; // of the plan; counted from the end where negative
  grid = false;
  pointer: { x: number; y: number } | undefined; // on the screen

  constructor(private readonly canvas: HTMLCanvasElement) {}

  draw(info: SlideInfo | undefined, view: View | undefined): void {
    const working = this.works.filter((work) => work.boxes?.length);
    this.canvas.hidden = !info || !view || !((this.grid && (this.plan || working.length)) || this.square || working.length);
    if (this.canvas.hidden || !info || !view) {
      return;
    }
    const { left, top, scale, wide, high } = view;
    const dense = window.devicePixelRatio;
    this.canvas.width = wide * dense;
    this.canvas.height = high * dense;
    const pen = this.canvas.getContext("2d")!;
    pen.setTransform(dense * scale, 0, 0, dense * scale, -left * dense * scale, -top * dense * scale);
    const segment = this.plan?.segments.at(this.segment) ?? this.plan?.segments.at(-1);
    if (this.grid && working.length) {
      drawGrid(pen, info, view, working[0]!.grid!, working[0]!.far!);
    } else if (this.grid && segment) {
      drawGrid(pen, info, view, segment.tile, [false, false]);
      this.drawHalo(pen, view, segment);
    }
    if (this.square) {
      const { x, y, side } = this.square;
      outline(pen, scale, [y, x, y + side, x + side]);
    }
    working.forEach((work) => drawWork(pen, scale, work));
  }

  // What the tile under the pointer is computed from.
  private drawHalo(pen: CanvasRenderingContext2D, view: View, segment: { tile: Shape; crop: Shape }): void {
    if (this.pointer) {
      const [height, width] = segment.tile;
      const [haloY, haloX] = segment.crop.map((side, axis) => (side - segment.tile[axis]!) / 2) as Shape;
      const x = Math.floor((view.left + this.pointer.x / view.scale) / width) * width;
      const y = Math.floor((view.top + this.pointer.y / view.scale) / height) * height;
      dashed(pen, view.scale, [y - haloY, x - haloX, y + height + haloY, x + width + haloX]);
    }
  }
}

function drawWork(pen: CanvasRenderingContext2D, scale: number, work: Work): void {
  pen.fillStyle = `${MARK}55`;
  for (const [y0, x0, y1, x1] of work.boxes!) {
    const [moreY, moreX] = [y1 - y0, x1 - x0].map((side) => Math.max(0, LEAST / scale - side) / 2) as Shape;
    const shown: Corners = [y0 - moreY, x0 - moreX, y1 + moreY, x1 + moreX];
    pen.fillRect(shown[1], shown[0], shown[3] - shown[1], shown[2] - shown[0]);
    outline(pen, scale, shown);
  }
  dashed(pen, scale, work.crop!);
}

function outline(pen: CanvasRenderingContext2D, scale: number, [y0, x0, y1, x1]: Corners): void {
  for (const [colour, times] of [["#ffffff", 6], [MARK, 3]] as const) {
    pen.lineWidth = times / scale;
    pen.strokeStyle = colour;
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
}

function dashed(pen: CanvasRenderingContext2D, scale: number, [y0, x0, y1, x1]: Corners): void {
  pen.setLineDash([8 / scale, 5 / scale]);
  for (const [colour, times] of [["#ffffffcc", 4], [MARK, 2]] as const) {
    pen.lineWidth = times / scale;
    pen.strokeStyle = colour;
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
  pen.setLineDash([]);
}

function drawGrid(pen: CanvasRenderingContext2D, info: SlideInfo, view: View, [height, width]: Shape, [bottom, right]: readonly boolean[]): void {
  const { left, top, scale, wide, high } = view;
  if (Math.min(height, width) * scale < 6) {
    return; // nothing but lines
  }
  const [x0, x1] = [Math.max(0, left), Math.min(left + wide / scale, info.width)];
  const [y0, y1] = [Math.max(0, top), Math.min(top + high / scale, info.height)];
  pen.beginPath();
  for (const x of cuts(x0, x1, width, right ? info.width : 0)) {
    pen.moveTo(x, y0);
    pen.lineTo(x, y1);
  }
  for (const y of cuts(y0, y1, height, bottom ? info.height : 0)) {
    pen.moveTo(x0, y);
    pen.lineTo(x1, y);
  }
  for (const [colour, times] of [["#ffffffcc", 3], ["#1a1a1a", 1]] as const) {
    pen.lineWidth = times / scale;
    pen.strokeStyle = colour;
    pen.stroke();
  }
}

// Places between two where tiles of a length meet, of which one begins at `from`.
function cuts(first: number, last: number, length: number, from: number): number[] {
  const found: number[] = [];
  for (let at = Math.ceil((first - from) / length); from + at * length <= last; at++) {
    found.push(from + at * length);
  }
  return found;
}
