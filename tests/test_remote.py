"""Rewards and references on servers: a real one, and those that behave badly."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from conftest import LLAMA, ROOT
from tiny_run import UPDATES, settings, train
from transformers import AutoConfig, AutoModelForSequenceClassification

import serve_reward_model
from async_rlhf.config import UserError, parse, run_script
from async_rlhf.evaluation_config import reference_policy
from async_rlhf.models import Policy, load_causal_lm, pad_tokens, train_tokenizer
from async_rlhf.reference import LocalReference
from async_rlhf.remote_reference import check_remote_reference, open_remote_reference
from async_rlhf.rewards import RewardContext, Sample, load_rewards, read_rewards
from async_rlhf.rewards.remote import RemoteReward, RemoteSettings, in_requests
from async_rlhf.runs import run_settings
from async_rlhf.vocabulary import describe_vocabulary, vocabulary_difference
from online_dpo import OnlineDPOConfig

KEY = "correct-horse-battery"
ALL_FIELDS = """
def all_fields(samples):
    assert all(s.response != "rude" for s in samples), "no manners"
    return [
        s.response.count("a") + 0.1 * len(s.columns["topic"]) + 0.01 * s.finished + 0.001 * len(s.reference or "") + len(s.prompt) / 1e4
        for s in samples
    ]
"""
PAIRS = [([40, 41, 42], [[50, 51, 1], [52]]), ([60, 61, 62, 63, 64], [[70], [71, 72, 73, 74]]), ([45], [[46, 47], [48, 49, 50]])]


# -- a server of ours ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewards(work, tokenizer):
    """A reward model and a function that reads all fields of a sample, as configured here and on the server."""
    config = AutoConfig.for_model(**LLAMA, vocab_size=len(tokenizer), num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(work / "served_rm")
    tokenizer.save_pretrained(work / "served_rm")
    (work / "all_fields.py").write_text(ALL_FIELDS)
    return [str(work / "served_rm"), json.dumps({"function": f"{work}/all_fields.py:all_fields", "weight": 0.5})]


@pytest.fixture(scope="module")
def url(rewards, model_folder):
    os.environ["TEST_KEY"] = KEY
    command = [
        *(sys.executable, ROOT / "serve_reward_model.py", "--port=0", "--reward", *rewards, f"--reference_model_path={model_folder}"),
        *("--api_key_env=TEST_KEY", "--max_batch=40", "--max_request_mib=0.05"),
    ]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    watch = threading.Timer(300, server.kill)
    watch.start()
    line = next((line for line in server.stdout if line.startswith("serving")), "")
    watch.cancel()
    assert "reference" in line and "http://127.0.0.1:" in line
    yield line.split()[-1]
    server.terminate()
    assert server.wait(120) == 0
    assert server.stdout.read() == "stopped\n"


def remote(url, **changes):
    return json.dumps({"remote": url, "api_key_env": "TEST_KEY", "backoff": 0.01, **changes})


def samples(tokenizer):
    texts = [("The cat sees", " the dog.", True), ("A bird near a", " bird and a whale", False), ("The cat sees", " a mouse.", True)]
    return [
        Sample(
            prompt,
            response,
            tokenizer(prompt)["input_ids"],
            tokenizer(response)["input_ids"] + [tokenizer.eos_token_id] * finished,
            finished,
            {"topic": "bird" * i},
            i,
            " one." * i,
        )
        for i, (prompt, response, finished) in enumerate(texts)
    ]


@pytest.mark.parametrize("send_ids", [True, False])
def test_served_scores_are_the_local_ones(url, rewards, tokenizer, send_ids):
    """Token ids that the server's tokenizer would not make of the text change the score only if they are sent."""
    context = RewardContext(policy_tokenizer=tokenizer)
    given = samples(tokenizer)
    odd = Sample(
        "The cat", " sees", tokenizer("The cat")["input_ids"], [tokenizer(c)["input_ids"][0] for c in "sees"], False, {"topic": ""}, 9
    )
    spec = remote(url, send_ids=send_ids, send_columns=["topic"], batch_size=2)
    served = load_rewards([spec], "reward", context).score([*given, odd]).total
    local = load_rewards(rewards, "reward", context).score([*given, odd]).total
    torch.testing.assert_close(served[:3], local[:3], atol=1e-5, rtol=0)
    assert (abs(served[3] - local[3]) < 1e-5) == send_ids


