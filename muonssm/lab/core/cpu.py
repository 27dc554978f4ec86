"""What Linux says about the CPU."""

from __future__ import annotations

import functools
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def cpu_fields(path: Path = CPUINFO) -> dict[str, str]:
    """Return the fields of the first processor, such as `flags` and `vendor_id`; none on another system."""
    try:
        first = path.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
