-- What every view, column and macro means: `describe`, `.help` of the prompt and docs/sql.md show it.
-- Of a macro, the lines after the first explain its parameters and those of its columns that no view explains.

comment on view trajectories is 'One row per response. Columns that a task adds to its shards come last, unless their name is taken or their type is not the same everywhere.';
comment on column trajectories.trajectory_id is 'searcher/seq/row';
comment on column trajectories.searcher is 'who generated it';
comment on column trajectories.round is 'in which pass of the searcher';
comment on column trajectories.slot is 'at which place of the round';
comment on column trajectories.seq is 'the shard within the searcher';
comment on column trajectories.version_start is 'the version that generated its first token';
comment on column trajectories.version_end is 'the version that generated its last token';
comment on column trajectories.version_start_attempt is 'the attempt that published version_start';
comment on column trajectories.version_end_attempt is 'the attempt that published version_end';
comment on column trajectories.prompt_id is 'what was asked: a row of prompts';
comment on column trajectories.group_id is 'searcher/round/prompt_id';
comment on column trajectories.prompt is 'the text asked';
comment on column trajectories.response is 'the text generated';
comment on column trajectories.prompt_tokens is 'the prompt as the policy reads it; null where given up';
comment on column trajectories.response_tokens is 'the response; it ends with the end token if finished; null where given up';
comment on column trajectories.behaviour_logps is 'per token, of the policy that generated it, at its temperature; null where given up';
comment on column trajectories.ref_logps is 'per token, of the reference, at the same temperature; null where given up';
comment on column trajectories.loss_mask is 'per token of the response, whether the policy wrote it; null where it wrote all. Tokens of the environment have 0 in behaviour_logps and ref_logps';
comment on column trajectories.step_ends is 'after how many tokens of the response each of its steps ends; null where search.value_samples was 0';
comment on column trajectories.step_values is 'of the state before each step, the mean reward of continuations by the policy that generated the response, or beyond search.value_steps its own reward; null likewise';
comment on column trajectories.reference_version is 'which reference';
comment on column trajectories.reference_version_attempt is 'the attempt that published the reference';
comment on column trajectories.reward is 'the number the task gave the response';
comment on column trajectories.reward_parts is 'what the reward was made of';
comment on column trajectories.finished is 'ended by itself, not by the limit of tokens';
comment on column trajectories.length is 'response tokens';
comment on column trajectories.temperature is 'of its generation';
comment on column trajectories.top_p is 'of its generation';
comment on column trajectories.seed is 'of its generation';
comment on column trajectories.content_hash is 'md5 of the prompt''s id and the response''s tokens';
comment on column trajectories.created_at is 'when it was stored';
comment on column trajectories.generate_seconds is 'its share of the time that generating its batch took';
comment on column trajectories.schema_version is '1';
comment on column trajectories.sync is 'the sync at which it entered the buffer; null while it waits';
comment on column trajectories.step is 'the step which that sync follows';
comment on column trajectories.version_step is 'the step that version_start follows; in a fork that replays, a step of its parent';
comment on column trajectories.age is 'steps from its version to its entry';

comment on view groups is 'The responses that one prompt got in one round.';
comment on column groups.group_id is 'searcher/round/prompt_id';
comment on column groups.prompt_id is 'what was asked: a row of prompts';
comment on column groups.searcher is 'who generated them';
comment on column groups.round is 'in which pass of the searcher';
comment on column groups.sync is 'the sync at which they entered the buffer';
comment on column groups.step is 'the step which that sync follows';
comment on column groups.version_start is 'the first version among them';
comment on column groups.version_end is 'the last version among them';
comment on column groups.responses is 'how many';
comment on column groups.distinct_responses is 'how many different ones';
comment on column groups.reward_mean is 'of their rewards';
comment on column groups.reward_min is 'of their rewards';
comment on column groups.reward_max is 'of their rewards';
comment on column groups.reward_std is 'of their rewards, as of a whole population';
comment on column groups.length_mean is 'of their response tokens';
comment on column groups.finished_share is 'how many ended by themselves';
comment on column groups.generate_seconds is 'all of them together';

comment on view prompts is 'What can be asked.';
comment on column prompts.split is 'train or test';
comment on column prompts.prompt_id is 'its name';
comment on column prompts.text is 'the text asked';
comment on column prompts.tokens is 'the text as the policy reads it';
comment on column prompts.answer is 'what the task compares a response with';
comment on column prompts.metadata is 'whatever else the task says of it, as JSON';

