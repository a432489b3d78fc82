"""Regions as an annotation store of TIAToolbox: an SQLite file of polygons with an R-tree over their boxes.

Its schema is version 1.0.1 of `SQLiteStore` (tiatoolbox/annotation/storage.py): a polygon is Well-Known Binary packed
by zlib, a property is JSON. The viewer colours by the property `type`, or takes `color`, of numbers up to 1.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from gigagrad.files import replacing
from gigagrad.prediction.polygons import Traced, placed

_PACKING: Final = 9
_METADATA: Final = {"version": "1.0.1", "compression": "zlib", "compression_level": _PACKING}
_SCHEMA: Final = """
CREATE TABLE metadata (key TEXT UNIQUE, value TEXT);
CREATE VIRTUAL TABLE rtree USING rtree (id, min_x, max_x, min_y, max_y);
CREATE TABLE annotations (
    id INTEGER PRIMARY KEY, key TEXT UNIQUE, objtype TEXT, cx FLOAT NOT NULL, cy FLOAT NOT NULL,
    geometry BLOB, properties TEXT, area FLOAT NOT NULL
);
"""


def write_annotations(path: Path, traced: Traced, name: str, scale: tuple[float, float] = (1, 1)) -> None:
    """The regions in level-0 pixels, under the ids of the GeoJSON (see `polygons.write_geojson`). Raises `WriteError`.

    The file is made in memory, where its polygons are, too.
    """
    with closing(sqlite3.connect(":memory:")) as store:
        store.executescript(_SCHEMA)
        store.executemany("INSERT INTO metadata VALUES (?, ?)", ((k, json.dumps(v)) for k, v in _METADATA.items()))
        for number, region in enumerate(placed(traced, name, scale), 1):
            polygon, kind = region.polygon, region.kind
            properties: dict[str, Any] = {"type": kind.name, "color": [part / 255 for part in kind.color]}
            if region.probability is not None:
                properties["mean_probability"] = round(region.probability, 4)
            geometry = zlib.compress(polygon.wkb, _PACKING)
            centre, (x0, y0, x1, y1) = polygon.centroid, polygon.bounds
            row = (number, region.id, polygon.geom_type, centre.x, centre.y, geometry, json.dumps(properties))
            store.execute("INSERT INTO annotations VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*row, polygon.area))
            store.execute("INSERT INTO rtree VALUES (?, ?, ?, ?, ?)", (number, x0, x1, y0, y1))
        store.commit()
        with replacing(path) as file:
            file.write(store.serialize())
