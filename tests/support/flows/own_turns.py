"""A task of several turns for runs."""

OWN = "list_sum([x::int for x in loss_mask])"
