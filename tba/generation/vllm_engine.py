"""The start and the end of an engine of vLLM, and the models that it cannot serve."""

import os
import signal
from concurrent.futures import InvalidStateError
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import AutoConfig, GenerationConfig
from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.exceptions import EngineDeadError  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

from tba.errors import ConfigError, RunFailed
from tba.generation.vllm_plugin import OURS
from tba.models.file_checks import check_files, read_object

CPU_CACHE = 1.0  # gigabytes of keys and values on a CPU, whose memory others use too


def start_engine(arguments: EngineArgs, *, on_cpu: bool) -> LLMEngine:
    """Start an engine in a process of its own, which leaves signals to stop to the role that may still need it.
    ConfigError if vLLM cannot serve this model so, RunFailed if it does not start."""
    resource_tracker.ensure_running()  # which unblocks signals as it starts, with the first process otherwise
    os.environ |= {OURS: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else every engine binds itself to the same cores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        engine = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"engine.name: vLLM cannot serve this model so: {error}; transformers may") from error
    except (RuntimeError, TimeoutError) as error:
        raise RunFailed(f"vLLM did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    Thread(target=_tell_of_death, args=(engine.engine_core,), name="engine-death", daemon=True).start()
    return engine


def _tell_of_death(core: Any) -> None:
    """Tell whoever waits for an engine that it has died: vLLM's own client waits on."""
    wait([process.sentinel for process in core.resources.engine_manager.processes])
    core.resources.engine_dead = True  # whoever asks from now on
    core.outputs_queue.put(EngineDeadError())
    for answer in list(core.utility_results.values()):
        with suppress(InvalidStateError):  # it came just before
            answer.set_exception(EngineDeadError())


def end_engine(engine: LLMEngine) -> None:
    """End an engine at once; it has nothing to lose."""
    core = engine.engine_core
    for process in core.resources.engine_manager.processes:
        process.kill()
        process.join(10)  # vLLM's own shutdown trips over one that ends while it looks
    with suppress(EngineDeadError):
        core.shutdown(timeout=0)


def check_served(folder: Path) -> None:
    """Raise ConfigError for a model that vLLM would serve as another model, without a word."""
    check_files(folder)
    config, fault = read_object(folder / "config.json"), ""
    if str(config.get("model_type")).startswith("qwen3") and config.get("attention_bias"):
        fault = "it leaves out a bias of Qwen3's attention (attention_bias)"
    if config.get("model_type") == "gpt_oss":
        fault = "new weights do not get into the experts of gpt-oss once an engine runs"
    if fault:
        raise ConfigError(f"engine.name: vLLM cannot serve this model so: {fault}; transformers may")


def generation_config(folder: Path, trust_remote_code: bool) -> GenerationConfig:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return GenerationConfig.from_model_config(config)
