"""The policy gradients: objectives whose gradient is advantage times the gradient of log-probability, and the code that
they share."""
