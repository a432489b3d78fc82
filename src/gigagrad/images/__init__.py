"""Open, read and write images; label tissue; make synthetic slides."""

from gigagrad.images.bag import Bag
from gigagrad.images.coordinates import read_coordinates, write_coordinates
from gigagrad.images.georeference import GuessedResolutionWarning, NonSquarePixelsWarning, require_mpp
from gigagrad.images.image import Image
from gigagrad.images.layout import MaskClass
from gigagrad.images.opening import open_image
from gigagrad.images.pixels import Level
from gigagrad.images.regions import Regions, fill_holes, find_regions
from gigagrad.images.synthetic import make_cohort, make_slide
from gigagrad.images.thumbnails import thumbnail
from gigagrad.images.tissue import PAPER_RECIPE, Recipe, label_image, tissue_mask, write_label
from gigagrad.images.views import InputView
from gigagrad.images.write import write_pyramid

__all__ = [
    "PAPER_RECIPE",
    "Bag",
    "GuessedResolutionWarning",
    "Image",
    "InputView",
    "Level",
    "MaskClass",
    "NonSquarePixelsWarning",
    "Recipe",
    "Regions",
    "fill_holes",
    "find_regions",
    "label_image",
    "make_cohort",
    "make_slide",
    "open_image",
    "read_coordinates",
    "require_mpp",
    "thumbnail",
    "tissue_mask",
    "write_coordinates",
    "write_label",
    "write_pyramid",
]
