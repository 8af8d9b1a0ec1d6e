-- Each statement finds one kind of error in a run. It returns the key of the object at fault, and what is wrong there.
-- The statements read tables that storage/maintenance/check/relations.py fills:
--     trajectories  rows of all readable shards; sync and step are null if no sync record admits the shard yet
--     shards        shards that sync records admit
--     draws, steps  rows of the ledger, on the chain of attempts; key is the object that they are in
--     recorded      the gradient steps that the ledger of each sync must have
--     prompts       the stored prompts
--     published     versions, including those that were given up
--     numbers       slots (B) and responses (K)
--     readable      keys of the objects of prompts, steps and draws that could be read

-- Two rows for the same slot of a round: a request was answered twice.
select
    'trajectories' as key,
    format('searcher {} round {} slot {} is stored {} times: {}', searcher, round, slot, count(*),
        string_agg(trajectory_id, ', ' order by trajectory_id)) as problem
from trajectories
group by searcher, round, slot
having count(*) > 1
order by searcher, round, slot;

select 'trajectories' as key, format('{} is stored {} times', trajectory_id, count(*)) as problem
from trajectories
group by trajectory_id
having count(*) > 1
order by trajectory_id;

select
    'trajectories' as key,
    format('{} trajectories answer {}, which is not among the stored prompts', count(*), prompt_id) as problem
from trajectories
where 'prompts/train.parquet' in (select key from readable) and prompt_id not in (select prompt_id from prompts)
group by prompt_id
order by prompt_id;

select
    format('versions/{:06d}-a{:04d}/', number, attempt) as key,
    format('{} trajectories cite this version, which is neither stored nor given up', count(*)) as problem
from (
    select version_start as number, version_start_attempt as attempt from trajectories
    union all
    select version_end, version_end_attempt from trajectories
    where (version_end, version_end_attempt) <> (version_start, version_start_attempt)
)
where (number, attempt) not in (select (number, attempt) from published)
group by number, attempt
order by attempt, number;

-- The ledger has each gradient step of the chain of attempts exactly once.
select any_value(key) as key, format('step {} is in the ledger {} times', step, count(*)) as problem
from steps
group by step
having count(*) > 1
order by step;

select key, format('step {} is not a step of sync {}', step, sync) as problem
from steps join recorded using (sync)
where step not between recorded.first_step and recorded.last_step
order by step;

select recorded.steps_key as key, format('step {} is missing', wanted.step) as problem
from recorded, lateral (select unnest(range(recorded.first_step, recorded.last_step + 1)) as step) wanted
where recorded.steps_key in (select key from readable) and wanted.step not in (select step from steps)
order by wanted.step;

-- Each step draws B slots of K rows, and the rows of a slot have one prompt.
select recorded.draws_key as key, format('step {} has no draws', wanted.step) as problem
from recorded, lateral (select unnest(range(recorded.first_step, recorded.last_step + 1)) as step) wanted
where recorded.draws_key in (select key from readable) and wanted.step not in (select step from draws)
order by wanted.step;

select
    any_value(key) as key,
    format('step {} has {} draws, not {} x {}', step, count(*), any_value(slots), any_value(responses)) as problem
from draws, numbers
group by step
having count(*) <> any_value(slots * responses)
order by step;

select
    any_value(key) as key,
    format('step {} slot {} position {} is drawn {} times', step, slot, position, count(*)) as problem
from draws
group by step, slot, position
having count(*) > 1
order by step, slot, position;

select any_value(key) as key, format('step {} slot {} mixes {} prompts', step, slot, count(distinct prompt_id)) as problem
from draws
group by step, slot
having count(distinct prompt_id) > 1
order by step, slot;

select key, format('step {} is drawn for, but is not a step of sync {}', step, sync) as problem
from draws join recorded using (sync)
where step not between recorded.first_step and recorded.last_step
group by key, step, sync
order by step;

-- Each draw names a row of a shard that was admitted before the step, and the prompt of that row.
select
    key,
    format('step {} draws {}, which no record admits', draws.step, trajectory_id) as problem
from draws left join shards on (draws.searcher, draws.seq) = (shards.searcher, shards.seq)
where shards.sync is null or coalesce(draws.row >= shards.rows, true)
order by draws.step, draws.slot, draws.position;

select
    key,
    format('step {} draws {}, which was admitted only after step {}', draws.step, trajectory_id, shards.step) as problem
from draws join shards on (draws.searcher, draws.seq) = (shards.searcher, shards.seq)
where shards.step >= draws.step
order by draws.step, draws.slot, draws.position;

select
    key,
    format('step {} draws {} for {}, but it answers {}',
        draws.step, trajectory_id, draws.prompt_id, found.prompt_id) as problem
from draws join trajectories found using (trajectory_id)
where draws.prompt_id <> found.prompt_id
order by draws.step, draws.slot, draws.position;
