"""Makes a loaded shard run a sub-range of its layers, as if they were the whole model.

A decoder's forward loops over its list of layers, asks its configuration about each and
addresses the cache by each layer's index. All three are set to the sub-range here.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from transformers.configuration_utils import PretrainedConfig

from meshnet.topology import LayerRange
from meshnet_node.hf.load import LoadedShard

__all__ = ["LayerWindow"]

_INDEX_ATTRIBUTES: Final = ("layer_idx", "layer_id", "layer_index", "layer_number")


class LayerWindow:
    """The part of a shard that runs now.

    Args:
        shard: whose decoder is changed in place.
        held: the layers that it holds.
        num_layers: layers of the whole model.
    """

    def __init__(self, shard: LoadedShard, held: LayerRange, num_layers: int) -> None:
        self._shard = shard
        self._held = held
        self._layers = list(getattr(shard.owner, shard.list_name))
        self._indexed = [
            (module, name, vars(module)[name])
            for layer in self._layers
            for module in layer.modules()
            for name in _INDEX_ATTRIBUTES
            if type(vars(module).get(name)) is int
        ]
        text = shard.model.config.get_text_config(decoder=True)
        owned = (shard.decoder.config, getattr(shard.owner, "config", text))
        configs = {id(config): config for config in (text, *owned)}
        self._configs = [
            _ConfigSlicer(config, num_layers)
            for config in configs.values()
            if config.num_hidden_layers == num_layers
        ]
        self._active: LayerRange | None = None
        self.first: nn.Module = self._layers[0]
        self.last: nn.Module = self._layers[-1]

    def select(self, layers: LayerRange) -> bool:
        """Make the decoder run `layers`; gives False when it does already."""
        if layers == self._active:
            return False
        start = self._held.start
        chosen = self._layers[layers.start - start : layers.end - start]
        setattr(self._shard.owner, self._shard.list_name, nn.ModuleList(chosen))
        for module, name, index in self._indexed:
            setattr(module, name, index - layers.start)
        for config in self._configs:
            config.apply(layers)
        self.first, self.last = chosen[0], chosen[-1]
        self._active = layers
        return True


class _ConfigSlicer:
    """Cuts a configuration's per-layer lists, the computed ones too, to a range of layers."""

    def __init__(self, config: Any, num_layers: int) -> None:
        self._config = config
        self._class = type(config)
        self._lists = {
            name: value
            for name, value in vars(config).items()
            if isinstance(value, list | tuple) and len(value) == num_layers
        }
        self._computed = {}
        for name in dir(self._class):
            own = getattr(PretrainedConfig, name, None) is None
            if own and isinstance(getattr(self._class, name, None), property):
                value = getattr(config, name, None)
                if isinstance(value, list | tuple) and len(value) == num_layers:
                    self._computed[name] = value

    def apply(self, layers: LayerRange) -> None:
        # Through __dict__: a configuration checks assignments against its other fields,
        # which do not fit together halfway.
        values = vars(self._config)
        values[self._layer_count_name()] = len(layers)
        for name, value in self._lists.items():
            values[name] = value[layers.start : layers.end]
        if self._computed:
            cut = {name: value[layers.start : layers.end] for name, value in self._computed.items()}
            self._config.__class__ = type(self._class.__name__, (self._class,), cut)

    def _layer_count_name(self) -> str:
        return str(self._class.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
