"""All settings of a run. They are frozen, checked before anything starts, and stored in the run's `run.json`.

`Config` has a section for each topic. An error names the setting, its value and what the setting allows.
"""

from tba.config.config import Config, parse, parse_known, parse_options
from tba.config.engine import CustomEngine, Engine, TransformersEngine, VLLMEngine
from tba.config.model import ModelConfig, TaskConfig
from tba.config.operations import AlarmsConfig, LimitsConfig, MetricsConfig, StartConfig
from tba.config.search import SamplingConfig, SearchConfig
from tba.config.training import EvaluationConfig, OptimizerName, SyncConfig, TrainingConfig, same_moments
from tba.settings import settings

__all__ = [
    "AlarmsConfig", "Config", "CustomEngine", "Engine", "EvaluationConfig", "LimitsConfig", "MetricsConfig",
    "ModelConfig", "OptimizerName", "SamplingConfig", "SearchConfig", "StartConfig", "SyncConfig", "TaskConfig",
    "TrainingConfig", "TransformersEngine", "VLLMEngine", "parse", "parse_known", "parse_options", "same_moments",
    "settings",
]  # fmt: skip
