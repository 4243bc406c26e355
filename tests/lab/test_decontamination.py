"""Only training questions that an evaluation set also contains are found."""

import pytest

from april_rl.lab.rehearsal.decontamination import NUM_WORDS, Passages

LONG = (
    "Every morning a baker sells nine loaves of bread for four dollars each and keeps two for home"
)


def find(training: list[str], **evaluation: list[str]) -> list[tuple[int, str, int]]:
    overlaps = Passages(evaluation).overlaps(training)
    return [(overlap.row, overlap.set_name, overlap.evaluation_row) for overlap in overlaps]


CHINESE = "一个农场有鸡和兔子共35只，它们一共有94只脚，请问这个农场里鸡和兔子各有多少只？"
SHARED = " ".join(LONG.split()[2 : 2 + NUM_WORDS])
TWELVE = " ".join(LONG.split()[2 : 1 + NUM_WORDS])
SCRIPTS = (
    CHINESE,
    "Каждое утро пекарь продаёт девять буханок хлеба по четыре доллара и две оставляет дома",
    "हर सुबह एक बेकर नौ रोटियाँ चार डॉलर में बेचता है और दो अपने घर के लिए रखता है",
    "농부는 매일 아침 달걀 아홉 개를 사 달러에 팔고 두 개는 집에 가져가서 나누어 준다",
    "ทุกเช้าคนทำขนมปังขายขนมปังเก้าก้อนในราคาก้อนละสี่ดอลลาร์และเก็บไว้ที่บ้านสองก้อน",
)


@pytest.mark.parametrize(
    ("question", "evaluation"),
    [
        (f"Problem 7. {SHARED.upper()}, right? Say why.", LONG),
        ("What is $2+3$?", "what is 2 + 3"),  # short, and identical
        *((f"{question} (7)", question) for question in SCRIPTS),
        (f"已知{CHINESE[3:36]}试求之", CHINESE),  # half of a question
    ],
)
def test_a_shared_passage_is_found_with_any_words_around_it(question: str, evaluation: str) -> None:
    """In any script. Fails when words only consist of the letters a to z."""
    assert find(["2 + 3?", question], test=["Name a prime.", evaluation]) == [(1, "test", 1)]


@pytest.mark.parametrize(
    ("question", "evaluation"),
    [
        (f"But here {TWELVE} differs after that and goes on", LONG),
        ("What is 2+3 then?", "what is 2 + 3"),
        *((text, text) for text in ("", "...", "?!")),
        ("2 + 3 =", "2 - 3 ="),  # three words are not a leak
        ("求2+3的值", "求2-3的值"),
        ("请问这个农场里鸡和兔子各有几条腿呢", CHINESE),  # a phrase
        # Only digits in common.
        ("小明有2个苹果，小红有5个，一共有几个苹果？", "从2到5的整数的乘积等于多少？"),
        ("Сколько будет 5 плюс 3 в сумме?", "Найдите остаток от деления 5 на 3"),
    ],
)
def test_less_than_a_passage_is_no_overlap(question: str, evaluation: str) -> None:
    assert find([question], test=[evaluation]) == []
