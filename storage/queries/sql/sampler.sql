-- Which trajectories step $step learns from: $slots prompts, $responses of each.
--
-- A sampler is one SELECT that returns, for every slot 0 … $slots - 1 and position 0 … $responses - 1, one row
--     slot, position, trajectory_id, prompt_id, branch ('recent' or 'prioritised'), weight (of the trajectory, 0 … 1)
-- with the rows of one slot of one prompt and one branch. It reads any of four tables:
--     turns   branch, turn, prompt_id, prompt: the prompts that the slots of a branch take one after the other at this
--             step, turn 0 … $slots - 1: at random, each once before any of the branch is taken again, and only within
--             sampling.mean_reward_between, where any is
--     front   the trajectories of the prompts in turns; columns as of pool
--     pool    all trajectories that can be drawn at this step: trajectory_id (which is searcher/seq/row), searcher,
--             seq, row, prompt_id, prompt, content (hash of prompt and response), ord (the order in which they
--             entered), sync, reward, length, finished, version_start, version_start_attempt, version_step (the step
--             that version follows: $step - 1 - version_step is the age, 0 for what the step's own starting weights
--             generated)
--     queue   the prompts that each branch can take: branch, prompt_id, prompt, used (since the queue was last
--             refilled). 'recent' has those of the newest record that admitted anything, 'prioritised' all, both
--             without those outside sampling.mean_reward_between and those of which nothing is young enough
-- What turns and front cost does not depend on how much is stored; pool and queue are read from end to end.
-- `prompt` is a number for prompt_id: join by it, but never draw by it.
-- Parameters: $seed, $step, $slots (B), $responses (K), $recent_share (m, or 0 where nothing recent is young enough for
-- sampling.max_age), $inv_temp, and $newest, the newest record that admitted anything: the rows that entered then have
-- sync = $newest. uniform(text) is md5 as a number between 0 and 1 and the only source of chance: what is drawn must
-- follow from the tables and the parameters alone, not from the order in which rows lie: LIMIT, row_number() and the like
-- need an ORDER BY without ties (ord differs between any two rows), and sums that decide something need their terms
-- sorted.
with
  -- A slot is recent with probability m.
  slots as (
    select
      slot,
      if(uniform(concat_ws(':', $seed, 'branch', $step, slot)) < $recent_share, 'recent', 'prioritised') as branch
    from range($slots) as s(slot)
  ),
  places as (select slot, branch, row_number() over (partition by branch order by slot) - 1 as turn from slots),

  -- Recent slots draw from the rows that entered then, uniformly; the others from all of the prompt's rows, with
  -- probability proportional to exp(inv_temp x reward).
  candidates as (
    select slot, branch, front.prompt_id, trajectory_id, if(branch = 'recent', 0.0, $inv_temp * reward) as log_weight
    from places join turns using (branch, turn) join front using (prompt)
    where branch = 'prioritised' or sync = $newest
  ),
  weights as (
    -- sorted, so that their sum does not depend on the order in which rows come
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

  -- Gumbel top-K in log space draws without replacement; with fewer than K rows each position is a trial of its own.
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
