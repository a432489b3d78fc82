"""Open everything that holds pixels, by `open_image`.

PNG and JPEG files are read through Pillow. They can only be decoded whole, so they are for small images.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gigagrad.errors import ImageError
from gigagrad.images.georeference import choose_mpp, world_file
from gigagrad.images.image import Image
from gigagrad.images.openslide import open_openslide
from gigagrad.images.pixels import Array, choose_level, in_our_words
from gigagrad.images.stream_check import Jpeg, check_png, png_size
from gigagrad.images.tiff import open_tiff
from gigagrad.images.views import ArrayImage, Registered, Stacked, TensorImage, at_another_resolution
from gigagrad.images.zarr import from_array, is_zarr, open_zarr
from gigagrad.units import format_bytes

if TYPE_CHECKING:
    import PIL.Image
    import torch
    import zarr

_SAME_EXTENT = 1.05
"""Registered images say that they are as wide as each other, up to this factor."""
_LARGEST_PICTURE_PX = 2**26  # 8192 x 8192: 192 MiB of RGB
_LARGEST_PICTURE_BYTES = 2**29  # as many pixels of 8 bytes
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_PNG_BITS, _PNG_GREY = 24, 0
# Every block of 8 x 8 px has at least one bit.
_MOST_PX_PER_JPEG_BYTE = 8 * 64
_DICOM_SLIDE = b"\x02\x00\x02\x00UI\x1e\x001.2.840.10008.5.1.4.1.1.77.1.6"
"""The beginning of an instance of a whole slide: tag, VR, length and class."""
_DICOM_SERIES = b"\x20\x00\x0e\x00UI"
_DICOM_HEAD_BYTES = 2**16
"""Bytes of an instance that its series is looked for in: it stands before what is long."""
_TIFF_SIGNATURES = (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")


Source: TypeAlias = "str | Path | Array | torch.Tensor | zarr.Array[Any] | Image"


def open_image(source: Source | Sequence[Source], *, level: int = 0, mpp: float | None = None) -> Image:
    """Open a slide, a mask or an array as an `Image`.

    Args:
        source: a path (TIFF and SVS, anything OpenSlide reads, a folder of DICOM instances, OME-TIFF, a Zarr array or
            OME-Zarr folder, PNG, JPEG), a NumPy array or tensor `(C, H, W)` or `(H, W)`, a zarr.Array, or an `Image`,
            which is returned as it is. Of several in a list or tuple, the channels follow each other: stains of one
            section, bands in files of their own, registered and of one dtype. Those of another resolution get the size
            of the first: each pixel is the nearest one of their level that is nearest in size.
        level: which resolution; 0 is the largest.
        mpp: micrometres per pixel **of level 0**, overriding what the file says; `Image.mpp` is the chosen level's.

    Pixels outside the image are white (the largest value of the dtype) where it is an integer colour slide: three
    channels of uint8, or a TIFF that calls itself RGB or YCbCr. Everything else - a mask or any other single-channel
    image, and floats - is 0 there. A colour image's alpha is no channel; it says where there is no data
    (`Image.missing`). A tile that a file leaves out is white in a slide, the value of no data or 0 elsewhere.

    Raises `ImageError` for a source that is missing, damaged or of no known kind, and for a level it does not have.
    """
    if isinstance(source, list | tuple):
        return _open_several(source, level, mpp)
    if isinstance(source, Image):
        if level or mpp is not None:
            raise ImageError(f"{source.name} is open already; give level and mpp when you open it from its source")
        return source
    if isinstance(source, str | Path):
        return _open_path(Path(source), level, mpp)
    return _open_array(source, level, mpp)


def open_ids(source: Source) -> Image:
    """Open class ids: a picture with a palette is its indices, whatever their colours."""
    return _open_path(Path(source), 0, None, ids=True) if isinstance(source, str | Path) else open_image(source)


def _open_several(sources: Sequence[Source], level: int, mpp: float | None) -> Image:
    if not sources:
        raise ImageError("got an empty list of images; name one or more")
    with ExitStack() as opened:
        first = opened.enter_context(open_image(sources[0], level=level, mpp=mpp))
        images = [first]
        for source in sources[1:]:
            own = level if isinstance(source, Image) else 0
            further = opened.enter_context(open_image(source, level=own, mpp=mpp))
            shapes = further.levels[0].shape, first.levels[0].shape
            if isinstance(further.dtype, np.dtype) and at_another_resolution(*shapes):
                if mpp is None:
                    _check_extents(first, further)
                further = opened.enter_context(Registered(further, first.levels, first._level))
            elif level:
                with further:
                    further = opened.enter_context(further.at_level(level))
            images.append(further)
        image = first if len(images) == 1 else Stacked(images)
        opened.pop_all()
    return image


def _check_extents(first: Image, other: Image) -> None:
    """Raise `ImageError` where both say how large they are, and that differs."""
    sizes = [image.mpp * image.width / 1000 for image in (first, other) if image.mpp is not None]
    if len(sizes) == 2 and max(sizes) > _SAME_EXTENT * min(sizes):
        raise ImageError(
            f"{first.name} is {sizes[0]:.3g} mm wide and {other.name} {sizes[1]:.3g} mm by what they say of their "
            "pixels; images of one place must be registered: export the same part of both, or give their --mpp"
        )


def _open_path(path: Path, level: int, mpp: float | None, *, ids: bool = False) -> Image:
    if path.is_dir():
        if is_zarr(path):
            return open_zarr(path, level=level, mpp=mpp)
        for instance in (instances := dicom_instances(path)):
            if of_dicom := open_openslide(instance, level=level, mpp=mpp):
                if other := _of_other_series(instances, of_dicom.series):
                    of_dicom.close()
                    raise ImageError(
                        f"{path} holds several slides of DICOM: {instance.name} and {other.name} are of two series; "
                        "give each a folder of its own, or name an instance of the one that you mean"
                    )
                return of_dicom
        raise ImageError(f"{path} is a folder, no image, Zarr store or DICOM slide; name a file inside it")
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist; check the path") from None
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}") from error
    if not head:
        raise ImageError(f"{path} is empty (0 bytes); copy or download it again")
    if path.suffix.lower() in (".geojson", ".xml"):
        raise ImageError(
            f"{path} holds outlines, not pixels; paint them over their slide: gg.open_mask({path.name!r}, slide)"
        )
    if path.suffix.lower() == ".ome" and head.startswith(b"<"):
        raise ImageError(f"{path} describes an image in other files, and holds no pixels; join them into one OME-TIFF")
    if head.startswith((_PNG, _JPEG)):
        image = _open_picture(path, mpp=mpp, ids=ids)
        choose_level(image.levels, level, path.name)
        return image
    tiff = open_tiff(path, level=level, mpp=mpp, ids=ids) if head.startswith(_TIFF_SIGNATURES) else None
    if slide := tiff or open_openslide(path, level=level, mpp=mpp):
        return slide
    raise ImageError(
        f"{path} is of no known kind; expected a slide that OpenSlide reads, a TIFF, a Zarr folder, a PNG or a JPEG"
    )


def dicom_instances(folder: Path) -> list[Path]:
    """List the DICOM files in a folder, which together are one slide."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".dcm")


