"""Masks: what is true of every pixel, from mask files and from outlines as QuPath and ASAP save them."""

from gigagrad.masks.annotations import is_annotation_file, read_annotations
from gigagrad.masks.classes import IGNORED, UNLABELLED, ClassTable
from gigagrad.masks.labels import LabelMap, ignoring_missing
from gigagrad.masks.opening import open_mask
from gigagrad.masks.outlines import Outlines
from gigagrad.masks.painting import AnnotationMask, paint

__all__ = [
    "IGNORED",
    "UNLABELLED",
    "AnnotationMask",
    "ClassTable",
    "LabelMap",
    "Outlines",
    "ignoring_missing",
    "is_annotation_file",
    "open_mask",
    "paint",
    "read_annotations",
]
