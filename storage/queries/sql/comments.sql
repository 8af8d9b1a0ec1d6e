-- The meaning of each view, column and macro. `help()`, `.help` at the prompt and docs/sql.md show these texts.
-- In the text of a macro, the first line says what it returns. The other lines explain its parameters, and those of its
-- columns that are not columns of the views trajectories, draws or prompts.

comment on view trajectories is 'One row per response. Columns that a task adds to its shards come last. They are left out if their name is in use or if their type differs between shards.';
comment on column trajectories.trajectory_id is 'searcher/seq/row';
comment on column trajectories.searcher is 'number of the searcher that generated it';
comment on column trajectories.round is 'the searcher''s round that it belongs to';
comment on column trajectories.slot is 'its place in the round';
comment on column trajectories.seq is 'number of its shard, within the searcher';
comment on column trajectories.version_start is 'the version that generated its first token';
comment on column trajectories.version_end is 'the version that generated its last token';
comment on column trajectories.version_start_attempt is 'the attempt that published version_start';
comment on column trajectories.version_end_attempt is 'the attempt that published version_end';
comment on column trajectories.prompt_id is 'its prompt: a row of prompts';
comment on column trajectories.group_id is 'searcher/round/prompt_id';
comment on column trajectories.prompt is 'text of the prompt';
comment on column trajectories.response is 'text of the response';
comment on column trajectories.prompt_tokens is 'tokens of the prompt; null if they were given up';
comment on column trajectories.response_tokens is 'tokens of the response, with the end token last if it finished; null if they were given up';
comment on column trajectories.behaviour_logps is 'log-probability of each token under the policy that generated it, at the sampling temperature; null if they were given up';
comment on column trajectories.ref_logps is 'log-probability of each token under the reference, at the same temperature; null if they were given up, or if the run does not compute them (search.reference_logps)';
comment on column trajectories.loss_mask is 'for each token of the response, whether the policy wrote it; null if the policy wrote all. Tokens of the environment have 0 in behaviour_logps and ref_logps';
comment on column trajectories.step_ends is 'number of tokens up to the end of each step of the response; null if search.value_samples was 0';
comment on column trajectories.step_values is 'value of the state before each step: the mean reward of continuations that the generating policy sampled from there. Beyond search.value_steps it is the response''s own reward. Null if search.value_samples was 0';
comment on column trajectories.reference_version is 'version of the reference, from which ref_logps come if they are stored';
comment on column trajectories.reference_version_attempt is 'the attempt that published reference_version';
comment on column trajectories.reward is 'the reward that the task gave the response';
comment on column trajectories.reward_parts is 'numbers that the task stored in addition to the reward';
comment on column trajectories.finished is 'true if it ended by itself, false if the token limit cut it off';
comment on column trajectories.length is 'number of response tokens';
comment on column trajectories.temperature is 'sampling temperature of its generation';
comment on column trajectories.top_p is 'top-p of its generation';
comment on column trajectories.seed is 'seed of its generation';
comment on column trajectories.content_hash is 'md5 of prompt_id and the response tokens; identical responses to a prompt share it';
comment on column trajectories.created_at is 'when its shard was made';
comment on column trajectories.generate_seconds is 'its share of the seconds that its batch took to generate';
comment on column trajectories.schema_version is 'version of the shard format: 1';
comment on column trajectories.sync is 'the sync at which it entered the replay buffer; null while it waits';
comment on column trajectories.step is 'the last step before that sync';
comment on column trajectories.version_step is 'the step whose weights version_start has; in a fork that replays, a step of its parent';
comment on column trajectories.age is 'number of steps from version_step to step, its age when it entered';

