"""``duoka merge``: add a LoRA adapter to the weights of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from duoka.base.progress import heard_by, say_import
from duoka.errors import UsageError

from . import planning
from .groups import with_groups
from .options import ModelOptions
from .terminal import note, stdout


@with_groups
def merge(
    model: ModelOptions,
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A LoRA adapter, from duoka tune or peft.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="A new directory for the merged checkpoint."),
    ],
) -> None:
    """Merge a LoRA adapter into its model, and write a checkpoint under the published names.

    [bold]duoka merge[/] ./glm-4-9b-chat run/adapter --out ./glm-4-9b-merged
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists", hint="give a new directory to --out")
    checkpoint = planning.open_checkpoint(model, to_run=True)
    say_import("torch")
    with heard_by(note):
        from duoka.models.lora import native_form
        from duoka.runtime.load.adapter import read_adapter
        from duoka.tuner.result import write_merged

        lora = native_form(read_adapter(adapter), checkpoint.config)
        checkpoint.fetch(None)
        write_merged(out, checkpoint, adapter=lora)
    stdout().print(f"the merged model is in {out}", markup=False, soft_wrap=True)