def test_an_openrlhf_client_is_answered_in_its_form(url, rewards, tokenizer):
    """Only query, prompts and labels; the end of sequence stands in the query."""
    given = samples(tokenizer)
    (model,) = load_rewards(rewards[:1], "reward", RewardContext()).score(given).by_name.values()
    body = {
        "query": [s.prompt + s.response + "<eos>" * s.finished for s in given],
        "prompts": [s.prompt for s in given],
        "labels": [""] * 3,
    }
    answer = httpx.post(f"{url}/get_reward", json=body | {"columns": [{"topic": ""}] * 3}, headers={"Authorization": f"Bearer {KEY}"})
    said = answer.json()
    assert said["scores"] == said["rewards"] and said["extra_logs"].keys() == {"served_rm", "all_fields"}
    assert said["extra_logs"]["served_rm"][::2] == pytest.approx(model.tolist()[::2], abs=1e-5)
    expected = [0.01 + 12 / 1e4, 3 + 0.01 + 13 / 1e4, 1 + 0.01 + 12 / 1e4]  # letters a, finished, the prompt's length
    assert said["extra_logs"]["all_fields"] == pytest.approx(expected, abs=1e-6)


def reference_config(url, **changes):
    request = {"api_key_env": "TEST_KEY", "batch_size": 4, "backoff": 0.01, "retries": 1}
    return OnlineDPOConfig(reference_url=[url] if isinstance(url, str) else url, reference_request=request, **changes)


def tiny_tokens():
    return pad_tokens([prompt for prompt, _ in PAIRS], [responses for _, responses in PAIRS], 0)


def local_reference(folder):
    return LocalReference(Policy(load_causal_lm(OnlineDPOConfig(), str(folder))).eval(), 4)


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_served_reference_equals_the_local_one(url, tokenizer, model_folder, temperature):
    served = open_remote_reference(reference_config([url, f"{url}/"]), tokenizer, 9)
    assert served.path == str(model_folder)
    tokens = tiny_tokens()
    mask = torch.arange(4) < tokens["response_length"][..., None]
    expected = local_reference(model_folder)(tokens, temperature)
    torch.testing.assert_close(served(tokens, temperature)[mask], expected[mask], atol=1e-5, rtol=0)


def test_a_run_with_served_reward_and_reference_is_the_local_run(url, rewards, neox_folder, model_folder, prompts_file, tmp_path):
    """The policy is not the reference, so that what the run's record says of it is seen."""
    shared = dict(reward_model_path=None, completion_column="answer", max_staleness=1)
    local = settings(neox_folder, prompts_file, "", tmp_path / "local", reward=rewards, sft_model_path=str(model_folder), **shared)
    changes = dict(reward=[remote(url, send_ids=True, send_columns=["*"], batch_size=6, name="served")], reference_url=[url])
    changes |= dict(reference_request={"api_key_env": "TEST_KEY", "batch_size": 6})
    far = settings(neox_folder, prompts_file, "", tmp_path / "far", **changes, **shared)
    records = [train(config)[0] for config in (local, far)]
    names = [name for name in records[0][0] if not name.startswith(("time/", "throughput/", "reward/"))]
    assert {"objective/kl", "objective/score", "loss/policy"} < set(names)
    for here, there in zip(*records, strict=True):
        assert {name: there.get(name) for name in names} == pytest.approx({name: here.get(name) for name in names}, abs=1e-4)
        assert there["reward/served"] == pytest.approx(here["objective/score"], abs=1e-5)
    assert reference_policy(run_settings(str(tmp_path / "far"))) == str(model_folder)
    assert KEY not in (tmp_path / "far" / "run_config.json").read_text()


def test_a_wrong_key_and_requests_that_are_too_large_are_refused_once(url, tokenizer, monkeypatch):
    def ask(**changes):
        spec = remote(url, send_columns=["topic"], retries=9, backoff=100, **changes)  # none of these is tried again
        load_rewards([spec], "reward", RewardContext()).score(samples(tokenizer) * 14)

    with pytest.raises(UserError, match=f"^{url}: HTTP 413: .*42 samples in a request; at most 40"):
        ask(batch_size=100)
    with pytest.raises(UserError, match=f"^{url}: HTTP 413: .*a request over 52428 bytes"):
        spec = remote(url, retries=9, backoff=100)
        load_rewards([spec], "reward", RewardContext()).score([Sample("", "long" * 20_000)])
    monkeypatch.setenv("TEST_KEY", "wrong-key")
    with pytest.raises(UserError, match=f"^{url}: HTTP 401: .*API key") as error:
        ask(batch_size=10)
    assert "wrong-key" not in str(error.value)
    assert httpx.get(f"{url}/health").status_code == 401