def files_of(path: Path) -> tuple[Path, ...]:
    """List the files and folders in which a slide lies: the one that it is named by, and what OpenSlide reads beside
    that of MIRAX, of Hamamatsu's VMS and VMU, and of DICOM.
    """
    suffix, beside = path.suffix.lower(), list[Path]()
    if suffix == ".mrxs":
        beside = [path.with_suffix("")]
    elif suffix in (".vms", ".vmu") and path.is_file():
        with in_our_words(f"cannot read {path}"):
            named = {line.partition("=")[2].strip() for line in path.read_text("latin-1").splitlines()}
            beside = sorted(other for other in path.parent.iterdir() if other.name in named)
    elif suffix == ".dcm" and path.is_file():
        beside = dicom_instances(path.parent)
    return path, *(other for other in beside if other != path and other.exists())


def _of_other_series(instances: Sequence[Path], series: str) -> Path | None:
    """Return an instance of another slide than that of the `series`; None where nothing says that there is one."""
    for instance in instances:
        with in_our_words(f"cannot read {instance}"), instance.open("rb") as file:
            head = file.read(_DICOM_HEAD_BYTES)
        if _DICOM_SLIDE in head and _DICOM_SERIES in head and series.encode() not in head:
            return instance
    return None


def _open_array(source: object, level: int, mpp: float | None) -> Image:
    """Open an array, known by its class: nobody has a tensor or a zarr.Array without having imported its package."""
    image: Image
    torch, zarr = sys.modules.get("torch"), sys.modules.get("zarr")
    if zarr is not None and isinstance(source, zarr.Array):
        return from_array(source, level=level, mpp=mpp)
    if torch is not None and isinstance(source, torch.Tensor):
        image = TensorImage(source, mpp=choose_mpp(mpp, "the tensor"))
    elif isinstance(source, np.ndarray):
        image = ArrayImage(source, mpp=choose_mpp(mpp, "the array"))
    else:
        raise ImageError(
            f"cannot open a {type(source).__name__} as an image; expected a path, a NumPy array, a tensor, "
            "a zarr.Array or an Image"
        )
    choose_level(image.levels, level, image.name)
    return image


