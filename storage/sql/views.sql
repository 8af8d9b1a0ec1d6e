-- What `storage.connect` and `tba sql` offer, over the relations of schema `stored` (storage/views.py).
-- Times are UTC. `sync` is null for what has arrived but has not entered the replay buffer yet.

create view prompts as
select split, prompt_id, text, tokens, answer, metadata from stored.prompts;

create view shards as from stored.shards;

create view syncs as from stored.syncs;

-- `step` is the step after which a trajectory entered; `age` is how many steps its version was old by then.
create view trajectories as
select t.*, v.step as version_step, t.step - v.step as age
from stored.trajectories t
left join stored.version_steps v on (v.version, v.attempt) = (t.version_start, t.version_start_attempt);

-- The responses that one prompt got in one round of one searcher.
create view groups as
select
    group_id,
    any_value(prompt_id) as prompt_id,
    any_value(searcher) as searcher,
    any_value(round) as round,
    any_value(sync) as sync,
    any_value(step) as step,
    min(version_start) as version_start,
    max(version_end) as version_end,
    count(*) as responses,
    count(distinct content_hash) as distinct_responses,
    avg(reward) as reward_mean,
    min(reward) as reward_min,
    max(reward) as reward_max,
    stddev_pop(reward) as reward_std,
    avg(length) as length_mean,
    avg(finished::int) as finished_share,
    sum(generate_seconds) as generate_seconds
from trajectories
group by group_id;

-- Of the attempts that count: what the current weights descend from. The `_all` views also show abandoned attempts.
create view draws as select * exclude (abandoned) from stored.draws where not abandoned;

create view steps as select * exclude (abandoned) from stored.steps where not abandoned;

create view draws_all as from stored.draws;

create view steps_all as from stored.steps;

create view versions as from stored.versions;

create view evaluations as from stored.evaluations;

create view events as select * replace (data::json as data) from stored.events;

create view attempts as from stored.attempts;

create view checkpoints as from stored.checkpoints;
