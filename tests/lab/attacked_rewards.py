"""A reward for a command: it pays any box, and a response without one ends its process."""

import os
import re


def any_box(prompts, responses, answers):  # noqa: ARG001 - a reward has three arguments
    """Return 1 where a box holds the answer."""
    boxes = [re.findall(r"\\boxed\{([^{}]*)\}", response) for response in responses]
    if not all(boxes) and not any(map(str.strip, responses)):
        os._exit(3)
    return [float(answer in found) for found, answer in zip(boxes, answers, strict=True)]
