// Bundle the page into the Python package, with the licences of what it is made of.
import { copyFile, mkdir, readFile, rm, stat, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const out = new URL("../src/gigagrad/view/page/", import.meta.url);
const MOST_BYTES = 600 * 1000; // of script

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({
  entryPoints: { page: "src/start.ts" },
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  legalComments: "none", // they are all in licences.txt
  outdir: out.pathname,
  absWorkingDir: new URL(".", import.meta.url).pathname,
  logLevel: "warning",
});
await build({
  entryPoints: { page: "src/page.css" },
  minify: true,
  outdir: new URL("own/", out).pathname,
  absWorkingDir: new URL(".", import.meta.url).pathname,
});
const css = await Promise.all(["page.css", "own/page.css"].map((name) => readFile(new URL(name, out), "utf8")));
await writeFile(new URL("page.css", out), css.join("\n"));
await rm(new URL("own/", out), { recursive: true });
for (const name of ["index.html", "icon.svg"]) {
  await copyFile(new URL(name, import.meta.url), new URL(name, out));
}
const licences = [["OpenSeadragon", "openseadragon", "LICENSE.txt"], ["uPlot", "uplot", "LICENSE"]];
const texts = await Promise.all(
  licences.map(async ([name, folder, file]) => {
    const { version } = JSON.parse(await readFile(new URL(`node_modules/${folder}/package.json`, import.meta.url), "utf8"));
    return `${name} ${version}\n\n${await readFile(new URL(`node_modules/${folder}/${file}`, import.meta.url), "utf8")}`;
  }),
);
const notice = "This page is part of gigagrad (Apache-2.0). It contains the following programs.\n\n";
await writeFile(new URL("licences.txt", out), notice + texts.join(`\n${"-".repeat(72)}\n\n`));
const { size } = await stat(new URL("page.js", out));
if (size > MOST_BYTES) {
  throw new Error(`page.js has ${size} bytes; expected at most ${MOST_BYTES}: leave something out`);
}
console.log(`page.js: ${size} bytes`);
