"""What a file leaves out - blocks, planes, alpha, names of other files - is what the library makes of it whose word
counts, or the file is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import rasterio
import rasterio.shutil
import tifffile
from PIL import Image as Pillow
from rasterio.windows import Window

from bench.readers import judge
from bench.readers_files import APERIO, Layout, Page, ascii_tag, noise, page_of, write_tiff
from gigagrad.boxes import Box
from gigagrad.errors import ImageError
from gigagrad.images import Image, open_image
from gigagrad.images.pixels import value_of_gaps
from gigagrad.images.tiff import TiffImage, open_tiff

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")

RGB = 2
DEFLATE = 8


def whole(image: Image) -> np.ndarray:
    return np.asarray(image.read(Box.whole(image.height, image.width)))


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_random_files_are_as_for_their_library(tmp_path: Path, start: int) -> None:
    verdicts = [(case, *judge(case, 40, tmp_path / "case")) for case in range(start, start + 10)]
    assert [verdict for verdict in verdicts if verdict[1] not in ("equal", "refused")] == []
    assert sum(verdict[1] == "equal" for verdict in verdicts) > 4


NORTH_UP = rasterio.Affine(2, 0, 9, 0, -2, 9)
SPARSE: dict[str, dict[str, Any]] = {
    "floats": {"dtype": "float32", "count": 2, "nodata": -9999},
    "NaN": {"dtype": "float64", "count": 1, "nodata": np.nan},
    "colours, 0": {"dtype": "uint8", "count": 3, "nodata": 0, "photometric": "RGB"},
    "colours, 255": {"dtype": "uint8", "count": 3, "nodata": 255, "photometric": "RGB"},
    "colours, no value": {"dtype": "uint8", "count": 3, "photometric": "RGB"},
    "colours, placed": {"dtype": "uint8", "count": 3, "photometric": "RGB", "transform": NORTH_UP},
    "16 bits": {"dtype": "uint16", "count": 4, "nodata": 65535},
    "planes": {"dtype": "int16", "count": 2, "interleave": "band", "nodata": -1},
    "alpha": {"dtype": "uint8", "count": 4, "photometric": "RGB", "ALPHA": "YES"},
    "strips": {"dtype": "int32", "count": 1, "nodata": 5, "tiled": False, "blockysize": 8},
}


@pytest.mark.parametrize("kind", SPARSE)
def test_blocks_that_a_sparse_geotiff_leaves_out_are_as_for_gdal(tmp_path: Path, kind: str) -> None:
    options = {"tiled": True, "blockxsize": 64, "blockysize": 64, "compress": "deflate", **SPARSE[kind]}
    block = np.random.default_rng(0).integers(1, 200, (options["count"], 64, 64)).astype(options["dtype"])
    with rasterio.open(tmp_path / "a.tif", "w", "GTiff", 192, 128, SPARSE_OK="TRUE", **options) as out:
        out.write(block, window=Window(64, 0, 64, 64))
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        assert 0 in tif.pages.first.databytecounts
    with open_image(tmp_path / "a.tif") as image, rasterio.open(tmp_path / "a.tif") as theirs:
        np.testing.assert_array_equal(whole(image), theirs.read()[: image.channels])
        missing = image.missing(Box.whole(128, 192))
        found = np.zeros((128, 192), bool) if missing is None else missing
        np.testing.assert_array_equal(found, theirs.dataset_mask() == 0)


def test_one_strip_that_is_left_out_is_not_the_header(tmp_path: Path) -> None:
    with rasterio.open(
        tmp_path / "a.tif", "w", "GTiff", 9, 5, 1, dtype="uint8", nodata=3, SPARSE_OK="TRUE", blockysize=5
    ):
        pass
    with open_image(tmp_path / "a.tif") as image:
        assert (whole(image) == 3).all()
        np.testing.assert_array_equal(image.missing(Box.whole(5, 9)), np.ones((5, 9), bool))


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [
        (None, "uint8", 0),
        ("7", "uint8", 7),
        ("-9999", "uint8", 0),
        ("1e40", "uint8", 255),
        ("nan", "int16", 0),
        ("inf", "int16", 32767),
        ("3.5", "uint16", 4),
        ("-1.5", "int32", -2),
        ("-0.5", "uint8", 0),
        ("9007199254740993", "int64", 9007199254740993),
        ("1e40", "float32", np.inf),
        ("0.1", "float32", float(np.float32(0.1))),
        ("none", "float32", 0),
    ],
)
def test_values_that_samples_cannot_have_come_as_near_as_for_gdal(text: str | None, dtype: str, value: float) -> None:
    assert value_of_gaps(text, np.dtype(dtype)) == value


def layout(**changed: Any) -> Layout:
    return replace(Layout("<", (16, 16), 0, False, DEFLATE, 1, RGB, (), 0, 0.0, False), **changed)


def slide(path: Path, levels: int = 1, tags: dict[int, Any] | None = None, thumbnail: bool = False) -> list[Page]:
    """Pages of a small Aperio slide, to be changed and written."""
    pixels, rng = noise(random.Random(1), (48, 64, 3), "u1"), random.Random(2)
    said = {270: ascii_tag(APERIO), **(tags or {})}
    pages = [page_of(rng, np.ascontiguousarray(pixels[::step, ::step]), layout(), said) for step in (1, 2, 4)[:levels]]
    if thumbnail:
        pages.insert(1, page_of(rng, np.ascontiguousarray(pixels[::3, ::3]), layout(segment=None, rows=16), said))
    write_tiff(path, pages, "<", False)
    return pages


def transparent_over_white(path: Path, level: int = 0) -> np.ndarray:
    with openslide.OpenSlide(path) as theirs:
        rgba = np.asarray(theirs.read_region((0, 0), level, theirs.level_dimensions[level]))
    return np.where(rgba[..., 3:] == 0, 255, rgba[..., :3]).transpose(2, 0, 1)


@pytest.mark.parametrize("thumbnail", [True, False])
def test_a_tile_that_a_smaller_level_of_aperio_leaves_out_is_of_the_larger(tmp_path: Path, thumbnail: bool) -> None:
    path = tmp_path / "a.svs"
    pages = slide(path, levels=2, thumbnail=thumbnail)
    pages[0].blocks[5] = pages[-1].blocks[0] = None
    write_tiff(path, pages, "<", False)
    for level in (0, 1):
        with open_image(path, level=level) as image:
            pixels = whole(image)
            np.testing.assert_array_equal(pixels, transparent_over_white(path, level))
            assert len(image.levels) == 2
    assert (pixels[:, :16, :16] != 255).any()


def test_levels_of_aperio_are_those_of_openslide_wherever_the_thumbnail_is(tmp_path: Path) -> None:
    slide(tmp_path / "a.svs", levels=3, thumbnail=True)
    slide(tmp_path / "b.svs", levels=3)
    with open_image(tmp_path / "a.svs") as usual, open_image(tmp_path / "b.svs") as without:
        assert isinstance(usual, TiffImage)
        assert [level.shape for level in usual.levels] == [level.shape for level in without.levels]


@pytest.mark.parametrize(
    "tags",
    [
        {305: ascii_tag("Philips DP v2"), 270: ascii_tag("<DataObject/>")},
        {700: ascii_tag("<iScan/>")},
        {65420: (4, [1])},
        {305: ascii_tag("MedScan 1")},
    ],
)
def test_pixels_of_vendors_are_left_to_openslide(tmp_path: Path, tags: dict[int, Any]) -> None:
    slide(tmp_path / "a.tif", tags=tags)
    assert open_tiff(tmp_path / "a.tif") is None


def test_a_slide_that_is_mirrored_by_a_tag_is_refused(tmp_path: Path) -> None:
    slide(tmp_path / "a.svs", tags={274: (3, [6])})
    with pytest.raises(ImageError, match=r"turned or mirrored by its orientation tag \(6\)"):
        open_image(tmp_path / "a.svs")
    slide(tmp_path / "b.svs", tags={274: (3, [1])})
    with open_image(tmp_path / "b.svs") as image:
        np.testing.assert_array_equal(whole(image), transparent_over_white(tmp_path / "b.svs"))


@pytest.mark.parametrize("samples", [2, 4])
def test_alpha_says_where_there_is_data(tmp_path: Path, samples: int) -> None:
    pixels = np.random.default_rng(0).integers(1, 255, (samples, 40, 50)).astype(np.uint8)
    pixels[-1, 10:20] = 0
    shown = {"photometric": "RGB"} if samples == 4 else {}
    with rasterio.open(
        tmp_path / "a.tif", "w", "GTiff", 50, 40, samples, dtype="uint8", ALPHA="YES", compress="lzw", **shown
    ) as out:
        out.write(pixels)
    with open_image(tmp_path / "a.tif") as image, rasterio.open(tmp_path / "a.tif") as theirs:
        np.testing.assert_array_equal(whole(image), pixels[: image.channels])
        np.testing.assert_array_equal(image.missing(Box.whole(40, 50)), theirs.dataset_mask() == 0)
        part = Box(5, 7, 25, 30)
        np.testing.assert_array_equal(image.missing(part), pixels[-1, 5:25, 7:30] == 0)
        across = image.missing(Box(5, 40, 25, 60))
        assert across is not None
        np.testing.assert_array_equal(across[:, :10], pixels[-1, 5:25, 40:] == 0)
        assert image.missing(Box(0, 0, 10, 50)) is None
        assert image.missing_bytes > 0
    with pytest.raises(ImageError, match="closed"):
        image.missing(part)


def test_gdal_may_say_that_a_sample_is_no_alpha(tmp_path: Path) -> None:
    with rasterio.open(tmp_path / "a.tif", "w", "GTiff", 50, 40, 4, dtype="uint8", photometric="MINISBLACK") as out:
        out.write(np.full((4, 40, 50), 7, np.uint8))
    rasterio.shutil.copy(tmp_path / "a.tif", tmp_path / "b.tif", driver="COG")
    with tifffile.TiffFile(tmp_path / "b.tif") as tif:
        assert tif.pages.first.extrasamples == (2,)
    with open_image(tmp_path / "b.tif") as image:
        assert image.channels == 4
        assert image.missing_bytes == 0


def test_a_mask_in_a_file_of_its_own_is_that_of_gdal(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(1, 255, (2, 40, 50)).astype(np.uint8)
    options = {"driver": "GTiff", "width": 50, "height": 40, "count": 2, "dtype": "uint8", "nodata": 9}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(tmp_path / "a.tif", "w", **options) as out:
        out.write(pixels)
        out.write_mask(pixels[0] > 90)
    assert (tmp_path / "a.tif.msk").is_file()
    with open_image(tmp_path / "a.tif") as image, rasterio.open(tmp_path / "a.tif") as theirs:
        missing = theirs.dataset_mask() == 0
        np.testing.assert_array_equal(image.missing(Box.whole(40, 50)), missing)
        np.testing.assert_array_equal(whole(image), np.where(missing, 0, pixels))
    tifffile.imwrite(tmp_path / "a.tif.msk", pixels, photometric="minisblack", planarconfig="separate")
    with pytest.raises(ImageError, match=r"a\.tif\.msk has 2 masks, one of each band; expected one of all bands"):
        open_image(tmp_path / "a.tif")


def test_sixteen_bits_of_a_coloured_png_are_not_cut(tmp_path: Path) -> None:
    import imagecodecs

    grey = np.arange(99, dtype=np.uint16).reshape(9, 11) * 600
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.stack([grey] * 3, axis=-1)))
    with pytest.raises(ImageError, match="16-bit colours, which would be cut to 8 bits; convert it to a TIFF"):
        open_image(tmp_path / "a.png")
    Pillow.fromarray(grey).save(tmp_path / "b.png")
    with open_image(tmp_path / "b.png") as image:
        np.testing.assert_array_equal(whole(image)[0], grey)


PIXELS = np.random.default_rng(0).integers(0, 255, (3, 32, 48)).astype(np.uint8)
OWN, OTHER = "urn:uuid:11111111-1111-1111-1111-111111111111", "urn:uuid:22222222-2222-2222-2222-222222222222"


def ome(path: Path, planes: int, files: list[tuple[str, str]], root: str | None = OWN, **attributes: str) -> Path:
    """An OME-TIFF of some planes; each of `files`, a UUID and a name, has one plane of the image."""
    shares = "".join(
        f'<TiffData FirstC="{c}" IFD="0" PlaneCount="1"><UUID FileName="{name}">{uuid}</UUID></TiffData>'
        for c, (uuid, name) in enumerate(files)
    )
    more = "".join(f' {name}="{value}"' for name, value in attributes.items())
    channels = "".join(f'<Channel ID="Channel:0:{c}" Name="stain {c}" SamplesPerPixel="1"/>' for c in range(len(files)))
    xml = (
        f"<?xml version='1.0' encoding='UTF-8'?><OME xmlns='http://www.openmicroscopy.org/Schemas/OME/2016-06'"
        f"{f' UUID={chr(34)}{root}{chr(34)}' if root else ''}><!-- <Pixels PhysicalSizeX='9'> --><Image ID='Image:0'>"
        f'<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="48" SizeY="32" SizeC="{len(files)}" '
        f'SizeZ="1" SizeT="1"{more}>{channels}{shares}</Pixels></Image></OME>'
    )
    with tifffile.TiffWriter(path) as writer:
        for plane in range(planes):
            said = {"description": xml.encode()} if plane == 0 else {}
            writer.write(PIXELS[plane], photometric="minisblack", metadata=None, contiguous=False, **said)
    return path


SETS = [
    ([(OWN, "a.ome.tif"), (OTHER, "b.ome.tif")], OWN, "b.ome.tif"),
    ([(OTHER, "b.ome.tif"), (OWN, "a.ome.tif")], OWN, "b.ome.tif"),
    ([(OTHER, "b.ome.tif")], OWN, "b.ome.tif"),
    ([(OWN, "a.ome.tif"), (OTHER, "b.ome.tif")], None, "b.ome.tif"),
    ([(OWN, "a.ome.tif"), (OTHER, "&#10;b.ome.tif")], OWN, "b.ome.tif"),
    ([(OWN, "a.ome.tif"), (OTHER, r"D:\set\b.ome.tif")], OWN, "b.ome.tif"),
    ([(OWN, "a.ome.tif"), (OTHER, "folder/b.ome.tif"), ("urn:uuid:3", "c.ome.tif")], OWN, "b.ome.tif, c.ome.tif"),
]


@pytest.mark.parametrize(("files", "root", "named"), SETS)
@pytest.mark.parametrize("there", [True, False])
def test_one_file_of_an_ome_tiff_of_several_is_refused_by_the_others_names(
    tmp_path: Path, files: list[tuple[str, str]], root: str | None, named: str, there: bool
) -> None:
    path = ome(tmp_path / "a.ome.tif", 1, files, root)
    if there:
        ome(tmp_path / "b.ome.tif", 1, files, OTHER)
    words = rf"a\.ome\.tif is one file of an OME-TIFF of several, beside {named}; join them .*bfconvert a\.ome\.tif"
    with pytest.raises(ImageError, match=words):
        open_image(path)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_that_a_companion_describes_is_refused(tmp_path: Path, there: bool) -> None:
    companion = ome(tmp_path / "x.tif", 1, [(OWN, "a.ome.tif"), (OTHER, "b.ome.tif")], None)
    with tifffile.TiffFile(companion) as tif:
        xml = tif.pages.first.description
    part = f"<OME UUID='{OWN}'><BinaryOnly MetadataFile='x.companion.ome' UUID='urn:uuid:9'/></OME>"
    tifffile.imwrite(tmp_path / "a.ome.tif", PIXELS[0], photometric="minisblack", description=part, metadata=None)
    if there:
        (tmp_path / "x.companion.ome").write_text(xml)
        with pytest.raises(ImageError, match="describes an image in other files, and holds no pixels"):
            open_image(tmp_path / "x.companion.ome")
    beside = r"b\.ome\.tif and x\.companion\.ome" if there else r"x\.companion\.ome"
    with pytest.raises(ImageError, match=rf"of several, beside {beside}, which describes them; join them"):
        open_image(tmp_path / "a.ome.tif")


@pytest.mark.parametrize(
    ("files", "root"),
    [
        ([(OWN, "renamed.ome.tif")], OWN),
        ([(OWN, "renamed.ome.tif")], None),
        ([(OTHER, "a.ome.tif")], OWN),
        ([(OWN, "A.OME.TIF")], None),
    ],
)
def test_a_file_that_was_renamed_is_still_whole(tmp_path: Path, files: list[tuple[str, str]], root: str | None) -> None:
    with open_image(ome(tmp_path / "a.ome.tif", 1, files, root)) as image:
        np.testing.assert_array_equal(whole(image)[0], PIXELS[0])
        assert image.channel_names == ("stain 0",)


@pytest.mark.parametrize(
    ("size", "unit", "mpp"),
    [
        ("0.25", "&#181;m", 0.25),
        ("0.25", "&#xB5;m", 0.25),
        ("0.25", "&#956;m", 0.25),
        ("0.25", "&micro;m", 0.25),
        ("0.25", "µm", 0.25),
        ("250", "nm", 0.25),
        ("2500", "Å", 0.25),
        ("2500", "&#197;", 0.25),
        ("250000", "pm", 0.25),
        ("0.00025", "mm", 0.25),
        ("0.000025", "cm", 0.25),
        ("0.01", "thou", 0.254),
        ("0.00001", "in", 0.254),
        ("0.00025", "Mm", None),
        ("0.25", "reference frame", None),
    ],
)
def test_a_unit_may_be_written_by_an_entity(tmp_path: Path, size: str, unit: str, mpp: float | None) -> None:
    path = ome(tmp_path / "a.ome.tif", 1, [(OWN, "a.ome.tif")], PhysicalSizeX=size, PhysicalSizeXUnit=unit)
    with open_image(path) as image:
        assert image.mpp == (mpp if mpp is None else pytest.approx(mpp))


def test_attributes_may_stand_between_apostrophes(tmp_path: Path) -> None:
    xml = (
        "<OME><Image ID='Image:0'><Pixels DimensionOrder='XYCZT' Type='uint8' SizeX='48' SizeY='32' SizeC='1' "
        "SizeZ='1' SizeT='1' PhysicalSizeX='0.5' PhysicalSizeXUnit='&#181;m'><Channel ID='c' Name='a &amp; b'/>"
        "<TiffData/></Pixels></Image></OME>"
    )
    tifffile.imwrite(tmp_path / "a.ome.tif", PIXELS[0], photometric="minisblack", description=xml, metadata=None)
    with open_image(tmp_path / "a.ome.tif") as image:
        assert image.mpp == 0.5
        assert image.channel_names == ("a & b",)
