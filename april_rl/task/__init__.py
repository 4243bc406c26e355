"""The task: what the policy is asked, and what its answers are worth."""