comment on view difficulty is 'One row per prompt to train on, also those never tried: what came of all responses that are stored. search.prompts_where of a later run is a condition on it.';
comment on column difficulty.prompt_id is 'its name';
comment on column difficulty.text is 'the text asked';
comment on column difficulty.tries is 'how many responses it got; 0 if none, and then what follows is null';
comment on column difficulty.distinct_responses is 'how many different ones';
comment on column difficulty.reward_mean is 'of their rewards';
comment on column difficulty.reward_min is 'of their rewards';
comment on column difficulty.reward_max is 'of their rewards';
comment on column difficulty.reward_std is 'of their rewards, as of a whole population';
comment on column difficulty.solve_rate is 'share of them with a reward of 1 or more';
comment on column difficulty.length_mean is 'of their response tokens';
comment on column difficulty.finished_share is 'how many ended by themselves';

comment on view selection is 'One row per trajectory: whether it could be learned from, and how often it was. Generated is every row, eligible says so, trained are those with draws.';
comment on column selection.trajectory_id is 'searcher/seq/row';
comment on column selection.prompt_id is 'what was asked: a row of prompts';
comment on column selection.searcher is 'who generated it';
comment on column selection.version_start is 'the version that generated its first token';
comment on column selection.sync is 'the sync at which it entered the buffer; null while it waits';
comment on column selection.step is 'the step which that sync follows';
comment on column selection.age is 'steps from its version to its entry';
comment on column selection.reward is 'the number the task gave the response';
comment on column selection.length is 'response tokens';
comment on column selection.finished is 'ended by itself, not by the limit of tokens';
comment on column selection.eligible is 'some step could draw it: it entered before the last step taken, was not older than sampling.max_age, and neither a copy nor the capacity of its prompt removed it at once';
comment on column selection.draws is 'how often steps that count drew it';
comment on column selection.first_step is 'the first step that drew it';
comment on column selection.last_step is 'the last step that drew it';
comment on column selection.age_drawn is 'its mean age when it was drawn';

comment on view draws is 'One row per response of each gradient step, of the attempts that the current weights descend from.';
comment on view draws_all is 'As draws, also of abandoned attempts.';
comment on column draws.step is 'which step';
comment on column draws.slot is 'place in the batch; the rows of a slot are of one prompt';
comment on column draws.position is 'place in the slot';
comment on column draws.trajectory_id is 'what was drawn: a row of trajectories';
comment on column draws.prompt_id is 'of which prompt';
comment on column draws.branch is 'recent or prioritised';
comment on column draws.weight is 'probability with which one draw from the slot''s candidates gives this one';
comment on column draws.age is 'steps taken when it was drawn, since the version that generated it';
comment on column draws.residual is 'of the loss, at that step; null for objectives that balance nothing';
comment on column draws.log_z is 'of its prompt, estimated from the slot''s rows, or learned; null likewise';
comment on column draws.logp is 'of the response, by the trainer''s policy at that step, at the temperature of generation';
comment on column draws.ref_logp is 'of the response, by the reference';
comment on column draws.advantage is 'what raises or lowers its log-probability, before any importance ratio: for trajectory balance -beta x residual; null in ledgers of 0.1.0';
comment on column draws.sync is 'the sync that closes the step';
comment on column draws.attempt is 'who took the step';
comment on column draws_all.abandoned is 'of an attempt that the current weights do not descend from';

