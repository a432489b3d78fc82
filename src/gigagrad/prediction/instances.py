"""The connected regions of a mask as a table: class, area, place, mean probability."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gigagrad.files import write_csv
from gigagrad.prediction.polygons import Traced, placed

COLUMNS: Final = (
    *("id", "class", "class_id", "area_px", "area_um2", "centroid_x", "centroid_y", "x0", "y0", "x1", "y1"),
    "mean_probability",
)
"""Ids are those of the GeoJSON. Pixels are those of the slide's level 0, boxes half open. No resolution, no um2; no
probabilities predicted, no mean."""


def write_instances(path: Path, traced: Traced, name: str, scale: tuple[float, float], mpp: float | None) -> None:
    """One line for each region, in the order of the GeoJSON (see `polygons.write_geojson`). Raises `WriteError`.

    `mpp` is of the mask, whose pixels are `scale` pixels of level 0 high and wide.
    """
    um2_per_px = None if mpp is None else mpp**2 / (scale[0] * scale[1])
    rows = []
    for region in placed(traced, name, scale):
        area, centre = region.polygon.area, region.polygon.centroid
        bounds = [round(side, 2) for side in region.polygon.bounds]
        um2 = "" if um2_per_px is None else round(area * um2_per_px, 3)
        where = (round(centre.x, 2), round(centre.y, 2), *bounds)
        mean = "" if region.probability is None else round(region.probability, 4)
        rows.append((region.id, region.kind.name, region.kind.id, area, um2, *where, mean))
    write_csv(path, [COLUMNS, *rows])
