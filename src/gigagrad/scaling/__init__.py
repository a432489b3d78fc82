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

__all__ = [
    "GPIPE",
    "ONE_F_ONE_B",
    "PIPEDREAM_2BW",
    "Layer",
    "Link",
    "PipelineStage",
    "Replicated",
    "Schedule",
    "Simulated",
    "Split",
    "StageTimes",
    "Work",
    "parse_link",
    "replicated",
    "simulate",
    "split",
]
