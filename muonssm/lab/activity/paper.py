"""The paper's figures for activity recognition (its Table "Comparison of different architectures"), in percent."""

from __future__ import annotations

METRICS = ("accuracy", "precision", "recall", "f1")
_TABLE = {
    ("MuWiGes", "mamba"): ((96.25, 96.31, 96.24, 96.25), (97.64, 97.47, 97.44, 97.45)),
    ("MuWiGes", "longhorn"): ((97.23, 97.44, 97.27, 97.35), (97.95, 97.98, 97.95, 97.96)),
    ("MuWiGes", "gated_deltanet"): ((96.88, 96.90, 96.87, 96.87), (97.73, 97.75, 97.72, 97.73)),
    ("UESTC-MMEA-CL", "mamba"): ((87.74, 88.38, 89.46, 88.91), (91.62, 91.41, 90.95, 90.96)),
    ("UESTC-MMEA-CL", "longhorn"): ((89.06, 89.88, 89.44, 89.43), (91.56, 90.94, 91.12, 91.02)),
    ("UESTC-MMEA-CL", "gated_deltanet"): ((86.09, 87.20, 86.16, 85.92), (87.97, 88.35, 87.82, 87.81)),
    ("MMAct", "mamba"): ((71.46, 71.82, 71.56, 71.68), (74.65, 78.16, 74.06, 74.25)),
    ("MMAct", "longhorn"): ((72.47, 75.68, 74.12, 73.76), (74.40, 79.25, 76.47, 76.43)),
    ("MMAct", "gated_deltanet"): ((66.39, 73.23, 68.28, 67.75), (66.61, 74.11, 69.09, 68.73)),
}


def published(source: str, backbone: str) -> dict[str, dict[str, float]]:
    """The paper's scores by variant (`"plain"`, `"muon"`) and metric; empty where it has none."""
    rows = zip(("plain", "muon"), _TABLE.get((source, backbone), ()), strict=False)
    return {variant: dict(zip(METRICS, scores, strict=True)) for variant, scores in rows}
