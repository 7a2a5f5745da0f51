import itertools
import json
import threading
from fractions import Fraction

import pytest
from conftest import ROOT

from async_rlhf.config import UserError
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards
from async_rlhf.rewards.answers import after_hashes, in_box, last_number
from async_rlhf.rewards.verifiers import format, gsm8k, length, math, reference_number, regex, rouge

GSM8K = ROOT.parent / "shared/data/gsm8k"
VERIFIERS = "async_rlhf.rewards.verifiers"


def sample(response: str, answer: object = "48/2 = <<48/2=24>>24 clips.\n#### 1,000") -> Sample:
    return Sample("[MATH_TASK] Problem:", response, columns={"question": "How many clips?", "answer": answer})


def responses(*texts: str, reference: str | None = None) -> list[Sample]:
    return [Sample("", text, reference=reference) for text in texts]


# -- numbers ------------------------------------------------------------------------------------------------------------------

AFTER_HASHES = [
    # plain, and where it stands
    ("#### 72", "72"),
    ("She sold 24.\n#### 72\n", "72"),
    ("####72", "72"),
    ("####\n72", "72"),
    ("#### 72.", "72"),
    ("#### 72, so 72.", "72"),
    ("#### 72 (24 + 48)", "72"),
    ("#### 10\nWrong, it is\n#### 12", "12"),
    ("#### 12\n5 more words", "12"),
    ("#### 007", "7"),
    # thousands
    ("#### 1,234,567", "1234567"),
    ("#### 1,000.00", "1000"),
    ("#### 1 000 000", "1000000"),
    ("#### 12\N{NO-BREAK SPACE}500", "12500"),
    ("#### 1{,}000", "1000"),
    ("#### 5 million", "5000000"),
    ("#### $2.5 thousand", "2500"),
    ("#### 3 hundred thousand people", "300000"),
    # currency
    ("#### $18", "18"),
    ("#### $ 18", "18"),
    ("#### 18$", "18"),
    ("#### \\$18", "18"),
    ("#### €7.50", "7.5"),
    ("#### 7.50 €", "7.5"),
    ("#### US$1,200", "1200"),
    ("#### USD 20", "20"),
    ("#### 18 dollars", "18"),
    ("#### 50¢", "50"),
    # signs
    ("#### -3", "-3"),
    ("#### \N{MINUS SIGN}3", "-3"),
    ("#### +3", "3"),
    ("#### -$18", "-18"),
    ("#### $-18", "-18"),
    ("#### -1,000.5", "-1000.5"),
    # percent
    ("#### 50%", "50"),
    ("#### 50 %.", "50"),
    ("#### 12.5\\%", "12.5"),
    ("#### 50 percent", "50"),
    # decimals and powers
    ("#### 5.0", "5"),
    ("#### 5.", "5"),
    ("#### 0.5", "1/2"),
    ("#### .5", "1/2"),
    ("#### 1e5", "100000"),
    ("#### 1.5e-2", "3/200"),
    ("#### 2 × 10^3", "2000"),
    ("#### $2 \\times 10^{3}$", "2000"),
    ("#### 99999999999999999999999999999999.1", "999999999999999999999999999999991/10"),
    # fractions
    ("#### 3/4", "3/4"),
    ("#### -3/4 cup", "-3/4"),
    ("#### 6 / 8", "3/4"),
    ("#### 1 1/2", "3/2"),
    ("#### -1 1/2", "-3/2"),
    ("#### 2½ hours", "5/2"),
    ("#### ¾", "3/4"),
    ("#### \\frac{3}{4}", "3/4"),
    ("#### -\\dfrac{3}{4}", "-3/4"),
    ("#### $1\\frac{1}{2}$", "3/2"),
    ("#### \\frac12", "1/2"),
    # units
    ("#### 72 clips", "72"),
    ("#### 5kg", "5"),
    ("#### 60 km/h", "60"),
    ("#### 60km/h", "60"),
    ("#### 90°", "90"),
    ("#### 90^\\circ", "90"),
    ("#### 3pm", "3"),
    ("#### 5th", "5"),
    ("#### 2 dozen", "2"),  # or 24: a question may ask for dozens
    # Markdown and LaTeX around it
    ("#### **72**", "72"),
    ("#### **$72** in all", "72"),
    ("#### `72`", "72"),
    ("#### \\boxed{72}", "72"),
    ("#### \\(72\\)", "72"),
    ("#### 72\\text{ clips}", "72"),
    # expressions
    ("#### 5 + 3 = 8", "8"),
    ("#### 48/2 = 24", "24"),
    ("#### x = 5", "5"),
    ("#### 5+3=8", "8"),
    ("#### 10 - 3 = $7", "7"),
]