comment on view groups is 'The responses to one prompt in one round of a searcher, as one row.';
comment on column groups.group_id is 'searcher/round/prompt_id';
comment on column groups.prompt_id is 'the prompt: a row of prompts';
comment on column groups.searcher is 'number of the searcher that generated them';
comment on column groups.round is 'the searcher''s round';
comment on column groups.sync is 'the sync at which they entered the replay buffer';
comment on column groups.step is 'the last step before that sync';
comment on column groups.version_start is 'the oldest version that began one of them';
comment on column groups.version_end is 'the newest version that ended one of them';
comment on column groups.responses is 'number of responses';
comment on column groups.distinct_responses is 'number of different responses';
comment on column groups.reward_mean is 'mean reward';
comment on column groups.reward_min is 'lowest reward';
comment on column groups.reward_max is 'highest reward';
comment on column groups.reward_std is 'standard deviation of the rewards (of a whole population, not of a sample)';
comment on column groups.length_mean is 'mean number of response tokens';
comment on column groups.finished_share is 'share of responses that ended by themselves';
comment on column groups.generate_seconds is 'seconds of generation, summed over the responses';

comment on view prompts is 'One row per prompt of the run, of the splits train and test.';
comment on column prompts.split is 'train or test';
comment on column prompts.prompt_id is 'name of the prompt, unique in its split';
comment on column prompts.text is 'text of the prompt';
comment on column prompts.tokens is 'tokens of the prompt';
comment on column prompts.answer is 'the answer that the task compares responses with';
comment on column prompts.metadata is 'other data of the task about the prompt, as JSON';

comment on view difficulty is 'One row per training prompt, also for prompts that were never tried. The numbers cover all stored responses. In a later run, search.prompts_where is a condition on this view.';
comment on column difficulty.prompt_id is 'name of the prompt';
comment on column difficulty.text is 'text of the prompt';
comment on column difficulty.tries is 'number of responses; if 0, the columns after distinct_responses are null';
comment on column difficulty.distinct_responses is 'number of different responses';
comment on column difficulty.reward_mean is 'mean reward';
comment on column difficulty.reward_min is 'lowest reward';
comment on column difficulty.reward_max is 'highest reward';
comment on column difficulty.reward_std is 'standard deviation of the rewards (of a whole population, not of a sample)';
comment on column difficulty.solve_rate is 'share of responses with a reward of 1 or more';
comment on column difficulty.length_mean is 'mean number of response tokens';
comment on column difficulty.finished_share is 'share of responses that ended by themselves';

comment on view selection is 'One row per trajectory: whether steps could learn from it, and how often they did. All rows are the generated set, rows with eligible = true the eligible set, and rows with draws > 0 the trained set.';
comment on column selection.trajectory_id is 'searcher/seq/row';
comment on column selection.prompt_id is 'its prompt: a row of prompts';
comment on column selection.searcher is 'number of the searcher that generated it';
comment on column selection.version_start is 'the version that generated its first token';
comment on column selection.sync is 'the sync at which it entered the replay buffer; null while it waits';
comment on column selection.step is 'the last step before that sync';
comment on column selection.age is 'its age in steps when it entered';
comment on column selection.reward is 'the reward that the task gave the response';
comment on column selection.length is 'number of response tokens';
comment on column selection.finished is 'true if it ended by itself, false if the token limit cut it off';
comment on column selection.eligible is 'true if some step could draw it: it entered before the last step taken, it was not older than sampling.max_age, and neither a newer copy nor the capacity of its prompt removed it at once';
comment on column selection.draws is 'number of times that steps drew it, abandoned steps not counted';
comment on column selection.first_step is 'the first step that drew it';
comment on column selection.last_step is 'the last step that drew it';
comment on column selection.age_drawn is 'its mean age over its draws';

