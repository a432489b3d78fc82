"""Look at a data set in an HDF5 file that came from somebody else, before anything of it is read.

A file may name other files, and filters that HDF5 would load as plugins; both are refused.
"""

from __future__ import annotations

import math
from typing import Any, Final

from gigagrad.errors import ImageError
from gigagrad.units import format_bytes

_BUILT_IN: Final = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf"}
"""Filters of HDF5 by number that need no plugin."""
_LARGEST_CHUNK_BYTES: Final = 2**26


def own_dataset(file: Any, name: str) -> Any:
    """Return a data set of an open `h5py.File` that lies in the file itself. Raises `ImageError` for any other.

    How much it claims to hold is for the caller to check.
    """
    import h5py

    path = file.filename
    if name not in file.keys():  # noqa: SIM118 - of a link that leads nowhere, `in file` says no
        there = ", ".join(map(repr, list(file)[:5])) or "nothing"
        raise ImageError(f"{path} has no {name}, but {there}; give a file of TRIDENT or CLAM that holds them")
    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or file.get(name, getclass=True) is not h5py.Dataset:
        raise ImageError(f"{path} leads elsewhere for its {name}; give the file that holds them")
    found = file[name]
    if found.is_virtual or found.external:
        raise ImageError(f"{path} keeps its {name} in other files; give the file that holds them")
    plist = found.id.get_create_plist()
    filters = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
    if unknown := [number for number in filters if number not in _BUILT_IN]:
        raise ImageError(
            f"{path} has {name} packed by the filter {unknown[0]}; expected {', '.join(_BUILT_IN.values())}, or none"
        )
    chunk_bytes = math.prod(found.chunks or ()) * found.dtype.itemsize
    if chunk_bytes > _LARGEST_CHUNK_BYTES:
        raise ImageError(
            f"{path} has {name} of which {format_bytes(chunk_bytes)} are read at a time; expected chunks of at most "
            f"{format_bytes(_LARGEST_CHUNK_BYTES)}"
        )
    return found
