-- Common questions about a run, as table macros over the views of views.sql.

-- --- which trajectories are learned from ----------------------------------------------------------------------------

-- What the replay buffer held once a sync was over. These are the rules of storage/buffer/drawable_rows.py: of the
-- trajectories that were not too old when they entered, the newest of identical copies stays; then each prompt keeps
-- the rows that it has room for; then rows that are too old for the next gradient step are left out.
create macro eligible_at(at_sync) as table
with
  newest as (
    select
      prompt_id, max(place) as place, max(sync) as sync,
      if((from stored.evict) = 'worst', max({'reward': reward, 'place': place}), {'reward': 0, 'place': max(place)}) as key
    from stored.light where sync <= at_sync and coalesce(age, 0) <= (from stored.max_age) group by prompt_id, content
  ),
  surviving as (
    select place from newest
    qualify row_number() over (partition by prompt_id order by key desc) <= (from stored.capacity)
      or ((from stored.evict) = 'worst' and sync = max(sync) over (partition by prompt_id))
  )
select trajectory_id, prompt_id, searcher, version_start, sync, step, age, reward, length, finished
from stored.light
where place in (from surviving)
  and coalesce(age, 0) + (select max(step) from syncs where sync <= at_sync) - step <= (from stored.max_age);

create macro compare_selection() as table
with
  measured as materialized (
    unpivot (
      select
        prompt_id, coalesce(sync, -1) as sync, eligible::double as eligible, (draws > 0)::double as trained,
        draws::double as draws,
        reward::double as reward, length::double as length, finished::double as finished, age::double as age
      from selection
    ) on reward, length, finished, age into name measure value value
  ),
  -- Chosen rows are compared with all rows that entered at the same sync, so a policy that changes over time causes no
  -- bias. Rows of one prompt are not independent, so their deviations are summed before they are squared.
  entered as (
    select measure, sync, avg(value) as value, avg(eligible) as eligible, avg(trained) as trained, avg(draws) as draws
    from measured group by measure, sync
  ),
  deviations as (
    select
      measure, prompt_id,
      sum((m.eligible - e.eligible) * (m.value - e.value)) as eligible,
      sum((m.trained - e.trained) * (m.value - e.value)) as trained,
      sum((m.draws - e.draws) * (m.value - e.value)) as drawn
    from measured m join entered e using (measure, sync) group by measure, prompt_id
  ),
  differences as (
    unpivot (
      select
        measure,
        [sum(eligible), stddev_samp(eligible) * sqrt(count(*))] as eligible,
        [sum(trained), stddev_samp(trained) * sqrt(count(*))] as trained,
        [sum(drawn), stddev_samp(drawn) * sqrt(count(*))] as drawn
      from deviations group by measure
    ) on eligible, trained, drawn into name set value sums
  ),
  members as (
    select 1 as place, 'generated' as set, measure, value, 1 as times from measured
    union all select 2, 'eligible', measure, value, 1 from measured where eligible > 0
    union all select 3, 'trained', measure, value, 1 from measured where trained > 0
    union all select 4, 'drawn', measure, value, unnest(range(draws::bigint)) from measured where draws > 0
  ),
  summaries as (
    select
      place, set, measure, count(*) as n, avg(value) as mean, stddev_pop(value) as std,
      quantile_cont(value, [0.1, 0.5, 0.9]) as quantiles
    from members group by all
  )
select
  measure, set, n, mean, std, quantiles[1] as lowest_tenth, quantiles[2] as median, quantiles[3] as highest_tenth,
  sums[1] / n as difference, sums[1] / nullif(sums[2], 0) as standard_errors
from summaries left join differences using (measure, set)
order by measure, place;

