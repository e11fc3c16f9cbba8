"""A serving loop over both runners: `LLM` is the way in.

The path of a request: `prompts` makes tokens of it, `scheduler` forms steps, `prefix_cache` finds what need not be computed
again, `prefill_step` and `decode_step` run the steps as graphs over the paged `kv_cache`, `sampling` draws tokens on the
device, `logits_tail` does what no graph holds (penalties, bias, log-probabilities), `engine` keeps the host one step ahead, and
`text` turns tokens back into text. `engine_thread` runs all that beside an event loop.
"""

from breakgraph.serving.config import EngineConfig, Graphs, SamplingPaths
from breakgraph.serving.llm import LLM
from breakgraph.serving.prefix_cache import PrefixReuse
from breakgraph.serving.requests import Chunk, Completion, FinishReason, TokenLogprobs
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.statistics import Statistics

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "EngineConfig",
    "FinishReason",
    "Graphs",
    "PrefixReuse",
    "SamplingParams",
    "SamplingPaths",
    "Statistics",
    "TokenLogprobs",
]
