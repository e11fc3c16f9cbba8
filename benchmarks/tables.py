"""Markdown tables of the results files, for docs/benchmarks.md and the README; and the data of `breakgraph models`.

python benchmarks/tables.py            rewrites the blocks between `<!-- table NAME -->` and `<!-- end -->`, and SERVED
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["SERVED", "TABLES", "rewritten", "served_models"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "models.md")
SERVED = ROOT / "breakgraph" / "models" / "served_models.json"


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ms(cell: dict[str, float]) -> str:
    return f"{cell['median_ms']:.2f}"


def serving_offline() -> str:
    """Tokens a second of 256 requests."""
    return _table(
        ("model", "requests", "prompt + new tokens", "seconds", "output tokens/s"),
        (
            (
                name,
                row["requests"],
                f"{row['prompt']} + {row['new']}",
                f"{row['seconds']:.2f}",
                f"{row['tokens_per_s']:.0f}",
            )
            for name, shape in _read("serving_speed_h200.json")["shapes"].items()
            for row in (shape["offline"],)
        ),
    )


def serving_first() -> str:
    """Time to the first token."""
    return _table(
        ("model", "prompt", "first token, ms", "fastest, slowest", "graph alone, ms", "ratio"),
        (
            (
                name,
                row["prompt"],
                f"{row['ms']:.2f}",
                f"{row['fastest_ms']:.2f}, {row['slowest_ms']:.2f}",
                f"{row['graph_alone_ms']:.2f}",
                f"{row['to_graph_alone']:.3f}",
            )
            for name, shape in _read("serving_speed_h200.json")["shapes"].items()
            for row in shape["first_token"]
        ),
    )


def serving_decode() -> str:
    """The step of a decode."""
    parts = ("schedule", "prepare", "launch", "wait", "process")
    return _table(
        (
            "model",
            "batch",
            "decode step, ms",
            "graph alone, ms",
            "overhead",
            "tokens/s",
            *(f"{part}, ms" for part in parts),
        ),
        (
            (
                name,
                row["batch"],
                f"{row['step_ms']:.2f}",
                f"{row['graph_alone_ms']:.2f}",
                f"{100 * row['overhead']:.1f} %",
                f"{row['tokens_per_s']:.0f}",
                *(f"{row['parts_ms'][part]:.2f}" for part in parts),
            )
            for name, shape in _read("serving_speed_h200.json")["shapes"].items()
            for row in shape["decode"]
        ),
    )


def decode_kernels() -> str:
    """Both decode kernels by shape, batch and context."""
    rows = _read("decode_kernels_h200.json")["rows"]
    contexts = sorted({row["context"] for row in rows})
    cases: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        cell = f"{row['cuda_cores_us']:.0f} / {row['tensor_cores_us']:.0f}"
        cases.setdefault((row["model"], row["batch"]), {})[row["context"]] = cell
    return _table(
        ("model", "batch", *(f"context {context}" for context in contexts)),
        ((model, batch, *(cells[context] for context in contexts)) for (model, batch), cells in cases.items()),
    )


def prefill() -> str:
    """Prefill steps of all shapes."""
    return _table(
        ("model", "tokens", "eager, ms", "breakable graph, ms", "its host time, ms", "one whole graph, ms"),
        (
            (
                shape["shape"],
                case["tokens"],
                _ms(case["eager"]),
                _ms(case["breakable_graph"]),
                _ms(case["breakable_graph_host"]),
                _ms(case["one_whole_graph"]),
            )
            for shape in _read("steps_h200.json")["shapes"]
            for case in shape["prefill"]
        ),
    )


def decode() -> str:
    """Decode steps of all shapes."""
    return _table(
        ("model", "batch", "eager, ms", "decode runner, ms", "its host time, ms", "the graph alone, ms"),
        (
            (
                shape["shape"],
                case["batch"],
                _ms(case["eager"]),
                _ms(case["decode_runner"]),
                _ms(case["decode_runner_host"]),
                _ms(case["one_whole_graph"]),
            )
            for shape in _read("steps_h200.json")["shapes"]
            for case in shape["decode"]
        ),
    )


def engine() -> str:
    """The engine loop of all shapes."""
    return _table(
        (
            "model",
            "batch",
            "prompt",
            "first token, eager",
            "first token, graphs",
            "decode step, eager",
            "decode step, graphs",
            "tokens/s, graphs",
        ),
        (
            (
                shape["shape"],
                case["batch"],
                case["prompt"],
                f"{case['eager']['first_token_ms']:.1f} ms",
                f"{case['graphs']['first_token_ms']:.1f} ms",
                f"{case['eager']['decode_step_ms']:.2f} ms",
                f"{case['graphs']['decode_step_ms']:.2f} ms",
                round(case["graphs"]["tokens_per_second"]),
            )
            for shape in _read("steps_h200.json")["shapes"]
            for case in shape["engine"]
        ),
    )


def captures() -> str:
    """What start-up costs."""
    return _table(
        ("model", "graphs", "capture, s", "prefill pool, MiB", "decode pool, MiB", "sizes equal to the eager twin"),
        (
            (
                shape["shape"],
                len(shape["prefill_buckets"]) + shape["decode_graphs"],
                shape["capture_seconds"],
                shape["pool_mib"][0],
                shape["pool_mib"][1],
                f"{shape['sizes_bit_equal_to_eager_twin']}, bit for bit",
            )
            for shape in _read("steps_h200.json")["shapes"]
        ),
    )


def summary() -> str:
    """One request through the engine, for the README."""
    return _table(
        ("model", "first token of 128, eager", "with graphs", "decode step, eager", "with graphs"),
        (
            (
                shape["shape"],
                f"{case['eager']['first_token_ms']:.1f} ms",
                f"**{case['graphs']['first_token_ms']:.1f} ms**",
                f"{case['eager']['decode_step_ms']:.2f} ms",
                f"**{case['graphs']['decode_step_ms']:.2f} ms**",
            )
            for shape in _read("steps_h200.json")["shapes"]
            for case in shape["engine"]
            if (case["batch"], case["prompt"]) == (1, 128)
        ),
    )


def real_weights() -> str:
    """SmolLM2 with its real weights."""
    result = _read("real_weights_h200.json")
    return _table(
        ("", "first text, ms", "tokens/s"),
        (
            (name, f"{result[name]['first_text_ms']:.1f}", round(result[name]["tokens_per_second"]))
            for name in ("eager", "graphs")
        ),
    )


def replay_cost() -> str:
    """Host time of a replay of 33 segments and 32 empty breaks."""
    cost = _read("capture_cost_h200.json")["replay"]
    return _table(
        ("33 segments, 32 breaks that do nothing", "host time, us", "ours to it"),
        (
            ("breakgraph", f"{cost['ours_us']:.1f}", ""),
            ("a bare loop over cudaGraphLaunch", f"{cost['bare_loop_us']:.1f}", f"{cost['ours_over_bare_loop']:.2f}"),
            ("breakable-cuda-graphs 0.1.0", f"{cost['peer_us']:.1f}", f"{cost['ours_over_peer']:.2f}"),
        ),
    )


def capture_cost() -> str:
    """Cost of a capture of the 8B shape, and of seven buckets."""
    results = _read("capture_cost_h200.json")
    rows = (
        ("breakgraph", "ours", results["memory_ours"]),
        ("breakable-cuda-graphs 0.1.0", "peer", results["memory_peer"]),
        ("torch alone, no bookkeeping", "torch alone", {}),
    )
    keys = ("largest_mib", "all_seven_mib", "of_all_executables_mib")
    return _table(
        (
            "8B, 33 segments",
            "capture less eager and launches, ms",
            "largest, MiB",
            "all seven, MiB",
            "of it executables, MiB",
        ),
        (
            (name, f"{results['capture'][kind]['overhead_ms']:.1f}", *(memory.get(key, "") for key in keys))
            for name, kind, memory in rows
        ),
    )


def runner_cost() -> str:
    """What a prefill runner adds to a bare replay."""
    return _table(
        (
            "model",
            "tokens",
            "bare replay, host us",
            "behind one small kernel, us",
            "added on the host, us",
            "of it `prepare`, us",
            "added on the device, %",
        ),
        (
            (
                shape,
                row["tokens"],
                round(row["bare replay"]["host_us"]),
                round(row["one small kernel and the bare replay"]["host_us"] - row["one small kernel"]["host_us"]),
                round(row["overhead_host_us"]),
                round(row["prepare"]["host_us"]),
                row["overhead_device_percent"],
            )
            for shape, rows in _read("runner_cost_h200.json")["shapes"].items()
            for row in rows
        ),
    )


def decode_period() -> str:
    """Decode steps that follow each other."""
    return _table(
        (
            "model",
            "batch",
            "bare replay, us",
            "decode step, us",
            "ratio",
            "of it host at work, us",
            "of that planning, us",
            "eager step, us",
            "tokens/s, graphs",
            "tokens/s, eager",
        ),
        (
            (
                shape,
                case["batch"],
                round(case["bare_us"]["median"]),
                round(case["period_us"]["median"]),
                f"{case['ratio']:.3f}",
                round(sum(us for name, us in case["host_us"].items() if name != "wait")),
                round(case["host_us"]["plan"]),
                round(case["eager"]["period_us"]["median"]),
                round(case["tokens_per_s"]),
                round(case["eager"]["tokens_per_s"]),
            )
            for shape, row in _read("decode_period_h200.json")["shapes"].items()
            for case in row["cases"]
        ),
    )


def start_up() -> str:
    """Start-up of the whole default ladder of decode."""
    return _table(
        (
            "model",
            "verified",
            "graphs",
            "dropped",
            "whole, s",
            "warm-up, s",
            "capture, s",
            "instantiate, s",
            "verify, s",
            "ms a graph",
            "pool, MiB",
            "executables, MiB",
            "attention states, MiB",
        ),
        (
            (
                shape,
                {"first": "yes", "never": "no"}[row["verify"]]
                + (", first of the process" if row["first_of_the_process"] else ""),
                row["graphs"],
                len(row["dropped"]),
                f"{row['seconds']:.1f}",
                *(
                    f"{row['ms'][phase]['total'] / 1000:.1f}"
                    for phase in ("warm-up", "capture", "instantiate", "verify")
                ),
                round(1000 * row["seconds"] / row["graphs"]),
                round(row["pool_mib"]),
                round(row["executable_mib"]["total"]),
                round(row["attention_state_mib"]["total"]),
            )
            for shape, rows in _read("start_up_h200.json")["shapes"].items()
            for row in rows
        ),
    )


def continuous_batching() -> str:
    """Whole requests, the engine and transformers."""
    return _table(
        ("model", "batch", "breakgraph, tokens/s", "transformers", "tokens/s", "ours to it"),
        (
            (
                shape,
                case["batch"],
                round(case["breakgraph"]["tokens_per_s"]),
                variant,
                *(("failed", "") if "error" in figures else (round(figures["tokens_per_s"]), figures["ours_to_it"])),
            )
            for shape, row in _read("continuous_batching_h200.json")["shapes"].items()
            for case in row["cases"]
            for variant, figures in case["transformers"].items()
        ),
    )


def planner() -> str:
    """Host time of planning, public against ours."""

    def rows() -> Iterator[tuple[object, ...]]:
        for shape, cases in _read("planner_h200.json")["shapes"].items():
            for case in cases:
                for field, what in (
                    ("decode", "decode"),
                    ("prefill_fa3", "prefill, FA3"),
                    ("prefill_fa2", "prefill, FA2"),
                ):
                    one = case[field]
                    plans = [("ours", what)] + ([("captured", "captured prefill")] if "captured_idle_us" in one else [])
                    for plan, name in plans:
                        times = (one[f"{who}_{when}_us"] for when in ("idle", "busy") for who in ("public", plan))
                        kernels = [f"kernel_{who}_us" for who in ("public", "ours")]
                        kernel = (one[k] for k in kernels) if plan == "ours" and kernels[0] in one else ("", "")
                        yield shape, case["requests"], name, *(round(t) for t in times), *kernel

    return _table(
        (
            "model",
            "requests",
            "what",
            "public, idle",
            "ours, idle",
            "public, busy",
            "ours, busy",
            "kernel, public",
            "ours",
        ),
        rows(),
    )


def _fast() -> dict[str, Any]:
    """Rows by shape, from the files of two runs."""
    return {
        shape: rows
        for name in ("fast_path_h200.json", "fast_path_8B_h200.json")
        for shape, rows in _read(name)["shapes"].items()
    }


_FAST = ("eager", "break", "captured", "captured part", "hf eager", "hf break", "hf captured")


def fast_path() -> str:
    """Prefill steps with nothing overlapped."""
    return _table(
        ("model", "requests", "tokens", *_FAST),
        (
            (shape, row["requests"], row["tokens"], *(f"{row[name]['single_ms']:.2f}" for name in _FAST))
            for shape, rows in _fast().items()
            for row in rows
        ),
    )


def fast_path_periods() -> str:
    """Prefill steps one behind the other."""
    names = ("eager", "break", "captured", "captured part")
    return _table(
        ("model", "requests", "tokens", *names, "captured / its part", "host, break", "host, captured"),
        (
            (
                shape,
                row["requests"],
                row["tokens"],
                *(f"{row[name]['period_ms']:.2f}" for name in names),
                f"{row['captured']['period_ms'] / row['captured part']['period_ms']:.3f}",
                *(f"{row[name]['host_ms']:.2f}" for name in ("break", "captured")),
            )
            for shape, rows in _fast().items()
            for row in rows
        ),
    )


def transformers_models() -> str:
    """What becomes of each model type of transformers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for kind, row in _read("transformers_models.json")["models"].items():
        reason = re.sub(r"\b\d+(\.\d+)? (for \d+)", r"... \2", row.get("reason", ""))
        reason = re.sub(r"\d+ attention calls for \d+ layers", "fewer attention calls than layers", reason)
        reason = re.sub(r"by [\d.e+-]+( of the largest.*)?", "by too much", reason)
        reason = re.sub(r"\b\w+(Attention|Residual)\b", "its attention", reason)
        groups.setdefault((row["outcome"], reason.split("; ")[0].rstrip(".")[:160]), []).append(kind)
    order = {"served": 0, "right, but eager": 1, "refused": 2, "not made": 3}
    ranked = sorted(groups.items(), key=lambda item: (order.get(item[0][0], -1), -len(item[1])))
    return _table(
        ("outcome", "reason", "types", "which"),
        ((outcome, reason, len(which), ", ".join(which)) for (outcome, reason), which in ranked),
    )


