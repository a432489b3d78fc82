"""Gains of several ranks, by arithmetic alone: links, groups, pipelines. Nothing here runs anything."""

from gigagrad.scaling.tiles import Link, TileStep, parse_link, tile_step
from gigagrad.scaling.ways import (
    DATA,
    GROUPS,
    PIPELINE,
    TILE,
    Layer,
    PipelineStage,
    Replicated,
    Scaling,
    Shared,
    Split,
    replicated,
    split,
)

__all__ = [
    "DATA",
    "GROUPS",
    "PIPELINE",
    "TILE",
    "Layer",
    "Link",
    "PipelineStage",
    "Replicated",
    "Scaling",
    "Shared",
    "Split",
    "TileStep",
    "parse_link",
    "replicated",
    "split",
    "tile_step",
]
