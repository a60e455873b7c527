"""Which model types run in shards exactly as in one process."""

from __future__ import annotations

import json
from importlib import resources

__all__ = ["verified_model_types"]


def verified_model_types() -> frozenset[str]:
    """Give the model types that were shown to run in shards bit for bit as in one process.

    Source: architectures.json, written by `meshnet_node.hf.survey`.
    """
    text = resources.files("meshnet_node").joinpath("architectures.json").read_text("utf-8")
    return frozenset(json.loads(text)["verified"])
