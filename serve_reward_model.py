"""Serve rewards, and a reference policy, to training runs on other machines.

    python serve_reward_model.py --reward results/rm_tiny --port 5000
    python serve_reward_model.py --reward my_rewards.py:helpful --reference_model_path checkpoints/sft_docstrings

A run takes them as `--reward http://HOST:5000/get_reward` and `--reference_url http://HOST:5000`. The server listens on this machine alone
unless `host` says otherwise; then set `api_key_env` too. The protocol is in docs/rewards.md.
"""

import os
import signal
import socket
import sys
from dataclasses import dataclass, replace

import torch
import uvicorn

from async_rlhf.config import ModelConfig, UserError, parse, require, run_script, setting
from async_rlhf.data import quiet_libraries
from async_rlhf.models import Policy, check_model_path, load_causal_lm, load_tokenizer, weights_digest
from async_rlhf.reward_server import RewardServer, ServedReference, served_names
from async_rlhf.rewards import RewardContext, load_rewards, read_rewards
from async_rlhf.rewards.servers import api_key
from async_rlhf.vocabulary import describe_vocabulary, vocabulary_difference

GRACE_SECONDS = 10  # for requests under way when the server is told to end


@dataclass
class ServeConfig(ModelConfig):
    """What is served, and to whom. `torch_dtype` is that of the reference and, unless they say otherwise, of reward models."""

    model_name_or_path: str | None = setting(
        None, "The policy whose token ids are sent (`send_ids`), for its tokenizer. Default: `reference_model_path`."
    )
    reward: list[str] = setting([], "The rewards, as in training; their weighted sum is what is answered.")
    reference_model_path: str | None = setting(None, "The reference policy: a folder or hub name.")
    host: str = setting("127.0.0.1", "Address to listen on: by default for this machine alone; 0.0.0.0 for all.")
    port: int = setting(5000, "Port to listen on; 0 takes a free one, and prints it.")
    api_key_env: str | None = setting(
        None, "Environment variable that holds the API key which clients must send. Default: none is asked for."
    )
    batch_size: int = setting(64, "Samples that a reward model, completions that the reference takes at a time.")
    max_batch: int = setting(1024, "Most samples of a request.")
    max_request_mib: float = setting(64.0, "Largest request, in MiB.")
    max_connections: int = setting(256, "Connections at once; one more is told to come again (HTTP 503).")
    device: str | None = setting(None, "Where models compute. Default: the first GPU, else the CPU.")
    dry_run: bool = setting(False, "Check paths and settings, print what would be served, load no model.")

    def __post_init__(self):
        require(self.reward or self.reference_model_path, "neither reward nor reference_model_path is set: there is nothing to serve")
        require(0 <= self.port < 65536, f"port {self.port}: 0 to 65535")
        for name in ("batch_size", "max_batch", "max_connections"):
            require(getattr(self, name) >= 1, f"{name} {getattr(self, name)}: at least 1")
        require(self.max_request_mib > 0, f"max_request_mib {self.max_request_mib}: above 0")


def main() -> None:
    config = parse(ServeConfig)
    quiet_libraries()
    names = list(read_rewards(config.reward, "reward")) if config.reward else []
    for field in ("reference_model_path", "model_name_or_path"):
        if getattr(config, field):
            check_model_path(getattr(config, field), field)
    api_key(config.api_key_env)
    require(int(os.environ.get("WORLD_SIZE", 1)) == 1, "one process serves: start it with python, not with a launcher")
    offer = served_names(names, config.reference_model_path)
    if config.dry_run:
        print(f"{offer} at {address(config.host, config.port)}, {config.max_batch} samples a request at most")
        return
    listener = open_port(config)
    host, port = listener.getsockname()[:2]
    where = address(host, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    server = open_server(config)
    if not config.api_key_env and not is_loopback(host):
        print(f"warning: whoever reaches {where} can use it: api_key_env is not set", file=sys.stderr)
    listen(server, listener, config.max_connections, f"serving {offer} at {where}")


def open_port(config: ServeConfig) -> socket.socket:
    """A socket bound to the address, which nobody can connect to before the server listens.

    Raises:
        UserError: the port is in use, or the address is none of this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise UserError(f"host {config.host}, port {config.port}: {error.strerror or error}: name others") from error
    return listener


def address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def open_server(config: ServeConfig) -> RewardServer:
    """Load what is served.

    Raises:
        UserError: nothing usable there, or the policy and the reference have different vocabularies.
    """
    device = config.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    tokenizer = open_tokenizer(config)
    reference = open_reference(config, device, describe_vocabulary(tokenizer)) if config.reference_model_path else None
    context = RewardContext(
        device, tokenizer, config.batch_size, getattr(torch, config.torch_dtype, torch.float32), config.trust_remote_code
    )
    rewards = load_rewards(config.reward, "reward", context) if config.reward else None
    return RewardServer(rewards, reference, tokenizer, config.max_batch, int(config.max_request_mib * 2**20), api_key(config.api_key_env))


def open_tokenizer(config: ServeConfig):
    """The tokenizer of the policy, or None where there is no policy to be known."""
    policy = config.tokenizer_name_or_path or config.model_name_or_path or config.reference_model_path
    if not policy:
        return None
    tokenizer = load_tokenizer(replace(config, tokenizer_name_or_path=policy))
    if config.reference_model_path and not config.tokenizer_name_or_path:
        own = load_tokenizer(replace(config, tokenizer_name_or_path=config.reference_model_path))
        difference = vocabulary_difference(describe_vocabulary(own), describe_vocabulary(tokenizer))
        require(not difference, f"reference_model_path: its vocabulary is not that of model_name_or_path {policy!r}: {difference}")
    return tokenizer


def open_reference(config: ServeConfig, device: str, vocabulary: dict | None) -> ServedReference:
    path = config.reference_model_path
    require(vocabulary, f"reference_model_path {path!r}: no fast tokenizer there, so that no client could compare its vocabulary")
    model = load_causal_lm(config, path).requires_grad_(False).to(device)
    return ServedReference(
        Policy(model).eval(),
        config.batch_size,
        id=f"{weights_digest(model)}-{vocabulary['hash']}",
        model=os.path.abspath(os.path.expanduser(path)) if os.path.isdir(os.path.expanduser(path)) else path,
        dtype=str(model.dtype).removeprefix("torch."),
        context=getattr(model.config, "max_position_embeddings", None),
    )


class _Listener(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config, message: str):
        super().__init__(config)
        self.message = message

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.message, flush=True)


def listen(server: RewardServer, listener: socket.socket, max_connections: int, message: str) -> None:
    """Serve until SIGTERM or SIGINT; requests under way have a little time to end."""
    settings = uvicorn.Config(
        server.app, log_level="warning", access_log=False, limit_concurrency=max_connections, timeout_graceful_shutdown=GRACE_SECONDS
    )
    running = _Listener(settings, message)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn has its own while it runs, and then raises what it got again
        signal.signal(number, lambda *_: setattr(running, "should_exit", True))
    try:
        running.run(sockets=[listener])
    except OSError as error:
        raise UserError(f"{message.rpartition(' ')[2]}: {error.strerror or error}") from error
    if server.rewards and not server.worker.busy:
        server.rewards.close()
    print("stopped", flush=True)
    if server.worker.busy:  # nobody waits for its answer any more, and Python would
        os._exit(0)


if __name__ == "__main__":
    run_script(main)
