"""Gains of several ranks, by arithmetic alone: links, groups, pipelines. Nothing here runs anything."""

from gigagrad.scaling.link import Link, parse_link
from gigagrad.scaling.pipeline import Layer, PipelineStage, Replicated, Split, replicated, split
from gigagrad.scaling.tiles import TileStep, tile_step
from gigagrad.scaling.ways import DATA, GROUPS, PIPELINE, TILE, Scaling, Shared

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