comment on view draws is 'One row per response in the batch of each gradient step. Abandoned attempts, from which the current weights do not descend, are left out.';
comment on view draws_all is 'Like draws, with the rows of abandoned attempts as well.';
comment on column draws.step is 'the gradient step';
comment on column draws.slot is 'place of the prompt in the batch; all rows of a slot have the same prompt';
comment on column draws.position is 'place of the response in the slot';
comment on column draws.trajectory_id is 'the trajectory that was drawn: a row of trajectories';
comment on column draws.prompt_id is 'its prompt';
comment on column draws.branch is 'recent or prioritised: the rule that chose it';
comment on column draws.weight is 'probability that a single draw from the slot''s candidates gives this trajectory';
comment on column draws.age is 'its age at this draw: steps taken so far, minus steps taken by version_start';
comment on column draws.residual is 'its residual in the loss of that step; null if the objective has none. 0 if the step did not compute the draw (training.computed_rows)';
comment on column draws.log_z is 'log Z of its prompt, estimated from the slot''s rows or learned; null if the objective has none, or if the step did not compute the draw (training.computed_rows)';
comment on column draws.logp is 'log-probability of the response under the trainer''s policy at that step, at the sampling temperature; null if the step did not compute the draw, because its gradient is 0 (training.computed_rows)';
comment on column draws.ref_logp is 'log-probability of the response under the reference; null if the run does not compute it (search.reference_logps)';
comment on column draws.advantage is 'how the step pushes its log-probability, before any importance ratio: up if positive, down if negative. For trajectory balance it is -beta / (1 - objective.behaviour_share) x residual. Null in ledgers of 0.1.0';
comment on column draws.sync is 'the sync that stores the step in the ledger';
comment on column draws.attempt is 'the attempt that took the step';
comment on column draws_all.abandoned is 'true if the step is of an abandoned attempt: the current weights do not descend from it';

comment on view steps is 'One row per gradient step. Abandoned attempts, from which the current weights do not descend, are left out. Other metrics of the run come after these columns.';
comment on view steps_all is 'Like steps, with the rows of abandoned attempts as well.';
comment on column steps.step is 'number of the step, from 1';
comment on column steps.sync is 'the sync that stores the step in the ledger';
comment on column steps.attempt is 'the attempt that took the step';
comment on column steps.version is 'the newest version that the weights before the step descend from';
comment on column steps.version_attempt is 'the attempt that published version';
comment on column steps.loss is 'loss of the objective; for trajectory balance the mean squared residual, weighted with objective.weights';
comment on column steps.grad_norm is 'gradient norm before clipping';
comment on column steps.skipped is '1 if the loss or the gradient was not finite, so that nothing was updated; values that are not finite are null';
comment on column steps.clipped is '1 if the gradient was scaled down to training.clip_norm, 0 if not; null if clip_norm is 0 or nothing was updated';
comment on column steps.lr is 'learning rate';
comment on column steps.beta is 'beta: the temperature of the target';
comment on column steps.log_z is 'mean log Z over the groups that the step computed';
comment on column steps.residual_abs is 'mean absolute residual over the groups that the step computed';
comment on column steps.log_ratio_mean is 'mean of log π − log π_ref over the responses that the step computed; null if log π_ref is not computed (search.reference_logps)';
comment on column steps.reward_mean is 'mean reward of the batch';
comment on column steps.age_mean is 'mean age of the batch, in steps';
comment on column steps.age_max is 'largest age in the batch, in steps';
comment on column steps.recent_share is 'share of the batch that was drawn as recent';
comment on column steps.equal_rewards is 'share of groups whose rewards are all equal; in these only the reference or the sampling policy has an effect';
comment on column steps.tokens is 'number of response tokens in the batch';
comment on column steps.seconds_step is 'seconds of the whole step, waiting included';
comment on column steps.seconds_wait is 'seconds of seconds_step in which the trainer waited for data';
comment on column steps.seconds_forward_backward is 'seconds of seconds_step for forward pass, backward pass and update';
comment on column steps.seconds_snapshot is 'seconds of seconds_step for copying the weights; null unless the step closes a sync';
comment on column steps.seconds_backlog is 'seconds of seconds_step spent waiting because the store took longer than the steps between two syncs; null unless the step closes a sync';
comment on column steps.seconds_draw is 'seconds for drawing the batch, in another thread during the previous step';
comment on column steps.seconds_fetch is 'seconds for reading the drawn trajectories, in another thread during the previous step';
comment on column steps.seconds_sync is 'seconds for admitting shards, in another thread during the previous step';
comment on column steps.seconds_collate is 'seconds for making tensors of the batch, in another thread during the previous step';
comment on column steps.weights_sha256 is 'digest of the weights after the step (sync.weights_digest); null unless the step closes a sync';
comment on column steps.created_at is 'when the ledger was written';
comment on column steps_all.abandoned is 'true if the step is of an abandoned attempt: the current weights do not descend from it';

