"""Settings of a searcher, with rounds as small as a test likes."""

from typing import Any

from tba.config import Config


def searcher_config(
    *, deadline: float = 60.0, lag: int | None = None, updates_in_flight: bool = False, **search: Any
) -> Config:
    return Config().replace(
        {
            "seed": 7,
            "training.prompts_per_step": 1,
            "training.responses_per_prompt": 2,
            "sync.every": 1,
            "sync.lag": lag,
            "sync.keep_versions": (lag or 0) + 2,
            "limits.data_deadline": deadline,
            "engine.in_flight": "update" if updates_in_flight else "finish",
            "search.initial_fill": 2,
            **{f"search.{name}": value for name, value in search.items()},
        }
    )
