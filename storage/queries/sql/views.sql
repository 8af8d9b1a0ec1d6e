-- The views that `storage.connect` and `tba sql` offer, over the relations of schema `stored`, which
-- storage/queries/views.py makes. Times are UTC. The `sync` of a trajectory is null until it enters the replay buffer.

create view prompts as
select split, prompt_id, text, tokens, answer, metadata from stored.prompts;

create view shards as from stored.shards;

create view syncs as from stored.syncs;

create view damage as from stored.damage;

-- `step` is the gradient step after which a trajectory entered the replay buffer. `age` is the number of steps from its
-- version to that step.
create view trajectories as
select t.*, v.step as version_step, t.step - v.step as age
from stored.trajectories t
left join stored.version_steps v on (v.version, v.attempt) = (t.version_start, t.version_start_attempt);

-- The results of each training prompt. Searchers never generate for test prompts, which may have the same ids.
create view difficulty as
with
  tried as (
    select
      prompt_id,
      count(*) as tries,
      count(distinct content_hash) as distinct_responses,
      avg(reward) as reward_mean,
      min(reward) as reward_min,
      max(reward) as reward_max,
      stddev_pop(reward) as reward_std,
      avg((reward >= 1)::int) as solve_rate,
      avg(length) as length_mean,
      avg(finished::int) as finished_share
    from trajectories group by prompt_id
  )
select
    p.prompt_id, p.text, coalesce(t.tries, 0) as tries, coalesce(t.distinct_responses, 0) as distinct_responses,
    t.* exclude (prompt_id, tries, distinct_responses)
from prompts p left join tried t using (prompt_id)
where p.split = 'train';

-- The responses to one prompt in one round of one searcher.
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

-- These two views have only rows of attempts that the current weights descend from. The `_all` views also have rows of
-- abandoned attempts.
create view draws as select * exclude (abandoned) from stored.draws where not abandoned;

create view steps as select * exclude (abandoned) from stored.steps where not abandoned;

create view draws_all as from stored.draws;

create view steps_all as from stored.steps;

create view versions as from stored.versions;

create view evaluations as from stored.evaluations;

create view examples as from stored.examples;

create view events as select * replace (data::json as data) from stored.events;

-- An alarm ends with the event that says it is over, or when the role that raised it begins another life.
create view alarms as
with told as (
    select *, data ->> '$.alarm' as word, data ->> '$.of' as about from stored.events
)
select
    created_at as began_at,
    (
        select min(later.created_at) from told as later
        where later.role = told.role and (
            later.life > told.life
            or (
                later.life = told.life and later.seq > told.seq and later.word = 'over' and later.kind = told.kind
                and later.about is not distinct from told.about
            )
        )
    ) as ended_at,
    role, life, kind, about, severity, message
from told where word = 'began'
order by began_at;

create view attempts as from stored.attempts;

create view checkpoints as from stored.checkpoints;

create view settings as select name, value::json as value from stored.settings;

-- Views in `stored` look up names in `stored` first, so they write `main.` for the views above.

create view stored.copies as
select coalesce(max(value ->> '$'), 'newest') as which from main.settings where name = 'sampling.copies';

-- Columns that are cheap to read, and the place of a row in the order of entry (sync, searcher, seq, row). If all copies
-- can be drawn, every row has a content of its own.
create view stored.light as
select
    trajectory_id, prompt_id, searcher, version_start, sync, step, age, reward, length, finished,
    try_cast(if((from stored.copies) = 'all', md5(trajectory_id), content_hash) as uuid) as content,
    (sync::hugeint << 93) + (searcher::hugeint << 62) + (seq::hugeint << 31)
        + split_part(trajectory_id, '/', 3)::integer as place
from main.trajectories;

-- The prompts that trajectories answer. The split `test` may use the same ids.
create view stored.asked as from main.prompts where split = 'train';

create view stored.capacity as
select coalesce(max(value::bigint), 9223372036854775807) as responses from main.settings where name = 'sampling.capacity';

create view stored.evict as
select coalesce(max(value ->> '$'), 'oldest') as first from main.settings where name = 'sampling.evict';

-- The maximum age, in steps, of what is drawn.
create view stored.max_age as
select coalesce(max(value::bigint), 2147483647) as steps from main.settings where name = 'sampling.max_age';

create view stored.drawn as
select trajectory_id, count(*) as draws, min(step) as first_step, max(step) as last_step, avg(age) as age_drawn
from main.draws group by trajectory_id;

-- Which trajectories could be drawn, and which were drawn. A trajectory is eligible if the replay buffer still held it
-- once the sync at which it entered was over, and a gradient step followed. So it was not too old, it was the newest of
-- identical copies and, if the oldest are evicted, one of the newest of its prompt. A fork applies its own capacity and
-- maximum age to the rows of its parent as well. All trajectories that were drawn count as eligible.
create view selection as
with
  light as materialized (from stored.light),
  copies as (
    select prompt_id, sync, max(place) as place from light
    where sync is not null and coalesce(age, 0) <= (from stored.max_age) group by prompt_id, sync, content
  ),
  survivors as (
    select place from copies
    qualify (from stored.evict) = 'worst'
        or row_number() over (partition by prompt_id, sync order by place desc) <= (from stored.capacity)
  )
select
    trajectory_id, prompt_id, searcher, version_start, sync, step, age, reward, length, finished,
    draws is not null or coalesce(step < (select max(step) from steps) and place in (from survivors), false) as eligible,
    coalesce(draws, 0) as draws, first_step, last_step, age_drawn
from light left join stored.drawn using (trajectory_id);
