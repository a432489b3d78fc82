"""Features on disk: as TRIDENT has them, computed once, and read back from files that somebody else wrote."""

from __future__ import annotations

import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import gigagrad as gg
from gigagrad.errors import ImageError, WriteError
from gigagrad.images.bag import ArrayBag
from gigagrad.prediction import Encoder, features_of, open_features
from tests.prediction.counting import Counting


@pytest.fixture
def patches():
    return np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16), np.uint8)


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return Encoder(Counting())


def test_features_are_computed_once(encoder, patches, tmp_path):
    first = features_of(ArrayBag(patches), encoder, tmp_path, name="a")
    assert first.shape == (40, 5)
    assert first.dtype == np.float32
    assert isinstance(first, np.memmap)
    assert encoder.network.patches == 40
    with torch.inference_mode():
        np.testing.assert_allclose(first, encoder.network.layer(torch.from_numpy(patches).float().mean((2, 3))), 1e-5)
    encoder.network.seen.clear()
    again = features_of(ArrayBag(patches), encoder, tmp_path, name="a")
    assert encoder.network.patches == 0
    assert np.array_equal(again, first)


@pytest.mark.parametrize("what", ["pixel", "order", "weight", "setting", "precision", "mpp"])
def test_features_of_anything_else_are_computed_anew(encoder, patches, tmp_path, what):
    before = features_of(ArrayBag(patches), encoder, tmp_path).copy()
    bag, precision = ArrayBag(patches), None
    if what == "pixel":
        bag = ArrayBag(np.where(np.arange(patches.size).reshape(patches.shape) == 7000, 255 - patches, patches))
    elif what == "order":
        bag = ArrayBag(patches[::-1].copy())
    elif what == "mpp":
        bag = ArrayBag(patches, mpp=0.5)
    net = Counting()
    net.load_state_dict(encoder.network.state_dict())
    if what == "weight":
        net.layer.bias.data[0] += 1e-3
    elif what == "setting":
        net.factor = 2.0
    elif what == "precision":
        precision = "bfloat16"
    after = features_of(bag, Encoder(net, precision=precision), tmp_path)
    assert net.patches == 40
    assert np.array_equal(after, before) == (what == "mpp")


def test_a_slide_is_known_by_its_file_and_its_patches(encoder, jpeg_slide, tmp_path):
    with gg.open_bag(jpeg_slide, 32, None, tissue=None) as bag:
        first = features_of(bag, encoder, tmp_path, files=[jpeg_slide])
        count = encoder.network.patches
        assert count == len(bag) == len(first)
        features_of(bag, encoder, tmp_path, files=[jpeg_slide])
        assert encoder.network.patches == count
        assert np.array_equal(np.asarray(open_features(tmp_path / f"{bag.name}.h5").coords), bag.coords)
        moved = bag.coords + 1
    with gg.open_bag(jpeg_slide, 32, None, coords=moved) as other:
        features_of(other, encoder, tmp_path, files=[jpeg_slide])
        assert encoder.network.patches == 2 * count
        copy = tmp_path / "copy.tif"
        shutil.copy(jpeg_slide, copy)
        features_of(other, encoder, tmp_path, files=[copy])
        assert encoder.network.patches == 2 * count
        copy.write_bytes(copy.read_bytes() + b"more")
        features_of(other, encoder, tmp_path, files=[copy])
        assert encoder.network.patches == 3 * count


def test_what_somebody_else_wrote_stays(encoder, patches, tmp_path):
    (tmp_path / "a.h5").write_bytes(b"mine")
    with pytest.raises(WriteError, match="not computed here"):
        features_of(ArrayBag(patches), encoder, tmp_path, name="a")
    assert (tmp_path / "a.h5").read_bytes() == b"mine"
    assert len(features_of(ArrayBag(patches), encoder, tmp_path, name="a", overwrite=True)) == 40


