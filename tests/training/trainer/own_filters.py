"""Group filters of a user that fail."""

num_good = 0  # calls until it fails


def reject_all_but(_scored) -> bool:
    """Reject every group after `num_good` ones."""
    global num_good
    num_good -= 1
    return num_good >= 0


def keep_after_errors(_scored) -> bool:
    global num_good
    num_good -= 1
    if num_good < 0:
        raise ValueError("not yet")
    return True
