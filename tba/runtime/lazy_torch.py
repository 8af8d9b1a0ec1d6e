"""The module torch, imported when it is first used.

Every command reads settings, and the settings of an objective are in the file of its loss. But most commands do not
need torch, which takes seconds to import.
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
