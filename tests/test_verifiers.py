import itertools
import json
from decimal import Decimal

import pytest
from conftest import ROOT

from async_rlhf.config import UserError
from async_rlhf.rewards import RewardContext, Sample, load_rewards
from async_rlhf.rewards.verifiers import after_hashes, gsm8k

GSM8K = ROOT.parent / "shared/data/gsm8k"


def sample(response: str, answer: object = "48/2 = <<48/2=24>>24 clips.\n#### 1,000") -> Sample:
    return Sample("[MATH_TASK] Problem:", response, columns={"question": "How many clips?", "answer": answer})


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("#### 72", "72"),
        ("She sold 24.\n#### 72\n", "72"),
        ("####72", "72"),
        ("#### 72 clips", "72"),
        ("#### 72.", "72"),
        ("#### 72, so 72.", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### 1,000.00", "1000"),
        ("#### $18", "18"),
        ("#### -$18", "-18"),
        ("#### $-18", "-18"),
        ("#### -3", "-3"),
        ("#### \N{MINUS SIGN}3", "-3"),
        ("#### +3", "3"),
        ("#### 18$", "18"),
        ("#### 50%", "50"),
        ("#### 50 %.", "50"),
        ("#### 0.5", "0.5"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### 10\nWrong, it is\n#### 12", "12"),
        ("#### 99999999999999999999999999999999.1", "99999999999999999999999999999999.1"),
    ],
)
def test_the_number_after_the_last_hashes_is_read(said, number):
    assert after_hashes(said) == Decimal(number)


@pytest.mark.parametrize(
    "said",
    ["", "72", "The answer is 72.", "### 72", "#### ", "#### clips: 72", "#### 3/4", "#### 12:30", "#### 1e5", "#### 1,00", "#### 72\n####",
     "#### 1.2.3", "#### $", "#### -", "#### .", "#### 5x", "#### \N{SUPERSCRIPT TWO}"],
)  # fmt: skip
def test_what_is_no_number_after_hashes_is_none(said):
    assert after_hashes(said) is None


def test_scores_are_1_for_the_rows_number_and_0_for_everything_else():
    said = ["#### 1000", "#### $1,000.00", "#### 1000 clips", "#### 100", "#### -1000", "1000", "#### 1000\n#### 1001", "#### 1000.5", ""]
    assert gsm8k([sample(response) for response in said]) == [1.0] * 3 + [0.0] * 6


def test_each_sample_is_judged_by_its_own_row():
    rows = [sample("#### 2", "#### 1"), sample("#### 2", "#### 2"), sample("#### -2", "#### -2.0")]
    assert gsm8k(rows) == [0.0, 1.0, 1.0]
    assert gsm8k([]) == []


@pytest.mark.parametrize("answer", ["72", "#### many", "", None, 72])
def test_a_row_without_a_readable_answer_is_an_error_that_names_its_question(answer):
    with pytest.raises(UserError, match=r"column 'answer', .*, in the row of question 'How many clips\?'") as caught:
        gsm8k([sample("#### 72", answer)])
    assert "\n" not in str(caught.value)


def test_a_data_set_without_the_column_is_an_error_too():
    with pytest.raises(UserError, match="column 'answer', None, in the row of question 'Q: 1 and 1'"):
        gsm8k([Sample("Q: 1 and 1", "#### 2")])


def test_it_loads_by_name_as_a_reward():
    rewards = load_rewards(["async_rlhf.rewards.verifiers:gsm8k"], "reward", RewardContext())
    assert rewards.score([sample("#### 1000"), sample("#### 1")]).total.tolist() == [1.0, 0.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not part of the project")
@pytest.mark.parametrize("name", ["train", "valid"])
def test_every_gsm8k_solution_is_right_and_no_neighbours_is_its_own(name):
    rows = [json.loads(line) for line in (GSM8K / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    assert gsm8k([Sample(row["question"], row["answer"], columns=row) for row in rows]) == [1.0] * len(rows)
    shifted = gsm8k([Sample(row["question"], said, columns=row) for row, said in zip(rows, answers[1:], strict=False)])
    numbers = [answer.split("#### ")[1].replace(",", "") for answer in answers]  # they are all written as whole numbers
    assert shifted == [float(int(a) == int(b)) for a, b in itertools.pairwise(numbers)]
