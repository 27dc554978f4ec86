"""Make transformers and PEFT know our models, without importing either.

`import muonssm` calls `register`. Where `transformers.models.auto` is imported already, it adds our model types to the
tables of names there; otherwise it does so right after the import, by an import hook. The tables hold names, so the
models are imported when an Auto class first asks for one. PEFT's table of default target modules is treated alike.

Nothing is replaced: `AutoConfig`, `AutoModel...` and pipelines find "muonssm" as they find "mamba".
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class ModelType(NamedTuple):
    """A model type: the module of its classes, the class of its configuration, and model classes by table."""

    module: str
    config: str
    classes: dict[str, str]


MODEL_TYPES = {
    "muonssm": ModelType(
        "muonssm.models.language",
        "MuonSSMConfig",
        {
            "MODEL_MAPPING": "MuonSSMModel",
            "MODEL_FOR_CAUSAL_LM_MAPPING": "MuonSSMForCausalLM",
            "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "MuonSSMForSequenceClassification",
            "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": "MuonSSMForTokenClassification",
        },
    ),
    "muonssm_mambavision": ModelType(
        "muonssm.models.vision.transformers_model",
        "MambaVisionBackboneConfig",
        {"MODEL_MAPPING": "MambaVisionBackbone", "MODEL_FOR_BACKBONE_MAPPING": "MambaVisionBackbone"},
    ),
}
LORA_TARGETS = ["in_proj", "out_proj", "q_proj", "v_proj"]  # of mixers, and of a hybrid's attention


class Alias(ModuleType):
    """A module whose attributes are those of another one, which is imported when the first of them is read."""

    def __init__(self, name: str, module: str) -> None:
        super().__init__(name, f"Stands for {module}.")
        self.module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.module), name)


def _add_configs(module: ModuleType) -> None:
    """Add names of configurations, and make our modules importable where transformers looks for a model type's."""
    for model_type, entry in MODEL_TYPES.items():
        module.CONFIG_MAPPING_NAMES.setdefault(model_type, entry.config)
        name = f"transformers.models.{model_type}"
        sys.modules.setdefault(name, Alias(name, entry.module))


def _add_models(module: ModuleType) -> None:
    """Add names of model classes."""
    for model_type, entry in MODEL_TYPES.items():
        for table, name in entry.classes.items():
            getattr(module, f"{table}_NAMES").setdefault(model_type, name)
            getattr(module, table)._reverse_config_mapping.setdefault(entry.config, model_type)


def _add_targets(module: ModuleType) -> None:
    """Add default target modules of LoRA, and of the methods that share LoRA's."""
    lora = module.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    tables = [value for name, value in vars(module).items() if name.endswith("TARGET_MODULES_MAPPING")]
    for table in [table for table in tables if table == lora]:
        table.setdefault("muonssm", list(LORA_TARGETS))


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _add_configs,
    "transformers.models.auto.modeling_auto": _add_models,
    "peft.utils.constants": _add_targets,
}


class AfterImport(MetaPathFinder):
    """Call a module's function of `HOOKS` after its import; leave the search to the other finders."""

    def __init__(self) -> None:
        self.waiting = set(HOOKS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of the waiting modules, and let its loader call the function."""
        if fullname not in self.waiting:
            return None
        self.waiting.remove(fullname)  # so that the search below passes here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load, added = spec.loader.exec_module, HOOKS[fullname]

        def exec_module(module: ModuleType) -> None:
            load(module)
            added(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Add our models to what is imported, and to what will be."""
    if any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return
    finder = AfterImport()
    for name, add in HOOKS.items():
        if name in sys.modules:
            finder.waiting.remove(name)
            add(sys.modules[name])
    sys.meta_path.insert(0, finder)
