"""Make graphs for graph networks of what was predicted: connected regions and patches with their neighbours.

Regions are found band by band and exactly (`images.regions`), so that a mask of many cells needs no outlines. Two are
neighbours where they share pixel edges, or by the Delaunay triangulation of their centroids, as squidpy has it for
cells. Arrays are called as in PyTorch Geometric. `smooth_scores` is a personalised PageRank (Page et al., 1999) whose
steps are products with the sparse matrix of edges; passing on only what has changed takes longer
(docs/decisions/0078-regions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gigagrad.errors import ConfigError
from gigagrad.files import replacing
from gigagrad.images import Image, MaskClass, find_regions
from gigagrad.images.thumbnails import names_shown
from gigagrad.prediction.classes import require_mask
from gigagrad.prediction.polygons import Region

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_PRECISION: Final = 1e-6


class TissueGraph(NamedTuple):
    """Regions and their neighbours, `N` nodes and `E` edges, each edge in both directions.

    Attributes:
        pos: `(N, 2)` float32 centroids x, y in pixels of the slide's level 0; `id` `(N,)` of the regions' outlines,
            empty where a region has none.
        x: `(N, F)` float32 features, and their names `x_names`, with their units.
        y: `(N,)` int64 class ids; `y_names` of all classes and `y_ids`, in the same order.
        edge_index: `(2, E)` int64 nodes from and to.
        edge_attr: `(E, 2)` float32: distance of the centroids, and shared border; `edge_names`, with their units.
    """

    pos: NDArray[np.float32]
    x: NDArray[np.float32]
    y: _Ints
    edge_index: _Ints
    edge_attr: NDArray[np.float32]
    x_names: NDArray[np.str_]
    y_names: NDArray[np.str_]
    y_ids: _Ints
    edge_names: NDArray[np.str_]
    id: NDArray[np.str_]


def tissue_graph(
    mask: Image,
    classes: Sequence[MaskClass],
    *,
    seen: Image | None = None,
    min_area_px: int = 256,
    scale: tuple[float, float] = (1, 1),
    outlines: Iterable[Region] = (),
) -> TissueGraph:
    """Make the graph of a mask's regions, 4-connected, of these classes.

    Args:
        mask: class ids, or a channel of 0 and 1 for each of several classes. Labels that overlap have no border.
        classes: those whose regions are nodes.
        seen: the slide at the mask's size, whose channels' means over a region are features.
        min_area_px: regions of fewer pixels of the mask are left out, unless they have an outline: those of thin rings
            have, as outlines are chosen by what they enclose.
        scale: how many level-0 pixels of the slide a pixel of the mask is high and wide.
        outlines: regions with ids, in pixels of the mask (`polygons.placed`); nodes of the same region get its id.

    Raises `ImageError` as `find_regions` does.
    """
    require_mask(mask, 1 if mask.channels == 1 else len(classes))
    if mask.channels == 1:
        found = [find_regions(mask, [kind.id for kind in classes], seen=seen)]
        values = found[0].values
    else:
        found = [find_regions(mask.bands([kind.id]), seen=seen) for kind in classes]
        values = np.repeat([kind.id for kind in classes], [len(each) for each in found])
    unit, side = ("px", 1.0) if mask.mpp is None else ("um", mask.mpp)
    starts = np.cumsum([0, *map(len, found)])
    ids = _ids(values, np.concatenate([each.firsts for each in found]), outlines)
    kept = (np.concatenate([each.areas for each in found]) >= min_area_px) | np.array([*map(bool, ids)], bool)
    names = ("areas", "perimeters", "centroids", "bounds_of", "means")
    of_all = (np.concatenate([getattr(each, name) for each in found]) for name in names)
    areas, perimeters, yx, bounds, means = (values_of[kept] for values_of in of_all)
    pairs = np.concatenate([each.pairs + start for each, start in zip(found, starts, strict=False)])
    there = kept[pairs].all(axis=1)
    touching, borders = (np.cumsum(kept) - 1)[pairs[there]], np.concatenate([each.borders for each in found])[there]
    pairs, place = np.unique(np.concatenate((touching, _delaunay(yx))), axis=0, return_inverse=True)
    shared = np.zeros(len(pairs))
    shared[place[: len(borders)]] = borders
    distance = np.linalg.norm(yx[pairs[:, 0]] - yx[pairs[:, 1]], axis=1)
    lengths = np.column_stack((perimeters, bounds[:, 2:] - bounds[:, :2]))
    colours = [] if seen is None else names_shown(seen)
    measured = (f"area_{unit}2", f"perimeter_{unit}", f"height_{unit}", f"width_{unit}")
    return TissueGraph(
        (yx[:, ::-1] * scale[::-1]).astype(np.float32),
        np.column_stack((areas * side**2, lengths * side, means)).astype(np.float32),
        values[kept],
        np.concatenate((pairs, pairs[:, ::-1])).T,
        np.tile(np.column_stack((distance, shared)) * side, (2, 1)).astype(np.float32),
        np.array([*measured, *(f"mean {colour}" for colour in colours)]),
        np.array([kind.name for kind in classes]),
        np.array([kind.id for kind in classes], np.int64),
        np.array([f"distance_{unit}", f"border_{unit}"]),
        np.array([ids[node] for node in np.flatnonzero(kept)], np.str_),
    )


def _ids(values: _Ints, firsts: _Ints, outlines: Iterable[Region]) -> list[str]:
    """Find the id of each region by its class and its first pixel, where an outline has its first corner; "" where none
    has."""
    known = {}
    for region in outlines:
        x, y = np.asarray(region.polygon.exterior.coords, np.int64).T
        at = np.lexsort((x, y))[0]
        known[region.kind.id, int(y[at]), int(x[at])] = region.id
    return [known.get(node, "") for node in zip(values.tolist(), *firsts.T.tolist(), strict=True)]


def _delaunay(points: _Floats) -> _Ints:
    """Return the edges `(E, 2)` of a Delaunay triangulation, the smaller node first; points in one place are linked."""
    import shapely

    at, first, of = np.unique(points[:, 0] + 1j * points[:, 1], return_index=True, return_inverse=True)
    lines = shapely.delaunay_triangles(shapely.multipoints(points), only_edges=True)
    ends = shapely.get_coordinates(lines)
    edges = first[np.searchsorted(at, ends[:, 0] + 1j * ends[:, 1])].reshape(-1, 2)
    again = np.flatnonzero(first[of] != np.arange(len(of)))
    return np.sort(np.concatenate((edges, np.stack((first[of[again]], again), axis=1))), axis=1)


def write_graph(path: Path, graph: TissueGraph) -> None:
    """Write the arrays of a graph by their names as NumPy's `.npz`, which holds no objects. Raises `WriteError`."""
    with replacing(path) as file:
        np.savez_compressed(file, **graph._asdict())


