"""What several ranks would gain, by arithmetic alone: links, pipelines, their schedules. Nothing here runs anything."""

from gigagrad.scaling.link import Link, parse_link
from gigagrad.scaling.pipeline import Layer, PipelineStage, Replicated, Split, replicated, split
from gigagrad.scaling.schedules import (
    GPIPE,
    ONE_F_ONE_B,
    PIPEDREAM_2BW,
    Schedule,
    Simulated,
    StageTimes,
    Work,
    simulate,
)
from gigagrad.scaling.tiles import TileStep, tile_step
from gigagrad.scaling.ways import DATA, GROUPS, PIPELINE, TILE, Scaling, Shared

__all__ = [
    "DATA",
    "GPIPE",
    "GROUPS",
    "ONE_F_ONE_B",
    "PIPEDREAM_2BW",
    "PIPELINE",
    "TILE",
    "Layer",
    "Link",
    "PipelineStage",
    "Replicated",
    "Scaling",
    "Schedule",
    "Shared",
    "Simulated",
    "Split",
    "StageTimes",
    "TileStep",
    "Work",
    "parse_link",
    "replicated",
    "simulate",
    "split",
    "tile_step",
]