comment on view steps is 'One row per gradient step, of the attempts that the current weights descend from. Whatever else a run measures comes after these.';
comment on view steps_all is 'As steps, also of abandoned attempts.';
comment on column steps.step is 'which step, from 1';
comment on column steps.sync is 'the sync that closes it';
comment on column steps.attempt is 'who took it';
comment on column steps.version is 'the newest version its starting weights descend from';
comment on column steps.version_attempt is 'the attempt that published that version';
comment on column steps.loss is 'of the objective: for trajectory balance the mean squared residual';
comment on column steps.grad_norm is 'of the gradient, before it is clipped';
comment on column steps.skipped is '1 where loss or gradient was not finite, so that nothing was updated; what was not finite is null';
comment on column steps.clipped is '1 where the gradient was scaled down to training.clip_norm, 0 where it was not; null where that is 0, or nothing was updated';
comment on column steps.lr is 'learning rate';
comment on column steps.beta is 'temperature of the target';
comment on column steps.log_z is 'mean over the batch';
comment on column steps.residual_abs is 'mean absolute residual';
comment on column steps.log_ratio_mean is 'mean of log π − log π_ref of the responses drawn';
comment on column steps.reward_mean is 'of what was drawn';
comment on column steps.age_mean is 'of what was drawn';
comment on column steps.age_max is 'of what was drawn';
comment on column steps.recent_share is 'share of draws that are recent';
comment on column steps.equal_rewards is 'share of groups whose rewards are all alike, where only the reference pulls';
comment on column steps.tokens is 'response tokens in the batch';
comment on column steps.seconds_step is 'from one step to the next';
comment on column steps.seconds_wait is 'of it, standing still for data';
comment on column steps.seconds_forward_backward is 'of it, arithmetic';
comment on column steps.seconds_snapshot is 'of it, in a step that closes a sync: copying the weights';
comment on column steps.seconds_backlog is 'of it, in a step that closes a sync: waiting for a store slower than k steps';
comment on column steps.seconds_draw is 'in another thread, beside the step before';
comment on column steps.seconds_fetch is 'in another thread, beside the step before';
comment on column steps.seconds_sync is 'in another thread, beside the step before';
comment on column steps.seconds_collate is 'in another thread, beside the step before';
comment on column steps.weights_sha256 is 'of the weights after it, at each sync';
comment on column steps.created_at is 'when the ledger was written';
comment on column steps_all.abandoned is 'of an attempt that the current weights do not descend from';

comment on view shards is 'One row per shard that is or should be there.';
comment on column shards.key is 'its name in the run''s folder';
comment on column shards.searcher is 'who wrote it; null of what was refused because it is not named like a shard';
comment on column shards.seq is 'its number within the searcher; null likewise';
comment on column shards.state is 'admitted; waiting for a record; refused; missing though admitted; damaged: not what was admitted; given up by a retention record; unreadable';
comment on column shards.rows is 'how many trajectories';
comment on column shards.bytes is 'its size';
comment on column shards.sha256 is 'of its bytes; null while it waits';
comment on column shards.sync is 'when it entered';
comment on column shards.step is 'the step which that sync follows';
comment on column shards.reason is 'why it was refused, or is damaged or unreadable; of one that waits, which damaged record may have admitted it';

comment on view damage is 'One row per object that is damaged or missing. Every other view leaves it out.';
comment on column damage.key is 'its name in the run''s folder';
comment on column damage.problem is 'what is wrong with it';

comment on view syncs is 'One row per sync record.';
comment on column syncs.sync is 'its number';
comment on column syncs.step is 'the step it follows';
comment on column syncs.attempt is 'who wrote the record';
comment on column syncs.shards is 'how many it admits';
comment on column syncs.rows is 'trajectories that it admits';
comment on column syncs.refused is 'how many shards it refuses';
comment on column syncs.previous_sha256 is 'of the record before it';
comment on column syncs.created_at is 'when it was written';

comment on view versions is 'One row per published version.';
comment on column versions.version is 'its number';
comment on column versions.attempt is 'who published it';
comment on column versions.step is 'the step it follows';
comment on column versions.state is 'kept, or removed after a retention record had given it up';
comment on column versions.abandoned is 'of an attempt that the current weights do not descend from';
comment on column versions.files is 'how many';
comment on column versions.bytes is 'of all its files';
comment on column versions.sha256 is 'of all its files';
comment on column versions.changed_share is 'of its weights, as they are stored, those that differ from the version that its attempt published before it; null of an attempt''s first, and where its manifest does not say';
comment on column versions.base is 'of one that is stored as a difference: the version, of the same attempt, that it is the difference from; null of one that is stored whole';
comment on column versions.stored_bytes is 'of what is stored of it: less than `bytes` where that is a difference';
comment on column versions.created_at is 'when it was published';

comment on view checkpoints is 'One row per checkpoint that is kept.';
comment on column checkpoints.sync is 'the sync it was taken at';
comment on column checkpoints.attempt is 'by whom';
comment on column checkpoints.step is 'the step before it';
comment on column checkpoints.abandoned is 'of an attempt that the current weights do not descend from';
comment on column checkpoints.files is 'how many';
comment on column checkpoints.bytes is 'of all its files';
comment on column checkpoints.created_at is 'when it was complete';

comment on view attempts is 'One row per life of the trainer.';
comment on column attempts.attempt is 'its number';
comment on column attempts.continues_sync is 'the checkpoint it went on from; null where it began anew';
comment on column attempts.continues_attempt is 'whose checkpoint that was';
comment on column attempts.created_at is 'when it began';