def served_models() -> str:
    """What the package keeps of the probe's records: one line for each model type, so that changes can be read."""
    results = _read("transformers_models.json")
    lines = [
        f"{json.dumps(kind)}: " + json.dumps({key: row[key] for key in ("outcome", "reason") if key in row})
        for kind, row in results["models"].items()
    ]
    head = (
        f'"made_by": "python benchmarks/tables.py",\n"transformers": {json.dumps(results["versions"]["transformers"])}'
    )
    return f'{{\n{head},\n"models": {{\n' + ",\n".join(lines) + "\n}\n}\n"


def explained() -> str:
    """What `explain` says of graphs, beside the graph's own counts."""
    return _table(
        (
            "graph",
            "segments",
            "breaks",
            "kernels",
            "of breaks",
            "replay, host us",
            "device us",
            "steps, host us",
            "device us",
            "explain, s",
            "page, kB",
        ),
        (
            (
                row["graph"],
                _agrees(row["segments"]),
                _agrees(row["breaks"]),
                _agrees(row["kernels"]),
                row["kernels_of_breaks"],
                f"{row['replay_host_us']:.0f}",
                f"{row['replay_device_us']:.0f}",
                f"{row['steps_host_us']:.0f}",
                f"{row['steps_device_us']:.0f}",
                f"{row['seconds_measured']:.1f}",
                f"{row['page_bytes'] / 1000:.0f}",
            )
            for row in _read("explained_h200.json")["rows"]
        ),
    )


