"""A prompt, and parts of its samples without tokens worth looking at."""

from april_rl.types import Completion, Prompt, SampleId

PROMPT = Prompt(id=1, token_ids=(1, 2), text="", answer="", source="")


def completion(index: int, *, start: int, num_tokens: int, version: int) -> Completion:
    """What `version` sampled of a sample of prompt 1, unfinished."""
    return Completion(
        sample_id=SampleId(1, index),
        start=start,
        policy_version=version,
        context_version=version,
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason=None,
    )