def test_what_a_reward_raises_on_the_server_is_said_here(url, tokenizer):
    spec = remote(url, send_columns=["topic"], retries=1)
    rude = Sample("", "rude", columns={"topic": ""})
    with pytest.raises(UserError, match=f"^{url}: HTTP 500: .*AssertionError: no manners.*tried 2 times"):
        load_rewards([spec], "reward", RewardContext()).score([rude])


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("get_reward", "no", 422, "no request of the form"),
        ("get_reward", {"query": ["a", "b"], "prompts": ["a"]}, 422, "query 2, prompts 1"),
        ("get_reward", {"prompts": ["a"]}, 422, "query or responses among them"),
        ("get_reward", {"query": ["a"], "prompt_ids": [[1]], "response_ids": [[2]], "vocabulary": "x"}, 409, "of vocabulary x"),
        ("logprobs", {"id": "other", "prompts": [[1]], "responses": [[[2]]], "temperature": 1}, 409, "reference other is asked for"),
        ("logprobs", {"prompts": [[1]], "responses": [[[2]]], "temperature": 0}, 422, "temperature"),
        ("logprobs", {"prompts": [[1], [1]], "responses": [[[2]], [[2], [3]]]}, 422, "as many responses"),
        ("logprobs", {"prompts": [[]], "responses": [[[2]]]}, 422, "a prompt of 0 tokens"),
        ("logprobs", {"prompts": [[1] * 60], "responses": [[[2] * 5]]}, 422, "65 with its response; 1 to 64"),
        ("logprobs", {"prompts": [[1]], "responses": [[[300]]]}, 422, "not below 300"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_a_request_that_is_wrong_is_refused_with_its_status(url, path, body, status, message):
    headers = {"Authorization": f"Bearer {KEY}"}
    if path == "logprobs":
        body = {"id": httpx.get(f"{url}/health", headers=headers).json()["reference"]["id"], "temperature": 0.7} | body
    answer = httpx.post(f"{url}/{path}", json=body, headers=headers)
    assert answer.status_code == status and message in answer.json()["error"]


def test_another_vocabulary_is_refused_and_both_are_named(url, tokenizer):
    other = train_tokenizer(["some other words that are merged in another way"], 280, 64)
    other.name_or_path = "the-policy"
    ours, theirs = describe_vocabulary(other)["hash"], describe_vocabulary(tokenizer)["hash"]
    both = (
        rf"the vocabulary at {url}/?(health)? \(.*llama, {theirs}\) is not the policy's \(the-policy, {ours}\): their tokenization models"
    )
    with pytest.raises(UserError, match=f"^reference_url: {both}"):
        open_remote_reference(reference_config(url), other, 9)
    with pytest.raises(UserError, match=f"^send_ids: {both}"):
        load_rewards([remote(url, send_ids=True)], "reward", RewardContext(policy_tokenizer=other))


def test_a_reference_that_cannot_read_the_longest_sequence_is_refused(url, tokenizer):
    with pytest.raises(UserError, match="sequences of 65 tokens are over its context 64"):
        open_remote_reference(reference_config(url), tokenizer, 65)


def test_a_port_in_use_is_said_before_anything_is_loaded(url, monkeypatch, capsys):
    port = url.rpartition(":")[2]
    monkeypatch.setattr(sys, "argv", ["", "--port", port, "--reward", "a-hub-name-that-is-not-there"])
    with pytest.raises(SystemExit) as end:
        run_script(serve_reward_model.main)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: host 127.0.0.1, port {port}: Address already in use: name others\n"


# -- servers that misbehave ----------------------------------------------------------------------------------------------------


ASKED = Counter()  # by path


class BadServer(BaseHTTPRequestHandler):
    """Behaves as the path says. It reads and writes only what OpenRLHF's servers do."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED[self.path] += 1
        rewards = [float(len(query)) for query in body["query"]]
        if self.path == "/slow":
            time.sleep(0.8)
        elif self.path == "/broken" or (self.path == "/flaky" and ASKED[self.path] <= 2):
            return self.answer("out of memory", 500)
        elif self.path == "/teapot":
            return self.answer("I am a teapot", 418)
        elif self.path == "/trickle":
            return self.trickle()
        answers = {
            "/short": {"rewards": rewards[1:]},
            "/nan": {"rewards": [float("nan")] * len(rewards)},
            "/null": {"rewards": [None] * len(rewards)},
            "/words": {"rewards": ["good"] * len(rewards)},
            "/huge": {"rewards": [10**400] * len(rewards)},
            "/none": {"scores": rewards},
        }
        found = answers.get(self.path, {"rewards": rewards, "scores": rewards, "extra_logs": {"length": rewards}})
        self.answer("<p>a page</p>" if self.path == "/page" else json.dumps(found))

    def answer(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def trickle(self):
        """A byte now and then: something always comes, an answer never."""
        self.send_response(200)
        self.end_headers()
        for _ in range(8):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.1)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def bad_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BadServer)
    server.handle_error = lambda *_: None  # a client that hangs up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


FOUR = [Sample(f"p{i}", "word", group=i) for i in range(4)]


def score(*urls, given=FOUR, **changes):
    changes = {"timeout": 20, "retries": 2, "backoff": 0.01, "batch_size": 2, **changes}
    return load_rewards([json.dumps({"remote": list(urls), **changes})], "reward", RewardContext()).score(given).total.tolist()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/slow", r"no answer within 0.25 s \(timeout\); tried 3 times"),
        ("/trickle", r"no answer within 0.25 s \(timeout\); tried 3 times"),
        ("/broken", "HTTP 500: out of memory; tried 3 times"),
        ("/teapot", "HTTP 418: I am a teapot$"),
        ("/short", "1 rewards for 2 samples; one a sample is needed"),
        ("/nan", "reward nan for the response 'word'; a finite number is needed"),
        ("/null", "reward None for the response 'word'"),
        ("/words", "reward 'good' for the response 'word'"),
        ("/huge", "reward 1000"),
        ("/none", 'no list "rewards" in the answer'),
        ("/page", "the answer is no JSON: '<p>a page</p>'"),
    ],
)
def test_every_fault_of_a_server_is_one_error_that_names_its_url(bad_server, path, message):
    waits = path in ("/slow", "/trickle")
    started = time.monotonic()
    with pytest.raises(UserError, match=f"^{bad_server}{path}: {message}") as error:
        score(bad_server + path, **({"timeout": 0.25} if waits else {}))
    assert "\n" not in str(error.value)
    assert not waits or 3 * 0.25 <= time.monotonic() - started < 3 * 0.25 + 0.03 + 5


def test_no_server_is_an_error_that_names_the_url():
    with pytest.raises(UserError, match="^http://127.0.0.1:1: ConnectError: .*tried 3 times"):
        score("http://127.0.0.1:1")


def test_all_requests_together_have_a_bound_too(bad_server):
    with pytest.raises(UserError, match=rf"^{bad_server}/slow: 0 of 2 requests answered within 0.2 s \(total_timeout\)"):
        score(f"{bad_server}/slow", timeout=60, total_timeout=0.2)


def test_failures_that_clear_are_got_over(bad_server):
    ASKED.clear()
    assert score(f"{bad_server}/flaky", batch_size=4) == [6.0] * 4  # p0word
    assert ASKED == {"/flaky": 3}


def test_servers_share_the_requests_and_one_that_failed_is_asked_after_the_others(bad_server):
    ASKED.clear()
    assert score(f"{bad_server}/a", f"{bad_server}/b", batch_size=1, concurrency=1) == [6.0] * 4
    assert ASKED == {"/a": 2, "/b": 2}
    ASKED.clear()
    assert score(f"{bad_server}/broken", f"{bad_server}/a", batch_size=1, concurrency=1) == [6.0] * 4
    assert ASKED == {"/broken": 1, "/a": 4}


def test_what_is_sent_of_a_sample(tokenizer):
    given = [
        Sample("Q", " A", [5], [6, 1], True, {"answer": "a", "n": 1}, 3, " R"),
        Sample("Q", " B", [5], [7], False, {"answer": "b", "n": None}, 3),
    ]
    sent = RemoteReward(RemoteSettings(remote="http://x", send_columns=["n"]), tokenizer).body(given)
    expected = {"query": ["Q A<eos>", "Q B"], "prompts": ["Q", "Q"], "labels": [" R", ""], "responses": [" A", " B"]}
    assert sent == expected | {"finished": [True, False], "groups": [3, 3], "columns": [{"n": 1}, {"n": None}]}
    bare = RemoteReward(RemoteSettings(remote="http://x", eos_in_query=False, label_column="answer"), tokenizer).body(given)
    assert (bare["query"], bare["labels"]) == (["Q A", "Q B"], ["a", "b"]) and "columns" not in bare
    with pytest.raises(UserError, match="JSON cannot hold column n, nan"):
        RemoteReward(RemoteSettings(remote="http://x", send_columns=["*"])).body([Sample("", "", columns={"n": float("nan")})])


def test_samples_of_a_prompt_are_sent_together():
    given = [Sample("p", str(i), group=group) for i, group in enumerate([0, 0, 1, 1, 1, 1, 2, 2, 3])]
    assert [[sample.group for sample in chunk] for chunk in in_requests(given, 3)] == [[0, 0], [1, 1, 1, 1], [2, 2, 3]]


DIES = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    left = int(sys.argv[2])

    def do_POST(self):
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
        Handler.left -= 1
        if Handler.left < 0:
            os._exit(9)
        answer = json.dumps({"rewards": [q.count("a") + len(q) / 100 for q in query]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def mortal_server(port, answers):
    """Dies at the request after so many. Gives the process and its port."""
    command = [sys.executable, "-c", DIES, str(port), str(answers)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, int(server.stdout.readline())


def test_a_server_that_dies_ends_the_run_and_one_that_is_started_again_lets_it_go_on(model_folder, prompts_file, tmp_path, capsys):
    server, port = mortal_server(0, 2)
    url = f"http://127.0.0.1:{port}/get_reward"
    died = []
    threading.Thread(target=lambda: died.append((server.wait(), time.monotonic())), daemon=True).start()
    spec = json.dumps({"remote": url, "timeout": 5, "retries": 2, "backoff": 0.1})
    fixed = dict(reward_model_path=None, reward=[spec], save_steps=1, max_staleness=1)
    config = settings(model_folder, prompts_file, "", tmp_path / "run", **fixed)
    with pytest.raises(SystemExit) as end:
        run_script(lambda: train(config))
    ((code, at),) = died
    assert (code, end.value.code) == (9, 2)
    assert time.monotonic() - at < 3 * 5 + 0.1 + 0.2 + 10  # (retries + 1) · timeout + backoff · (2^retries − 1), and to end the run
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and lines[0].startswith(f"error: {url}: ConnectError: ") and lines[0].endswith("tried 3 times")
    saved = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2"] and (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()
    assert UPDATES > 2 and not any(thread.name == "generation" for thread in threading.enumerate())

    server, _ = mortal_server(port, 100)
    try:
        _, resumed = train(settings(model_folder, prompts_file, "", tmp_path / "run", resume_from_checkpoint="latest", **fixed))
        _, whole = train(settings(model_folder, prompts_file, "", tmp_path / "whole", **fixed))
    finally:
        server.kill()
        server.wait()
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


# -- settings ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"remote": "ftp://there"}, "'ftp://there': a URL such as"),
        ({"remote": "http://me:secret@there"}, "a URL of there holds a password"),
        ({"remote": "http://there", "timeout": 0}, "timeout 0.0: above 0"),
        ({"remote": "http://there", "batch_size": 0}, "batch_size 0"),
        ({"remote": "http://there", "api_key_env": "NOT_SET_ANYWHERE"}, "there is no such environment variable"),
        ({"remote": "http://there", "api_key_env": "sk-secret"}, "not the key itself"),
        ({"remote": []}, "remote is empty"),
    ],
)
def test_a_remote_reward_that_cannot_be_is_refused_before_the_run(spec, message):
    with pytest.raises(UserError, match=f"^reward.*{message}") as error:
        read_rewards([json.dumps(spec)], "reward")
    assert "secret@" not in str(error.value) and "sk-secret" not in str(error.value).replace(json.dumps(spec), "")


def test_a_bare_url_is_a_remote_reward():
    (name, one), *_ = read_rewards(["http://there:5000/get_reward"], "reward").items()
    assert isinstance(one, RemoteSettings) and (name, one.remote) == ("there:5000", ["http://there:5000/get_reward"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reference_url=http://there/v1", "--reference_server=vllm"], "temperature is 0.7: set it to 1"),
        (["--reference_url=http://there", "--use_peft"], "reference_url: with use_peft"),
        (["--reference_url=there"], "reference_url: 'there': a URL"),
        (['--reference_request={"time": 3}'], "reference_request: .*did you mean 'timeout'"),
    ],
)
def test_a_remote_reference_that_cannot_be_is_refused_before_the_run(words, message):
    with pytest.raises(UserError, match=message):
        check_remote_reference(parse(OnlineDPOConfig, words))


def test_vocabularies_differ_by_any_id_but_the_pad_tokens(tokenizer):
    own = describe_vocabulary(tokenizer)
    padded = own | {"added": {"300": "<|pad|>"}, "pad": 300}
    assert vocabulary_difference(own, padded) is None
    assert vocabulary_difference(own | {"added": {"300": "<|user|>"}}, own) == "token 300 is '<|user|>' in the one, None in the other"
    assert (
        vocabulary_difference(own | {"added": {"300": "<|user|>"}}, padded) == "token 300 is '<|user|>' in the one, '<|pad|>' in the other"
    )
    assert vocabulary_difference(own, own | {"hash": "0"}) == "their tokenization models or ends of sequence differ"


# -- vLLM's server as reference --------------------------------------------------------------------------------------------------


class VLLM(BadServer):
    """Answers as vLLM's server does, with a model's log-probabilities at temperature 1."""

    tokenizer, policy = None, None

    def do_GET(self):
        assert self.path == "/v1/models"
        self.answer(json.dumps({"data": [{"id": "served", "root": "org/served", "parent": None, "max_model_len": 64}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "served"
        if self.path == "/detokenize":
            return self.answer(json.dumps({"prompt": self.tokenizer.decode(body["tokens"])}))
        if self.path == "/tokenize":
            return self.answer(json.dumps({"count": 1, "tokens": self.tokenizer(body["prompt"])["input_ids"]}))
        assert (self.path, body["prompt_logprobs"], body["max_tokens"]) == ("/v1/completions", 0, 1)
        choices = [{"index": i, "prompt_logprobs": self.logprobs(ids)} for i, ids in enumerate(body["prompt"])]
        self.answer(json.dumps({"choices": choices[::-1]}))

    def logprobs(self, ids):
        with torch.no_grad():
            logits = self.policy.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        rows = enumerate(ids[1:])
        return [None, *({str(token): {"logprob": logits[i, token].item(), "rank": 1, "decoded_token": "x"}} for i, token in rows)]


def test_vllms_server_is_a_reference_at_temperature_1(tokenizer, model_folder, monkeypatch):
    local = local_reference(model_folder)
    monkeypatch.setattr(VLLM, "tokenizer", tokenizer)
    monkeypatch.setattr(VLLM, "policy", local.policy)
    monkeypatch.setenv("TEST_KEY", KEY)
    server = ThreadingHTTPServer(("127.0.0.1", 0), VLLM)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = reference_config(f"http://127.0.0.1:{server.server_address[1]}/v1", reference_server="vllm", temperature=1.0)
    try:
        served = open_remote_reference(config, tokenizer, 9)
        assert served.path == "org/served"
        tokens = tiny_tokens()
        mask = torch.arange(4) < tokens["response_length"][..., None]
        torch.testing.assert_close(served(tokens, 1.0)[mask], local(tokens, 1.0)[mask], atol=1e-5, rtol=0)
        with pytest.raises(UserError, match="sequences of 65 tokens are over its context 64"):
            open_remote_reference(config, tokenizer, 64)
        other = train_tokenizer(["some other words that are merged in another way"], 280, 64)
        with pytest.raises(UserError, match=r"^reference_url: the text of the tokens at http://127.0.0.1:\d+/v1 \(served\) is not that of"):
            open_remote_reference(config, other, 9)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.full
def test_the_real_vllm_server_is_a_reference(model_folder, tokenizer, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_folder, "--dtype=float32", "--enforce-eager"]
    command += ["--max-model-len=64", "--host=127.0.0.1", f"--port={port}", f"--api-key={KEY}"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        config = reference_config(f"http://127.0.0.1:{port}/v1", reference_server="vllm", temperature=1.0)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and server.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(1)
        served = open_remote_reference(config, tokenizer, 9)
        assert served.path == str(model_folder)
        tokens = tiny_tokens()
        mask = torch.arange(4) < tokens["response_length"][..., None]
        torch.testing.assert_close(served(tokens, 1.0)[mask], local_reference(model_folder)(tokens, 1.0)[mask], atol=1e-5, rtol=0)
    finally:
        server.terminate()
        server.wait(60)
