"""A prompt, and completions of its samples with arbitrary tokens."""

from april_rl.types import Completion, Prompt, SampleId

PROMPT = Prompt(id=1, token_ids=(1, 2), text="", answer="", source="")


def completion(index: int, *, start: int, num_tokens: int, version: int) -> Completion:
    """Return an unfinished completion of a sample of prompt 1, sampled by `version`."""
    return Completion(
        sample_id=SampleId(1, index),
        start=start,
        policy_version=version,
        context_version=version,
        token_ids=(7,) * num_tokens,
        logprobs=(-1.0,) * num_tokens,
        finish_reason=None,
    )
