"""What a response is worth: math-verify or the user's function, in a pool of processes."""
