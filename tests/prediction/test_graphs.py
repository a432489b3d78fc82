"""Graphs of regions and patches: nodes and edges against other libraries, files, and what smoothing does to scores."""

import networkx as nx
import numpy as np
import pytest
from scipy.spatial import Delaunay

from gigagrad.errors import ConfigError
from gigagrad.images import open_image
from gigagrad.masks.classes import mask_classes
from gigagrad.prediction import patch_edges, smooth_scores, tissue_graph, write_graph
from gigagrad.prediction.polygons import placed, trace

TUMOUR_AND_STROMA = mask_classes(2, ["Tumour", "Stroma"])


@pytest.fixture
def mask():
    """Tumour in stroma, a speck apart from both, and one that is too small."""
    ids = np.zeros((40, 60), np.uint8)
    ids[5:25, 5:25] = 2
    ids[10:20, 10:20] = 1
    ids[30:36, 50:58] = 1
    ids[38, 0:4] = 1
    return open_image(ids, mpp=0.5)


def test_nodes_and_edges_of_a_small_mask(mask):
    slide = np.full((3, 40, 60), 200, np.uint8)
    slide[1, 10:20, 10:20] = 90
    graph = tissue_graph(mask, TUMOUR_AND_STROMA, seen=open_image(slide), min_area_px=5, scale=(2, 2))
    assert graph.y.tolist() == [2, 1, 1]
    assert graph.pos.tolist() == [[30, 30], [30, 30], [108, 66]]
    assert graph.x_names.tolist() == [
        *("area_um2", "perimeter_um", "height_um", "width_um", "mean red", "mean green", "mean blue"),
    ]
    assert graph.x[0].tolist() == [300 / 4, (80 + 40) / 2, 10, 10, 200, 200, 200]
    assert graph.x[1].tolist() == [100 / 4, 20, 5, 5, 200, 90, 200]
    edges = {
        tuple(edge): tuple(float(each) for each in found)
        for edge, found in zip(graph.edge_index.T, graph.edge_attr, strict=True)
    }
    apart = np.hypot(39, 18) / 2
    assert edges == {
        pair: pytest.approx(value)
        for pair, value in {
            **dict.fromkeys([(0, 1), (1, 0)], (0, 20)),
            **dict.fromkeys([(0, 2), (2, 0)], (apart, 0)),
        }.items()
    }
    assert graph.edge_names.tolist() == ["distance_um", "border_um"]


def test_nodes_have_the_ids_of_their_outlines():
    """Regions of two classes in any order, with holes, and corners that touch."""
    mask = open_image(np.kron(np.random.default_rng(3).integers(0, 3, (12, 17)), np.ones((5, 5))).astype(np.uint8))
    outlines = list(placed(trace(mask, TUMOUR_AND_STROMA, min_area_px=1), "a"))
    graph = tissue_graph(mask, TUMOUR_AND_STROMA, min_area_px=1, outlines=outlines)
    assert len(set(graph.id)) == len(graph.y) == len(outlines) > 20
    own = {region.id: region for region in outlines}
    for number, (name, kind, area) in enumerate(zip(graph.id, graph.y, graph.x[:, 0], strict=True)):
        assert (own[name].kind.id, own[name].polygon.area) == (kind, area), number
        assert np.allclose(own[name].polygon.centroid.coords[0], graph.pos[number], atol=1e-4)


def test_each_outline_has_its_node():
    """Rings of few pixels are outlined by what they enclose, with their hole or without."""
    ids = np.zeros((60, 90), np.uint8)
    ids[2:22, 2:22], ids[3:21, 3:21] = 1, 0
    ids[2:19, 30:47], ids[3:18, 31:46] = 1, 2
    ids[2:52, 60:85] = 2
    ids[30:40, 5:15] = 2  # smaller than 256 px, and without an outline
    mask = open_image(ids)
    outlines = list(placed(trace(mask, TUMOUR_AND_STROMA), "a"))
    graph = tissue_graph(mask, TUMOUR_AND_STROMA, outlines=outlines)
    assert sorted(graph.id) == sorted(region.id for region in outlines)
    assert sorted(graph.x[:, 0]) == [64, 76, 1250]
    assert graph.edge_attr[:, 1].tolist() == [0] * graph.edge_index.shape[1], "what they touched is no node"
    assert tissue_graph(mask, TUMOUR_AND_STROMA).x[:, 0].tolist() == [1250]


