"""Groups in flight, without a searcher: which groups make a shard, and when."""

from collections.abc import Sequence

from benchmarks.harness import fakes
from tba.config import SearchConfig
from tba.search.groups_in_flight import GroupsInFlight
from tba.search.open_rounds import Group
from tba.search.round_requests import make_requests
from tba.types import Prompt, Request, Response, Version

SIZE = 2


class Answers(fakes.Generator):
    """A generator that answers the requests for the prompts that a test names next."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[Request] = []
        self.due: set[str] = set()
        self.version = Version(0, 1)

    def submit(self, requests: Sequence[Request]) -> None:
        self.begun += requests

    def step(self) -> list[tuple[Request, Response]]:
        due = [it for it in self.begun if it.prompt.prompt_id in self.due]
        self.begun = [it for it in self.begun if it not in due]
        return [(it, self.make_response(it.prompt, it.seed, it.temperature)) for it in due]


def groups(round: int, prompts: Sequence[Prompt]) -> list[Group]:
    return [Group(round=round, number=i, prompt=prompt, size=SIZE) for i, prompt in enumerate(prompts)]


def test_a_shard_has_the_groups_that_ended_first_in_the_order_of_their_rounds():
    config = SearchConfig(prompts_per_round=2, responses_per_prompt=SIZE)
    prompts, in_flight = fakes.make_prompts(6), GroupsInFlight(answers := Answers(), shard_size=2)
    for round in range(3):
        asked = groups(round, prompts[2 * round : 2 * round + 2])
        in_flight.ask(make_requests(asked, config, seed=7, searcher=2))
    assert len(in_flight) == 6 * SIZE and in_flight.next_shard() == []
    found: list[list[str]] = []
    for due in ("p4", "p1", "p5", "p0", "p2"):
        answers.due = {due}
        in_flight.step()
        found.append([group.prompt.prompt_id for group in in_flight.next_shard()])
    assert found == [[], ["p1", "p4"], [], ["p0", "p5"], []] and len(in_flight) == SIZE


def test_a_shard_is_smaller_once_nothing_is_in_flight():
    config = SearchConfig(prompts_per_round=1, responses_per_prompt=SIZE)
    in_flight = GroupsInFlight(answers := Answers(), shard_size=3)
    in_flight.ask(make_requests(groups(4, fakes.make_prompts(1)), config, seed=7, searcher=2))
    in_flight.step()
    assert in_flight.next_shard() == []
    answers.due = {"p0"}
    in_flight.step()
    [group] = in_flight.next_shard()
    assert group.is_whole and not in_flight and in_flight.next_shard() == []
