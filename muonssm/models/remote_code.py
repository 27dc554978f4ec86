"""The two small files beside saved weights, by which transformers loads a folder without `import muonssm`.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

runs them. They import the package; where it is missing, transformers asks to `pip install muonssm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

CONFIGURATION, MODELING = "configuration_muonssm", "modeling_muonssm"
TEXT = '''"""{title} The code is in the package muonssm: pip install muonssm."""

from {module} import {names}

__all__ = [{quoted}]
'''


class RemoteCode:
    """A configuration that writes the two files when it is saved; comes before `PreTrainedConfig` in the bases."""

    package_module: str  # where the classes are
    auto_classes: dict[str, str]  # names of classes by Auto class, "AutoConfig" among them

    @classmethod
    def code_map(cls) -> dict[str, str]:
        """Return file and class by Auto class, as transformers reads them."""
        files = {name: CONFIGURATION if name == "AutoConfig" else MODELING for name in cls.auto_classes}
        return {name: f"{files[name]}.{class_name}" for name, class_name in cls.auto_classes.items()}

    def to_dict(self) -> dict[str, Any]:
        """Add the key `auto_map`."""
        return {**super().to_dict(), "auto_map": self.code_map()}  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write the files, then config.json."""
        folder = Path(save_directory)
        if not folder.is_file():  # else transformers says so
            folder.mkdir(parents=True, exist_ok=True)
            config = self.auto_classes["AutoConfig"]
            models = [name for name in self.auto_classes.values() if name != config]
            self._write(folder, CONFIGURATION, "Configuration of a MuonSSM model.", [config])
            self._write(folder, MODELING, "Classes of a MuonSSM model.", models)
        super().save_pretrained(save_directory, **options)  # type: ignore[misc]

    def _write(self, folder: Path, name: str, title: str, classes: list[str]) -> None:
        names = sorted(set(classes))
        quoted = ", ".join(f'"{name}"' for name in names)
        text = TEXT.format(title=title, module=self.package_module, names=", ".join(names), quoted=quoted)
        (folder / f"{name}.py").write_text(text)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: transformers would copy the package's source beside the weights."""


class RemoteModel:
    """A model of such a configuration; comes before `PreTrainedModel` in the bases."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: transformers would copy the package's source beside the weights."""
