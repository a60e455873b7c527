"""Which model types run in shards; the shape of a model directory comes from `meshnet`."""

from __future__ import annotations

import json
from importlib import resources

from meshnet.model_dir import ModelDir as ModelConfig
from meshnet.model_dir import read_model_dir as read_model_config

__all__ = ["ModelConfig", "read_model_config", "verified_model_types"]


def verified_model_types() -> frozenset[str]:
    """Give the model types that were shown to run in shards exactly as in one process.

    Source: architectures.json, written by `meshnet_node.hf_survey`.
    """
    text = resources.files("meshnet_node").joinpath("architectures.json").read_text("utf-8")
    return frozenset(json.loads(text)["verified"])