comment on view shards is 'One row per shard that is stored or should be stored.';
comment on column shards.key is 'name of the object in the run''s folder';
comment on column shards.searcher is 'number of the searcher that wrote it; null if it was refused because its name is not that of a shard';
comment on column shards.seq is 'number of the shard within the searcher; null in the same case';
comment on column shards.state is 'admitted; waiting: no sync record names it yet; refused; missing: admitted, but not there; damaged: not what was admitted; given up: by a retention record; unreadable';
comment on column shards.rows is 'number of trajectories';
comment on column shards.bytes is 'size in bytes';
comment on column shards.sha256 is 'sha256 of its bytes; null while it waits';
comment on column shards.sync is 'the sync that admitted it';
comment on column shards.step is 'the last step before that sync';
comment on column shards.reason is 'why it was refused, or what is damaged or unreadable. For a shard that waits: the damaged sync record that may have admitted it';

comment on view damage is 'One row per object that is damaged or missing. All other views leave these objects out.';
comment on column damage.key is 'name of the object in the run''s folder';
comment on column damage.problem is 'what is wrong with it';

comment on view syncs is 'One row per sync record.';
comment on column syncs.sync is 'number of the sync';
comment on column syncs.step is 'the last step before the sync';
comment on column syncs.attempt is 'the attempt that wrote the record';
comment on column syncs.shards is 'number of shards that it admits';
comment on column syncs.rows is 'number of trajectories that it admits';
comment on column syncs.refused is 'number of shards that it refuses';
comment on column syncs.previous_sha256 is 'sha256 of the sync record before it';
comment on column syncs.created_at is 'when the record was written';

comment on view versions is 'One row per published version.';
comment on column versions.version is 'number of the version';
comment on column versions.attempt is 'the attempt that published it';
comment on column versions.step is 'the step whose weights it has; 0 before the first step';
comment on column versions.state is 'kept, or removed after a retention record gave it up';
comment on column versions.abandoned is 'true if the current weights do not descend from it';
comment on column versions.files is 'number of files';
comment on column versions.bytes is 'size of all its files';
comment on column versions.sha256 is 'sha256 over all its files';
comment on column versions.changed_share is 'share of its weights, in the stored number format, that differ from the version which the same attempt published before; null for the first version of an attempt, and if the manifest does not say';
comment on column versions.base is 'if it is stored as a difference: the version, of the same attempt, that it is the difference from; null if it is stored whole';
comment on column versions.stored_bytes is 'size of what is stored: less than `bytes` for a difference';
comment on column versions.created_at is 'when it was published';

comment on view checkpoints is 'One row per checkpoint that is kept.';
comment on column checkpoints.sync is 'the sync at which it was taken';
comment on column checkpoints.attempt is 'the attempt that took it';
comment on column checkpoints.step is 'the step whose weights it has';
comment on column checkpoints.abandoned is 'true if the current weights do not descend from it';
comment on column checkpoints.files is 'number of files';
comment on column checkpoints.bytes is 'size of all its files';
comment on column checkpoints.created_at is 'when it was complete';

