"""The tokens between turns, for templates of several kinds."""

from __future__ import annotations

import pytest
from word_tokenizer import WORDS, hf_tokenizer, words

from april_rl.task.data.stop_tokens import MARKER
from april_rl.task.data.tokenizer import Tokenizer, TokenizerError
from april_rl.task.environments.dialogue import Dialogue

EOS = WORDS.index("<eos>")
GENERATION = "{% if add_generation_prompt %}assistant {% endif %}"
EACH = "{% for m in messages %}"
SAID = "{{ m.role }} {{ m.content }} <eos> "
# Like Qwen3: the last answer gets an empty thought, an earlier one gets none; tool messages have
# the role of the user.
THINKING = (
    EACH + "{% if m.role == 'tool' %}user two {{ m.content }} <eos> "
    "{% elif m.role == 'assistant' and loop.last %}assistant three {{ m.content }} <eos> "
    "{% else %}" + SAID + "{% endif %}{% endfor %}" + GENERATION
)
# Like Mistral: a tool message is only allowed after a call.
STRICT = (
    EACH + "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a tool was not called') }}{% endif %}" + SAID + "{% endfor %}" + GENERATION
)


def dialogue(template=EACH + SAID + "{% endfor %}" + GENERATION, *, is_chat=True):
    tokenizer = Tokenizer(hf_tokenizer(template), path="words")
    return Dialogue(tokenizer=tokenizer, is_chat=is_chat, variables={}, stop_ids=frozenset({EOS}))


def message(content, role="user"):
    return {"role": role, "content": content}


def render(told, messages, *, begins_turn=True):
    text = told.tokenizer.chat_text(messages, begins_turn=begins_turn)
    return told.tokenizer.encode([text], add_special_tokens=False)[0]


@pytest.mark.parametrize("opening", [[], [message("two")], [message("two"), message("three")]])
def test_a_prompt_and_first_words_are_the_whole_conversation(opening):
    told = dialogue()
    asked = [message("one", "system"), message("one")]
    prompt = render(told, asked, begins_turn=False)
    assert prompt + told.opening(opening) == render(told, [*asked, *opening])


def test_turns_and_what_follows_them_are_the_whole_conversation():
    told = dialogue()
    asked, said, more = message("one"), message("two", "assistant"), message("three")
    prompt, turn = render(told, [asked]), told.turn_of("two")
    assert prompt + turn + told.following([more]) == render(told, [asked, said, more])


def test_a_thought_that_the_template_adds_or_drops_changes_nothing_after_the_turn():
    told = dialogue(THINKING)
    assert words(told.following([message("one", "tool")])) == "user two one <eos> assistant"
    assert words(told.following([message("one")])) == "user one <eos> assistant"
    assert words(told.opening([])) == "assistant"


def test_a_tool_message_works_although_the_template_requires_a_call_before_it():
    assert (
        words(dialogue(STRICT).following([message("one", "tool")])) == "<unk> one <eos> assistant"
    )


def test_text_without_a_template_is_appended_unchanged():
    told = dialogue(is_chat=False)
    assert words(told.opening([message("one two")])) == "one two"
    assert words(told.following([message("one"), message(" two")])) == "one two"
    assert told.following([]) == ()


def test_a_turn_has_a_text_with_and_without_special_tokens():
    told = dialogue()
    ids = [WORDS.index(word) for word in ("one", "<bos>", "two", "<eos>")]
    turn = told.turn(ids, is_truncated=False, is_last=False)
    assert (turn.text, turn.raw_text, turn.is_truncated) == ("one two", "one <bos> two", False)
    assert told.turn(ids[:3], is_truncated=True, is_last=True).raw_text == "one <bos> two"


REFUSED = {
    "no stop": (EACH + "{{ m.role }} {{ m.content }} {% endfor %}" + GENERATION, "holds none of"),
    "changed": (
        EACH
        + "{{ m.content }}{% if loop.last %} three{% else %} two{% endif %} <eos> {% endfor %}",
        "changes a message when another follows it",
    ),
    "no text": (EACH + "{{ m.role }} {{ m.content | length }} <eos> {% endfor %}", "as it is"),
    "no tools": (
        EACH + "{{ raise_exception('no') }}{% endfor %}",
        "messages: no. .* data.template=plain",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_template_that_cannot_continue_is_refused_with_the_reason(kind):
    template, reason = REFUSED[kind]
    told = dialogue(template)
    write = told.opening if kind == "changed" else told.following
    with pytest.raises(TokenizerError, match=reason):
        write([message("one")])


def test_an_observation_may_hold_the_text_that_marks_a_turn():
    told = dialogue()
    text = f"one {MARKER} two"
    assert len(told.following([message(text)])) == len(told.following([message("one three two")]))
    assert len(told.opening([message(text)])) == len(told.opening([message("one three two")]))
