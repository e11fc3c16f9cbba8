"""How each model type of transformers is served, as it was found out once: what `breakgraph models` prints.

Our own decoders are those of `config.py`. The others come from `served_models.json`, which `python benchmarks/tables.py`
makes of what the probe recorded. It decides nothing: a model is probed when it is loaded.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import attrs

from breakgraph.models.config import SUPPORTED_MODEL_TYPES

__all__ = ["Families", "Family", "families"]

OWN = "own decoder"
RECORDS = "served_models.json"

# By the outcomes of benchmarks/transformers_models.py; the order is that of the table.
ADAPTED = {
    "served": "adapter",
    "right, but eager": "adapter, eager steps",
    "passed the probe, then differed": "adapter, tokens differed",
    "refused": "refused",
    "not made": "not tried",
}


@attrs.frozen
class Family:
    """One model type.

    Attributes:
        model_type: As transformers names it.
        served: How, in a few words.
        reason: Why not better; empty where all is well.
    """

    model_type: str
    served: str
    reason: str = ""


@attrs.frozen
class Families:
    """All model types.

    Attributes:
        transformers: The version that was probed.
        families: Our own decoders, then what the adapter serves, then the rest; by name within each.
    """

    transformers: str
    families: tuple[Family, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it as values that JSON has."""
        return attrs.asdict(self)

    @property
    def note(self) -> str:
        """What the table is worth, for people."""
        return (
            f"As found with transformers {self.transformers}, on small random models. Every model is probed when it is loaded, "
            "with whatever version is installed."
        )


def families() -> Families:
    """Reads the package's table."""
    records = json.loads(resources.files("breakgraph.models").joinpath(RECORDS).read_text(encoding="utf-8"))
    own = [Family(kind, OWN) for kind in sorted(SUPPORTED_MODEL_TYPES)]
    order = list(ADAPTED.values())
    others = [
        Family(kind, ADAPTED[row["outcome"]], row.get("reason", ""))
        for kind, row in records["models"].items()
        if kind not in SUPPORTED_MODEL_TYPES
    ]
    others.sort(key=lambda family: (order.index(family.served), family.model_type))
    return Families(records["transformers"], (*own, *others))