comment on view attempts is 'One row per attempt: a life of the trainer.';
comment on column attempts.attempt is 'number of the attempt';
comment on column attempts.continues_sync is 'sync of the checkpoint that it continues; null if it began anew';
comment on column attempts.continues_attempt is 'the attempt that took that checkpoint';
comment on column attempts.created_at is 'when it began';
comment on column attempts.compute_dtype is 'number format in which its trainer multiplied matrices; like the next columns null in older runs, and for a trainer that ended before it had loaded the policy';
comment on column attempts.device is 'kind of device of its trainer, such as cpu';
comment on column attempts.threads is 'number of threads with which its trainer computed on a CPU';
comment on column attempts.torch is 'version of torch';

comment on view evaluations is 'One row per evaluated version and metric.';
comment on column evaluations.version is 'number of the version';
comment on column evaluations.attempt is 'the attempt that published it';
comment on column evaluations.step is 'the step whose weights it has; 0 before the first step';
comment on column evaluations.metric is 'name of the metric, such as greedy, sampled or pass@4';
comment on column evaluations.value is 'the score';
comment on column evaluations.n is 'number of responses that the score is computed from; for pass@k, of prompts';
comment on column evaluations.temperature is 'sampling temperature of the responses; 0 is greedy; null in records from before it was stored';
comment on column evaluations.top_p is 'top-p of the responses; null in the same records';
comment on column evaluations.seconds is 'seconds that it took; 0 for metrics computed from the responses of greedy or sampled';
comment on column evaluations.abandoned is 'true if the current weights do not descend from the version';
comment on column evaluations.created_at is 'when it was stored';

comment on view examples is 'Greedy responses to the first prompts of each evaluation (`evaluation.examples`). Runs of earlier versions have none. The middle of a long text is left out.';
comment on column examples.version is 'number of the version that responded';
comment on column examples.attempt is 'the attempt that published it';
comment on column examples.step is 'the step whose weights it has; 0 before the first step';
comment on column examples.prompt_id is 'the prompt: a row of prompts with split test';
comment on column examples.prompt is 'text of the prompt';
comment on column examples.response is 'text of the greedy response; each turn of several begins on a line of its own';
comment on column examples.answer is 'the right answer to the prompt; empty if the prompt has none';
comment on column examples.reward is 'reward of the response; null if it is not finite';
comment on column examples.abandoned is 'true if the current weights do not descend from the version';

comment on view events is 'One row per event, in the order of their times.';
comment on column events.created_at is 'when it happened';
comment on column events.role is 'the role that stored it';
comment on column events.life is 'number of the role''s life';
comment on column events.seq is 'number of the event within that life';
comment on column events.kind is 'name of what happened';
comment on column events.severity is 'info, warning or error';
comment on column events.message is 'what happened, in words';
comment on column events.data is 'values that belong to an event of this kind';

comment on view alarms is 'One row per alarm: a problem that does not stop the run, with its beginning and its end.';
comment on column alarms.began_at is 'when it was noticed';
comment on column alarms.ended_at is 'when it was over, or when the role that noticed it began another life; null while it lasts, or if it lasted until the run ended';
comment on column alarms.role is 'the role that noticed it';
comment on column alarms.life is 'number of that role''s life';
comment on column alarms.kind is 'name of the alarm';
comment on column alarms.about is 'the role or machine that the alarm is about, if there can be several';
comment on column alarms.severity is 'warning or error';
comment on column alarms.message is 'what is wrong, in words';

comment on view settings is 'One row per setting of the run.';
comment on column settings.name is 'dotted name, as --set takes it';
comment on column settings.value is 'value as JSON';

comment on macro table eligible_at is 'What the replay buffer held once a sync was over. Three rules choose the rows. First, of the responses that were not older than sampling.max_age when they entered, the newest of identical copies stays, or every copy with sampling.copies=all. Second, each prompt keeps its newest responses up to sampling.capacity; with sampling.evict=worst it keeps those of which some copy had the highest reward, and those that its newest sync record admitted. Third, responses that are older than sampling.max_age at the next step are left out. A fork applies its own settings throughout.
at_sync: the sync, such as (select max(sync) from syncs)
sync: the sync at which it entered';

