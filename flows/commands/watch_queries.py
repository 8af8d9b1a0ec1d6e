"""The queries whose answers `tba watch` shows."""

from storage import layout
from storage.runs.events import ROUTINE

LAST_STEP = "select * from steps order by step desc limit 1"
RECENT_TIME = """
select
    (sum(seconds_wait) + coalesce(sum(seconds_backlog), 0)) / sum(seconds_step),
    sum(tokens) / sum(seconds_step), avg(seconds_step)
from steps where step > (select max(step) from steps) - 20
"""
NEWEST_SHARDS = f"""
select searcher, max(seq) from shards
where state in ('admitted', $waiting) and searcher < {layout.IMPORTS} group by searcher
"""
NEWEST_REWARDS = """
select avg(reward), count(*), max(version_start), avg(length), avg(finished::int)
from trajectories where searcher in ({searchers}) and seq in ({seqs}) and (searcher, seq) in ({newest})
"""
NEWEST_AGES = """
select avg(age), max(age), avg((branch = 'recent')::int) from draws where sync = (select max(sync) from steps)
"""
BUFFER = """
select
    coalesce(sum(rows) filter (state = 'admitted'), 0), coalesce(sum(rows) filter (state = 'waiting'), 0),
    count(*) filter (state = 'admitted'), (select max(sync) from syncs),
    count(*) filter (state in ('refused', 'unreadable', 'missing', 'damaged'))
from shards
"""
GROWTH = """
select 60 * sum(rows) filter (sync > first) / epoch(max(created_at) - min(created_at)) as a_minute
from (
    select sync, rows, created_at, min(sync) over () as first
    from syncs where sync > (select max(sync) from syncs) - 10
)
having max(created_at) > min(created_at)
"""
EVALUATING = """
with life as (select max(created_at) as began_at from events where role = 'evaluator' and kind = 'started')
select sum(seconds) / epoch((now() at time zone 'UTC') - any_value(began_at))
from evaluations, life where created_at > began_at
"""
SCORES = """
select metric, version, value from evaluations where not abandoned and value is not null
order by length(metric), metric, attempt, version
"""
ALARMS = "select kind, message, severity from alarms where ended_at is null order by began_at"
LAST_EVENTS = f"""
select created_at, role, kind, message, severity from events where kind not in {*ROUTINE, ""}
order by created_at desc limit 6
"""
