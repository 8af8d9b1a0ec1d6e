"""Start and end a vLLM engine, and reject models that vLLM cannot serve."""

import os
import signal
from collections.abc import Callable, Mapping
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
from tba.generation.vllm_profiles import Resolved, resolved
from tba.models.file_checks import check_files, read_object

CPU_CACHE = 1.0  # gigabytes for keys and values on a CPU, whose memory other processes use too
CPU_BLOCK = 32  # tokens; responses share whole blocks of a prompt. vLLM's 128 on a CPU are longer than many prompts


def start_engine(
    arguments: EngineArgs, *, on_cpu: bool, variables: Mapping[str, str], tell: Callable[[Resolved], None]
) -> LLMEngine:
    """Start an engine in its own process, which ignores SIGTERM and SIGINT: the role handles these signals and may
    still need the engine. `variables` are environment variables that choose between implementations of vLLM. `tell`
    hears what vLLM has made of the arguments before the process starts. Raise ConfigError if vLLM cannot serve this
    model with these arguments, and RunFailed if the engine does not start."""
    # The resource tracker unblocks signals when it starts. It would otherwise start together with the engine, when
    # they must be blocked.
    resource_tracker.ensure_running()
    os.environ |= {OURS: "cpu" if on_cpu else "gpu", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= variables  # the role's own process reads them for as long as the engine runs
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else every engine binds itself to the same cores
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        config = arguments.create_engine_config()
        tell(resolved(config))
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"engine.name: vLLM cannot serve this model with these settings: {error}; try transformers"
        ) from error
    except (RuntimeError, TimeoutError) as error:
        raise RunFailed(f"vLLM did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    Thread(target=_tell_of_death, args=(engine.engine_core,), name="engine-death", daemon=True).start()
    return engine


def _tell_of_death(core: Any) -> None:
    """Wait until an engine dies, and raise EngineDeadError in every call that waits for it. vLLM's own client would
    wait forever."""
    wait([process.sentinel for process in core.resources.engine_manager.processes])
    core.resources.engine_dead = True  # for later calls
    core.outputs_queue.put(EngineDeadError())
    for answer in list(core.utility_results.values()):
        with suppress(InvalidStateError):  # the answer came just before
            answer.set_exception(EngineDeadError())


def end_engine(engine: LLMEngine) -> None:
    """Kill an engine at once; it holds nothing that must be saved."""
    core = engine.engine_core
    for process in core.resources.engine_manager.processes:
        process.kill()
        process.join(10)  # vLLM's own shutdown fails if a process ends while it checks that process
    with suppress(EngineDeadError):
        core.shutdown(timeout=0)


def check_served(folder: Path) -> None:
    """Raise ConfigError for a model that vLLM would compute wrongly without an error."""
    check_files(folder)
    config, fault = read_object(folder / "config.json"), ""
    if str(config.get("model_type")).startswith("qwen3") and config.get("attention_bias"):
        fault = "it leaves out a bias of Qwen3's attention (attention_bias)"
    if config.get("model_type") == "gpt_oss":
        fault = "a running engine cannot load new weights into the experts of gpt-oss"
    if fault:
        raise ConfigError(f"engine.name: vLLM cannot serve this model: {fault}; try transformers")


def generation_config(folder: Path, trust_remote_code: bool) -> GenerationConfig:
    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return GenerationConfig.from_model_config(config)