@pytest.mark.parametrize(("said", "number"), AFTER_HASHES)
def test_the_number_after_the_last_hashes_is_read(said, number):
    assert after_hashes(said) == Fraction(number)


@pytest.mark.parametrize(
    "said",
    [
        *("", "72", "The answer is 72.", "### 72", "#### ", "#### clips: 72", "#### seventy-two", "#### 72\n####"),
        *("#### 12:30", "#### 1,00", "#### 1,0000", "#### 1.2.3", "#### 3/0", "#### 1/2/3", "#### 1.5/2", "#### 1,5"),
        *("#### $", "#### -", "#### .", "#### %", "#### --5", "#### 5x", "#### 5k", "#### 5M", "#### x2", "#### \N{SUPERSCRIPT TWO}"),
        *("#### 5, 6", "#### 5 or 6", "#### 5 and 6", "#### 5-6", "#### 5 - 6", "#### 3:4", "#### 3 to 1", "#### 5 + 3", "#### 5 x 3"),
        *("#### 2\\pi", "#### 3\\sqrt{2}", "#### x = y", "#### ±5", "#### " + "9" * 5000),
    ],
)
def test_what_is_no_one_number_after_hashes_is_none(said):
    assert after_hashes(said) is None


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("So \\boxed{72}.", "72"),
        ("\\boxed{1}, no: \\boxed{\\$1{,}234.50}", "1234.5"),
        ("$$\\boxed{\\frac{3}{4}}$$", "3/4"),
        ("\\boxed{72\\text{ clips}}", "72"),
        ("\\boxed{\\textbf{72}}", "72"),
        ("\\boxed{x = -5}", "-5"),
        ("\\boxed{50\\%}", "50"),
        ("\\boxed{72} and then 73", "72"),
        ("72", None),
        ("\\boxed{}", None),
        ("\\boxed{72", None),
        ("\\boxed{5, 6}", None),
        ("\\boxed{\\sqrt{2}}", None),
    ],
)
def test_the_number_in_the_last_box_is_read(said, number):
    assert in_box(said) == (number and Fraction(number))


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("The answer is 72.", "72"),
        ("She sold 48/2 = <<48/2=24>>24 clips, and 48 + 24 = 72 in all!", "72"),
        ("It costs $1,234.50.", "1234.5"),
        ("It is -5 degrees.", "-5"),
        ("Answer:72", "72"),
        ("<answer>72</answer>", "72"),
        ("(72)", "72"),
        ("He ate 3/4 of it.", "3/4"),
        ("There are 5 million people", "5000000"),
        ("- 5 apples", "5"),  # an item of a list
        ("72 clips, at 12:30", "72"),
        ("18 g of H2O", "18"),
        ("from 10-12", None),
        ("2\\pi", None),
        ("none", None),
        ("", None),
        ("5" + " " * 5000, None),  # it is looked for in the last thousand characters
        ("123 words" * 500 + " 7", "7"),
        ("word" + "9" * 5000, None),
        ("$" * 5000, None),
    ],
)
def test_the_last_number_is_read(said, number):
    assert last_number(said) == (number and Fraction(number))


# -- gsm8k --------------------------------------------------------------------------------------------------------------------


def test_scores_are_1_for_the_rows_number_and_0_for_everything_else():
    said = ["#### 1000", "#### $1,000.00", "#### 1000 clips", "#### 100", "#### -1000", "1000", "#### 1000\n#### 1001", "#### 1000.5", ""]
    assert gsm8k([sample(response) for response in said]) == [1.0] * 3 + [0.0] * 6


