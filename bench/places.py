"""Where labels lie and what they are: random outlines, masks and regions against GDAL, shapely and OpenSlide.

    python bench/places.py [--cases 300] [--seed 0]

A case is one of: outlines as QuPath, ASAP or GIS programs write them, over a slide of which a part was scanned or over
an image on earth (four reference systems; north up, turned, mirrored, sheared; levels), with classes of every kind
(several names, ignored ones, QuPath's Region*, Background; a table or none); regions exported from a mask and read
back; a mask of what was scanned; a mask file and a world file. What is expected is computed apart: rasterio transforms
and rasterises, OpenSlide says where the scanned part lies, and a few lines here say which class has which id. A mask
that may be of the scanned part or of the whole slide is to be refused. Prints the seed of each case that differs and,
last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import rasterio
import rasterio.features
import rasterio.warp
import shapely
import shapely.geometry
from rasterio.transform import Affine

import gigagrad as gg
from gigagrad.boxes import Box
from gigagrad.images import MaskClass, write_pyramid
from gigagrad.images.georeference import geotiff_tags
from gigagrad.prediction.polygons import trace, write_geojson

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.images.scanned import write_scn

SYSTEMS = {4326: (11, 48, 1e-4), 32633: (500000, 5300000, 10), 3857: (1.3e6, 6.1e6, 12), 3035: (4.4e6, 2.8e6, 10)}
"""A place in each, and how large a pixel is there; all within one region, so that any leads to any other."""
KINDS = (
    "Tumor",
    "Stroma",
    ("Tumor", "Positive"),
    ("Tumor", "Negative"),
    "Background",
    "Ignore*",
    "Artefact*",
    "Region*",
)
IGNORED = 255

Ring = list[list[float]]
Drawn = list[tuple[Any, list[Ring]]]
"""Polygons with their class, a name or several, None without one; rings in pixels of level 0, holes after the first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    families: tuple[Callable[[Path, np.random.Generator], int], ...] = (
        *(over_scan, over_scan, on_earth, on_earth, on_earth),
        *(exported_scan, exported_earth, mask_of_scan, mask_file, world_file),
    )
    counts, different = Counter[str](), []
    for case in range(args.seed, args.seed + args.cases):
        family = families[case % len(families)]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            try:
                pixels = family(Path(folder), np.random.default_rng(case))
            except Exception as error:  # whatever it is, it is no mask
                print(f"case {case}, {family.__name__}: {type(error).__name__}: {error}")
                pixels = -1
        counts[family.__name__] += 1
        if pixels:
            print(f"case {case}, {family.__name__}: {pixels} differ")
            different.append(case)
    print(json.dumps({"cases": args.cases, "seed": args.seed, "families": counts, "different": different}))


def over_scan(folder: Path, rng: np.random.Generator) -> int:
    """Outlines over a slide of which a part was scanned, as QuPath and as ASAP write them."""
    slide_path, level = scanned(folder, rng), int(rng.integers(2))
    with openslide.OpenSlide(slide_path) as theirs:
        x, y = (int(theirs.properties[f"openslide.bounds-{axis}"]) for axis in "xy")
        shapes = [(height, width) for width, height in theirs.level_dimensions]
    drawn = drawing(rng, (y, x, *shapes[0]))
    by_asap = rng.random() < 0.4
    path = asap(folder, drawn) if by_asap else geojson(folder, rng, moved(drawn, -x, -y), qupath=True)
    if by_asap:
        drawn = [(kind, rings[:1]) for kind, rings in drawn]
    return painted(rng, slide_path, level, path, drawn, shapes[level], shapes[0])


