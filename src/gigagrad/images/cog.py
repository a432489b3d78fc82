"""Write cloud-optimised GeoTIFF: the file's tables at its head and small levels before large ones, so that a map server
reads what it shows by a few requests. GDAL's own driver does that; it wants the whole file to be there first.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from gigagrad.errors import WriteError
from gigagrad.extras import extra
from gigagrad.files import replacing

_CACHE_MIB = 64
"""The cache of GDAL's blocks; by default it takes a twentieth of the machine's memory."""
_TILE = 512
_OPTIONS = {"compress": "DEFLATE", "bigtiff": "IF_SAFER"}
_RGB = 2
"""TIFF's photometric interpretation."""


def require_gdal() -> None:
    """Raise `ConfigError` where rasterio, which brings GDAL, is not installed."""
    with extra("geo"):
        import rasterio.shutil  # noqa: F401


def write_cog(source: Path, path: Path, *, nearest: bool) -> Path:
    """Write the TIFF `source` as cloud-optimised GeoTIFF to `path`, which it may be itself, and return that.

    Reference system, transform, nodata and pixels are the same, and channels that are no colours stay none; levels are
    made anew, by every second pixel where `nearest`, else by means. For a while, two more copies are on the disk.
    Raises `WriteError`.
    """
    require_gdal()
    import rasterio
    import rasterio.shutil

    resampling = "NEAREST" if nearest else "AVERAGE"
    options = {"blocksize": _TILE, "overviews": "IGNORE_EXISTING", **_OPTIONS}
    with replacing(path) as file, TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        made = Path(folder) / "cog.tif"
        try:
            with rasterio.Env(GDAL_CACHEMAX=_CACHE_MIB), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of images that lie nowhere on earth
                rasterio.shutil.copy(source, made, driver="COG", overview_resampling=resampling, **options)
                if _calls_channels_colours(made):
                    made = _without_colours(made)
        except Exception as error:  # GDAL's errors have many classes, none of them the system's
            reason = " ".join(str(error).split())[:200]
            raise WriteError(f"cannot write {path} as a cloud-optimised GeoTIFF: {reason}") from error
        with made.open("rb") as whole:
            shutil.copyfileobj(whole, file)
    return path


def _calls_channels_colours(path: Path) -> bool:
    """Return whether three or four channels of bytes are red, green, blue and alpha by the TIFF's tags, and not to
    GDAL, whose driver has no option for it: to all who read the tags, a class' probability would be how opaque the
    others are."""
    import rasterio
    import tifffile
    from rasterio.enums import ColorInterp

    with rasterio.open(path) as file, tifffile.TiffFile(path) as tiff:
        return int(tiff.pages[0].photometric) == _RGB and file.colorinterp[0] != ColorInterp.red


def _without_colours(path: Path) -> Path:
    """Replace a cloud-optimised GeoTIFF by a copy, laid out alike, whose channels are but numbers."""
    import rasterio.shutil

    plain = path.with_name("plain.tif")
    layout = {"tiled": True, "blockxsize": _TILE, "blockysize": _TILE, "copy_src_overviews": True}
    rasterio.shutil.copy(path, plain, driver="GTiff", photometric="MINISBLACK", **layout, **_OPTIONS)
    path.unlink()
    return plain