def test_each_sample_is_judged_by_its_own_row():
    rows = [sample("#### 2", "#### 1"), sample("#### 2", "#### 2"), sample("#### -2", "#### -2.0"), sample("#### 0.5", "#### 1/2")]
    assert gsm8k(rows) == [0.0, 1.0, 1.0, 1.0]
    assert gsm8k([]) == []


def test_the_first_form_whose_mark_is_there_decides():
    """Against 1000. By default `####` alone is an answer; a `####` without a number is not rescued by a form further down."""
    said = ["#### 1000", "\\boxed{1000}", "It is 1000.", "\\boxed{1000} #### 5", "#### none, but 1000", "\\boxed{5} 1000"]
    expected = {
        ("hashes",): [1, 0, 0, 0, 0, 0],
        ("boxed",): [0, 1, 0, 1, 0, 0],
        ("hashes", "boxed"): [1, 1, 0, 0, 0, 0],
        ("boxed", "hashes"): [1, 1, 0, 1, 0, 0],
        ("hashes", "boxed", "last_number"): [1, 1, 1, 0, 0, 0],
        ("last_number",): [1, 1, 1, 0, 1, 1],
    }
    for forms, scores in expected.items():
        assert gsm8k([sample(response) for response in said], forms=list(forms)) == scores, forms
    assert gsm8k([sample(response) for response in said]) == expected[("hashes",)]


@pytest.mark.parametrize(
    ("answer", "number"),
    [("#### 72", "72"), ("\\boxed{72}", "72"), ("72", "72"), ("$1,000", "1000"), (72, "72"), (0.1, "1/10"), (-2.5, "-5/2")],
)
def test_a_reference_may_be_marked_or_bare(answer, number):
    assert reference_number(sample("", answer)) == Fraction(number)


@pytest.mark.parametrize("answer", ["#### many", "72 #### ", "It is 72", "", None, True, float("nan"), float("inf"), ["72"]])
def test_a_row_without_a_readable_answer_is_an_error_that_names_its_question(answer):
    with pytest.raises(UserError, match=r"column 'answer', .*, in the row of question 'How many clips\?'") as caught:
        gsm8k([sample("#### 72", answer)])
    assert "\n" not in str(caught.value)


