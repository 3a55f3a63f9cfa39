"""server.py - an OpenAI-compatible model server on loopback, with the toy's scripted model behind
it, for tests: with every fault that a long run will meet.

    python tests/server.py --port 8000 --latency 0.2    prints its URL, serves until it is killed

A real server over real sockets: status codes, headers, slow bodies and refused connections are what
the client sees, not what somebody thinks it would see.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path[:0] = map(str, (Path(__file__).resolve().parent.parent, Path(__file__).resolve().parent))
from marks import signed
from simulator import CHECK_REPLY
from tools.judge import ScriptedJudge
from toy import world

GARBAGE = ["", "I would rather not say.", "Content: c\nChange: lots", '{"change": 5}']


class Loopback(ThreadingHTTPServer):
    """faults: {"429": share, "500": share, "garbage": share, "hang": share}, of the calls, drawn by
    a seed. latency: seconds a call.
    outage: (after so many calls, seconds): then connections are cut without an answer. answer: a
    function of the prompt, instead of the scripted model; its text gets the prompt's mark. reply: a
    function of the request that returns (status, headers, body), instead of everything. The first
    question of a program, its check, is answered by the scripted models, and not counted."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        port=0,
        latency=0.0,
        faults=None,
        outage=None,
        answer=None,
        reply=None,
        difficulty="vanilla",
        seed=0,
        key=None,
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.latency, self.faults, self.outage = latency, faults or {}, outage
        self.answer, self.reply, self.key = answer, reply, key
        self.model = world.ScriptedModel(difficulty)
        self.rng, self.lock = random.Random(seed), threading.Lock()
        self.calls = 0
        self.active, self.most = 0, 0  # calls under way now, and at most
        self.down_until = 0.0
        self.prompts, self.times = [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, address):  # a client that gave up waiting is no news
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_):
        pass

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][0]["content"]
        with server.lock:
            fault, garbage = self.count_and_draw(prompt)
        try:
            if time.monotonic() < server.down_until:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            time.sleep(server.latency)
            if server.reply:
                self.send(*server.reply(request))
            elif refusal := self.refusal(request, fault):
                self.send(*refusal)
            elif fault == "hang":
                time.sleep(30)
            else:
                self.send(200, {}, completion(self.text_for(prompt, fault, garbage)))
        finally:
            with server.lock:
                server.active -= 1

    def count_and_draw(self, prompt):
        """Count the call and draw its fault: (a key of `faults` or None, a garbage answer)."""
        server = self.server
        is_check = CHECK_REPLY in prompt
        server.calls += not is_check
        server.active += 1
        server.most = max(server.most, server.active)
        if not is_check:
            server.prompts.append(prompt)
            server.times.append(time.monotonic())
        if server.outage and server.calls == server.outage[0]:
            server.down_until = time.monotonic() + server.outage[1]
        draw, edge, fault = server.rng.random(), 0.0, None
        for name, share in server.faults.items():
            if fault is None:
                edge += share
                fault = name if draw < edge else None
        return fault, server.rng.choice(GARBAGE)

    def refusal(self, request, fault):
        """(status, headers, body) of a call that is refused, or None."""
        key = self.headers["Authorization"]
        if self.server.key and key != f"Bearer {self.server.key}":
            error = {"message": f"Incorrect API key: {key}", "code": "invalid_api_key"}
            return 401, {}, {"error": error}
        if fault == "429":
            return 429, {"Retry-After": "0"}, {"error": {"message": "slow down"}}
        if fault == "500":
            return 500, {}, {"error": {"message": "oops"}}
        if request["model"] != "scripted":
            message = f"The model `{request['model']}` does not exist."
            return 404, {}, {"error": {"message": message}}
        return None

    def text_for(self, prompt, fault, garbage):
        """What the model says to a prompt."""
        if CHECK_REPLY in prompt:
            return asyncio.run(answer_check(prompt))
        if fault == "garbage":
            return garbage
        if self.server.answer:
            return signed(prompt, self.server.answer(prompt))
        return asyncio.run(self.server.model(prompt))

    def send(self, status, headers, body):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def people(path, split="train", count=None):
    """The file `path`, with `count` users of the toy (default: all)."""
    path.write_text("".join(json.dumps(row) + "\n" for row in world.profiles(split, count)))
    return path


def toy_people(directory):
    """The toy's users as files, for a server's simulator, which must be told whom it plays. Returns
    the flags."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    return [
        "--profiles",
        *[
            str(people(Path(directory) / f"toy-{split}.jsonl", split))
            for split in ("train", "heldout")
        ],
    ]


async def answer_check(prompt):
    """What a program asks first, of a user or of a judge, answered in its form."""
    model = world.ScriptedModel() if "<hidden_theme>" in prompt else ScriptedJudge()
    return await model(prompt)


async def steady(prompt):
    """A user who never leaves: a mild change, a plain line. For measuring, where every dialogue
    must take all its turns."""
    if "<emotion_level>" in prompt:
        return signed(prompt, "Thinking: t\nOrigin: o\nChange: none\nResponse: Hm, go on.")
    return signed(prompt, "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: x\nChange: +1")


def completion(text):
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": len(text.split()),
            "total_tokens": 10 + len(text.split()),
        },
    }


def start(*flags):
    """The server in a process of its own, so that it takes no time from who is measured. Returns
    (process, URL)."""
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, flags)], stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--faults", type=json.loads, default={})
    parser.add_argument("--outage", type=json.loads)
    parser.add_argument("--steady", action="store_true", help="a user who never leaves")
    flags = vars(parser.parse_args())
    with Loopback(
        answer=(lambda prompt: asyncio.run(steady(prompt))) if flags.pop("steady") else None,
        **flags,
    ) as server:
        print(server.url, flush=True)
        threading.Event().wait()
