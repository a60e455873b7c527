"""Models by name: a directory, or a name of the Hugging Face hub fetched into its cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshnet.errors import Code, ConfigError, MeshError
from meshnet.model_dir import CONFIG_FILE, TOKENIZER_FILES, check_files, read_model_dir

__all__ = ["HubModel", "TokenizerFiles", "fetch_files", "parse_source", "resolve_tokenizer"]

_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME: Final = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repo: ``org/name``.
        revision: branch, tag or commit.
    """

    repo: str
    revision: str


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A model as a gateway needs it.

    Attributes:
        directory: with ``config.json`` and the tokenizer's files.
        name: the model's name in the mesh, as its nodes register it.
    """

    directory: Path
    name: str


def parse_source(source: str) -> Path | HubModel:
    """Read what the user named: a directory that exists, or ``org/name[@revision]``.

    Raises:
        ConfigError: neither of the two.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path.absolute()
    if path.is_file():
        hint = f": meshnet model import {source} DIR" if path.suffix == ".gguf" else ""
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
            hint = " with safetensors weights: pickle can run code and is never read"
        raise ConfigError(f"{source}: a file, expected a model directory{hint}", field="model")
    match = _HUB_NAME.fullmatch(source)
    if match is None or ".." in source:
        raise ConfigError(
            f"{source!r}: no such directory, and no hub name of the form org/name[@revision]",
            field="model",
        )
    return HubModel(match[1], match[2] or "main")


def fetch_files(
    model: HubModel,
    names: Iterable[str],
    *,
    endpoint: str | None = None,
    hub_cache: Path | None = None,
    progress: bool = False,
) -> Path:
    """Bring those of the named files that the model has into the hub's cache.

    Files cached already are not fetched again; without a connection they suffice.

    Args:
        model: to fetch from.
        names: of files in the repository, without wildcards.
        endpoint: the hub's address; None for the public one.
        hub_cache: where the cache is; None for the one that all Hugging Face tools share.
        progress: draw progress bars on stderr.

    Returns:
        The snapshot directory in the cache; it may hold other files too.

    Raises:
        MeshError: ConfigError where the hub knows no such model, revision or file;
            UNAVAILABLE where it cannot be reached and the cache lacks a file.
    """
    from huggingface_hub import errors, snapshot_download  # slow to import
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    label = model.repo if model.revision == "main" else f"{model.repo}@{model.revision}"
    wanted = sorted(set(names))
    try:
        snapshot = snapshot_download(
            model.repo,
            revision=model.revision,
            endpoint=endpoint,
            cache_dir=hub_cache,
            allow_patterns=wanted,
            tqdm_class=None if progress else Silent,
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"model {label}: access is gated: accept its terms and log in with `hf auth login`",
            field="model",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {label}: the hub has no such model, or shows it only after `hf auth login`",
            field="model",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"model {model.repo}: no revision {model.revision!r}", field="model"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        where = endpoint or "the hub"
        raise MeshError(
            Code.UNAVAILABLE,
            f"model {label}: {where} cannot be reached, and the cache does not hold every file",
            field="model",
            reason="HUB_UNREACHABLE",
        ) from error
    # The rest are transport errors of whichever HTTP library the hub client uses.
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise MeshError(
            Code.UNAVAILABLE,
            f"model {label}: download failed: {type(error).__name__}: {first_line}",
            field="model",
            reason="HUB_UNREACHABLE",
        ) from error
    return Path(snapshot)


def resolve_tokenizer(
    source: str,
    *,
    endpoint: str | None = None,
    hub_cache: Path | None = None,
    progress: bool = False,
) -> TokenizerFiles:
    """Make a model's tokenizer and configuration available; no weights are fetched.

    `source` is a model directory or ``org/name[@revision]``; for the rest see `fetch_files`.
    """
    place = parse_source(source)
    if isinstance(place, Path):
        check_files(place)
        return TokenizerFiles(place, read_model_dir(place).name)
    names = (CONFIG_FILE, *TOKENIZER_FILES)
    directory = fetch_files(place, names, endpoint=endpoint, hub_cache=hub_cache, progress=progress)
    return TokenizerFiles(directory, place.repo)