comment on macro table compare_selection is 'How the trajectories that steps learned from differ from those that were generated, by reward, length, finished and age at entry. Chosen trajectories are compared with all that entered at the same sync, so a policy that changes over time causes no bias.
measure: reward, length, finished or age
set: generated; eligible; trained: drawn at least once; drawn: counted once per draw
n: number of trajectories; for the set drawn, of draws
mean: mean of the measure in the set
std: standard deviation of the measure in the set
lowest_tenth: a tenth of the set lies at or below this value
median: median of the measure in the set
highest_tenth: a tenth of the set lies at or above this value
difference: mean of the set, minus the mean if all trajectories that entered at the same sync had been equally likely
standard_errors: the difference in standard errors, with the rows of one prompt counted as one; up to about 3 may be chance';

comment on macro table selection_by is 'How often responses were eligible and drawn, by the value of a measure. Rates are relative to all responses that entered at the same sync: they are 1 everywhere if the choice does not depend on the measure.
measure: reward, length, finished or age, at entry
bins: approximate number of bins, each with as many trajectories; one bin per value if there are not more values (10)
low: lowest value in the bin
high: highest value in the bin
mean: mean of the values in the bin
generated: number of trajectories in the bin
eligible: number of them that some step could draw
trained: number of them that were drawn at least once
draws: number of draws of them
eligible_rate: relative rate of being eligible
trained_rate: relative rate of being trained
draw_rate: relative rate of draws
draw_rate_error: standard error of draw_rate, with the rows of one prompt counted as one';

comment on macro table prompts_by_set is 'How many prompts each set contains, and how evenly it uses them.
set: generated; eligible; trained: drawn at least once; drawn: counted once per draw
n: number of trajectories; for the set drawn, of draws
prompts: number of prompts with at least one of them
share_of_task: the same as a share of all training prompts
effective_prompts: number of evenly used prompts that would be as diverse: 1 / the sum of squared shares
gini: Gini coefficient: 0 if all prompts that were generated for are used evenly, close to 1 if few of them are';

comment on macro table learned_from is 'The trajectories that one step learned from.
step: the gradient step
slot: place of the prompt in the batch; all rows of a slot have the same prompt
version_start: the version that generated its first token
age: its age at this draw: steps taken so far, minus steps taken by version_start';

comment on macro table trajectory is 'One trajectory, with every step that drew it.
id: its trajectory_id, searcher/seq/row
answer: the answer that the task compares responses with
draws: number of times that steps drew it, abandoned steps not counted
drawn_at: the steps that drew it
residuals: its residual at each of them';

comment on macro table group_of is 'All responses of the group that a trajectory belongs to.
id: the trajectory_id of any response of the group
draws: number of times that steps drew it, abandoned steps not counted';

comment on macro table unsolved is 'Prompts that no response has solved, the most tried first.
min_tries: lowest number of responses (1)
solved_at: lowest reward with which a response solves its prompt (1)
tries: number of responses to the prompt
reward_max: highest reward among them
distinct_responses: number of different responses
newest_version: the newest version that tried';

comment on macro table cost_per_solved is 'What each prompt has cost in tokens and seconds, the most expensive first.
solved_at: lowest reward with which a response solves its prompt (1)
tries: number of responses to the prompt
solved: number of responses that solve it
first_solved_round: first round of a searcher in which a response solved it
tokens: response tokens of all tries
generate_seconds: seconds of generation of all tries
tokens_per_solved: tokens divided by solved; null if no response solves it
seconds_per_solved: generate_seconds divided by solved; null if no response solves it';

comment on macro table duplicates is 'Responses that were generated more than once for the same prompt, the most frequent first.
min_copies: lowest number of copies (2)
copies: number of times that it was generated
first_version: the first version that generated it
last_version: the last version that generated it';

