import json

import pytest
import torch
from conftest import GPT2, LLAMA, NEOX
from tiny_run import settings, train
from transformers import AutoConfig, AutoModelForSequenceClassification, BertTokenizerFast

from async_rlhf.config import UserError
from async_rlhf.dry_run import check_paths
from async_rlhf.models import train_tokenizer
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards, score_samples
from async_rlhf.rewards.docstrings import fluency, form, gold, relevance
from async_rlhf.rewards.function import FunctionSettings
from async_rlhf.rewards.model import RewardModel
from async_rlhf.vocabulary import same_vocabulary

CODE = "def is_bucket_id(argument):\n    return '/' in argument"


@pytest.fixture(scope="module", params=[LLAMA, GPT2, NEOX], ids=lambda settings: settings["model_type"])
def decoder(request, tokenizer, tmp_path_factory):
    settings = dict(request.param)
    config = AutoConfig.for_model(settings.pop("model_type"), vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, **settings)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def samples(tokenizer):
    texts = [("The cat sees", " the dog.", True), ("A", " bird", False), ("The whale hears the", " snake and the mouse.", True)]
    made = []
    for prompt, response, finished in texts:
        response_ids = tokenizer(response)["input_ids"] + [tokenizer.eos_token_id] * finished
        made.append(Sample(prompt, response, tokenizer(prompt)["input_ids"], response_ids, finished))
    return made


def test_a_decoder_is_read_at_its_true_last_token(decoder, tokenizer):
    """Alone and unpadded, in a padded batch, and with pad = eos: the same score."""
    reward = RewardModel(decoder, policy_tokenizer=tokenizer)
    assert reward.reuses_ids
    batch = reward(samples(tokenizer))
    for sample, score in zip(samples(tokenizer), batch, strict=True):
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        with torch.no_grad():
            expected = reward.model.score(reward.model.base_model(ids).last_hidden_state[:, -1])[0, 0]
        assert score.item() == pytest.approx(expected.item(), abs=1e-5)
    reward.tokenizer.pad_token = reward.tokenizer.eos_token
    torch.testing.assert_close(reward(samples(tokenizer)), batch, atol=1e-5, rtol=0)


def test_text_is_tokenized_anew_for_another_vocabulary(decoder, tokenizer):
    other = train_tokenizer(["some other words that are merged in another way"], 280, 64)
    assert not same_vocabulary(other, tokenizer)
    reward = RewardModel(decoder, policy_tokenizer=other)
    foreign = [
        Sample(s.prompt, s.response, other(s.prompt)["input_ids"], other(s.response)["input_ids"], s.finished) for s in samples(tokenizer)
    ]
    assert not reward.reuses_ids
    torch.testing.assert_close(reward(foreign), RewardModel(decoder, policy_tokenizer=tokenizer)(samples(tokenizer)), atol=1e-5, rtol=0)


def test_the_prompt_is_cut_from_the_left_and_the_response_never(decoder, tokenizer):
    reward = RewardModel(decoder, policy_tokenizer=tokenizer, max_length=6)
    sample = Sample("p", "r", [10, 11, 12, 13, 14], [20, 21, 1])
    assert reward.encode(sample) == [12, 13, 14, 20, 21, 1]
    assert reward.encode(Sample("p", "r", [10], list(range(20, 30)))) == list(range(20, 30))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT with fresh weights and a WordPiece vocabulary, unlike the policy's byte-level BPE."""
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sees", "dog", "a", "bird", "##s", "."]
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    settings = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, max_position_embeddings=24)
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", vocab_size=len(words), num_labels=1, **settings)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_encoder_scores_the_text_by_its_own_tokenizer(encoder, tokenizer):
    reward = RewardModel(encoder, policy_tokenizer=tokenizer)
    assert reward.is_encoder
    samples = [Sample("the cat sees", " the dogs.", [1, 2], [3, 4]), Sample("a", " bird.", [1], [2])]
    for sample, score in zip(samples, reward(samples), strict=True):
        ids = torch.tensor([reward.tokenizer(sample.prompt, sample.response.strip())["input_ids"]])
        with torch.no_grad():
            assert score.item() == pytest.approx(reward.model(ids).logits.item(), abs=1e-5)


