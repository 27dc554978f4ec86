"""Data sets of activity recognition: one file per layout on disk, each with a `SOURCE`.

Recordings in a folder with an `index.csv` need no code: see `folder`. To add a data set with another layout:

1.  Create `sources/mydata.py`. Its docstring describes the layout: folders, file names, columns, units, rate.
2.  Write `read_file(path, channels) -> Signal`. It reads one file and returns its samples in physical units with times
    in seconds. `csv_files` has `read_columns`, `parse_numbers` and `parse_times`. `Signal.sorted_by_time` sorts the
    samples and drops repeated time stamps, and `.select(channels)` selects channels. Raise `DamagedFileError` for a
    file that cannot be used.
3.  Write `find_recordings(root, channels) -> Listing`. It lists all recordings with label and subject, without reading
    them. Put files that are not recordings into `Listing.lost`, with the reason; do not skip them silently. Raise
    `FileNotFoundError` if `root` does not have this layout.
4.  Define `SOURCE = Source(splits, find_recordings, read_file, channels, rate)`; see `source` for the fields.
5.  Add it to `SOURCES` below. The key is its name in recipes.
6.  Add a recipe, `recipes/mydata.toml`, with `source = "mydata"` in `[data]`.
7.  Add tests to `tests/lab/activity/test_sources.py`. Write a small folder in this layout (see `trees.py`), load it,
    then damage some files and check the reasons in `lost`.

Splitting, resampling, windows and standardization are the same for every source; `dataset.load_activity` does them.
"""

from __future__ import annotations

from . import folder, mmact, muwiges, uestc, watch
from .source import Source

SOURCES: dict[str, Source] = {
    "watch": watch.SOURCE,
    "MuWiGes": muwiges.SOURCE,
    "UESTC-MMEA-CL": uestc.SOURCE,
    "MMAct": mmact.SOURCE,
    "folder": folder.SOURCE,
}
