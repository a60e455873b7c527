"""Runs a shard of a Hugging Face causal language model: `ShardBackend` on transformers.

The model's own forward does the arithmetic, masks and positions included. At a shard that
does not begin at layer 0 the hidden states received replace what the model made of its
inputs; at one that does not end at the last layer the output of its last layer is taken.
Hidden states are bfloat16 at both ends, whatever the arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from meshnet.dtypes import BFLOAT16, INT32, numpy_dtype
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.grammar import Want
from meshnet.kv import KvLayout
from meshnet.model_dir import read_model_dir
from meshnet.topology import LayerRange
from meshnet_node.backend import Cache, ShardSpec
from meshnet_node.hf.cache import SessionCache
from meshnet_node.hf.load import load_shard, quiet_transformers
from meshnet_node.hf.skeleton import arguments_of
from meshnet_node.hf.tensor import from_torch, to_torch
from meshnet_node.hf.weights import ShardWeights
from meshnet_node.hf.window import LayerWindow

__all__ = ["TransformersShard"]

_CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "cache_params")


class TransformersShard:
    """Layers of a model directory, loaded and ready to compute.

    One token is run through the shard before the constructor returns.

    Args:
        directory: with ``config.json`` and safetensors weights.
        layers: to load, half-open.
        model: name under which the model is served.
        digest: of the model's files, as `ShardSpec.digest`.
        dtype: of the arithmetic: ``auto`` (as saved), ``bfloat16`` or ``float32``.
        threads: for torch, in the whole process; None leaves torch's default.
        allow_unverified: also load architectures that were not shown to run in shards.

    Raises:
        MeshError: the directory or the layers cannot be used; see `load.load_shard`.
    """

    def __init__(
        self,
        directory: Path,
        layers: LayerRange,
        *,
        model: str,
        digest: str,
        dtype: str = "auto",
        threads: int | None = None,
        allow_unverified: bool = False,
    ) -> None:
        if threads is not None:
            if threads < 1:
                raise ConfigError(f"threads {threads}, expected at least 1", field="threads")
            torch.set_num_threads(threads)
        shape = read_model_dir(directory)
        self._shape = shape
        self._shard = load_shard(
            directory, shape, layers, dtype=dtype, allow_unverified=allow_unverified
        )
        self._weights = ShardWeights(self._shard, layers)
        self._window = LayerWindow(self._shard, layers, shape.num_layers)
        self._decoder_cache = _cache_argument(self._shard.decoder)
        self._model_cache = _cache_argument(self._shard.model)
        self._picks_logits = "logits_to_keep" in arguments_of(self._shard.model)
        self._received: torch.Tensor | None = None
        self._given: torch.Tensor | None = None
        self._hooks: list[Any] = []
        holds_head = layers.end == shape.num_layers
        self._spec = ShardSpec(
            model=model,
            digest=digest,
            layers=layers,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size if holds_head or layers.start == 0 else 0,
            holds_embedding=layers.start == 0,
            holds_head=holds_head,
            cache_bytes_per_token=0,
        )
        with quiet_transformers():
            probed = self._probe()
        self._spec = replace(self._spec, cache_bytes_per_token=probed.bytes_per_token)
        self._kv = probed.kv()

    @property
    def spec(self) -> ShardSpec:
        """What is held."""
        return self._spec

    @property
    def keeps_threads(self) -> bool:
        """Whether torch computes with threads besides its caller, kept for each caller."""
        return torch.get_num_threads() > 1

    @property
    def kv(self) -> KvLayout | None:
        """What a cache holds, as the first token showed it."""
        return self._kv

    @property
    def weights(self) -> ShardWeights:
        """The weights held, by layer."""
        return self._weights

    def open_cache(self) -> SessionCache:
        """Make an empty cache for a new session."""
        return SessionCache(self._shard.config, self._spec.layers)

    def forward(
        self,
        cache: Cache,
        tensor: npt.NDArray[Any],
        *,
        layers: LayerRange,
        want: Want,
    ) -> npt.NDArray[Any] | None:
        """Run `layers` on one chunk; see `ShardBackend.forward`.

        ``hidden`` at the model's last layer gives its output before the final norm.

        Raises:
            MeshError: INVALID_ARGUMENT or OUT_OF_RANGE for what this shard cannot take;
                INTERNAL when the computation fails. The cache is unchanged then, except
                that a failed computation empties a recurrent model's.
        """
        if not isinstance(cache, SessionCache):
            raise TypeError(f"cache {type(cache).__name__}, expected one from open_cache()")
        inputs = self._check(cache, tensor, layers, want)
        position, view = cache.length, cache.view(layers)
        if self._window.select(layers):
            self._hook(layers)
        try:
            with torch.inference_mode():
                result = self._run(inputs, view, layers, want)
        except Exception as error:
            cache.roll_back()
            raise MeshError(
                Code.INTERNAL,
                f"layers {layers} failed on {tensor.shape[1]} tokens at position {position}: "
                f"{type(error).__name__}: {error}",
                reason="COMPUTE_FAILED",
            ) from error
        finally:
            self._received = self._given = None
        cache.advance(int(tensor.shape[1]))
        return result

    def _run(
        self, inputs: torch.Tensor, view: Any, layers: LayerRange, want: Want
    ) -> npt.NDArray[Any] | None:
        arguments: dict[str, Any] = {"use_cache": True}
        if layers.start == 0:
            arguments["input_ids"] = inputs
        else:
            # The model learns their number; the hook on the first layer puts them in.
            self._received = inputs
            width = self._shard.embedding_width
            embeddings = torch.zeros(1, inputs.shape[1], width, dtype=self._shard.dtype)
            arguments["inputs_embeds"] = embeddings
        if want.kind in ("logits", "top"):
            if self._picks_logits:
                # An index, since a count makes some heads copy their whole transposed weight.
                arguments["logits_to_keep"] = torch.tensor([inputs.shape[1] - 1])
            arguments[self._model_cache] = view
            logits = self._shard.model(**arguments).logits[:, -1:].float()
            if want.kind == "top":
                return _top(logits[0, 0], want.top)
            return cast("npt.NDArray[Any]", logits.numpy())
        arguments[self._decoder_cache] = view
        self._shard.decoder(**arguments)
        if want.kind == "none":
            return None
        if self._given is None:
            raise RuntimeError("the last layer was not called")
        return from_torch(self._given)

    def _hook(self, layers: LayerRange) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [self._window.last.register_forward_hook(self._take)]
        if layers.start > 0:
            first = self._window.first
            self._hooks.append(first.register_forward_pre_hook(self._put, with_kwargs=True))

    def _put(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = args[0] if args else kwargs["hidden_states"]
        if self._received is None:
            raise RuntimeError("no hidden states were received")
        received = self._received.to(made.dtype)
        if args:
            return (received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received}

    def _take(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._given = output[0] if isinstance(output, tuple) else output

    def _check(
        self, cache: SessionCache, tensor: npt.NDArray[Any], layers: LayerRange, want: Want
    ) -> torch.Tensor:
        """Refuse what this shard cannot compute; gives the model's input otherwise."""
        spec, shape = self._spec, self._shape
        if not spec.layers.contains(layers):
            raise _refused("X-Meshnet-Layers", f"layers {layers}", f"within {spec.layers}")
        if want.kind in ("logits", "top") and layers.end != spec.num_layers:
            raise _refused(
                "X-Meshnet-Want",
                f"{want} after layers {layers}",
                f"hidden or none: the head follows layer {spec.num_layers - 1}",
            )
        if want.kind == "top" and not 1 <= want.top <= spec.vocab_size:
            raise _refused("X-Meshnet-Want", str(want), f"top-1 to top-{spec.vocab_size}")
        name, dims = (INT32, 2) if layers.start == 0 else (BFLOAT16, 3)
        if tensor.dtype != numpy_dtype(name):
            raise _refused(
                "X-Meshnet-Dtype",
                f"{tensor.dtype} for layers {layers}",
                "int32 token ids" if name == INT32 else "bfloat16 hidden states",
            )
        expected = f"1,SEQ{'' if dims == 2 else f',{spec.hidden_size}'} for layers {layers}"
        if (
            tensor.ndim != dims
            or tensor.shape[0] != 1
            or tensor.shape[1] < 1
            or (dims == 3 and tensor.shape[2] != spec.hidden_size)
        ):
            raise _refused("X-Meshnet-Shape", ",".join(map(str, tensor.shape)), expected)
        end = cache.length + int(tensor.shape[1])
        if shape.max_positions and end > shape.max_positions:
            raise MeshError(
                Code.OUT_OF_RANGE,
                f"the chunk ends at position {end}, the model takes {shape.max_positions}",
                field="X-Meshnet-Position",
                reason="CONTEXT_FULL",
            )
        if name == BFLOAT16:
            return to_torch(np.ascontiguousarray(tensor))
        low, high = int(tensor.min()), int(tensor.max())
        if low < 0 or high >= shape.vocab_size:
            raise _refused(
                "body", f"token id {low if low < 0 else high}", f"0 to {shape.vocab_size - 1}"
            )
        return torch.from_numpy(tensor.astype(np.int64))

    def _probe(self) -> SessionCache:
        """Run one token; gives the cache that holds it.

        Raises:
            MeshError: what comes out is of no use: ConfigError for another shape than the
                configuration's; UNIMPLEMENTED, reason ``ARCHITECTURE_NOT_VERIFIED``, for NaN
                while weights were left out.
        """
        spec = self._spec
        cache = self.open_cache()
        dims = (1, 1) if spec.holds_embedding else (1, 1, spec.hidden_size)
        tensor = np.zeros(dims, numpy_dtype(INT32 if spec.holds_embedding else BFLOAT16))
        want = Want("logits" if spec.holds_head else "hidden")
        output = self.forward(cache, tensor, layers=spec.layers, want=want)
        width = spec.vocab_size if spec.holds_head else spec.hidden_size
        if output is None or output.shape != (1, 1, width):
            raise ConfigError(
                f"layers {spec.layers} give {None if output is None else output.shape}, "
                f"config.json says {(1, 1, width)}",
                field="config.json",
            )
        if self._shard.left_out and np.isnan(output.astype(np.float32)).any():
            raise MeshError(
                Code.UNIMPLEMENTED,
                f"layers {spec.layers} give NaN without the weights of "
                f"{', '.join(self._shard.left_out)}, which should have no effect on them",
                reason="ARCHITECTURE_NOT_VERIFIED",
            )
        return cache


def _top(logits: torch.Tensor, count: int) -> npt.NDArray[np.float32]:
    values, ids = torch.topk(logits, count)
    out = np.empty((1, count + 1, 2), np.float32)
    out[0, :count, 0] = ids.numpy()
    out[0, :count, 1] = values.numpy()
    out[0, count] = -1.0, float(torch.logsumexp(logits, 0))
    return out


def _cache_argument(module: torch.nn.Module) -> str:
    names = arguments_of(module)
    found = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    if found is None:
        raise MeshError(
            Code.UNIMPLEMENTED,
            f"{type(module).__name__} takes no KV cache",
            reason="ARCHITECTURE_NOT_VERIFIED",
        )
    return found


def _refused(field: str, value: str, expected: str) -> MeshError:
    return MeshError(Code.INVALID_ARGUMENT, f"{field}: {value}, expected {expected}", field=field)
