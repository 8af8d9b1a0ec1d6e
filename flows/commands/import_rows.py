"""Reads rows with responses from elsewhere: matches them to the prompts of a run, tokenises and scores them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from hashlib import sha256
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from flows.progress import bar
from storage import layout
from storage.log.shard_checks import LARGEST_REWARD
from storage.objects.datasets import Placed
from tba.config import Config
from tba.errors import DataError
from tba.interfaces import Task
from tba.types import Prompt, Response, Reward, Trajectory, Version

if TYPE_CHECKING:
    from torch import nn

    from tba.models.policy import Policy

MOST_TOKENS = 16_000_000
"""Largest number of tokens in the prompts and responses of one file. A file becomes one object, which is read as a
whole when it is admitted."""
_LEAST_LOGP = -1e30  # log-probabilities are stored as 32-bit floats
_AT_A_TIME = 64  # responses scored between two updates of the progress bar


@dataclass(frozen=True, kw_only=True)
class Read:
    """A row that can be trained on."""

    prompt: Prompt
    response: Response  # `logps` is empty if the log-probabilities are unknown
    reward: float | None  # None: the task computes it


@dataclass(frozen=True, kw_only=True)
class File:
    name: str
    rows: Sequence[Read]
    sha256: str  # checksum of the content of the rows; the format of the file does not matter

    @property
    def searcher(self) -> int:
        return layout.imported(self.sha256)

    @property
    def key(self) -> str:
        return layout.shard(self.searcher, 0)


class _Fault(Exception): ...


class Importer:
    """Reads rows as responses that the run's own policy could have generated, and scores them as its searchers do."""

    def __init__(
        self,
        config: Config,
        task: Task,
        scorer: Any,
        policy: "Policy",
        ends: frozenset[int],
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt],
    ):
        self.config, self.task, self.scorer, self.tokenizer, self.ends = config, task, scorer, policy.tokenizer, ends
        self.special = frozenset(policy.tokenizer.all_special_ids)
        eos = policy.tokenizer.eos_token_id
        self.end = eos if eos in ends else min(ends, default=None)
        self.vocabulary = cast("nn.Embedding", policy.model.get_input_embeddings()).num_embeddings
        self.prompts = {it.prompt_id: it for it in prompts}
        self.held_out = {name for it in held_out for name in (it.prompt_id, it.text)}
        self.by_text: dict[str, list[Prompt]] = {}
        for it in prompts:
            self.by_text.setdefault(it.text, []).append(it)

    def read(self, name: str, rows: Sequence[Placed], mapping: Mapping[str, str]) -> File:
        if not rows:
            raise DataError(f"{name} has no rows")
        read = [self._row(it, mapping) for it in rows]
        tokens = sum(len(it.prompt.tokens) + len(it.response.tokens) for it in read)
        if tokens > MOST_TOKENS:
            raise DataError(f"{name} has {tokens:,} tokens, and a file may have {MOST_TOKENS:,}: import it in parts")
        said = [
            json.dumps([it.prompt.prompt_id, it.response.tokens, it.response.finished, it.reward, it.response.logps])
            for it in read
        ]
        return File(name=name, rows=read, sha256=sha256("\n".join(sorted(said)).encode()).hexdigest())

    def _row(self, placed: Placed, mapping: Mapping[str, str]) -> Read:
        row = {field: placed.row.get(mapping.get(field, field)) for field in FIELDS}
        try:
            prompt = self._prompt(row)
            tokens, finished = self._tokens(row)
            return Read(prompt=prompt, response=self._response(row, tokens, finished), reward=_reward(row["reward"]))
        except _Fault as fault:
            said = ", ".join(map(repr, placed.names))
            hint = f" (it has {said}; --map says what a field is called)" if "is needed" in str(fault) else ""
            raise DataError(f"{placed.place}: {fault}{hint}") from None

    def _prompt(self, row: Mapping[str, Any]) -> Prompt:
        prompt_id, text = (_text(row, field) for field in ("prompt_id", "prompt"))
        if prompt_id is None and text is None:
            raise _Fault("prompt_id or prompt is needed")
        if prompt_id is not None:
            if (found := self.prompts.get(prompt_id)) is None:
                why = "is held out for evaluation" if prompt_id in self.held_out else "is no prompt of the run"
                raise _Fault(f"prompt_id {prompt_id!r} {why}")
            if text is not None and text != found.text:
                given, asked = around_difference(text, found.text)
                raise _Fault(f"prompt {given} is not what the run asks as {prompt_id!r}: {asked}")
            return found
        same = self.by_text.get(text or "", [])
        if not same and text in self.held_out:
            raise _Fault(f"prompt {text!r:.80} is held out for evaluation")
        if not same:
            given, first = around_difference(text or "", next(iter(self.prompts.values())).text)
            raise _Fault(f"prompt {given} is no prompt of the run, whose first is {first}")
        if len(same) > 1:
            raise _Fault(f"prompt {text!r:.80} is that of {len(same)} prompts of the run: prompt_id has to say which")
        return same[0]

    def _tokens(self, row: Mapping[str, Any]) -> tuple[tuple[int, ...], bool]:
        """Return the tokens of the response, and whether it is finished. A finished response ends with an end token."""
        text, given, finished = _text(row, "response"), row["response_tokens"], row["finished"]
        if finished is not None and not isinstance(finished, bool):
            raise _Fault(f"finished must be true or false, got {finished!r:.80}")
        if given is None and text is None:
            raise _Fault("response or response_tokens is needed")
        tokens = self._check_tokens(given) if given is not None else self._tokenised(text or "", finished is not False)
        has_ended = tokens[-1:] != () and tokens[-1] in self.ends
        if finished is not None and finished != has_ended:
            raise _Fault(f"finished is {finished}, but the last token is {'an' if has_ended else 'no'} end token")
        if early := [token for token in tokens[:-1] if token in self.ends]:
            raise _Fault(f"the response goes on after end token {early[0]}")
        if given is not None and text is not None and text != (read := self._decoded(tokens)):
            raise _Fault(f"response_tokens say {read!r:.80}, but response {text!r:.80}: are they another tokenizer's?")
        most = self.config.search.max_response_tokens
        if not 1 <= len(tokens) <= most:
            raise _Fault(f"the response must have 1 to {most} tokens (search.max_response_tokens), got {len(tokens)}")
        return tokens, has_ended

    def _check_tokens(self, given: Any) -> tuple[int, ...]:
        if not isinstance(given, list) or not all(type(token) is int for token in given):
            raise _Fault(f"response_tokens must be a list of whole numbers, got {given!r:.80}")
        if outside := [token for token in given if not 0 <= token < self.vocabulary]:
            raise _Fault(f"response_tokens must be 0 to {self.vocabulary - 1}, got {outside[0]}")
        return tuple(given)

    def _tokenised(self, text: str, finished: bool) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        if (unknown := self.tokenizer.unk_token_id) is not None and unknown in tokens:
            raise _Fault(f"response {text!r:.80} has characters that the tokenizer does not know")
        if special := [token for token in tokens if token in self.special and token not in self.ends]:
            name = self.tokenizer.convert_ids_to_tokens(special[0])
            raise _Fault(f"response {text!r:.80} has {name!r} in it, a token and no text: give response_tokens")
        if not finished or self.end is None or (tokens and tokens[-1] in self.ends):
            return tokens
        return (*tokens, self.end)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _response(self, row: Mapping[str, Any], tokens: tuple[int, ...], finished: bool) -> Response:
        search, nobody = self.config.search, Version(0, 0)
        return Response(
            tokens=tokens,
            logps=self._logps(row, tokens),
            text=self._decoded(tokens),
            finished=finished,
            temperature=search.temperature,
            top_p=1.0,
            seed=0,
            version_start=nobody,
            version_end=nobody,
            generate_seconds=0.0,
        )

    def _logps(self, row: Mapping[str, Any], tokens: Sequence[int]) -> tuple[float, ...]:
        given, objective = row["behaviour_logps"], self.config.objective
        if given is None:
            if objective.needs_tokens:
                raise _Fault(f"behaviour_logps is needed by objective {objective.name!r} with its settings")
            return ()
        if row["response_tokens"] is None:
            raise _Fault("behaviour_logps are those of response_tokens, which is needed")
        logps = [_number(it) for it in given] if isinstance(given, list) else [None]
        if not all(logp is not None and _LEAST_LOGP <= logp <= 0 for logp in logps):
            raise _Fault(f"behaviour_logps must be a list of numbers from {_LEAST_LOGP:g} to 0, got {given!r:.80}")
        if len(logps) != len(tokens):
            raise _Fault(f"behaviour_logps must be as many as response_tokens, {len(tokens)}, got {len(logps)}")
        return tuple(cast(list[float], logps))

    def trajectories(self, file: File, version: Version) -> list[Trajectory]:
        """Return the rows as trajectories, in the form in which a searcher stores responses that it generated in one
        round."""
        rows = sorted(file.rows, key=lambda it: it.prompt.prompt_id)
        ref_logps, rewards = self._scored(file.name, rows)
        now = datetime.now(UTC)
        return [
            Trajectory(
                searcher=file.searcher,
                round=0,
                slot=slot,
                version_start=version,
                version_end=version,
                prompt_id=it.prompt.prompt_id,
                group_id=f"{file.searcher}/0/{it.prompt.prompt_id}",
                prompt=it.prompt.text,
                response=it.response.text,
                prompt_tokens=it.prompt.tokens,
                response_tokens=it.response.tokens,
                behaviour_logps=it.response.logps or ref_logps[slot] or (),
                ref_logps=ref_logps[slot] if self.config.stores_reference_logps else None,
                reference_version=self.scorer.version,
                reward=rewards[slot].value,
                reward_parts=rewards[slot].parts,
                finished=it.response.finished,
                temperature=it.response.temperature,
                top_p=it.response.top_p,
                seed=it.response.seed,
                created_at=now,
                generate_seconds=it.response.generate_seconds,
            )
            for slot, it in enumerate(rows)
        ]

    def _scored(self, name: str, rows: Sequence[Read]) -> tuple[list[tuple[float, ...] | None], list[Reward]]:
        """Return the reference log-probabilities and the reward of each row. The log-probabilities are computed if the
        run stores them, and for rows whose log-probabilities under the policy that sampled are not known."""
        from tba.search.scoring import Scoring

        scoring = Scoring(self.task)
        ref_logps: list[tuple[float, ...] | None] = []
        stores, temperature = self.config.stores_reference_logps, self.config.search.temperature
        rewards: list[Reward] = []
        with bar(f"scoring {name}") as tell:
            for start in range(0, len(rows), _AT_A_TIME):
                some = rows[start : start + _AT_A_TIME]
                unknown = [it for it in some if stores or not it.response.logps]
                found = iter(_ref_logps(self.scorer, unknown, temperature=temperature))
                ref_logps += [next(found) if stores or not it.response.logps else None for it in some]
                asked = [it for it in some if it.reward is None]
                given = iter(scoring.rewards([it.prompt for it in asked], [[it.response] for it in asked]))
                rewards += [Reward(value=it.reward) if it.reward is not None else next(given)[0] for it in some]
                tell(len(rewards), len(rows))
        return ref_logps, rewards