def test_nothing_half_written_remains(patches, tmp_path):
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                self.calls += 1
            if self.calls > 2:
                raise KeyboardInterrupt
            return x.float().mean((2, 3))

    with pytest.raises(KeyboardInterrupt):
        features_of(ArrayBag(patches), Encoder(Ends()), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(encoder, patches, tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        with pytest.raises(WriteError, match=r"bag\.h5"):
            features_of(ArrayBag(patches), encoder, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# Files of TRIDENT and CLAM


def as_trident(path, features, coords, **more):
    """Write as `save_h5` of TRIDENT does: chunks of one row, which can grow."""
    with h5py.File(path, "w") as file:
        for name, values in {"features": features, "coords": coords}.items():
            rows = {"maxshape": (None, *values.shape[1:]), "chunks": (1, *values.shape[1:])}
            file.create_dataset(name, data=values, **rows, **more)
        file["features"].attrs["encoder"] = "uni_v1"


@pytest.mark.parametrize("packed", [{}, {"compression": "gzip"}, {"compression": "lzf", "shuffle": True}])
def test_files_of_trident_are_read(tmp_path, packed):
    features = np.random.default_rng(0).random((9, 6), np.float32)
    coords = np.arange(18).reshape(9, 2)
    as_trident(tmp_path / "a.h5", features, coords, **packed)
    found = open_features(tmp_path / "a.h5")
    assert np.array_equal(found.features, features)
    assert found.coords is not None
    assert found.coords.dtype == np.int64
    assert np.array_equal(found.coords, coords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_clam_are_read(tmp_path, dtype):
    features = torch.rand(9, 6).to(dtype)
    torch.save(features, tmp_path / "a.pt")
    found = open_features(tmp_path / "a.pt")
    assert torch.equal(torch.from_numpy(found.features).to(dtype), features)
    assert found.coords is None


def test_a_tensor_s_file_runs_nothing(tmp_path):
    class Run:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save(Run(), tmp_path / "a.pt")
    with pytest.raises(ImageError, match="cannot read the features"):
        open_features(tmp_path / "a.pt")
    torch.save(torch.rand(3), tmp_path / "a.pt")
    with pytest.raises(ImageError, match=r"holds \(3,\); expected a tensor of floats \(N, D\)"):
        open_features(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def _claims_much(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (2**20, 2**20), np.float32, chunks=(1, 2**10))


def _is_packed_by_a_plugin(path):
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((2, 3))
        plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
        h5py.h5d.create(file.id, b"features", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((2, 3)), plist)


def _leads_elsewhere(path):
    as_trident(path.with_name("other.h5"), np.zeros((2, 3), np.float32), np.zeros((2, 2), int))
    with h5py.File(path, "w") as file:
        file["features"] = h5py.ExternalLink("other.h5", "features")


def _lies_elsewhere(path):
    path.with_name("raw").write_bytes(bytes(24))
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (2, 3), np.float32, external=[(str(path.with_name("raw")), 0, 24)])


def _is_virtual(path):
    as_trident(path.with_name("other.h5"), np.zeros((2, 3), np.float32), np.zeros((2, 2), int))
    layout = h5py.VirtualLayout((2, 3), np.float32)
    layout[:] = h5py.VirtualSource(path.with_name("other.h5"), "features", (2, 3))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("features", layout)


def _has(**datasets):
    def write(path):
        with h5py.File(path, "w") as file:
            for name, values in datasets.items():
                file[name] = values

    return write


def _ends_early(path):
    as_trident(path, np.zeros((2, 3), np.float32), np.zeros((2, 2), int))
    path.write_bytes(path.read_bytes()[:1500])


_ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (_claims_much, "claim 4398046511104 bytes and have 0"),
        (_is_packed_by_a_plugin, "the filter 32015; expected gzip"),
        (_leads_elsewhere, "leads elsewhere for its features"),
        (_lies_elsewhere, "keeps its features in other files"),
        (_is_virtual, "keeps its features in other files"),
        (_has(coords=np.zeros((2, 2), int)), "has no features, but 'coords'"),
        (_has(features=_ROWS[0]), r"shape \(3,\)"),
        (_has(features=_ROWS[:0]), r"shape \(0, 3\)"),
        (_has(features=_ROWS.astype(int)), "int64, expected floats"),
        (_has(features=np.array([[b"a"]])), r"expected a row of numbers"),
        (
            _has(features=_ROWS, coords=np.zeros((3, 2), int)),
            r"coords are \(3, 2\) of int64, expected integers \(2, 2\)",
        ),
        (_has(features=_ROWS, coords=np.zeros((2, 2))), "float64, expected integers"),
        (_ends_early, "damaged"),
        (lambda path: path.write_bytes(b"no HDF5"), "damaged"),
        (lambda path: None, "there is no file of features"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, write, told):
    write(tmp_path / "a.h5")
    with pytest.raises(ImageError, match=told) as refused:
        open_features(tmp_path / "a.h5")
    assert str(tmp_path / "a.h5") in str(refused.value)


def test_our_own_say_what_they_were_computed_of(encoder, patches, tmp_path):
    attributes = {"features": {"encoder": "counting"}, "coords": {}}
    features_of(ArrayBag(patches), encoder, tmp_path, name="a", attributes=attributes, asked={"size": 16})
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file) == ["features"]
        assert file["features"].attrs["encoder"] == "counting"
        assert file["features"].attrs["name"] == "a"
        made_of = json.loads(file["features"].attrs["gigagrad"])
    assert made_of["asked"] == {"size": 16}
    assert made_of["encoder"] == encoder.digest