def test_an_encoder_cuts_the_prompts_start_and_a_response_only_when_it_alone_is_too_long(encoder):
    reward = RewardModel(encoder, max_length=10)
    words = reward.tokenizer.convert_ids_to_tokens
    cut = words(reward.encode(Sample("bird bird the cat sees a", " the dog .")))
    assert cut == ["[CLS]", "the", "cat", "sees", "a", "[SEP]", "the", "dog", ".", "[SEP]"]
    assert len(reward.encode(Sample("the cat", " dog" * 30))) == 10


def test_two_labels_are_refused(tokenizer, tmp_path):
    settings = {key: value for key, value in GPT2.items() if key != "model_type"}
    config = AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), num_labels=2, **settings)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="gives 2 scores"):
        RewardModel(str(tmp_path))


def test_a_function_is_a_reward(reward_file):
    rewards = load_rewards([f"{reward_file}:letters"], "reward", RewardContext())
    assert rewards.score([Sample("", "banana"), Sample("", "xyz")]).total.tolist() == pytest.approx([3.06, 0.03])


@pytest.mark.parametrize("spec", ["absent.py:f", "async_rlhf.rewards.docstrings:absent", "no.such.module:f", "./absent"])
def test_a_reward_that_is_not_there_is_refused_before_the_run(spec):
    with pytest.raises(UserError, match="^reward_model_path: "):
        read_rewards([spec], "reward_model_path")


@pytest.mark.parametrize(
    ("scores", "message"), [([1.0, float("nan")], "score nan for sample 1, response 'bad'"), ([1.0], "scores for 2 samples")]
)
def test_bad_scores_name_the_sample(scores, message):
    with pytest.raises(ValueError, match=message):
        score_samples(lambda samples: torch.tensor(scores), [Sample("", "good"), Sample("", "bad")], "mine")


def test_an_exception_in_a_function_names_it(tmp_path):
    (tmp_path / "broken.py").write_text("def f(samples):\n    return [{'x': 1.0}[s.response] for s in samples]\n")
    with pytest.raises(KeyError) as caught:
        load_rewards([f"{tmp_path}/broken.py:f"], "reward", RewardContext()).score([Sample("", "x"), Sample("", "rude")])
    assert "broken.py:f on sample 1, response 'rude'" in caught.value.__notes__[0]


SEVERAL = """
import asyncio

calls = []

def length(samples, per_letter=1.0):
    calls.append(len(samples))
    return [per_letter * len(s.response) for s in samples]

async def vowels(samples):
    inside.append(1)
    most.append(len(inside))
    await asyncio.sleep(0.01)
    inside.pop()
    if any(s.response == "rude" for s in samples):
        raise KeyError("topic")
    return [float(sum(s.response.count(v) for v in "aeiou")) for s in samples]

inside, most = [], []
"""


@pytest.fixture
def several(tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    return f"{tmp_path}/several.py"


def test_several_rewards_are_summed_with_their_weights(several):
    """banana: 6 letters × 0.5 × weight 2, and 3 vowels × weight −1; xyz: 3 letters, no vowel."""
    specs = [
        json.dumps({"function": f"{several}:length", "arguments": {"per_letter": 0.5}, "weight": 2}),
        json.dumps({"function": f"{several}:vowels", "weight": -1.0, "name": "open"}),
    ]
    scores = load_rewards(specs, "reward", RewardContext()).score([Sample("", "banana"), Sample("", "xyz")])
    assert scores.total.tolist() == [6.0 - 3.0, 3.0]
    assert {name: values.tolist() for name, values in scores.by_name.items()} == {"length": [3.0, 1.5], "open": [3.0, 0.0]}


def test_an_async_function_runs_concurrently_within_its_limit(several):
    spec = json.dumps({"function": f"{several}:vowels", "concurrency": 3, "batch_size": 2})
    reward = load_rewards([spec], "reward", RewardContext()).parts[0].reward
    assert reward([Sample("", "a" * i) for i in range(11)]).tolist() == [float(i) for i in range(11)]
    assert max(reward._function.__globals__["most"]) == 3
    with pytest.raises(KeyError) as caught:
        reward([Sample("", "a")] * 6 + [Sample("", "rude")])
    assert "vowels on sample 6, 'rude'" in caught.value.__notes__[0]


def test_a_relative_score_subtracts_that_of_the_data_sets_own_completion_which_is_scored_once(several):
    rewards = load_rewards([json.dumps({"function": f"{several}:length", "relative": True})], "reward", RewardContext())
    samples = [Sample("p", "four", reference="two"), Sample("p", "eleven", reference="two"), Sample("q", "", reference="12345")]
    assert rewards.score(samples).total.tolist() == [1.0, 3.0, -5.0]
    assert rewards.score(samples[:2]).total.tolist() == [1.0, 3.0]
    assert rewards.parts[0].reward._function.__globals__["calls"] == [3, 2, 2]  # both references once
    with pytest.raises(ValueError, match="relative needs the data set's own completion"):
        rewards.score([Sample("p", "four")])


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "is not set"),
        (["{bad"], "no JSON mapping"),
        (['{"weight": 2}'], "one of function, remote, judge, model"),
        (['{"model": "a-hub-name", "wieght": 2}'], "did you mean 'weight'"),
        (['{"model": "a-hub-name", "max_length": "long"}'], "max_length"),
        (['{"function": "async_rlhf.rewards.docstrings:gold", "concurrency": 0}'], "concurrency 0"),
        (["async_rlhf.rewards.docstrings:gold"] * 2, "two of them named gold"),
    ],
)
def test_a_reward_that_is_named_wrongly_is_refused(specs, message):
    with pytest.raises(UserError, match=f"^reward.*{message}"):
        read_rewards(specs, "reward")