def _ref_logps(scorer: Any, rows: Sequence[Read], *, temperature: float) -> list[tuple[float, ...]]:
    """Return the log-probabilities of rows, which are sorted by prompt, under the reference."""
    if not rows:
        return []
    groups = _by_prompt(rows)
    prompts, responses = [group[0].prompt for group in groups], [[it.response for it in g] for g in groups]
    found = scorer.token_logps(prompts, responses, temperature=temperature)
    return [logps for group in found for logps in group]


def _by_prompt(rows: Iterable[Read]) -> list[list[Read]]:
    groups: dict[str, list[Read]] = {}
    for it in rows:
        groups.setdefault(it.prompt.prompt_id, []).append(it)
    return list(groups.values())


def around_difference(one: str, other: str) -> tuple[str, str]:
    """Return excerpts of two texts for an error message. Both start shortly before the first difference."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - 20) if same > 40 else 0
    shown = [f"{'…' if start else ''}{text[start:]!r:.80}" for text in (one, other)]
    return shown[0], shown[1]


def _text(row: Mapping[str, Any], field: str) -> str | None:
    value = row[field]
    if value is not None and not isinstance(value, str):
        raise _Fault(f"{field} must be text, got {value!r:.80}")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise _Fault(f"{field} has half a character in it: {value!r:.80}") from None
    return value


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None or abs(number) > LARGEST_REWARD:
        raise _Fault(f"reward must be a number of at most {LARGEST_REWARD:g} in size, got {value!r:.80}")
    return number


def _number(value: Any) -> float | None:
    """Return a value as a float. Return None if the value is not a number, or if no finite float can hold it."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


FIELDS = ("prompt_id", "prompt", "response", "response_tokens", "finished", "reward", "behaviour_logps")
"""The fields that are read from a row, named as in the view `trajectories`."""
