"""What a node process serves: which shard, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshnet.cli.output import errors
from meshnet.control.reference_file import REFERENCE_FILE, read_reference_file
from meshnet.errors import ConfigError
from meshnet.topology import LayerRange
from meshnet.v1.reference_service_pb2 import Reference
from meshnet_node.backend import ShardBackend, ShardSpec
from meshnet_node.model_files import ModelFiles, resolve_model
from meshnet_node.stub import StubBackend

__all__ = ["ShardSource", "model_source", "stub_source"]


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A shard that is not loaded yet.

    Attributes:
        spec: what it will hold.
        open: loads it.
        reference: of its model, if there is one beside the weights.
    """

    spec: ShardSpec
    open: Callable[[], ShardBackend]
    reference: Reference | None = None


def stub_source(
    layers: LayerRange,
    *,
    hidden_size: int,
    num_layers: int | None,
    head: bool,
    delay_s: float,
    busy: bool,
) -> ShardSource:
    """Give a stub's shard.

    Args:
        layers: of the shard.
        hidden_size: of what passes through.
        num_layers: of the model; None for those up to the end of `layers`.
        head: whether the last layers of the model end in logits.
        delay_s: seconds that a chunk takes.
        busy: keep a thread computing in Python.

    Raises:
        ConfigError: `num_layers` are too few.
    """
    if num_layers is not None and num_layers < layers.end:
        raise ConfigError(
            f"--stub-layers: {num_layers}; expected at least {layers.end}, where --layers ends",
            field="--stub-layers",
        )
    stub = StubBackend(
        layers,
        hidden_size=hidden_size,
        num_layers=num_layers,
        head=head,
        delay_s=delay_s,
        busy=busy,
    )
    return ShardSource(stub.spec, lambda: stub)


def model_source(
    model: str | None,
    layers: LayerRange,
    *,
    hub_endpoint: str | None,
    cache_dir: Path,
    dtype: str,
    threads: int | None,
    allow_unverified: bool,
) -> ShardSource:
    """Find the files of a model, and give its shard.

    Args:
        model: directory or hub name.
        layers: of the shard.
        hub_endpoint: where hub names are looked up; None for the hub's own address.
        cache_dir: for what is made of files.
        dtype: what to compute in.
        threads: to compute with; None for torch's choice.
        allow_unverified: also an architecture that is not known to run exactly in shards.

    Raises:
        ConfigError: there is no model, or it cannot be served.
    """
    if model is None:
        raise ConfigError(
            "--model is missing; expected a model directory or a hub name", field="--model"
        )
    files = resolve_model(
        model,
        layers,
        endpoint=hub_endpoint,
        cache_dir=cache_dir,
        progress=errors.is_terminal,
    )
    spec = ShardSpec(
        model=files.name,
        digest=files.digest,
        layers=layers,
        num_layers=files.num_layers,
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
        holds_embedding=layers.start == 0,
        holds_head=layers.end == files.num_layers,
        cache_bytes_per_token=0,
    )

    def open_shard() -> ShardBackend:
        from meshnet_node.hf.shard import TransformersShard

        return TransformersShard(
            files.directory,
            layers,
            model=files.name,
            digest=files.digest,
            dtype=dtype,
            threads=threads,
            allow_unverified=allow_unverified,
        )

    return ShardSource(spec, open_shard, _reference(files))


def _reference(files: ModelFiles) -> Reference | None:
    """Give the reference that lies beside the weights, if it is of this model."""
    reference = read_reference_file(files.directory)
    if reference is not None and reference.model_digest != files.digest:
        errors.print(
            f"{files.directory}: {REFERENCE_FILE} is of another digest of the model and not used;"
            " meshnet model reference makes it anew",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return None
    if reference is not None:
        reference.model = f"models/{files.name}"
    return reference