def test_labels_that_overlap_are_nodes_each():
    planes = np.zeros((2, 20, 20), np.uint8)
    planes[0, 2:12, 2:12] = 1
    planes[1, 5:9, 5:15] = 1
    graph = tissue_graph(open_image(planes), TUMOUR_AND_STROMA, min_area_px=1)
    assert graph.y.tolist() == [1, 2]
    assert graph.x[:, 0].tolist() == [100, 40]
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]
    assert graph.edge_attr[:, 1].tolist() == [0, 0]


def test_cells_are_linked_as_by_qhull():
    draw = np.random.default_rng(0)
    places = draw.choice(150 * 150, 300, replace=False)
    cells = np.zeros((300, 300), np.uint8)
    cells[places // 150 * 2, places % 150 * 2] = 1
    graph = tissue_graph(open_image(cells), mask_classes(1), min_area_px=1)
    jittered = graph.pos[:, ::-1].astype(float)
    found = set(map(tuple, np.sort(graph.edge_index.T, axis=1).tolist()))
    triangles = Delaunay(jittered).simplices
    expected = set(map(tuple, np.sort(triangles[:, [[0, 1], [1, 2], [0, 2]]].reshape(-1, 2), axis=1).tolist()))
    # Of four cells on a circle either diagonal will do.
    assert len(found) == len(expected)
    assert len(found - expected) < 0.05 * len(found)


def test_the_file_holds_arrays_alone_and_networkx_takes_them(mask, tmp_path):
    graph = tissue_graph(mask, TUMOUR_AND_STROMA, min_area_px=5)
    write_graph(tmp_path / "a.npz", graph)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as stored:
        assert list(stored) == list(graph._fields)
        assert all(np.array_equal(stored[name], value) for name, value in graph._asdict().items())
        assert stored["edge_index"].dtype == np.int64
        made = nx.Graph()
        made.add_weighted_edges_from(zip(*stored["edge_index"], stored["edge_attr"][:, 0], strict=True))
    assert nx.is_connected(made)
    assert sorted(made) == [0, 1, 2]


def test_a_mask_without_regions_has_a_graph_without_nodes(tmp_path):
    graph = tissue_graph(open_image(np.zeros((8, 8), np.uint8)), ())
    assert (graph.pos.shape, graph.x.shape, graph.edge_index.shape) == ((0, 2), (0, 4), (2, 0))
    write_graph(tmp_path / "a.npz", graph)


def grid(side, step=224):
    return np.stack(np.meshgrid(np.arange(side), np.arange(side)), axis=-1).reshape(-1, 2) * step


def test_patches_of_a_grid_have_eight_neighbours():
    edges = patch_edges(grid(5), 224)
    degree = np.bincount(edges[0]).reshape(5, 5)
    assert (degree[0, 0], degree[0, 2], degree[2, 2]) == (3, 5, 8)
    assert patch_edges(np.array([[0, 0], [1000, 0]]), 224).shape == (2, 0)


@pytest.mark.parametrize("damping", [0, 0.5, 0.85])
def test_smoothed_scores_solve_the_equation(damping):
    coords = np.concatenate((grid(6), [[9999, 9999]]))
    edges, scores = patch_edges(coords, 224), np.random.default_rng(0).random((37, 2))
    walk = np.zeros((37, 37))
    walk[edges[0], edges[1]] = 1
    walk[:36] /= walk[:36].sum(axis=1, keepdims=True)
    walk[36, 36] = 1
    expected = np.linalg.solve(np.eye(37) - damping * walk, (1 - damping) * scores)
    found = smooth_scores(scores, edges, damping)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found[36], scores[36], rtol=1e-12)
    np.testing.assert_allclose(smooth_scores(scores[:, 0], edges, damping), found[:, 0], rtol=1e-12)


def test_smoothing_finds_a_tumour_in_noise():
    """The patches of a disc score higher by one standard deviation: of two, which one is it?"""
    coords = grid(40)
    inside = ((coords / 224 - 20) ** 2).sum(axis=1) < 100
    scores = inside + np.random.default_rng(0).standard_normal(len(coords))

    def area_under_curve(found):
        rank = np.argsort(np.argsort(found)) + 1
        return (rank[inside].sum() - inside.sum() * (inside.sum() + 1) / 2) / (inside.sum() * (~inside).sum())

    assert area_under_curve(scores) < 0.78
    assert area_under_curve(smooth_scores(scores, patch_edges(coords, 224))) > 0.97


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"got damping 1, expected 0 or more and less than 1"):
        smooth_scores(np.ones(2), np.array([[0, 1], [1, 0]]), 1)
    with pytest.raises(ConfigError, match="edges are of nodes 0 to 2, scores of 0 to 1; give all"):
        smooth_scores(np.ones(2), np.array([[0, 2], [2, 0]]))
