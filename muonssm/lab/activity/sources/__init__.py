"""Data sets of activity recognition: one file per layout on disk, each with a `SOURCE`.

Recordings in a folder with an `index.csv` need no code: see `folder`. CONTRIBUTING.md has the steps to add a data set
with another layout. Splitting, resampling, windows and standardization are the same for every source;
`dataset.load_activity` does them.
"""

from __future__ import annotations

from . import folder, mmact, motionsense, muwiges, uci_har, uestc, utd_mhad, watch
from .source import Source

SOURCES: dict[str, Source] = {
    "watch": watch.SOURCE,
    "MuWiGes": muwiges.SOURCE,
    "UESTC-MMEA-CL": uestc.SOURCE,
    "MMAct": mmact.SOURCE,
    "motionsense": motionsense.SOURCE,
    "utd-mhad": utd_mhad.SOURCE,
    "uci-har": uci_har.SOURCE,
    "uci-hapt": uci_har.WITH_TRANSITIONS,
    "folder": folder.SOURCE,
}
