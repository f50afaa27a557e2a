"""A `vllm serve` process on the CPU that decodes with trees, and requests to it over HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e_helpers import MODEL

START_S = 300
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def completion(prompt: list[int], max_tokens: int, **options) -> dict:
    """The body of a completion: greedy, to its limit, with token ids; `options` add to that or replace it."""
    greedy = {"temperature": 0.0, "seed": 11, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, "max_tokens": max_tokens, **greedy, **options}


class Refused(Exception):
    """An answer that is no 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


@dataclass
class Server:
    url: str
    process: subprocess.Popen
    log: Path

    @classmethod
    def start(cls, folder: Path) -> Server:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        folder.joinpath("chat.jinja").write_text(TEMPLATE)
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", MODEL, "--port", str(port), "--host", "127.0.0.1",
            "--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager", "--served-model-name", "demo",
            "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 7}),
            "--additional-config", json.dumps({"bole": {}}),
            "--chat-template", str(folder / "chat.jinja"), "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--enable-scale-out",  # for the route that renders a chat to token ids and sampling options
        ]  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        with open(folder / "server.log", "w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        return cls(f"http://127.0.0.1:{port}", process, folder / "server.log")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"vllm serve ended:\n{self.log.read_text()[-4000:]}"
            try:
                self._open("/health").close()
                return
            except OSError:
                time.sleep(1)
        raise AssertionError(f"vllm serve did not answer in {START_S} s:\n{self.log.read_text()[-4000:]}")

    def post(self, path: str, **body) -> dict:
        with self._open(path, body) as answer:
            return json.loads(answer.read())

    def stream(self, path: str, **body) -> Iterator[dict]:
        """The chunks of a streamed answer, each as it arrives; a stream that ends without [DONE] is an error."""
        with self._open(path, {**body, "stream": True}) as answer:
            for line in answer:
                data = line.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield json.loads(data)
        raise AssertionError("the stream ended early")

    def counter(self, name: str) -> float:
        """Of speculative decoding: drafts, draft_tokens, accepted_tokens."""
        with self._open("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        [value] = [line.split()[-1] for line in lines if line.startswith(f"vllm:spec_decode_num_{name}_total{{")]
        return float(value)

    def _open(self, path: str, body: dict | None = None):
        data = json.dumps({"model": "demo", **body}).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=300)
        except urllib.error.HTTPError as error:
            raise Refused(error.code, json.loads(error.read())["error"]["message"]) from error
