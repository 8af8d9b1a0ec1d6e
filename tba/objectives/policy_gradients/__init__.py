"""Objectives whose gradient is that of advantage times log-probability: the policy gradients, and what they share."""
