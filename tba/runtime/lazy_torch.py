"""torch, imported when it is first used.

The settings of an objective stand beside its loss, and every command reads settings. Most commands need no torch, which
takes seconds to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch = _Torch()