create macro selection_by(measure, bins := 10) as table
with
  valued as materialized (
    select
      prompt_id, coalesce(sync, -1) as sync, eligible::double as eligible, (draws > 0)::double as trained,
      draws::double as draws,
      case measure
        when 'reward' then reward
        when 'length' then length
        when 'finished' then finished::double
        when 'age' then age
        else error('selection_by: a measure is reward, length, finished or age, not ' || measure)
      end as value
    from selection
  ),
  edges as (
    select if(
      count(distinct value) <= bins,
      list_sort(list(distinct value)),
      list_distinct(quantile_disc(value, [b / bins for b in range(1, bins)]))
    ) as edges
    from valued
  ),
  entered as (
    select sync, avg(eligible) as eligible, avg(trained) as trained, avg(draws) as draws from valued group by sync
  ),
  placed as (
    select
      len([e for e in edges if e < value]) as bin, prompt_id,
      count(*) as generated, min(value) as low, max(value) as high, sum(value) as value,
      sum(v.eligible) as eligible, sum(v.trained) as trained, sum(v.draws) as draws,
      sum(e.eligible) as eligible_fair, sum(e.trained) as trained_fair, sum(e.draws) as draws_fair
    from valued v join entered e using (sync), edges
    where value is not null
    group by all
  )
select
  min(low) as low, max(high) as high, sum(value) / sum(generated) as mean,
  sum(generated)::bigint as generated, sum(eligible)::bigint as eligible, sum(trained)::bigint as trained,
  sum(draws)::bigint as draws,
  sum(eligible) / nullif(sum(eligible_fair), 0) as eligible_rate,
  sum(trained) / nullif(sum(trained_fair), 0) as trained_rate,
  sum(draws) / nullif(sum(draws_fair), 0) as draw_rate,
  sqrt(sum((draws - draws_fair) ** 2)) / nullif(sum(draws_fair), 0) as draw_rate_error
from placed group by bin order by bin;

create macro prompts_by_set() as table
with
  counts as materialized (
    select prompt_id, count(*) as generated, count(*) filter (eligible) as eligible,
      count(*) filter (draws > 0) as trained, sum(draws)::bigint as drawn
    from selection group by prompt_id
  ),
  ranked as (
    select set, n, row_number() over (partition by set order by n) as rank, count(*) over (partition by set) as prompts
    from (unpivot counts on generated, eligible, trained, drawn into name set value n)
  )
select
  set, sum(n)::bigint as n, count(*) filter (n > 0) as prompts,
  count(*) filter (n > 0) / (select nullif(count(*), 0) from prompts where split = 'train') as share_of_task,
  sum(n) ** 2 / nullif(sum(n ** 2), 0) as effective_prompts,
  sum((2 * rank - prompts - 1) * n) / nullif(any_value(prompts) * sum(n), 0) as gini
from ranked group by set order by array_position(['generated', 'eligible', 'trained', 'drawn'], set);

-- --- single steps, trajectories and groups --------------------------------------------------------------------------

create macro learned_from(step) as table
select
  d.slot, d.position, d.branch, d.trajectory_id, d.prompt_id, t.prompt, t.response, t.reward, t.length,
  t.version_start, d.age, d.weight, d.advantage, d.residual, d.log_z, d.logp, d.ref_logp
from draws d left join trajectories t using (trajectory_id)
where d.step = step
order by d.slot, d.position;

create macro trajectory(id) as table
select
  t.trajectory_id, t.prompt_id, p.answer, t.prompt, t.response, t.reward, t.length, t.finished, t.version_start,
  t.created_at, t.sync, t.step, t.age, count(d.step) as draws,
  coalesce(list(d.step order by d.step) filter (d.step is not null), []) as drawn_at,
  coalesce(list(d.residual order by d.step) filter (d.step is not null), []) as residuals
from trajectories t
left join stored.asked p using (prompt_id)
left join draws d using (trajectory_id)
where t.trajectory_id = id
group by all;

create macro group_of(id) as table
select t.slot, t.trajectory_id, t.response, t.reward, t.length, t.finished, t.sync, coalesce(d.draws, 0) as draws
from trajectories t left join stored.drawn d using (trajectory_id)
where t.group_id = (select group_id from trajectories where trajectory_id = id)
order by t.slot;

-- --- prompts --------------------------------------------------------------------------------------------------------

create macro unsolved(min_tries := 1, solved_at := 1) as table
with
  tried as (
    select
      prompt_id, count(*) as tries, max(reward) as reward_max, count(distinct content_hash) as distinct_responses,
      max(version_start) as newest_version
    from trajectories group by prompt_id
  )