def _agrees(counts: list[int]) -> str:
    said, own = counts
    return str(said) if said == own else f"{said}, but {own}"


def server_speed() -> str:
    """Requests through HTTP and through the engine."""
    results = _read("server_speed_h200.json")
    new = results["new"]
    return _table(
        ("requests", "answers", "seconds", "tokens/s", "first ms", "last ms", "chunks", "engine alone, tokens/s"),
        (
            (
                row["requests"],
                "streamed" if row["streamed"] else "whole",
                f"{row['seconds']:.2f}",
                f"{row['tokens_per_s']:.0f}",
                f"{row['first_ms']:.0f}",
                f"{row['last_ms']:.0f}",
                row["chunks"],
                f"{row['requests'] * new / row['engine_seconds']:.0f}",
            )
            for row in results[next(key for key in ("cases", "rows") if key in results)]
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        prefill,
        decode,
        engine,
        captures,
        summary,
        real_weights,
        replay_cost,
        capture_cost,
        runner_cost,
        decode_period,
        start_up,
        continuous_batching,
        planner,
        fast_path,
        fast_path_periods,
        transformers_models,
        serving_offline,
        serving_first,
        serving_decode,
        decode_kernels,
        explained,
        server_speed,
    )
}


def rewritten(text: str) -> str:
    """A page with each of its tables made anew from the results files."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Rewrite the pages and the package's data."""
    SERVED.write_text(served_models())
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main()
