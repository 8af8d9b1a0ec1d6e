"""Small environments for tests with the library `verifiers`, which load them by `load_environment(kind=…)`."""

import itertools
from datetime import datetime
from typing import Any

import verifiers as vf
from datasets import Dataset

BITS = ("0", "1", "00", "01", "10", "11")


def rows(texts: tuple[str, ...] = BITS) -> Dataset:
    return Dataset.from_list([{"question": text, "answer": text, "info": {"length": len(text)}} for text in texts])


async def as_long(completion: Any, info: dict[str, Any]) -> float:
    """Return 1 if the first turn is as long as the question."""
    return float(len(completion[0].content) == info["length"])


def ones(completion: Any, answer: str, state: Any) -> float:
    """Return the share of ones in the last turn. `state` is the library's."""
    assert state["prompt"][-1].content == answer
    last = [it.content for it in completion if it.role == "assistant"][-1]
    return last.count("1") / max(1, len(last))


def rubric() -> vf.Rubric:
    return vf.Rubric(funcs=[ones, as_long], weights=[1.0, 0.5])


class Countdown(vf.MultiTurnEnv):
    """Answers with as many ones as it has received so far. It counts them in its state, and ends after the third
    one."""

    async def setup_state(self, state: Any) -> Any:
        state["heard"] = 0
        return state

    @vf.stop
    async def heard_enough(self, state: Any) -> bool:
        return state["heard"] >= 3

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["heard"] += messages[-1].content.count("1")
        if messages[-1].content == "":
            state["final_env_response"] = [vf.UserMessage(content="bye")]
        return [vf.UserMessage(content="1" * state["heard"])]


class Fickle(vf.MultiTurnEnv):
    """Never gives the same answer twice."""

    numbers = itertools.count(10)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [vf.UserMessage(content=str(next(self.numbers)))]


class Dealt(Fickle):
    """Never gives the same question or answer twice."""

    async def setup_state(self, state: Any) -> Any:
        state["prompt"] = [vf.UserMessage(content=str(next(self.numbers)))]
        return state


class Forgetful(vf.MultiTurnEnv):
    """Shows the policy a different conversation at its second turn."""

    async def get_prompt_messages(self, state: Any) -> Any:
        if not state["trajectory"]:
            return state["prompt"]
        return [vf.UserMessage(content="01?")]

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise vf.InfraError("no sandbox")


def flip(bits: str) -> str:
    """Every bit the other way round.

    Args:
        bits: Zeros and ones.
    """
    return bits.translate({48: "1", 49: "0"})


def fails(completion: Any) -> float:
    return 1 / len(completion[0].content)  # fails on an empty answer


def whole(state: Any) -> float:
    return float(not state["is_truncated"])


def compared(completions: Any) -> list[float]:
    return [float(len(completions)) for _ in completions]


def load_environment(kind: str, **options: Any) -> vf.Environment:
    common: dict[str, Any] = {"dataset": rows(), "eval_dataset": rows(("01", "10")), "rubric": rubric(), **options}
    match kind:
        case "single":
            return vf.SingleTurnEnv(**common)
        case "countdown":
            return Countdown(**common)
        case "tools":
            return vf.ToolEnv(tools=[flip], **common)
        case "group":
            members = [vf.SingleTurnEnv(**common), Countdown(**common)]
            return vf.EnvGroup(envs=members, env_names=["short", "long"])
        case "failing":
            return vf.SingleTurnEnv(**{**common, "rubric": vf.Rubric(funcs=[fails])})
        case "compared":
            return vf.SingleTurnEnv(**{**common, "rubric": vf.Rubric(funcs=[compared])})
        case "text":
            texts = Dataset.from_list([{"prompt": "0?", "answer": "0?"}])
            return vf.SingleTurnEnv(dataset=texts, rubric=vf.Rubric(funcs=[fails]))
        case "images":
            part = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
            asked = Dataset.from_list([{"prompt": [{"role": "user", "content": [part]}], "answer": ""}])
            return vf.SingleTurnEnv(dataset=asked, rubric=rubric())
        case "dates":
            dated = rows().add_column("when", [datetime(2030, 1, 1)] * len(BITS))  # pyright: ignore[reportCallIssue]
            return vf.SingleTurnEnv(**{**common, "dataset": dated})
        case "whole":
            return vf.SingleTurnEnv(**{**common, "rubric": vf.Rubric(funcs=[whole])})
    return {"fickle": Fickle, "dealt": Dealt, "forgetful": Forgetful, "broken": Broken}[kind](**common)
