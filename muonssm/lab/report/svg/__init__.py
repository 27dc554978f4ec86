"""Small pictures as SVG text, drawn with the colours of the page they stand in (light, dark or print).

svg.lines({"plain": [points], "muon": [points]}, "epoch", "loss")        # curves, one or more a name
svg.heatmap(values, ["0.5", "0.9"], ["1", "2"], "gamma", "tau")          # a table in colours
svg.bars({"plain": (72.0, 0.6), "muon": (74.1, None)}, "accuracy, %")    # means with their deviation
svg.pictures([S, M], ["memory", "momentum"])                             # matrices, pixel by pixel
svg.confusion(counts, classes)
svg.standalone(picture)                                                  # the same as a file of its own
"""

from .bars import bars
from .cells import heatmap
from .confusion import confusion
from .frame import standalone
from .lines import lines
from .pictures import pictures

__all__ = ["bars", "confusion", "heatmap", "lines", "pictures", "standalone"]
