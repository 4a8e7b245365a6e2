"""`vlmrl export`: the model of a run or of a checkpoint in Hugging Face form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ExportCommand:
    """Write the model of a run or of a checkpoint in Hugging Face form, with tokenizer, processor and chat template."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run's folder (the weights that it wrote last, in a checkpoint or as a model), a checkpoint, or the folder `best`."""
    to: Annotated[str, tyro.conf.arg(metavar="FOLDER|hub:OWNER/NAME")]
    """A new folder, or `hub:OWNER/NAME`: uploaded to the Hugging Face Hub, into a private repository if it is new."""
    adapters: bool = False
    """Write the LoRA adapters alone, as peft reads them. By default they are merged into the weights."""

    def run(self, options: Sequence[str]) -> None:
        from vlmrl.run.model_export import export_model

        found = export_model(self.source, self.to, adapters=self.adapters)
        print(f"exported {found} to {self.to}")