def patch_edges(coords: NDArray[np.integer[Any]], reach: float) -> _Ints:
    """Return the edges `(2, E)`, in both directions, between patches whose corners `coords` `(N, 2)` are at most
    `reach` apart in x and in y: of a grid, with its step, the eight around each.
    """
    import shapely

    points: Any = shapely.points(coords)
    x, y = np.asarray(coords, np.float64).T
    found = shapely.STRtree(points).query(shapely.box(x - reach, y - reach, x + reach, y + reach), "intersects")
    return np.asarray(found[:, found[0] != found[1]], np.int64)


def smooth_scores(scores: _Floats, edge_index: _Ints, damping: float = 0.85) -> _Floats:
    """Smooth scores `(N,)` or `(N, C)` of patches over their neighbours.

    A walk begins at a patch, goes to any of its neighbours with the probability `damping`, and else ends: the result is
    the score expected where it ends, `s = (1 - damping) * scores + damping * mean of s over neighbours`. A patch
    without neighbours keeps its score. Steps are taken until no score changes by more than a millionth of their range.

    Raises `ConfigError` for a damping outside of 0 to 1 (excluded), and for edges of patches that there are not.
    """
    if not 0 <= damping < 1:
        raise ConfigError(f"got damping {damping}, expected 0 or more and less than 1 (0.85 is usual)")
    begin, count = np.asarray(scores, np.float64), len(scores)
    edges = np.asarray(edge_index)
    if edges.size and not 0 <= edges.min() <= edges.max() < count:
        raise ConfigError(f"edges are of nodes {edges.min()} to {edges.max()}, scores of 0 to {count - 1}; give all")
    here, there = edges
    degree = np.bincount(here, minlength=count)
    alone = degree == 0
    columns = begin.reshape(count, -1).T.copy()
    for column in columns:
        first, change = column.copy(), np.inf
        limit = _PRECISION * max(np.ptp(first), np.finfo(float).tiny) if count else np.inf
        while change > limit:
            mean = np.bincount(here, column[there], count) / np.maximum(degree, 1)
            following = np.where(alone, first, (1 - damping) * first + damping * mean)
            change = np.abs(following - column).max()
            column[:] = following
    return columns.T.reshape(begin.shape)
