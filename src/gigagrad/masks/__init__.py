"""Masks: what is true of every pixel, from mask files and from outlines as QuPath and ASAP save them."""

from gigagrad.masks.annotations import is_annotation_file, read_annotations
from gigagrad.masks.bags import find_tissue, open_bag
from gigagrad.masks.classes import IGNORED, UNLABELLED, ClassTable
from gigagrad.masks.opening import LabelMap, ignoring_missing, open_mask
from gigagrad.masks.outlines import AnnotationMask, Outlines, paint

__all__ = [
    "IGNORED",
    "UNLABELLED",
    "AnnotationMask",
    "ClassTable",
    "LabelMap",
    "Outlines",
    "find_tissue",
    "ignoring_missing",
    "is_annotation_file",
    "open_bag",
    "open_mask",
    "paint",
    "read_annotations",
]
