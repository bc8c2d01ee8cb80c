"""Real vLLM servers in a machine: how one is started, its processes and shared memory, and its answers."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from node.machine import Machine
from node.running import Running

MODEL = "/tmp/model"  # in the machine
START_DEADLINE_S = 300.0  # one server computes for 40 s, most of it imports; the tests start several at once
# head_dim: the CPU attention kernel has none for 16, which hidden_size / heads would give
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = ("--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "128", "--enforce-eager")
ENVIRONMENT = {
    "HOME": "/tmp/home",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPATH": "",
}
# How the front end comes by its parent; "$@" is the server's command. What it leaves when it dies goes to the machine's
# PID 1, but with `subreaper` to a Python program in the same process group that adopts orphans, like a job launcher.
LAUNCHES = {
    "program": ("bash", "-c", 'exec "$@"', "bash"),
    "bash": ("bash", "-c", '"$@"; exit $?', "bash"),
    "nohup": ("bash", "-c", 'nohup "$@" & exit', "bash"),
    "subreaper": (sys.executable, str(Path(__file__).resolve().parent / "subreaper.py")),
}


class ServerMachine(Machine):
    """A machine in which the environment of vLLM is visible and the model lies at MODEL."""

    def __init__(self, vllm: Path, **how: Any) -> None:
        super().__init__(**how)
        self.vllm = vllm

    def __enter__(self) -> Self:
        super().__enter__()
        self.path(MODEL).mkdir()
        (self.path(MODEL) / "config.json").write_text(json.dumps(CONFIG))
        return self

    def _spec(self) -> dict[str, Any]:
        spec = super()._spec()
        return spec | {"keep": [*spec["keep"], str(self.vllm)]}


class Server:
    """One server, from its start on. The pids are the machine's, known once it is `up`."""

    def __init__(self, machine: ServerMachine, launch: str) -> None:
        self.machine = machine
        self.launch = launch
        self.port = _free_port()
        self.log = machine.path(f"/tmp/server-{self.port}.log")
        python, script = (str(machine.vllm / "bin" / name) for name in ("python", "vllm"))
        command = (python, script, "serve", MODEL, *OPTIONS, "--port", str(self.port))
        redirected = ("bash", "-c", f'exec "$@" >/tmp/{self.log.name} 2>&1', "bash", *LAUNCHES[launch], *command)
        self._python = python
        self.running: Running = machine.popen(*redirected, env=ENVIRONMENT, cwd="/", new_session=True)

    def up(self) -> Self:
        """Returns when /health answers 200 and every process has its title. Raises RuntimeError with the log's end."""
        deadline = time.monotonic() + START_DEADLINE_S
        while not self.healthy():
            if time.monotonic() > deadline or not self._starting():
                raise RuntimeError(f"vLLM ({self.launch}) has not come up: {self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        self.front_end = self._front_end()
        self.engine = self._descendant("VLLM::EngineCore")
        self.worker = self._descendant("VLLM::Worker")
        self.tracker = self._descendant("multiprocessing.resource_tracker")
        self.segments = self._segments()
        return self

    @property
    def pids(self) -> tuple[int, int, int, int]:
        """Front end, engine, worker, resource tracker."""
        return self.front_end, self.engine, self.worker, self.tracker

    def kill_front_end(self) -> None:
        """SIGKILL to the front end, as the kernel's OOM killer does; returns when the others have another parent."""
        self.machine.kill(self.front_end)
        self.machine.wait_until(
            lambda: self.machine.parent(self.engine) != self.front_end, "a new parent of the engine"
        )

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        with contextlib.suppress(OSError), self._ask("/health") as answer:
            return answer.status == 200
        return False

    def complete(self, tokens: int = 8) -> int:
        """Has `tokens` tokens made from three given ones; returns how many came. Raises OSError."""
        body = {"model": MODEL, "prompt": [1, 5, 7], "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        with self._ask("/v1/completions", json.dumps(body).encode(), timeout_s=60) as answer:
            return json.load(answer)["usage"]["completion_tokens"]

    @contextlib.contextmanager
    def watched(self) -> Iterator["Watch"]:
        """Asks for /health all the time meanwhile, in a thread."""
        watch = Watch(self)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()

    def _ask(self, path: str, body: bytes | None = None, timeout_s: float = 5.0) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def _starting(self) -> bool:
        return self.launch == "nohup" or self.running.poll() is None

    def _front_end(self) -> int:
        """The one with the server's command line whose parent has another: children have it until they set a title."""
        ours = {pid for pid in self.machine.with_title(f"--port {self.port}") if self._is_python(pid)}
        return next(pid for pid in ours if self.machine.parent(pid) not in ours)

    def _is_python(self, pid: int) -> bool:
        return self.machine.title(pid).startswith(self._python)

    def _descendant(self, title: str) -> int:
        return next(pid for pid in self.machine.with_title(title) if self.front_end in self._ancestors(pid))

    def _ancestors(self, pid: int) -> Iterator[int]:
        parent = self.machine.parent(pid)
        while parent:
            yield parent
            parent = self.machine.parent(parent)

    def _segments(self) -> set[str]:
        """The names in /dev/shm that the engine has mapped."""
        lines = self.machine.path(f"/proc/{self.engine}/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
        return {os.path.basename(path) for path in paths}


class Watch(threading.Thread):
    """Asks one server for its health, over and over. `failures`: at what second the answer was not 200."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._ended = threading.Event()
        self.answers = 0
        self.failures: list[float] = []

    def run(self) -> None:
        """The thread."""
        begun = time.monotonic()
        while not self._ended.wait(0.02):
            if self._server.healthy():
                self.answers += 1
            else:
                self.failures.append(time.monotonic() - begun)

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self.join()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]
