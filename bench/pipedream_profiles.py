"""PipeDream's profiles of VGG-16 and ResNet-50 as chains: 128 images a micro-batch, one V100.

The numbers are those of github.com/msr-fiddle/pipedream (MIT), commit 7db6a1c, in
profiler/image_classification/profiles/*/graph.txt. The tables are ours: forward and backward added up, a cut only where
a single tensor crosses, layers of 0 s joined to the one before, and of ResNet-50 each residual block one layer. Loading
the images is left out, as their optimizer does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gigagrad.scaling import Layer

_VGG16 = """
conv 46.920 1644167168 7168
relu 9.999 1644167168 0
conv 159.531 1644167168 147712
relu 9.766 1644167168 0
pool 9.374 411041792 0
conv 54.803 822083584 295424
relu 5.097 822083584 0
conv 75.441 822083584 590336
relu 5.133 822083584 0
pool 4.999 205520896 0
conv 29.149 411041792 1180672
relu 2.757 411041792 0
conv 44.481 411041792 2360320
relu 3.103 411041792 0
conv 48.133 411041792 2360320
relu 2.870 411041792 0
pool 2.682 102760448 0
conv 23.823 205520896 4720640
relu 1.722 205520896 0
conv 37.259 205520896 9439232
relu 1.527 205520896 0
conv 40.445 205520896 9439232
relu 1.523 205520896 0
pool 1.583 51380224 0
conv 12.989 51380224 9439232
relu 1.050 51380224 0
conv 11.466 51380224 9439232
relu 0.653 51380224 0
conv 12.690 51380224 9439232
relu 0.630 51380224 0
pool 0.787 12845056 0
dense 7.050 2097152 411058176
relu 0.407 2097152 0
dense 1.443 2097152 67125248
relu 0.309 2097152 0
dense 0.941 512000 16388000
"""
_RESNET50 = """
conv 26.909 102760448 38144
block 42.943 411041792 300032
block 33.091 411041792 281600
block 35.595 411041792 281600
block 46.271 205520896 1517568
block 20.324 205520896 1120256
block 19.802 205520896 1120256
block 21.573 205520896 1120256
block 40.070 102760448 6049792
block 17.383 102760448 4468736
block 16.340 102760448 4468736
block 16.279 102760448 4468736
block 16.184 102760448 4468736
block 17.325 102760448 4468736
block 35.433 51380224 24158208
block 17.001 51380224 17850368
block 19.250 51380224 17850368
pool 1.039 1048576 0
dense 0.607 512000 8196000
"""
"""A layer a line: what it is, milliseconds, bytes behind it, bytes of parameters."""


def _layers(table: str) -> list[Layer]:
    rows = [line.split() for line in table.strip().splitlines()]
    return [Layer(float(ms) / 1000, int(cut), int(parameters)) for _, ms, cut, parameters in rows]


VGG16, RESNET50 = _layers(_VGG16), _layers(_RESNET50)
