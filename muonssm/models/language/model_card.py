"""README.md beside the weights of a trained run: what it is, how well it does, how it was trained, how to load it.

A run of the lab is a folder with recipe.json and metrics.json. `save_pretrained` of a model that was loaded from such a
folder writes the card from its files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .config import SLIDING, MuonSSMConfig

RUN_FILES = ("recipe.json", "metrics.json")
CITATION = """\
```bibtex
@inproceedings{nguyen2026muonssm,
  title     = {MuonSSM: Orthogonalizing State Space Models for Sequence Modeling},
  author    = {Nguyen, Thai-Khanh and Vo, Ngoc-Bich-Uyen and Vo, Thieu N. and Nguyen, Tan M. and Pham, Cuong},
  booktitle = {International Conference on Machine Learning (ICML)},
  year      = {2026}
}
```"""
TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- muonssm
- state-space-model
- {backbone}
---

# MuonSSM language model: {backbone}, {rule_name}

{layers} of width {width}, {parameters}, trained with [muonssm](https://github.com/muonssm/muonssm).

## Metrics

{metrics}

## Data

{data}

## Memory rule

{rule}

## Load

```python
from transformers import AutoModelForCausalLM  # pip install muonssm

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
```

`trust_remote_code` runs two small files of the folder, which import the classes from the package muonssm. After
`import muonssm` it is not needed.

## Recipe

```json
{recipe}
```

Versions: {versions}.

## Citation

{citation}
"""


def write_model_card(run: str | Path, config: MuonSSMConfig, folder: str | Path) -> None:
    """Write README.md into `folder` if `run` is the folder of a finished run; keep a README.md that is there."""
    source, target = Path(run), Path(folder) / "README.md"
    if not str(run) or target.exists() or not all((source / name).is_file() for name in RUN_FILES):
        return
    target.write_text(model_card(source, config), encoding="utf-8")


def model_card(run: Path, config: MuonSSMConfig) -> str:
    """Return the text of the card."""
    recipe, metrics = (_read(run / name) for name in RUN_FILES)
    muon = config.build_muon()
    plain = muon.gamma == 0 and muon.normalization is None
    hybrid = SLIDING in (config.layer_types or ())
    window = f", every {config.ssm_every}th with a mixer, others attention over {config.sliding_window} tokens"
    versions = _read(run / "versions.json")
    count = metrics.get("parameters")
    return TEMPLATE.format(
        backbone=config.backbone,
        rule_name="plain" if plain else "with momentum and normalized writes",
        layers=f"{config.num_hidden_layers} layers" + (window if hybrid else ""),
        width=config.hidden_size,
        parameters="size not recorded" if count is None else f"{count:,} parameters",
        metrics=_table(metrics),
        data=str(_read(run / "metadata.json").get("summary") or "Not recorded."),
        rule=f"`{muon!r}`, momentum {config.momentum!r}",
        recipe=json.dumps(recipe, indent=1),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded",
        citation=CITATION,
    )


def _table(metrics: dict[str, Any]) -> str:
    """Return a table of scores: one row per split, one column per number."""
    extra = metrics.get("extra_tests") or {}
    splits = {"validation": metrics.get("validation"), "test": metrics.get("test"), **extra}
    scores = {split: _numbers(values) for split, values in splits.items() if isinstance(values, dict)}
    names = list(dict.fromkeys(name for values in scores.values() for name in values))
    if not names:
        return "None recorded."
    rows = [["split", *names], ["---"] * (len(names) + 1)]
    rows += [[split, *(f"{values[n]:.4g}" if n in values else "" for n in names)] for split, values in scores.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", f"After {metrics.get('epochs')} epochs, {metrics.get('steps')} steps."])


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
