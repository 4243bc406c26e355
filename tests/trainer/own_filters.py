"""Group filters of a user that fail."""

num_good = 0  # calls until it fails


def keep_after_errors(_scored) -> bool:
    global num_good
    num_good -= 1
    if num_good < 0:
        raise ValueError("not yet")
    return True
