"""Only training questions that an evaluation set also contains are found."""

import pytest

from april_rl.lab.rehearsal.decontamination import NUM_WORDS, Passages, passages

LONG = (
    "Every morning a baker sells nine loaves of bread for four dollars each and keeps two for home"
)


def find(training: list[str], **evaluation: list[str]) -> list[tuple[int, str, int]]:
    overlaps = Passages(evaluation).overlaps(training)
    return [(overlap.row, overlap.set_name, overlap.evaluation_row) for overlap in overlaps]


def test_a_passage_of_thirteen_words_is_found_with_any_words_around_it() -> None:
    words = LONG.split()
    shared = " ".join(words[2 : 2 + NUM_WORDS])
    training = ["What is 2 + 3?", f"Problem 7. {shared.upper()}, right? Say why."]
    assert find(training, aime=["Name a prime.", LONG]) == [(1, "aime", 1)]


def test_twelve_common_words_are_not_an_overlap() -> None:
    words = LONG.split()
    shared = " ".join(words[2 : 1 + NUM_WORDS])
    assert find([f"But here {shared} differs after that and goes on"], aime=[LONG]) == []


def test_a_short_question_overlaps_only_with_an_identical_one() -> None:
    assert find(["What is $2+3$?", "What is 2+3 then?"], test=["what is 2 + 3"]) == [(0, "test", 0)]


@pytest.mark.parametrize("text", ["", "...", "?!"])
def test_a_question_without_words_overlaps_with_nothing(text: str) -> None:
    assert passages(text) == []
    assert find([text], test=[text]) == []


CHINESE = "一个农场有鸡和兔子共35只，它们一共有94只脚，请问这个农场里鸡和兔子各有多少只？"


@pytest.mark.parametrize(
    "question",
    [
        CHINESE,
        "Каждое утро пекарь продаёт девять буханок хлеба по четыре доллара и две оставляет дома",
        "हर सुबह एक बेकर नौ रोटियाँ चार डॉलर में बेचता है और दो अपने घर के लिए रखता है",
        "농부는 매일 아침 달걀 아홉 개를 사 달러에 팔고 두 개는 집에 가져가서 나누어 준다",
        "ทุกเช้าคนทำขนมปังขายขนมปังเก้าก้อนในราคาก้อนละสี่ดอลลาร์และเก็บไว้ที่บ้านสองก้อน",
    ],
)
def test_a_question_in_any_script_is_found(question: str) -> None:
    """Fails when words only consist of the letters a to z."""
    assert find([f"{question} (7)"], test=["Name a prime.", question]) == [(0, "test", 1)]


def test_questions_in_other_scripts_that_only_share_digits_do_not_overlap() -> None:
    """Fails when the comparison leaves out all words except digits."""
    assert (
        find(["小明有2个苹果，小红有5个，一共有几个苹果？"], test=["从2到5的整数的乘积等于多少？"])
        == []
    )
    assert (
        find(["Сколько будет 5 плюс 3 в сумме?"], test=["Найдите остаток от деления 5 на 3"]) == []
    )


def test_chinese_questions_overlap_by_a_passage_and_not_by_a_phrase() -> None:
    """Half of a question, with other words around it. Fails when a dozen characters are enough."""
    assert find([f"已知{CHINESE[3:36]}试求之"], test=[CHINESE]) == [(0, "test", 0)]
    assert find(["请问这个农场里鸡和兔子各有几条腿呢"], test=[CHINESE]) == []


def test_a_question_of_three_words_overlaps_with_nothing() -> None:
    """Fails when the same sum in two sets, or "2 + 3" for "2 - 3", counts as a leak."""
    assert find(["2 + 3 ="], test=["2 - 3 ="]) == []
    assert find(["求2+3的值"], test=["求2-3的值"]) == []