select t.prompt_id, p.text, p.answer, t.tries, t.reward_max, t.distinct_responses, t.newest_version
from tried t left join stored.asked p using (prompt_id)
where t.reward_max < solved_at and t.tries >= min_tries
order by t.tries desc, t.prompt_id;

create macro cost_per_solved(solved_at := 1) as table
select
  t.prompt_id, any_value(p.text) as text, count(*) as tries, count(*) filter (t.reward >= solved_at) as solved,
  min(t.round) filter (t.reward >= solved_at) as first_solved_round,
  sum(t.length)::bigint as tokens, sum(t.generate_seconds) as generate_seconds,
  sum(t.length) / nullif(count(*) filter (t.reward >= solved_at), 0) as tokens_per_solved,
  sum(t.generate_seconds) / nullif(count(*) filter (t.reward >= solved_at), 0) as seconds_per_solved
from trajectories t left join stored.asked p using (prompt_id)
group by t.prompt_id
order by tokens_per_solved desc nulls first, tokens desc, t.prompt_id;

create macro duplicates(min_copies := 2) as table
with
  contents as (
    select
      any_value(prompt_id) as prompt_id, any_value(prompt) as prompt, any_value(response) as response,
      count(*) as copies, any_value(reward) as reward, min(version_start) as first_version,
      max(version_start) as last_version, content_hash
    from trajectories group by content_hash
  )
from contents where copies >= min_copies order by copies desc, content_hash;

-- --- data for other training -----------------------------------------------------------------------------------------

create macro demonstrations(least_reward := 1) as table
select
  prompt_id, prompt, response, max(reward) as reward, min(version_start) as version_start, count(*) as copies
from trajectories where finished and reward >= least_reward
group by prompt_id, prompt, response
order by prompt_id, reward desc, response;

create macro preferences(least_gap := 1) as table
with
  texts as (
    select
      any_value(prompt_id) as prompt_id, group_id, any_value(prompt) as prompt, response, avg(reward) as reward,
      bool_or(finished) as finished, min(trajectory_id) as id, min(version_start) as version_start
    from trajectories group by group_id, response
  ),
  pairs as (
    select
      any_value(prompt_id) as prompt_id, group_id, any_value(prompt) as prompt,
      max_by(response, {'reward': reward, 'id': id}) filter (finished) as chosen,
      min_by(response, {'reward': reward, 'id': id}) as rejected,
      max(reward) filter (finished) as chosen_reward, min(reward) as rejected_reward,
      min(version_start) as version_start
    from texts group by group_id
  )
from pairs where chosen_reward > rejected_reward and chosen_reward - rejected_reward >= least_gap order by group_id;

-- --- progress -------------------------------------------------------------------------------------------------------

-- The standard error is that of a share of independent answers, so only values between 0 and 1 have an error.
create macro compare_versions(metric := 'greedy') as table
with
  scores as (
    select
      e.version, e.attempt, e.step, e.value, e.n,
      if(e.value between 0 and 1, sqrt(e.value * (1 - e.value) / e.n), null) as error
    from evaluations e where e.metric = metric and not e.abandoned
  )
select
  *, value - first_value(value) over w as gain,
  (value - lag(value) over w) / nullif(sqrt(error ** 2 + lag(error) over w ** 2), 0) as change_in_errors
from scores window w as (order by step, attempt)
order by step, attempt;

-- The probability that at least one of k responses solves the prompt, estimated without bias from groups of k or more.
-- With c of n responses right it is 1 - (n - c choose k) / (n choose k), which equals 1 - the product of 1 - k / i over
-- i from n - c + 1 to n.
create macro pass_at(k, solved_at := 1) as table
with
  counts as (
    select version_start, count(*) as n, count(*) filter (reward >= solved_at) as c
    from trajectories group by version_start, group_id
  )
select
  version_start, count(*) as groups, avg(c / n) as pass_at_1,
  avg(if(n - c < k, 1, 1 - coalesce(list_product([1 - k / i for i in range(n - c + 1, n + 1)]), 1))) as pass_at_k