comment on view evaluations is 'One row per version and metric.';
comment on column evaluations.version is 'which version';
comment on column evaluations.attempt is 'who published it';
comment on column evaluations.step is 'the step it follows';
comment on column evaluations.metric is 'such as greedy, sampled or pass@4';
comment on column evaluations.value is 'the score';
comment on column evaluations.n is 'of how many responses; of pass@k, of how many prompts';
comment on column evaluations.temperature is 'of the responses; 0 is greedy; null in records from before it was stored';
comment on column evaluations.top_p is 'likewise';
comment on column evaluations.seconds is 'how long it took; 0 for what comes from the responses of greedy or sampled';
comment on column evaluations.abandoned is 'of an attempt that the current weights do not descend from';
comment on column evaluations.created_at is 'when it was stored';

comment on view events is 'One row per event, in the order in which they say they happened.';
comment on column events.created_at is 'when';
comment on column events.role is 'whose';
comment on column events.life is 'which life of the role';
comment on column events.seq is 'the event''s number in that life';
comment on column events.kind is 'what happened';
comment on column events.severity is 'info, warning or error';
comment on column events.message is 'what happened, in words';
comment on column events.data is 'what belongs to its kind';

comment on view alarms is 'One row per alarm: something that went wrong quietly, from when to when.';
comment on column alarms.began_at is 'when it was noticed';
comment on column alarms.ended_at is 'when it was over, or the role that noticed it began another life; null while it lasts, or if it did at the end';
comment on column alarms.role is 'who noticed it';
comment on column alarms.life is 'which life of that role';
comment on column alarms.kind is 'what goes wrong';
comment on column alarms.about is 'the role or the machine it is about, where there can be several';
comment on column alarms.severity is 'warning or error';
comment on column alarms.message is 'what goes wrong, in words';

comment on view settings is 'One row per setting of the run.';
comment on column settings.name is 'dotted, as --set takes it';
comment on column settings.value is 'as JSON';

comment on macro table eligible_at is 'What the replay buffer held once a sync was over: of what was not older than sampling.max_age when it entered the newest copy of equal content, or every copy with sampling.copies=all, and of those what each prompt has room for: its newest up to the capacity or, with sampling.evict=worst, those of which some copy had the greatest reward, and what its newest record brought; and of those what is not older than sampling.max_age at the next step. A fork applies its own settings throughout.
at_sync: the sync, such as (select max(sync) from syncs)
sync: the sync at which it entered';

comment on macro table compare_selection is 'How what was learned from differs from what was generated, by reward, length, finished and age at entry. What was chosen is compared with all that entered at the same sync, so that a policy which changes over time is no bias.
measure: reward, length, finished or age
set: generated; eligible; trained: drawn at least once; drawn: as often as it was drawn
n: trajectories, or draws
mean: of the measure in the set
std: of the measure in the set
lowest_tenth: a tenth of the set lies at or below it
median: of the measure in the set
highest_tenth: a tenth of the set lies at or above it
difference: mean of the set minus what it would be had everything that entered together been as likely
standard_errors: the difference in standard errors, with the rows of one prompt taken as one; within 3 or so it may be chance';

comment on macro table selection_by is 'How often responses were eligible and drawn, by the size of a measure. Rates are relative to all that entered at the same sync: 1 everywhere if the choice does not look at the measure.
measure: reward, length, finished or age at entry
bins: about how many, of as many trajectories each; one per value where there are not more values (10)
low: least value of the bin
high: greatest value of the bin
mean: of the values in the bin
generated: trajectories in the bin
eligible: of them, those that some step could draw
trained: of them, those drawn at least once
draws: how often steps drew them
eligible_rate: eligible ones, relative
trained_rate: trained ones, relative
draw_rate: draws, relative
draw_rate_error: standard error of draw_rate, with the rows of one prompt taken as one';

comment on macro table prompts_by_set is 'How many prompts are in each set, and how evenly.
set: generated; eligible; trained: drawn at least once; drawn: as often as it was drawn
n: trajectories, or draws
prompts: with at least one of them
share_of_task: of the prompts of split train
effective_prompts: as many prompts, evenly used, would be as diverse: 1 / the sum of squared shares
gini: 0 if every prompt that was generated for is used evenly, towards 1 if few are';

comment on macro table learned_from is 'What one step learned from.
step: which step
slot: place in the batch; the rows of a slot are of one prompt
version_start: the version that generated it
age: steps taken when it was drawn, since the version that generated it';