def test_a_data_set_without_the_column_is_an_error_too():
    with pytest.raises(UserError, match="column 'answer', None, in the row of question 'Q: 1 and 1'"):
        gsm8k([Sample("Q: 1 and 1", "#### 2")])
    assert gsm8k([Sample("", "#### 2", columns={"solution": "2"})], column="solution") == [1.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not part of the project")
@pytest.mark.parametrize("name", ["train", "valid"])
def test_every_gsm8k_solution_is_right_and_no_neighbours_is_its_own(name):
    rows = [json.loads(line) for line in (GSM8K / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    assert gsm8k([Sample(row["question"], row["answer"], columns=row) for row in rows]) == [1.0] * len(rows)
    shifted = gsm8k([Sample(row["question"], said, columns=row) for row, said in zip(rows, answers[1:], strict=False)])
    numbers = [answer.split("#### ")[1].replace(",", "") for answer in answers]  # they are all written as whole numbers
    assert shifted == [float(int(a) == int(b)) for a, b in itertools.pairwise(numbers)]


# -- math ---------------------------------------------------------------------------------------------------------------------

MATHEMATICS = [
    # the row's answer, the response, equal
    ("\\frac{\\sqrt{3}}{2}", "The answer is $\\frac{1}{2}\\sqrt{3}$.", 1),
    ("\\frac{\\sqrt{3}}{2}", "The answer is $\\frac{\\sqrt{2}}{2}$.", 0),
    ("$x^2 - 1$", "\\boxed{(x-1)(x+1)}", 1),
    ("#### 72", "So she sold \\boxed{72} clips.", 1),
    ("0.5", "$\\frac{1}{2}$", 1),
    ("1,234", "\\boxed{1234}", 1),
    ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}", 1),
    ("(0, 1]", "\\boxed{(0,1]}", 1),
    ("(0, 1]", "\\boxed{(0,1)}", 0),
    ("2\\pi", "\\boxed{6.283185307}", 1),
    ("72", "I do not know.", 0),
    ("72", "", 0),
]


def test_mathematics_is_compared_by_value():
    pytest.importorskip("math_verify")
    scores = math([sample(said, answer) for answer, said, _ in MATHEMATICS])
    assert scores == [float(equal) for *_, equal in MATHEMATICS]


def test_with_boxed_only_a_box_is_an_answer():
    pytest.importorskip("math_verify")
    said = ["The answer is $72$.", "\\boxed{72}", "\\boxed{\\frac{144}{2}} or 73", "\\boxed{72"]
    assert math([sample(response, "72") for response in said], boxed=True) == [0.0, 1.0, 1.0, 0.0]


def test_mathematics_without_a_reference_or_off_the_main_thread_is_an_error():
    pytest.importorskip("math_verify")
    with pytest.raises(UserError, match="math: no expression in column 'answer', None, in the row of question"):
        math([sample("72", None)])
    raised = []

    def off_main():
        try:
            math([sample("72", "72")])
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=off_main)
    thread.start()
    thread.join(60)
    assert raised and "main thread only" in raised[0]


# -- rules --------------------------------------------------------------------------------------------------------------------


def test_a_pattern_is_found_or_is_all():
    said = responses("an answer: 12", "12", "twelve", "12\n")
    assert regex(said, pattern=r"\d+") == [1.0, 1.0, 0.0, 1.0]
    assert regex(said, pattern=r"\d+", full=True) == [0.0, 1.0, 0.0, 0.0]


def test_length_by_hand():
    """5 words, 2, 0; 23 characters, 7, 0."""
    said = responses("one two three four five", "one two", "")
    assert length(said, target=2) == [0.0, 1.0, 0.0]
    assert length(said, target=2, slack=4) == [0.25, 1.0, 0.5]
    assert length(said, minimum=2, maximum=4) == [0.0, 1.0, 0.0]
    assert length(said, minimum=3, slack=2) == [1.0, 0.5, 0.0]
    assert length(said, maximum=10, unit="characters", slack=26) == [0.5, 1.0, 1.0]
    ended, cut = Sample("", "a b", [], [5, 6, 1], True), Sample("", "a b c", [], [5, 6, 7], False)
    assert length([ended, cut], target=2, unit="tokens") == [1.0, 0.0]  # the token that ends a response is not counted
    with pytest.raises(ValueError, match="text alone"):
        length(said, target=2, unit="tokens")


def test_tags_stand_in_order_once_and_hold_something():
    said = responses(
        "<think>a</think> so <answer>b</answer>",
        "<think>a</think>\n<answer>b</answer>\n",
        "<answer>b</answer><think>a</think>",
        "<think>a</think><answer> </answer>",
        "<think>a</think>",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think><answer>b</answer></think>",
        "",
    )
    assert format(said, tags=["think", "answer"]) == [1.0, 1.0] + [0.0] * 6
    assert format(said, tags=["think", "answer"], only=True) == [0.0, 1.0] + [0.0] * 6


def test_sections_begin_lines_in_order():
    said = responses(
        "Steps: 1 + 1\nAnswer: 2",
        "First.\n  Steps: 1 + 1\nAnswer:\n2",
        "The Steps: 1 + 1\nAnswer: 2",
        "Answer: 2\nSteps: 1 + 1",
        "Steps:\nAnswer: 2",
    )
    assert format(said, sections=["Steps:", "Answer:"]) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert format(said, sections=["Steps:", "Answer:"], only=True) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_rouge_by_hand():
    """5 of the reference's 6 words are said in 5: F1 = 2·1·(5/6)/(1 + 5/6) = 10/11. Pairs: 3 of 4 said, of 5 wanted: 2·(3/4)·(3/5)/(27/20)
    = 2/3. The longest common subsequence is all that is said."""
    said = responses("the cat on the mat", "", reference="The cat sat on the mat.")
    assert rouge(said, kind="rouge1") == [pytest.approx(10 / 11), 0.0]
    assert rouge(said, kind="rouge2") == [pytest.approx(2 / 3), 0.0]
    assert rouge(said) == [pytest.approx(10 / 11), 0.0]
    assert rouge(responses("swapped", reference="the cat"), kind="rougeL") == [0.0]
    assert rouge(responses("running dogs", reference="a dog runs"), kind="rouge1", stem=True) == [pytest.approx(2 * 1 * (2 / 3) / (5 / 3))]
    with pytest.raises(UserError, match="no completion in the row of question 'Q'"):
        rouge([Sample("Q", "a")])


# -- as rewards ---------------------------------------------------------------------------------------------------------------


def spec(name: str, **arguments) -> str:
    return json.dumps({"function": f"{VERIFIERS}:{name}", "arguments": arguments})


def test_they_load_by_name_with_arguments_and_sum_with_others():
    specs = [f"{VERIFIERS}:gsm8k", json.dumps(json.loads(spec("length", maximum=2)) | {"weight": -0.5})]
    scores = load_rewards(specs, "reward", RewardContext()).score([sample("#### 1000"), sample("It is #### 1")])
    assert scores.total.tolist() == [0.5, 0.0]
    boxed = load_rewards([spec("gsm8k", forms=["hashes", "boxed"])], "reward", RewardContext())
    assert boxed.score([sample("\\boxed{1000}")]).total.tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gsm8k", {"forms": "boxed"}, "a list of hashes, boxed, last_number"),
        ("gsm8k", {"forms": ["bocks"]}, "a list of hashes, boxed, last_number"),
        ("gsm8k", {"forms": []}, "a list of hashes"),
        ("gsm8k", {"column": 3}, "column 3: the name of a column"),
        ("gsm8k", {"from": ["boxed"]}, r"unexpected keyword argument 'from'; it takes \(samples.*forms"),
        ("math", {"boxed": "yes"}, "boxed 'yes'"),
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, r"pattern '\('"),
        ("regex", {"pattern": "a", "full": 1}, "full 1"),
        ("length", {}, "target, or minimum and maximum"),
        ("length", {"target": 5, "maximum": 9}, "and not both"),
        ("length", {"target": -1}, "target -1: a number of 0 or more"),
        ("length", {"target": "ten"}, "target 'ten'"),
        ("length", {"minimum": 9, "maximum": 5}, "minimum 9 is above maximum 5"),
        ("length", {"target": 5, "unit": "lines"}, "one of characters, words, tokens"),
        ("length", {"target": 5, "slack": None}, "slack null"),
        ("format", {}, "tags or sections are needed"),
        ("format", {"tags": ["a"], "sections": ["b"]}, "and not both"),
        ("format", {"tags": "think"}, "tags 'think': a list of names"),
        ("format", {"tags": ["a", "a"]}, "one stands there twice"),
        ("rouge", {"kind": "rouge3"}, "one of rouge1, rouge2, rougeL"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_the_run(name, arguments, message):
    with pytest.raises(UserError, match=f"^reward: function {VERIFIERS}:{name}: arguments.*{message}"):
        read_rewards([spec(name, **arguments)], "reward")


def test_a_users_function_is_held_to_its_signature_and_not_called(tmp_path):
    (tmp_path / "mine.py").write_text("def f(samples, scale):\n    raise RuntimeError('called')\nnumber = 3\n")
    good = json.dumps({"function": f"{tmp_path}/mine.py:f", "arguments": {"scale": 2}})
    assert list(read_rewards([good], "reward")) == ["f"]
    with pytest.raises(UserError, match=r"missing a required argument: 'scale'; it takes \(samples, scale\)"):
        read_rewards([f"{tmp_path}/mine.py:f"], "reward")
    with pytest.raises(UserError, match="no function but a value, 3"):
        read_rewards([f"{tmp_path}/mine.py:number"], "reward")
