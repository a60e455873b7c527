"""Which files of a model a shard needs, and a directory that holds just those."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from meshnet.errors import ConfigError
from meshnet.model_dir import (
    CONFIG_FILE,
    READ_SUFFIXES,
    TOKENIZER_FILES,
    ModelDir,
    check_files,
    read_model_dir,
)
from meshnet.model_hub import HubModel, fetch_files, parse_source
from meshnet.model_weights import (
    INDEX_FILE,
    WEIGHTS_FILE,
    WeightIndex,
    model_digest,
    read_safetensors_header,
    read_weight_index,
)
from meshnet.topology import LayerRange
from meshnet_node.tensor_names import left_out

__all__ = ["ModelFiles", "resolve_model", "shard_files"]

_LINKED_SUFFIXES: Final = READ_SUFFIXES - {".safetensors"}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine, as far as a shard needs it.

    Attributes:
        directory: loadable; its weight index names only files that are there.
        name: the model's name in the mesh.
        digest: equal on every node of the model, whichever files it holds.
        num_layers: of the whole model.
        hidden_size: width of the hidden states.
        vocab_size: width of the logits.
        weight_files: names of the weight files that the shard reads.
    """

    directory: Path
    name: str
    digest: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    weight_files: tuple[str, ...]


def resolve_model(
    source: str,
    layers: LayerRange | None = None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    hub_cache: Path | None = None,
    progress: bool = False,
) -> ModelFiles:
    """Make the files of a shard available and check them.

    Args:
        source: a model directory, or ``org/name[@revision]`` on the hub: then only the weight
            files that the shard reads are fetched.
        layers: of the shard; None for all.
        endpoint: the hub's address; None for the public one.
        cache_dir: of meshnet, for directories of links; None for ``~/.cache/meshnet``.
        hub_cache: for downloads; None for the one that all Hugging Face tools share.
        progress: draw progress bars of downloads on stderr.

    Raises:
        MeshError: ConfigError for a source, file or layer range that cannot be used;
            UNAVAILABLE where the hub cannot be reached and the cache lacks a file.
    """
    place = parse_source(source)
    if isinstance(place, HubModel):
        directory = _download(place, layers, endpoint, hub_cache, progress=progress)
        check_files(directory)
        shape = replace(read_model_dir(directory), name=place.repo)
    else:
        directory = place
        check_files(directory)
        shape = read_model_dir(directory)
    index = read_weight_index(directory)
    digest = model_digest(directory)
    files = shard_files(index, _checked(layers, shape, directory), shape.num_layers)
    _check_weights(directory, index, files)
    if any(not (directory / file).is_file() for file in set(index.weight_map.values())):
        views = (cache_dir or Path.home() / ".cache" / "meshnet") / "views"
        directory = _view(directory, index, files, views)
    return ModelFiles(
        directory, shape.name, digest, shape.num_layers, shape.hidden_size, shape.vocab_size, files
    )


def shard_files(index: WeightIndex, layers: LayerRange, num_layers: int) -> tuple[str, ...]:
    """Choose the weight files that hold what a shard loads, sorted by name.

    See `tensor_names.left_out`. Files are named whole: one is needed for a single tensor.
    """
    unneeded = left_out(index.weight_map, layers, num_layers)
    files = {file for tensor, file in index.weight_map.items() if tensor not in unneeded}
    return tuple(sorted(files))


def _download(
    model: HubModel,
    layers: LayerRange | None,
    endpoint: str | None,
    hub_cache: Path | None,
    *,
    progress: bool,
) -> Path:
    def fetch(revision: str, names: Iterable[str]) -> Path:
        return fetch_files(
            HubModel(model.repo, revision),
            names,
            endpoint=endpoint,
            hub_cache=hub_cache,
            progress=progress,
        )

    directory = fetch(model.revision, (CONFIG_FILE, INDEX_FILE, *TOKENIZER_FILES))
    # A branch may move between the two requests; the snapshot's name is its commit.
    commit = directory.name
    if not (directory / INDEX_FILE).exists():
        return fetch(commit, (WEIGHTS_FILE,))
    shape = read_model_dir(directory)
    files = shard_files(
        read_weight_index(directory), _checked(layers, shape, directory), shape.num_layers
    )
    return fetch(commit, files)


def _checked(layers: LayerRange | None, shape: ModelDir, directory: Path) -> LayerRange:
    whole = LayerRange(0, shape.num_layers)
    if layers is None:
        return whole
    if not whole.contains(layers):
        raise ConfigError(
            f"layers {layers}: expected a part of {whole}, which {directory} has", field="layers"
        )
    return layers


def _check_weights(directory: Path, index: WeightIndex, files: tuple[str, ...]) -> None:
    for file in files:
        path = directory / file
        if not path.exists():
            raise ConfigError(f"{path}: missing, but the shard needs it", field=str(path))
        header = read_safetensors_header(path)
        for tensor, holder in index.weight_map.items():
            if holder == file and tensor not in header:
                raise ConfigError(
                    f"{path}: no tensor {tensor!r}, which {INDEX_FILE} says is there",
                    field=str(path),
                )


def _view(directory: Path, index: WeightIndex, files: tuple[str, ...], views: Path) -> Path:
    """Link the needed files into a directory of their own, with an index of just these.

    Loaders fail on an index that names absent files. The model directory, possibly a cache
    that other programs share, is not touched.
    """
    directory = directory.resolve()
    links = [
        path
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in _LINKED_SUFFIXES and path.name != INDEX_FILE
    ]
    links += [directory / file for file in files]
    names = [path.name for path in links]
    key = json.dumps([str(directory), index.identity.decode("utf-8", "replace"), names])
    view = views / hashlib.sha256(key.encode()).hexdigest()[:32]
    if view.is_dir() and all((view / name).exists() for name in (*names, INDEX_FILE)):
        return view
    part = views / f".{view.name}.{secrets.token_hex(4)}.part"
    try:
        part.mkdir(parents=True)
        for path in links:
            (part / path.name).symlink_to(path)
        kept = {tensor: file for tensor, file in index.weight_map.items() if file in files}
        (part / INDEX_FILE).write_text(
            json.dumps({"metadata": {}, "weight_map": kept}), encoding="utf-8"
        )
        shutil.rmtree(view, ignore_errors=True)
        part.rename(view)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        # Another node of this machine may have made the same one meanwhile.
        if not view.is_dir():
            raise ConfigError(
                f"{views}: cannot link the shard's files: {error.strerror or error}",
                field=str(views),
            ) from error
    return view