comment on macro table trajectory is 'One trajectory and every step that drew it.
id: its trajectory_id, searcher/seq/row
answer: what the task compares a response with
draws: how often steps that count drew it
drawn_at: those steps
residuals: its residual at each of them';

comment on macro table group_of is 'Every response of the group that a trajectory belongs to.
id: the trajectory_id of any of them
draws: how often steps that count drew it';

comment on macro table unsolved is 'Prompts that no response has solved, the most tried first.
min_tries: of how many responses at least (1)
solved_at: from which reward a response solves its prompt (1)
tries: responses to it
reward_max: the best of them
distinct_responses: how many different ones
newest_version: the last version that tried';

comment on macro table cost_per_solved is 'What each prompt has cost, the dearest first.
solved_at: from which reward a response solves its prompt (1)
tries: responses to it
solved: how many of them solve it
first_solved_round: the first round of a searcher that did
tokens: response tokens of all of them
generate_seconds: generating all of them
tokens_per_solved: null if none solves it
seconds_per_solved: null if none solves it';

comment on macro table duplicates is 'Responses to a prompt that were generated more than once, the most frequent first.
min_copies: how often at least (2)
copies: how often
first_version: the first version that generated it
last_version: the last version that generated it';

comment on macro table demonstrations is 'Responses to imitate: those that ended by themselves and were rewarded enough, each once for its prompt.
least_reward: the least reward
copies: how often it was generated
version_start: the first version that generated it
reward: the greatest that it had';

comment on macro table preferences is 'Pairs to prefer by: of each group the best response that ended by itself and the worst one, where their rewards are far enough apart. Of equals any may be taken, always the same.
least_gap: the least difference of their rewards
chosen: the response with the greatest reward of its group
rejected: the one with the least
chosen_reward: its reward, the mean if it was generated more than once
rejected_reward: likewise
version_start: the version that began the group';

comment on macro table compare_versions is 'Scores by version, of the attempts that the current weights descend from.
metric: which (''greedy'')
version: which version
attempt: who published it
step: the step it follows
value: the score
n: of how many answers
error: standard error of a share of n independent answers; null of a score that is no share
gain: since the first version
change_in_errors: since the version before, in standard errors of the difference';

comment on macro table pass_at is 'Chance that at least one of k responses solves the prompt, by version: estimated without bias from the groups of k responses or more.
k: how many responses
solved_at: from which reward a response solves its prompt (1)
groups: how many
pass_at_1: share of responses that solve
pass_at_k: the chance';

comment on macro table reward_by_age is 'What was drawn, by its age.
width: of a range of ages, in steps (10)
age_from: least age of the range
draws: how many
recent_share: of them, drawn as recent
reward_mean: of what was drawn
length_mean: of what was drawn
residual_abs: mean absolute residual';

comment on macro table stale is 'How much of each step is older than an age.
max_age: the age, in steps
step: which step
draws: responses in the step
stale: of them, those older
stale_share: of them, those older
age_max: of the oldest';

comment on macro table outdated is 'How many of the responses that entered at each sync an age has kept, or would have kept, from being learned from.
max_age: the age, in steps (sampling.max_age)
sync: which sync
step: which step it follows
responses: how many entered
late: of them, those that were older already
undrawn: of the others, those that a step could draw, that none drew, and that are older by now
lost_share: late or undrawn, of all
lost_tokens: in them';

comment on macro table drift is 'How far the trainer''s policy had moved from the policies that generated what it drew: log-probability of the response by the one minus that by the other. Draws whose log-probabilities were given up are left out.
width: of a range of ages, in steps (10)
age_from: least age of the range
draws: how many
drift_mean: in nats
drift_abs: mean absolute drift
drift_max: greatest absolute drift
drift_per_token: mean drift of a token
effective_share: what importance weights would leave of the draws: (Σw)² / (n Σw²), w = exp(drift)';

comment on macro table from_reference is 'How far the policy had moved from the reference, by the version that generated: log-probability of its responses by the one minus that by the other, at the temperature of generation.
responses: how many it is estimated from
left_out: those whose log-probabilities were given up
kl: in nats a response, unbiased where sampling was not cut by top_p and nothing is left out
kl_error: its standard error
kl_per_token: in nats a token';

comment on macro table help is 'The views and macros, or what one of them offers.
about: the name of a view or macro; without it all are listed
name: of a view, a macro with its parameters, a column or a parameter
type: view, macro, parameter, or the type of a column
meaning: what it is';