comment on macro table demonstrations is 'Responses for supervised fine-tuning: those that ended by themselves with a high enough reward, each once per prompt.
least_reward: lowest reward (1)
copies: number of times that it was generated
version_start: the first version that generated it
reward: its highest reward';

comment on macro table preferences is 'Preference pairs: from each group the best response that ended by itself, and the worst response, if their rewards are far enough apart. Of responses with equal rewards one is chosen by a fixed rule.
least_gap: smallest difference between the two rewards (1)
chosen: the response with the highest reward among those that ended by themselves
rejected: the response with the lowest reward of its group
chosen_reward: reward of chosen; its mean if the response was generated more than once
rejected_reward: reward of rejected; its mean likewise
version_start: the first version that generated a response of the group';

comment on macro table compare_versions is 'Scores by version. Versions that the current weights do not descend from are left out.
metric: name of the metric (''greedy'')
version: number of the version
attempt: the attempt that published it
step: the step whose weights it has; 0 before the first step
value: the score
n: number of responses that the score is computed from
error: standard error of the score as a share of n independent answers; null if the score is not a share
gain: difference from the first version
change_in_errors: difference from the version before, in standard errors of that difference';

comment on macro table pass_at is 'Probability that at least one of k responses solves the prompt, by version. It is an unbiased estimate from groups of k or more responses.
k: number of responses
solved_at: lowest reward with which a response solves its prompt (1)
groups: number of groups that it is estimated from
pass_at_1: share of responses that solve their prompt
pass_at_k: probability that at least one of k responses solves the prompt';

comment on macro table reward_by_age is 'Rewards and residuals of what was drawn, by age at the draw.
width: width of a range of ages, in steps (10)
age_from: lowest age of the range
draws: number of draws
recent_share: share of them that were drawn as recent
reward_mean: mean reward
length_mean: mean number of response tokens
residual_abs: mean absolute residual';

comment on macro table stale is 'How many draws of each step are older than a given age.
max_age: the age, in steps
step: the gradient step
draws: number of responses in the step
stale: number of them that are older than max_age
stale_share: share of them that are older than max_age
age_max: largest age in the step';

comment on macro table outdated is 'How many of the responses that entered at each sync were not learned from because of a maximum age, or would not have been.
max_age: the age, in steps (sampling.max_age)
sync: the sync
step: the last step before that sync
responses: number of responses that entered
late: number of them that were too old when they entered
undrawn: number of the others that a step could have drawn, that no step drew, and that are too old by now
lost_share: late and undrawn as a share of responses
lost_tokens: response tokens of late and undrawn together';

comment on macro table drift is 'How far the trainer''s policy had moved from the policies that generated what it drew. The drift of a response is its log-probability under the trainer''s policy minus that under the generating policy. Draws whose log-probabilities were given up, and draws that their step did not compute, are left out.
width: width of a range of ages, in steps (10)
age_from: lowest age of the range
draws: number of draws
drift_mean: mean drift, in nats
drift_abs: mean absolute drift
drift_max: largest absolute drift
drift_per_token: mean drift per token
effective_share: share of the draws that would count if they were importance-weighted: (Σw)² / (n Σw²), w = exp(drift)';

comment on macro table from_reference is 'How far the policy had moved from the reference, by version. It compares the log-probability of each response under the version that generated it with that under the reference, at the sampling temperature.
responses: number of responses that it is estimated from
left_out: number of responses whose log-probabilities were given up or never computed
kl: KL divergence in nats per response; unbiased if top_p cut nothing and nothing is left out
kl_error: standard error of kl
kl_per_token: the same in nats per token';

comment on macro table help is 'The views and macros, or the columns and parameters of one of them.
about: name of a view or macro; without it, all are listed
name: name of a view, a column or a parameter, or a macro with its parameters
type: view, macro, parameter, or the type of a column
meaning: what it means';
