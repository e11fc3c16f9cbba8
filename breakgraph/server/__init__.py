"""An HTTP server that speaks OpenAI's completions and chat completions, over the engine of `breakgraph.serving`.

The path of a request: `bodies` reads it, `protocol` checks it, `prompting` makes tokens (in the thread of `tokenizing`) and
sampling parameters of it, `service` hands it to the engine's thread, `answers` makes text of what comes back, and `forms` gives
it OpenAI's form, whole or as chunks of an `event_stream`. `app` puts the routes together, `run` serves them until a signal comes.
"""

from breakgraph.server.app import create_app
from breakgraph.server.limits import Limits
from breakgraph.server.run import run_server
from breakgraph.server.service import Service

__all__ = ["Limits", "Service", "create_app", "run_server"]
