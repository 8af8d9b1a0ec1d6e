"""SQL for tests of runs with several turns: the number of a response's tokens that the policy generated itself."""

OWN = "list_sum([x::int for x in loss_mask])"
