"""Keep features of patches on disk, computed once, and read those that TRIDENT and CLAM have written.

A file is as TRIDENT writes it (github.com/mahmoodlab/TRIDENT: `save_h5` in `trident/IO.py`, `extract_patch_features` in
`trident/wsi_objects/WSI.py`): HDF5 with `features` `(N, D)` and `coords` `(N, 2)`, x and y of each patch's top left
pixel in pixels of level 0. Attributes of `features` are `name` (the slide's), `savetodir` and `encoder`. Ours have one
more, `gigagrad`: in JSON, what they were computed of. They lie in one piece, so that they are read as a memory map.
CLAM's files (github.com/mahmoodlab/CLAM: `extract_features_fp.py`) have the same two data sets, or are `.pt`: a tensor
`(N, D)`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gigagrad.errors import GigagradError, ImageError, WriteError, extra
from gigagrad.events import Events
from gigagrad.files import content_digest, read_torch, replacing
from gigagrad.images.bag import Bag
from gigagrad.images.coordinates import own_dataset
from gigagrad.prediction.encoding import Encoder, read_tensor
from gigagrad.ranks.ranks import as_bytes

_OURS: Final = "gigagrad"
"""The attribute of `features` that says what they were computed of."""
_SAME: Final = "encoder", "patches"
"""Keys of what features follow from."""
_PATCHES_AT_ONCE: Final = 64
_MOST_PACKED: Final = 1032
"""The factor by which deflate, which packs most of them, makes bytes fewer at most."""


class Features(NamedTuple):
    """Features `(N, D)` of a slide's patches, and their corners `(N, 2)`, None where the file has none."""

    features: NDArray[Any]
    coords: NDArray[np.int64] | None


def open_features(path: str | Path, made_of: Mapping[str, Any] | None = None) -> Features:
    """Read the features of a slide's patches from a file of ours, of TRIDENT or of CLAM, `.h5` or `.pt`.

    Features that lie in one piece are a memory map. Nothing in the file is executed, and no other file is opened.
    Raises `ImageError` for a file that is missing, damaged, or holds anything else; for features that were not computed
    of `made_of`, as `made_of_file` tells it, too.
    """
    path = Path(path)
    if path.suffix in (".pt", ".pth"):
        return Features(_tensor(path), None)
    found, known = _read(path)
    if made_of is not None and (known is None or any(known.get(key) != made_of.get(key) for key in _SAME)):
        raise ImageError(
            f"{path} holds features of another encoder or of other patches now, which another program has written; "
            "give each a folder of its own"
        )
    return found


def features_of(
    bag: Bag,
    encoder: Encoder,
    folder: str | Path,
    *,
    name: str | None = None,
    files: Sequence[str | Path] = (),
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    asked: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    events: Events | None = None,
) -> NDArray[np.float32]:
    """Return the features `(N, D)` of a bag's patches, a memory map of the file `folder/NAME.h5`.

    It is written first where it is not there, or holds features of anything else: other weights, other patches.

    Args:
        bag: the patches.
        encoder: what makes a vector of each.
        folder: where features by this encoder are kept; made if it is missing.
        name: of the slide; None: the bag's.
        files: what the bag reads, by whose content the slide is known (`files.content_digest`). Without any, all
            pixels of all patches are read to tell whether they are the same.
        attributes: of the data sets `features` and `coords`, further ones, for other programs.
        asked: what the caller chose the patches by, of plain values; kept with the features.
        overwrite: compute them whatever is there.
        events: are told of the job `patches`.

    Raises `WriteError` for a file that cannot be written or that somebody else wrote, and as `Encoder.features` does.
    """
    path = Path(folder) / f"{name or bag.name}.h5"
    made_of = {"encoder": encoder.digest, "patches": patches_digest(bag, files), "asked": dict(asked or {})}
    known = made_of_file(path)
    if known is None and path.exists() and not overwrite:
        raise WriteError(f"{path} holds features that were not computed here; name another folder, or remove it")
    if overwrite or known is None or {**known, "asked": made_of["asked"]} != made_of:
        _write(path, bag, encoder, made_of, attributes or {}, events or Events())
    found: NDArray[np.float32] = open_features(path).features
    return found


def made_of_file(path: str | Path) -> dict[str, Any] | None:
    """Return what features in a file were computed of, None where there is no file of ours."""
    try:
        return _read(Path(path))[1]
    except ImageError:
        return None