from counts where n >= k group by version_start order by version_start;

-- --- age ------------------------------------------------------------------------------------------------------------

create macro reward_by_age(width := 10) as table
select
  d.age // width * width as age_from, count(*) as draws, avg((d.branch = 'recent')::int) as recent_share,
  avg(t.reward) as reward_mean, avg(t.length) as length_mean, avg(abs(d.residual)) as residual_abs
from draws d left join stored.light t using (trajectory_id)
group by age_from order by age_from;

create macro stale(max_age) as table
select
  step, count(*) as draws, count(*) filter (age > max_age) as stale, avg((age > max_age)::int) as stale_share,
  max(age) as age_max
from draws group by step order by step;

create macro outdated(max_age := null) as table
with
  bound as (select coalesce(max_age, (from stored.max_age)) as steps, (select max(step) from steps) as taken),
  found as (
    select
      sync, step, length, coalesce(age > bound.steps, false) as late,
      not late and eligible and draws = 0 and coalesce(age + taken - step > bound.steps, false) as undrawn
    from selection, bound where sync is not null
  )
select
  sync, any_value(step) as step, count(*) as responses, count(*) filter (late) as late,
  count(*) filter (undrawn) as undrawn, avg((late or undrawn)::int) as lost_share,
  coalesce(sum(length) filter (late or undrawn), 0)::bigint as lost_tokens
from found group by sync order by sync;

-- How far the trainer's policy had moved from the policies that generated the drawn responses.
create macro drift(width := 10) as table
with
  gaps as (
    select d.age // width * width as age_from, d.logp - list_sum(t.behaviour_logps)::double as gap, t.length
    from draws d join trajectories t using (trajectory_id)
    where t.behaviour_logps is not null and d.logp is not null
  )
select
  age_from, count(*) as draws, avg(gap) as drift_mean, avg(abs(gap)) as drift_abs, max(abs(gap)) as drift_max,
  sum(gap) / nullif(sum(length), 0) as drift_per_token,
  sum(exp(least(gap, 50))) ** 2 / (count(*) * sum(exp(2 * least(gap, 50)))) as effective_share
from gaps group by age_from order by age_from;

-- How far the policy that generated the responses had moved from the reference.
create macro from_reference() as table
with
  gaps as (
    select
      version_start, length,
      case when behaviour_logps is not null then list_sum(behaviour_logps)::double - list_sum(ref_logps)::double end as gap
    from trajectories
  )
select
  version_start, count(gap) as responses, count(*) - count(gap) as left_out, avg(gap) as kl,
  stddev_samp(gap) / sqrt(count(gap)) as kl_error,
  sum(gap) / nullif(sum(length) filter (gap is not null), 0) as kl_per_token
from gaps group by version_start order by version_start;

-- --- help -------------------------------------------------------------------------------------------

create macro help(about := null) as table
with
  macros as (
    select
      function_name || '(' || array_to_string(parameters, ', ') || ')' as signature, function_name as name, parameters,
      string_split(comment, chr(10)) as lines
    from duckdb_functions() where function_type = 'table_macro' and comment is not null
  ),
  lines as (
    select name, parameters, unnest(lines[2:]) as line, generate_subscripts(lines[2:], 1) as n from macros
  ),
  entries as (
    select 1 as place, view_name as about, view_name as name, 'view' as type, comment as meaning, 0 as n
    from duckdb_views() where schema_name = 'main' and not internal
    union all
    select 2, name, signature, 'macro', lines[1], 0 from macros
    union all
    select 3, table_name, column_name, lower(data_type), coalesce(comment, ''), column_index  -- added columns have none
    from duckdb_columns() where schema_name = 'main' and not internal
    union all
    select
      4, name, split_part(line, ': ', 1),
      if(list_contains(parameters, split_part(line, ': ', 1)), 'parameter', 'column'),
      line[len(split_part(line, ': ', 1)) + 3:], n
    from lines
  )
select name, type, meaning from entries e
where if(about is null, place <= 2, e.about = about)
  or (place = 1 and about not in (select entries.about from entries)
    and error(format('there is no view and no macro {}: from help() names them', about)))
order by place, n, name;
