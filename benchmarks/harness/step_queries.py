"""What two runs that took the same steps have in common, as queries of a run."""

LEDGER = "select step, sync, loss, grad_norm, lr, beta, weights_sha256 from steps order by step"
DRAWS = """
select step, slot, position, trajectory_id, prompt_id, branch, weight, age, advantage, residual, log_z, logp, ref_logp
from draws order by step, slot, position
"""
