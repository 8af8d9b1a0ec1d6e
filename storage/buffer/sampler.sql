-- Chooses the trajectories that step $step learns from: $slots prompts, with $responses trajectories each.
--
-- A sampler is one SELECT. For every slot 0 … $slots - 1 and every position 0 … $responses - 1 it returns one row
--     slot, position, trajectory_id, prompt_id, branch ('recent' or 'prioritised'),
--     weight (probability of the trajectory, 0 … 1)
-- All rows of a slot have the same prompt and the same branch. A sampler may read these four tables:
--     turns   branch, turn, prompt_id, prompt: the prompts that the slots of a branch take at this step, in turns
--             0 … $slots - 1. Their order is random. No prompt comes twice before all of the branch have been taken.
--             Prompts outside sampling.mean_reward_between are left out, unless the branch has no others.
--     front   the trajectories of the prompts in turns, with the columns of pool
--     pool    all trajectories that can be drawn at this step: trajectory_id (searcher/seq/row), searcher, seq, row,
--             prompt_id, prompt, content (hash of prompt and response), ord (position in the order of entry), sync,
--             reward, length, finished, version_start, version_start_attempt, version_step (the step whose weights
--             that version has). The age is $step - 1 - version_step: it is 0 for what the weights before the step
--             generated.
--     queue   the prompts that each branch can take: branch, prompt_id, prompt, used (whether it was taken since the
--             queue was last refilled). 'recent' has the prompts of the newest record that admitted anything,
--             'prioritised' has all. Both leave out prompts outside sampling.mean_reward_between, and prompts with no
--             trajectory that is young enough.
-- Reading turns and front takes the same time however much is stored; pool and queue are read from end to end.
-- `prompt` is a number that stands for prompt_id. Join by it, but never let it decide what is drawn.
--
-- Parameters: $seed, $step, $slots (B), $responses (K), $recent_share (m, or 0 if nothing recent is young enough for
-- sampling.max_age), $inv_temp, and $newest (the newest record that admitted anything; its rows have sync = $newest).
-- uniform(text) turns the md5 of a text into a number between 0 and 1. It is the only source of randomness.
-- The draw must follow from the tables and the parameters alone, never from the order in which rows lie. So LIMIT,
-- row_number() and the like need an ORDER BY without ties (no two rows have the same ord), and sums that decide what is
-- drawn need sorted terms.
with
  -- A slot is recent with probability m.
  slots as (
    select
      slot,
      if(uniform(concat_ws(':', $seed, 'branch', $step, slot)) < $recent_share, 'recent', 'prioritised') as branch
    from range($slots) as s(slot)
  ),
  places as (select slot, branch, row_number() over (partition by branch order by slot) - 1 as turn from slots),

  -- Recent slots draw uniformly from the prompt's rows that entered with the newest record. Other slots draw from all
  -- rows of the prompt, with probability proportional to exp(inv_temp x reward).
  candidates as (
    select slot, branch, front.prompt_id, trajectory_id, if(branch = 'recent', 0.0, $inv_temp * reward) as log_weight
    from places join turns using (branch, turn) join front using (prompt)
    where branch = 'prioritised' or sync = $newest
  ),
  weights as (
    -- sorted, so that the sum does not depend on the order of rows
    select slot, max(log_weight) as heaviest, list_sort(list(log_weight)) as log_weights from candidates group by slot
  ),
  groups as (
    select
      slot,
      heaviest,
      list_sum([exp(w - heaviest) for w in log_weights]) as total,
      len(log_weights) >= $responses as enough
    from weights
  ),

  -- Gumbel top-K in log space draws K rows without replacement. If there are fewer than K rows, each position is a
  -- separate draw of one row, so rows repeat.
  trials as (
    select
      slot,
      branch,
      prompt_id,
      trajectory_id,
      log_weight - heaviest as log_weight,
      total,
      enough,
      unnest(range(if(enough, 1, $responses))) as trial
    from candidates join groups using (slot)
  ),
  winners as (
    select
      slot,
      branch,
      prompt_id,
      enough,
      trial,
      max(
        {
          'key': log_weight - ln(-ln(uniform(concat_ws(':', $seed, 'response', $step, slot, trial, trajectory_id)))),
          'id': trajectory_id,
          'weight': exp(log_weight) / total
        },
        $responses
      ) as rows
    from trials
    group by slot, branch, prompt_id, enough, trial
  ),
  drawn as (
    select
      slot,
      branch,
      prompt_id,
      unnest(if(enough, range($responses), [trial])) as position,
      unnest(if(enough, rows, rows[:1])) as row
    from winners
  )
select slot, position, row.id as trajectory_id, prompt_id, branch, row.weight as weight from drawn
order by slot, position
