"""Write OME-Zarr images, chunk by chunk by zarr-python itself: version 0.4 on Zarr 2, which QuPath and Bio-Formats
read, too.

Axes are y and x, after c where there are several channels. A mask whose classes have names is a label image under
`labels/classes`, and the image itself shows the same arrays: they are there once, and open as either.
(https://ngff.openmicroscopy.org/0.4/)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import zarr
from numcodecs import Blosc

from gigagrad.images.layout import ENCODERS, Layout, MaskClass
from gigagrad.images.pixels import ZARR_NODATA, Array
from gigagrad.threads import SideThreads

_VERSION: Final = "0.4"
_LABELS: Final = "labels/classes"
_RGB: Final = (
    MaskClass(0, "Red", (255, 0, 0)),
    MaskClass(1, "Green", (0, 255, 0)),
    MaskClass(2, "Blue", (0, 0, 255)),
)


def write_zarr(folder: Path, layout: Layout, rows: Iterable[Array]) -> None:
    """Write the image into an empty folder. The main thread waits for others that call zarr (see `threads`)."""
    with SideThreads(ENCODERS, "gigagrad-encode") as pool:
        arrays = pool.submit(_create, folder, layout).result()
        done_rows = [0] * len(arrays)
        for level, band in layout.bands(rows):
            place = slice(done_rows[level], done_rows[level] + len(band))
            done_rows[level] = place.stop
            channels = range(band.shape[2])
            tasks = [
                pool.submit(arrays[level].__setitem__, (c, place) if len(channels) > 1 else place, band[..., c])
                for c in channels
            ]
            for task in tasks:
                task.result()


def _create(folder: Path, layout: Layout) -> list[Any]:
    """Create the groups with all that is said of the image, and an array for each level."""
    several, nodata = layout.shape[2] > 1, layout.nodata
    root = zarr.open_group(folder, mode="a", zarr_format=2)
    inside = f"{_LABELS}/" if layout.classes else ""
    root.attrs.update({"multiscales": _multiscales(layout, layout.path.name, inside), **_omero(layout)})
    if layout.classes:
        name = _LABELS.rpartition("/")[2]
        root.create_group("labels", attributes={"labels": [name]})
        attributes = {"multiscales": _multiscales(layout, name), "image-label": _image_label(layout)}
        root.create_group(_LABELS, attributes=attributes)
    return [
        root.create_array(
            f"{inside}{level}",
            shape=(layout.shape[2], *sides) if several else sides,
            chunks=(1, layout.tile, layout.tile) if several else (layout.tile, layout.tile),
            dtype=layout.dtype,
            compressors=Blosc(cname="zstd", clevel=3),
            fill_value=0 if nodata is None else nodata,
            attributes={} if nodata is None else {ZARR_NODATA: str(nodata)},
            chunk_key_encoding={"name": "v2", "separator": "/"},
        )
        for level, sides in enumerate(layout.levels)
    ]


def _multiscales(layout: Layout, name: str, inside: str = "") -> list[dict[str, Any]]:
    """Describe the levels, with the size of a pixel in micrometres or, where unknown, in pixels of level 0."""
    unit = {} if layout.mpp is None else {"unit": "micrometer"}
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}] if layout.shape[2] > 1 else []
    axes += [{"name": axis, "type": "space", **unit} for axis in "yx"]
    datasets = [
        {
            "path": f"{inside}{level}",
            "coordinateTransformations": [
                {"type": "scale", "scale": [*([1.0] * (len(axes) - 2)), *[(layout.mpp or 1.0) * 2.0**level] * 2]}
            ],
        }
        for level in range(len(layout.levels))
    ]
    return [{"version": _VERSION, "name": name, "axes": axes, "datasets": datasets}]


def _omero(layout: Layout) -> dict[str, Any]:
    """Describe names and colours of the channels, where they have any."""
    channels = _RGB if layout.colour else layout.channels
    most = 1.0 if layout.dtype.kind == "f" else float(np.iinfo(layout.dtype).max)
    window = {"min": 0.0, "start": 0.0, "max": most, "end": most}
    described = [
        {"label": kind.name, "color": bytes(kind.color).hex().upper(), "window": window, "active": True}
        for kind in channels
    ]
    return {"omero": {"version": _VERSION, "channels": described}} if described else {}


def _image_label(layout: Layout) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "colors": [{"label-value": kind.id, "rgba": [*kind.color, 255]} for kind in layout.classes],
        "properties": [{"label-value": kind.id, "name": kind.name} for kind in layout.classes],
        "source": {"image": "../../"},
    }