def test_docstring_relevance_by_hand():
    """Words said: check, argument, bucket, id; in the code: all but check; the name's: bucket, id ("is" is a function word)."""
    assert relevance("Check if the argument is a bucket ID.", CODE, "is_bucket_id") == pytest.approx((3 / 4 + 3 * 1) / 4)
    assert relevance("Return the argument.", CODE, "is_bucket_id") == 0.25  # precise, but recalls no word of the name
    assert relevance("", CODE, "is_bucket_id") == 0.0


def test_docstring_form_by_hand():
    assert form("Return the bucket id.") == 1.0
    assert form("return the bucket id") == 0.5  # no capital, no period
    assert form("Return the value for the value for the value.") == 0.75  # a content word twice
    assert form("Actionizes.") == 0.75  # too short


def test_docstring_gold_is_the_product_and_fluency_knows_authors_pairs():
    assert fluency("Return the value.") == 1.0
    assert fluency("Zebra quux frobnicate.") < 0.3
    sample = Sample("", " Return the bucket id.", columns={"code": CODE, "name": "is_bucket_id"})
    expected = relevance(" Return the bucket id.", CODE, "is_bucket_id") * fluency(" Return the bucket id.")
    assert gold([sample]) == [pytest.approx(expected)]


def test_scoring_in_the_pipeline_changes_nothing_but_the_time(model_folder, prompts_file, reward_file, several, tmp_path):
    """Two rewards, one of them relative, one batch stale, with evaluations: every score and loss is that of scoring in the trainer."""
    rewards = [f"{reward_file}:letters", json.dumps({"function": f"{several}:length", "weight": 0.01, "relative": True})]
    fixed = dict(reward_model_path=None, reward=rewards, completion_column="answer", max_staleness=1, total_episodes=32)
    fixed |= dict(eval_steps=1, eval_split="train[:4]")
    runs = {}
    for inside in (False, True):
        config = settings(model_folder, prompts_file, reward_file, tmp_path / str(inside), score_in_pipeline=inside, **fixed)
        lines, _ = train(config)
        timeless = [{name: x for name, x in line.items() if not name.startswith(("time/", "throughput/"))} for line in lines]
        runs[inside] = timeless, (tmp_path / str(inside) / "eval.jsonl").read_text()
    assert runs[True] == runs[False]
    first = runs[True][0][0]
    assert first["objective/score"] == pytest.approx(first["reward/letters"] + 0.01 * first["reward/length"], abs=1e-6)
    assert first["reward/length"] != 0


def test_scoring_in_the_pipeline_is_refused_for_a_collective_reward(model_folder, prompts_file, reward_file, tmp_path, monkeypatch):
    config = settings(model_folder, prompts_file, reward_file, tmp_path, score_in_pipeline=True)
    monkeypatch.setattr(FunctionSettings, "collective", True)
    with pytest.raises(UserError, match="score_in_pipeline: reward letters is sharded"):
        check_paths(config)