def patches_digest(bag: Bag, files: Sequence[str | Path] = ()) -> str:
    """Digest what patches are in a bag: of files, their content and where the patches are; else all pixels."""
    coords = getattr(bag, "coords", None)
    digest = hashlib.sha256(repr((bag.shape, str(bag.dtype), bag.mpp)).encode())
    if files and coords is not None:
        digest.update(repr([content_digest(Path(file)) for file in files]).encode())
        digest.update(np.ascontiguousarray(coords).tobytes())
        digest.update(np.asarray(bag.patch_size_level0).tobytes())  # type: ignore[attr-defined]  # beside coords
        return digest.hexdigest()
    for start in range(0, len(bag), _PATCHES_AT_ONCE):
        digest.update(as_bytes(read_tensor(bag, start, min(start + _PATCHES_AT_ONCE, len(bag)))).numpy())
    return digest.hexdigest()


def _write(
    path: Path,
    bag: Bag,
    encoder: Encoder,
    made_of: Mapping[str, Any],
    attributes: Mapping[str, Mapping[str, Any]],
    events: Events,
) -> None:
    with extra("bags"):
        import h5py
    shape, coords = (len(bag), encoder.length(bag)), getattr(bag, "coords", None)
    batches = encoder.batches(bag)
    try:
        with replacing(path, lambda: 4 * shape[0] * shape[1]) as raw, h5py.File(raw, "w") as file:
            features = file.create_dataset("features", shape, np.float32)
            if coords is not None:
                file.create_dataset("coords", data=coords, dtype=np.int64)
            of_features = {"name": path.stem, "savetodir": str(path.parent), **attributes.get("features", {})}
            features.attrs.update({**of_features, _OURS: json.dumps(made_of)})
            if coords is not None:
                file["coords"].attrs.update(attributes.get("coords", {}))
            with events.job("patches", len(bag), bag.name) as advance:
                for start, found in encoder.features(bag, batches):
                    features[start : start + len(found)] = found
                    advance(start + len(found), "")
    except RuntimeError as error:  # what h5py makes of a full disk
        if error.__context__ is None or not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from None


def _read(path: Path) -> tuple[Features, dict[str, Any] | None]:
    """Read a file, and what it says of itself if it is ours."""
    if not path.is_file():
        raise ImageError(f"there is no file of features {path}; check the path")
    with extra("bags"):
        import h5py
    try:
        with h5py.File(path, "r", locking=False) as file:
            stored = _dataset(file, "features")
            features = _values(stored, path)
            coords = np.asarray(_dataset(file, "coords")[...]) if "coords" in file else None
            text = stored.attrs.get(_OURS)
            made_of = json.loads(text) if isinstance(text, str) else None
            made_of = made_of if isinstance(made_of, dict) else None
        if features.dtype.kind != "f":
            raise _Refused(f"features are {features.dtype}, expected floats")
        if coords is not None and (coords.dtype.kind not in "iu" or coords.shape != (len(features), 2)):
            raise _Refused(f"coords are {coords.shape} of {coords.dtype}, expected integers ({len(features)}, 2)")
    except _Refused as error:
        raise ImageError(f"{path} is no file of features: {error}") from error
    except GigagradError:
        raise
    except Exception as error:  # whatever a library makes of a file
        reason = " ".join(str(error).split())[:200]
        raise ImageError(f"{path} is damaged or no file of features ({reason}); compute them again") from error
    return Features(features, None if coords is None else coords.astype(np.int64)), made_of


class _Refused(Exception):
    """The file holds something else."""


def _dataset(file: Any, name: str) -> Any:
    """Return a data set `(N, .)` of numbers that lie in the file itself, as many as it has bytes for."""
    found = own_dataset(file, name)
    if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "fiu":
        raise _Refused(
            f"{name} have the shape {found.shape} and {found.dtype}, expected a row of numbers for each patch"
        )
    packed = found.id.get_create_plist().get_nfilters() > 0
    if found.nbytes > found.id.get_storage_size() * (_MOST_PACKED if packed else 1):
        raise _Refused(f"{name} claim {found.nbytes} bytes and have {found.id.get_storage_size()}")
    return found


def _values(stored: Any, path: Path) -> NDArray[Any]:
    """Return what a data set holds: a memory map where it lies in one piece."""
    offset = stored.id.get_offset() if stored.chunks is None else None
    if offset is None or offset % stored.dtype.itemsize or not stored.dtype.isnative:
        return np.asarray(stored[...])
    return np.memmap(path, stored.dtype, "r", offset, stored.shape)


def _tensor(path: Path) -> NDArray[Any]:
    try:
        found = read_torch(path, "tensor of features")
    except ValueError as error:
        raise ImageError(f"cannot read the features: {error}; compute them again, or save a tensor alone") from error
    if not isinstance(found, torch.Tensor) or found.ndim != 2 or not found.is_floating_point() or not found.numel():
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ImageError(f"{path} holds {shape}; expected a tensor of floats (N, D), a row for each patch")
    return found.float().numpy() if found.dtype == torch.bfloat16 else found.numpy()
