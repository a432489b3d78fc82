"""A slide of which a part was scanned, as small as OpenSlide takes it: Leica's SCN, which names the part's place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile

_NM_PER_PX = 250


def write_scn(
    path: Path, pixels_HWC: np.ndarray, *, corner: tuple[int, int], slide: tuple[int, int], levels: int = 1
) -> Path:
    """`pixels_HWC` `(h, w, 3)` of bytes at `corner`, (y, x), of a slide `(height, width)`; every level has half the
    pixels of the one before.
    """
    pictures = [pixels_HWC[:: 2**level, :: 2**level] for level in range(levels)]
    (y, x), (height, width) = corner, slide
    sizes = "".join(
        f'<dimension sizeX="{each.shape[1]}" sizeY="{each.shape[0]}" r="{level}" c="0" z="0" ifd="{level}"/>'
        for level, each in enumerate(pictures)
    )
    h, w = pixels_HWC.shape[:2]
    description = (
        '<?xml version="1.0"?><scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01">'
        f'<collection sizeX="{width * _NM_PER_PX}" sizeY="{height * _NM_PER_PX}"><image>'
        f'<pixels sizeX="{w}" sizeY="{h}">{sizes}</pixels>'
        f'<view sizeX="{w * _NM_PER_PX}" sizeY="{h * _NM_PER_PX}" '
        f'offsetX="{x * _NM_PER_PX}" offsetY="{y * _NM_PER_PX}"/>'
        "<scanSettings><objectiveSettings><objective>40</objective></objectiveSettings><illuminationSettings>"
        "<illuminationSource>brightfield</illuminationSource></illuminationSettings></scanSettings></image>"
        "</collection></scn>"
    )
    dense = {"resolution": (40000, 40000), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as file:
        for level, each in enumerate(pictures):
            said = description if not level else None
            file.write(each, photometric="rgb", tile=(64, 64), description=said, metadata=None, **dense)
    return path
