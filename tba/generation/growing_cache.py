"""A cache of keys and values whose rows can be added and removed while a batch is being generated."""
# Shapes: B rows, T columns (tokens of prompt and response with padding on the left).

from typing import Any, cast

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from tba.errors import ConfigError


class GrowingLayer(DynamicLayer):
    """The keys and values of one layer, [B, heads, T, head size], with spare columns at the end. A generated token
    writes its column in place, whereas transformers' own cache copies all earlier columns."""

    length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keys, self._values = key_states, value_states
        else:
            if self.length > self._keys.shape[-2]:
                self._keys, self._values = self._with_room(self._keys), self._with_room(self._values)
            self._keys[:, :, first : self.length] = key_states
            self._values[:, :, first : self.length] = value_states
        return self._show()

    def select(self, rows_B: Tensor, *, first: int = 0) -> None:
        """Keep only the rows whose numbers `rows_B` lists, and drop the columns before `first`. A row that is listed
        twice is copied."""
        self._keys = self._keys[:, :, first : self.length].index_select(0, rows_B)
        self._values = self._values[:, :, first : self.length].index_select(0, rows_B)
        self.length -= first
        self._show()

    def join(self, other: "GrowingLayer") -> None:
        """Append the rows of another layer. The shorter of the two is padded on the left, so that all rows end in the
        same column."""
        self._keys = _stack(self._keys[:, :, : self.length], other._keys)
        self._values = _stack(self._values[:, :, : self.length], other._values)
        self.length = self._keys.shape[2]
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values

    def _with_room(self, held: Tensor) -> Tensor:
        rows, heads, columns, size = held.shape
        larger = held.new_zeros((rows, heads, max(self.length, columns + columns // 2 + 8), size))
        larger[:, :, :columns] = held
        return larger


def _stack(upper: Tensor, lower: Tensor) -> Tensor:
    rows, columns = len(upper) + len(lower), max(upper.shape[2], lower.shape[2])
    both = upper.new_zeros((rows, upper.shape[1], columns, upper.shape[3]))
    both[: len(upper), :, columns - upper.shape[2] :] = upper
    both[len(upper) :, :, columns - lower.shape[2] :] = lower
    return both


def new_cache() -> Cache:
    return Cache(layer_class_to_replicate=GrowingLayer)


def layers_of(cache: Cache) -> list[GrowingLayer]:
    return cast(list[GrowingLayer], cache.layers)


def check_cache(model: PreTrainedModel, setting: str) -> None:
    """Raise ConfigError, naming the setting, if some layer of a model does not cache exactly one entry per token: rows
    could not be added to such a cache, or removed from it, one by one."""
    kept = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if foreign := kept - {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise ConfigError(
            f"{setting}: cannot generate with {model.config.model_type}: its cache has layers of type "
            f"{', '.join(foreign)}, whose rows cannot be added or removed one by one"
        )