def on_earth(folder: Path, rng: np.random.Generator) -> int:
    """Outlines over an image on earth: in its reference system, in another, in degrees without a name, or in pixels."""
    image, place, system, shape = located(folder, rng)
    level = int(rng.integers(2))
    drawn = drawing(rng, (0, 0, *shape))
    how = rng.choice(["own", "other", "degrees", "null", "qupath"])
    if how in ("null", "qupath"):
        path = geojson(folder, rng, drawn, qupath=how == "qupath", crs=None if how == "null" else "")
    else:
        chosen = {"own": system, "other": int(rng.choice(list(SYSTEMS))), "degrees": 4326}[how]
        there = [(kind, [mapped(ring, place, system, chosen) for ring in rings]) for kind, rings in drawn]
        # What is expected goes back the way that GDAL goes, from the numbers in the file.
        drawn = [(kind, [unmapped(ring, place, system, chosen) for ring in rings]) for kind, rings in there]
        path = geojson(folder, rng, there, qupath=False, crs="" if how == "degrees" else name_of(rng, chosen))
    sides = [-(-side // 2**level) for side in shape]
    return painted(rng, image, level, path, drawn, (sides[0], sides[1]), shape)


def exported_scan(folder: Path, rng: np.random.Generator) -> int:
    """Regions of a mask over a slide of which a part was scanned, as QuPath shows them and as OpenSlide reads it."""
    slide_path = scanned(folder, rng, coloured=True)
    with openslide.OpenSlide(slide_path) as theirs, gg.open_image(slide_path) as slide:
        width, height = theirs.dimensions
        x, y = (int(theirs.properties[f"openslide.bounds-{axis}"]) for axis in "xy")
        seen = np.asarray(theirs.read_region((0, 0), 0, (width, height)))
        plane = np.where(seen[..., 3] == 0, 0, seen[..., 0] // 60).astype(np.uint8)
        mask = gg.open_image(plane)
        write_geojson(folder / "a.geojson", traced(mask), "a", bounds=slide.bounds)
        back = np.asarray(gg.open_mask(folder / "a.geojson", slide, TABLE | {"unlabelled": 0}).read(whole(plane)))[0]
    found = json.loads((folder / "a.geojson").read_text())
    theirs_plane = burnt(
        [
            (shapely.affinity.translate(shapely.geometry.shape(each["geometry"]), x, y), number_of(each))
            for each in found["features"]
        ],
        plane.shape,
    )
    return int((theirs_plane != plane).sum() + (back != plane).sum())


def exported_earth(folder: Path, rng: np.random.Generator) -> int:
    """Regions of a mask over an image on earth, read back by the image's own reference system, and by ours."""
    image, place, system, shape = located(folder, rng)
    plane = blobs(rng, shape)
    with gg.open_image(image) as slide:
        write_geojson(folder / "a.geojson", traced(gg.open_image(plane)), "a", (1, 1), slide.georeference)
        back = np.asarray(gg.open_mask(folder / "a.geojson", slide, TABLE | {"unlabelled": 0}).read(whole(plane)))[0]
    found = json.loads((folder / "a.geojson").read_text())
    named = rasterio.crs.CRS.from_user_input(found["crs"]["properties"]["name"])
    shapes = [(each["geometry"], number_of(each)) for each in found["features"]]
    theirs = rasterio.features.rasterize(shapes, shape, transform=place) if shapes else np.zeros(shape, np.uint8)
    same = named == rasterio.crs.CRS.from_epsg(system) or (system == 4326 and named.to_string() == "OGC:CRS84")
    return int((theirs != plane).sum() + (back != plane).sum()) + (not same)


def mask_of_scan(folder: Path, rng: np.random.Generator) -> int:
    """A mask image as QuPath exports it: of what was scanned, at some downsample."""
    slide_path = scanned(folder, rng)
    with openslide.OpenSlide(slide_path) as theirs:
        x, y, width, height = (
            int(theirs.properties[f"openslide.bounds-{part}"]) for part in ("x", "y", "width", "height")
        )
        full = theirs.dimensions[::-1]
    step = int(rng.choice([1, 2, 4]))
    small = rng.integers(0, 4, (height // step, width // step), dtype=np.uint8)
    expected = np.zeros(full, np.uint8)
    rows, columns = (
        ((np.arange(side) + 0.5) * of / side).astype(int)
        for side, of in ((height, small.shape[0]), (width, small.shape[1]))
    )
    expected[y : y + height, x : x + width] = small[np.ix_(rows, columns)]
    box = Box(0, 0, *full) if rng.random() < 0.5 else Box(max(0, y - 7), x + 3, y + 50, x + 70)
    with gg.open_image(slide_path) as slide:
        try:
            mask = gg.open_mask(small, slide)
        except gg.GigagradError as error:
            # Small masks may be of the whole slide just as well; which, nobody can know.
            return int("may be of the whole slide" not in str(error))
        with mask:
            seen = np.asarray(mask.read(box))[0]
    return int((seen != expected[box.y0 : box.y1, box.x0 : box.x1]).sum())


def mask_file(folder: Path, rng: np.random.Generator) -> int:
    """A predicted mask's place, field by field, as GDAL reads it."""
    image, _, _, shape = located(folder, rng)
    plane = blobs(rng, shape)
    with gg.open_image(image) as slide:
        tags = geotiff_tags(slide.georeference, IGNORED)
    write_pyramid(folder / "m.tif", [plane[..., None]], shape=(*shape, 1), dtype=np.uint8, nearest=True, tags=tags)
    with rasterio.open(image) as before, rasterio.open(folder / "m.tif") as after:
        fields = [before.crs == after.crs, after.nodata == IGNORED, before.shape == after.shape]
        fields += [np.allclose(before.transform, after.transform, rtol=1e-12, atol=0)]
        fields += [np.allclose(before.bounds, after.bounds, rtol=1e-12)]
        return fields.count(False) + int((after.read(1) != plane).sum())


def world_file(folder: Path, rng: np.random.Generator) -> int:
    """The place that a world file gives an image."""
    shape = sizes(rng)
    path = folder / "a.png"
    with rasterio.open(path, "w", driver="PNG", height=shape[0], width=shape[1], count=1, dtype="uint8") as out:
        out.write(np.zeros((1, *shape), np.uint8))
    a, b, c, d, e, f = transform(rng, *SYSTEMS[32633])[:6]
    lines = (a, d, b, e, c + 0.5 * (a + b), f + 0.5 * (d + e))
    path.with_suffix(str(rng.choice([".pgw", ".wld"]))).write_text("\n".join(f"{line:.12g}" for line in lines))
    with rasterio.open(path) as theirs, gg.open_image(path) as ours:
        assert ours.georeference is not None
        return int((~np.isclose(theirs.transform[:6], ours.georeference.transform, rtol=1e-9)).sum())


def painted(
    rng: np.random.Generator,
    image: Path,
    level: int,
    path: Path,
    drawn: Drawn,
    shape: tuple[int, int],
    full: tuple[int, int],
) -> int:
    """How many pixels of our mask are not what GDAL makes of the polygons and the rules below of their classes."""
    names = [called(kind) for kind, _ in drawn]
    table = None
    if rng.random() < 0.5:
        known = sorted({name for name in names if name in TABLE})
        table = {name: TABLE[name] for name in known} or None
    ids, unlabelled = rules(names, table)
    scale = Affine.scale(full[1] / shape[1], full[0] / shape[0])
    expected = np.full(shape, unlabelled, np.uint8)
    for (_, rings), name in zip(drawn, names, strict=True):
        if (value := ids.get(name)) is not None:
            area = {"type": "Polygon", "coordinates": rings}
            expected[rasterio.features.rasterize([area], shape, transform=scale) == 1] = value
    with gg.open_image(image, level=level) as slide, gg.open_mask(path, slide, table) as mask:
        seen = np.asarray(mask.read(Box.whole(*shape)))[0]
    return int((seen != expected).sum())


def rules(names: list[str], table: dict[str, int] | None) -> tuple[dict[str, int | None], int]:
    """The id of each class, None of one that is not painted, and that of what no polygon covers."""
    ids: dict[str, int | None] = {}
    if table is None:
        numbered = sorted(
            {name for name in names if not name.endswith("*") and name not in ("Background", "Unclassified")}
        )
        alone = not numbered and "Unclassified" in names
        ids |= {name: number for number, name in enumerate(numbered or ["Unclassified"] * alone, 1)}
        ids |= {"Background": 0} if "Background" in names else {}
    else:
        ids.update(table)
    classes = set(ids.values())
    ids |= {name: IGNORED for name in names if name.endswith("*") and name not in ids}
    if table is None or "Region*" not in table:
        ids["Region*"] = None
    return ids, 0 if classes == {1} else IGNORED


def called(kind: Any) -> str:
    return "Unclassified" if kind is None else kind if isinstance(kind, str) else ": ".join(kind)


TABLE = {"Tumor": 1, "Stroma": 2, "Tumor: Positive": 3, "Tumor: Negative": 1, "Background": 0}


def drawing(rng: np.random.Generator, area: tuple[int, int, int, int]) -> Drawn:
    """Stars and rings that overlap one another and the border of `area` (y, x, height, width of the slide)."""
    y, x, height, width = area
    drawn: Drawn = []
    for number in range(int(rng.integers(2, 8))):
        centre = rng.uniform((x, y), (width, height))
        angles = np.linspace(0, 2 * np.pi, int(rng.integers(3, 12)), endpoint=False) + rng.uniform(0, 1)
        radii = rng.uniform(0.3, 1, len(angles)) * rng.uniform(5, max(8, min(height - y, width - x) / 3))
        star = centre + radii[:, None] * np.stack((np.cos(angles), np.sin(angles)), axis=1)
        rings = [star] if rng.random() < 0.7 else [star, centre + 0.4 * (star - centre)]
        # One class that is to be found is always there.
        kind: Any = KINDS[int(rng.integers(len(KINDS) if number else 2))]
        kind = None if number and rng.random() < 0.1 else kind
        drawn.append((kind, [[*ring.tolist(), ring[0].tolist()] for ring in rings]))
    return drawn


def moved(drawn: Drawn, x: float, y: float) -> Drawn:
    return [(kind, [[[px + x, py + y] for px, py in ring] for ring in rings]) for kind, rings in drawn]


def mapped(ring: Ring, place: Affine, system: int, chosen: int) -> Ring:
    points = [place * (x, y) for x, y in ring]
    area = {"type": "LineString", "coordinates": points}
    if chosen != system:
        area = rasterio.warp.transform_geom(f"EPSG:{system}", f"EPSG:{chosen}", area)
    return [list(point) for point in area["coordinates"]]


def unmapped(ring: Ring, place: Affine, system: int, chosen: int) -> Ring:
    area = {"type": "LineString", "coordinates": ring}
    if chosen != system:
        area = rasterio.warp.transform_geom(f"EPSG:{chosen}", f"EPSG:{system}", area)
    return [list(~place * tuple(point)) for point in area["coordinates"]]


def name_of(rng: np.random.Generator, system: int) -> str:
    names = [f"EPSG:{system}", f"urn:ogc:def:crs:EPSG::{system}", f"http://www.opengis.net/def/crs/EPSG/0/{system}"]
    return str(rng.choice([*names, *["urn:ogc:def:crs:OGC:1.3:CRS84"] * (system == 4326)]))


def geojson(folder: Path, rng: np.random.Generator, drawn: Drawn, *, qupath: bool, crs: str | None = "") -> Path:
    """A file of features; `crs` before or behind them, null for None, without one for ""."""
    features = []
    for kind, rings in drawn:
        about: dict[str, Any] = {"objectType": "annotation"} if qupath else {"note": "x" * int(rng.integers(5000))}
        if isinstance(kind, tuple):
            about["classification"] = {"names": list(kind), "color": [1, 2, 3]} if qupath else ": ".join(kind)
        elif kind is not None:
            about["classification"] = {"name": kind, "color": [1, 2, 3]} if qupath else kind
        geometry = {"type": "Polygon", "coordinates": rings}
        features.append({"type": "Feature", "geometry": geometry, "properties": about})
    said = {} if crs == "" else {"crs": None if crs is None else {"type": "name", "properties": {"name": crs}}}
    behind = rng.random() < 0.5
    content = {
        "type": "FeatureCollection",
        **({} if behind else said),
        "features": features,
        **(said if behind else {}),
    }
    path = folder / "a.geojson"
    path.write_text(json.dumps(content))
    return path


def asap(folder: Path, drawn: Drawn) -> Path:
    parts = []
    for kind, (ring, *_) in drawn:
        corners = "".join(f'<Coordinate Order="{k}" X="{x!r}" Y="{y!r}"/>' for k, (x, y) in enumerate(ring[:-1]))
        group = "None" if kind is None else called(kind)
        parts.append(
            f'<Annotation Type="Polygon" PartOfGroup="{group}"><Coordinates>{corners}</Coordinates></Annotation>'
        )
    path = folder / "a.xml"
    path.write_text(f"<ASAP_Annotations><Annotations>{''.join(parts)}</Annotations></ASAP_Annotations>")
    return path


def sizes(rng: np.random.Generator) -> tuple[int, int]:
    height, width = rng.integers(60, 200, 2)
    return int(height), int(width)


def scanned(folder: Path, rng: np.random.Generator, *, coloured: bool = False) -> Path:
    """A slide of which a part was scanned; `coloured`: red is 60 times the class of a pixel."""
    height, width = (2 * side for side in sizes(rng))
    y, x = (2 * int(side) for side in rng.integers(1, 60, 2))
    pixels = np.full((height, width, 3), 200, np.uint8)
    if coloured:
        pixels[..., 0] = 60 * blobs(rng, (height, width))
    slide = (y + height + 2 * int(rng.integers(1, 40)), x + width + 2 * int(rng.integers(1, 40)))
    return write_scn(folder / "a.scn", pixels, corner=(y, x), slide=slide, levels=2)


def located(folder: Path, rng: np.random.Generator) -> tuple[Path, Affine, int, tuple[int, int]]:
    system, shape = int(rng.choice(list(SYSTEMS))), sizes(rng)
    shape = (shape[0] - shape[0] % 2, shape[1] - shape[1] % 2)
    place = transform(rng, *SYSTEMS[system])
    path = folder / "scene.tif"
    about = {"height": shape[0], "width": shape[1], "count": 1, "dtype": "uint8", "crs": f"EPSG:{system}"}
    with rasterio.open(path, "w", driver="GTiff", transform=place, **about) as out:
        out.write(np.full((1, *shape), 7, np.uint8))
    with rasterio.open(path, "r+") as out:
        out.build_overviews([2])
    return path, place, system, shape


def transform(rng: np.random.Generator, x: float, y: float, step: float) -> Affine:
    """North up, turned, mirrored or sheared."""
    place = Affine.translation(x, y) * Affine.scale(step, -step * rng.uniform(0.5, 2))
    kind = rng.integers(4)
    if kind == 1:
        place *= Affine.rotation(rng.uniform(-180, 180))
    elif kind == 2:
        place *= Affine.scale(-1, 1)
    elif kind == 3:
        place *= Affine.shear(rng.uniform(-30, 30), rng.uniform(-30, 30))
    return place


def blobs(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    coarse = rng.integers(0, 3, (shape[0] // 12 + 1, shape[1] // 12 + 1), dtype=np.uint8)
    return np.kron(coarse, np.ones((12, 12), np.uint8))[: shape[0], : shape[1]]


def traced(mask: Any) -> Any:
    kinds = (MaskClass(1, "Tumor", (200, 0, 0)), MaskClass(2, "Stroma", (0, 200, 0)))
    return trace(mask, kinds, min_area_px=1)


def number_of(feature: dict[str, Any]) -> int:
    return TABLE[feature["properties"]["classification"]["name"]]


def burnt(shapes: list[tuple[Any, int]], shape: tuple[int, int]) -> Any:
    return rasterio.features.rasterize(shapes, shape, dtype=np.uint8) if shapes else np.zeros(shape, np.uint8)


def whole(plane: Any) -> Box:
    return Box.whole(*plane.shape)


if __name__ == "__main__":
    main()