def _open_picture(path: Path, *, mpp: float | None = None, ids: bool = False) -> ArrayImage:
    """Open a PNG or JPEG as an image: grey ones have 1 channel, all others 3 (transparency over white); of `ids` one
    with a palette has 1, its indices. `mpp` is over what a world file says.

    Raises `ImageError` for a damaged file, for one that ends before its pixels and for one of more than 67 Mpx.
    """
    if (size := path.stat().st_size) > _LARGEST_PICTURE_BYTES:
        raise _too_large(path, format_bytes(size), format_bytes(_LARGEST_PICTURE_BYTES))
    # Pillow raises errors of any class for damaged files, and its own size limit warns or
    # raises by the global settings of the process; ours comes first.
    with in_our_words(f"cannot read {path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = path.read_bytes()
        pixels = _png(data, path, ids) if data.startswith(_PNG) else _jpeg(data, path)
        place = world_file(path)
        mpp = choose_mpp(mpp, path.name, georeference=place)
        return ArrayImage(pixels, mpp=mpp, name=path.stem, georeference=place)


def _png(data: bytes, path: Path, ids: bool) -> Array:
    _check_size(*png_size(data), path)
    check_png(data)
    if data[_PNG_BITS] == 16 and data[_PNG_BITS + 1] != _PNG_GREY:
        raise ImageError(f"{path} is a PNG of 16-bit colours, which would be cut to 8 bits; convert it to a TIFF")
    picture = _decoded(data)
    return np.array(picture)[None] if ids and picture.mode == "P" else _colours(picture)


def _jpeg(data: bytes, path: Path) -> Array:
    jpeg = Jpeg.parse(data)
    _check_size(jpeg.height, jpeg.width, path)
    if jpeg.height * jpeg.width > len(data) * _MOST_PX_PER_JPEG_BYTE:
        raise ValueError(
            f"it ends before its pixels: it says that it is {jpeg.height} x {jpeg.width} px, which {len(data)} bytes "
            "cannot hold"
        )
    picture = _decoded(data)
    jpeg.check_ends(_stored(picture), lambda other: _stored(_decoded(other)))
    return _colours(picture)


def _check_size(height: int, width: int, path: Path) -> None:
    if height * width > _LARGEST_PICTURE_PX:
        raise _too_large(path, f"{height} x {width} px", f"{_LARGEST_PICTURE_PX} px")


def _too_large(path: Path, got: str, most: str) -> ImageError:
    return ImageError(
        f"{path} is too large for a PNG or JPEG, which must be decoded whole ({got}); expected at most {most}; convert "
        "it to a tiled TIFF"
    )


def _decoded(data: bytes) -> PIL.Image.Image:
    import PIL.Image

    picture = PIL.Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    picture.load()
    return picture


def _stored(picture: PIL.Image.Image) -> Array:
    """Return `(H, W, C)`, in the colours of the file."""
    pixels = np.asarray(picture)
    return pixels.reshape(*pixels.shape[:2], -1)


def _colours(picture: PIL.Image.Image) -> Array:
    """Return `(C, H, W)`, grey or RGB."""
    if picture.mode in ("1", "L", "I;16", "I", "F"):
        grey = picture.convert("L") if picture.mode == "1" else picture
        return np.array(grey)[None]
    if picture.has_transparency_data:
        import PIL.Image

        white = PIL.Image.new("RGBA", picture.size, "white")
        picture = PIL.Image.alpha_composite(white, picture.convert("RGBA"))
    return np.array(picture.convert("RGB")).transpose(2, 0, 1)
